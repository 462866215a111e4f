"""Random losses: what is read of the outputs, how it errs from y, and what is returned of that.

A loss sees all K steps at once, so that it may read across time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

Read = Callable[[Tensor], Tensor]
Compare = Callable[[Tensor, Tensor], Tensor]

# [K, B, H] -> [K, B, H]
READS: dict[str, Read] = {
    "all": lambda out: out,
    "so far": lambda out: out.cumsum(0) / len(out),
    "backwards": lambda out: out.flip(0),
    "changes": lambda out: out - out.roll(1, 0),
    "over time": lambda out: out.softmax(0),
    "from the mean": lambda out: out - out.mean(0, keepdim=True),
    "half": lambda out: torch.cat([out[..., :3].detach(), out[..., 3:]], -1),
    "over rows": lambda out: out - out.mean(1, keepdim=True),
}
# [K, B, H] -> fewer steps, for losses that return one number
FEWER: dict[str, Read] = {
    "last": lambda out: out[-1:],
    "mean": lambda out: out.mean(0, keepdim=True),
    "largest": lambda out: out.amax(0, keepdim=True),
    "every other": lambda out: out[::2],
    "none but one row": lambda out: out[:, :1],
}
# [..., H], [..., H] -> [..., H]
COMPARISONS: dict[str, Compare] = {
    "squares": lambda a, b: (a - b).square(),
    "smooth": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "entropy": lambda a, b: -b.softmax(-1) * a.log_softmax(-1),
    "binary": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction="none"),
    "divergence": lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="none"),
    "hinge": lambda a, b: (1 - a * b.sign()).relu(),
    "likelihood": lambda a, b: F.poisson_nll_loss(a.clamp(max=2), b.abs(), reduction="none"),
    "correlation": lambda a, b: -a * b,
    # The gradient depends on no data, and on no output.
    "itself": lambda a, b: a,
    "constant": lambda a, b: a * 0 + b,
}
# [K, B, H] -> what the loss returns
RETURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda error: error.mean(),
    "sum": lambda error: error.sum() / 10,
    "per step": lambda error: error.flatten(1).mean(1),
    "per row": lambda error: error.mean(-1),
}

Name = tuple[str, str, str]  # what is read, compared and returned
SQUARES = ("all", "squares")  # of every step


@st.composite
def names(draw: st.DrawFn) -> Name:
    returns = draw(st.sampled_from(sorted(RETURNS)))
    reads = READS if is_by_step(returns) else READS | FEWER
    return draw(st.sampled_from(sorted(reads))), draw(st.sampled_from(sorted(COMPARISONS))), returns


def is_by_step(returns: str) -> bool:
    return returns in ("per step", "per row")


def loss_of(name: Name) -> Callable[[Tensor, Tensor], Tensor]:
    read, comparison, returns = name

    def loss(out: Tensor, y: Tensor) -> Tensor:
        reads = (READS | FEWER)[read]
        return RETURNS[returns](COMPARISONS[comparison](reads(out), reads(y)))

    return loss
