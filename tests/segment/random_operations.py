"""What random steps are made of: operations on vectors, matrices, counts and flags."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cells.problems import B, H

WEIGHTS = 3
ORDER = [3, 0, 6, 1, 5, 2, 4]  # of the H features


def _with_column(w: list[Tensor], a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, 1] = b[:, 0]
    return a


def _with_marked(w: list[Tensor], c: Tensor, a: Tensor) -> Tensor:
    a = a.clone()
    a[c] = 0.3
    return a


# Values by kind: "v" vectors [B, H], "m" matrices [B, H, H], "i" counts [B], "b" flags [B, H].
# Operations by name: what they take and give, and what they do with weights ``w`` at hand.
OPERATIONS: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    # elementwise
    "tanh": ("v", "v", lambda w, a: torch.tanh(a)),
    "sigmoid": ("v", "v", lambda w, a: torch.sigmoid(a)),
    "gelu": ("v", "v", lambda w, a: F.gelu(a)),
    "softplus": ("v", "v", lambda w, a: F.softplus(a)),
    "relu": ("v", "v", lambda w, a: torch.relu(a)),
    "bell": ("v", "v", lambda w, a: torch.exp(-a * a)),
    "root": ("v", "v", lambda w, a: (a * a + 0.1).sqrt()),
    "clamp": ("v", "v", lambda w, a: a.clamp(-0.4, 0.7)),
    "half": ("v", "v", lambda w, a: 0.5 * a),
    "negate": ("v", "v", lambda w, a: -a),
    "detach": ("v", "v", lambda w, a: a.detach()),
    "add": ("vv", "v", lambda w, a, b: a + b),
    "subtract": ("vv", "v", lambda w, a, b: a - b),
    "multiply": ("vv", "v", lambda w, a, b: a * b),
    "gate": ("vv", "v", lambda w, a, b: torch.sigmoid(a) * b),
    "lerp": ("vv", "v", lambda w, a, b: torch.lerp(a, b, 0.3)),
    "maximum": ("vv", "v", lambda w, a, b: torch.maximum(a, b)),
    "greater": ("vv", "b", lambda w, a, b: a > b),
    "where": ("bvv", "v", lambda w, c, a, b: torch.where(c, a, b)),
    "cast flag": ("b", "v", lambda w, c: c.to(torch.float64)),
    # over the features
    "softmax": ("v", "v", lambda w, a: torch.softmax(a, -1)),
    "log softmax": ("v", "v", lambda w, a: torch.log_softmax(a, -1)),
    "layer norm": ("v", "v", lambda w, a: F.layer_norm(a, (H,), w[0][0], w[0][1])),
    "centre": ("v", "v", lambda w, a: a - a.mean(-1, keepdim=True)),
    "largest": ("v", "v", lambda w, a: a - a.amax(-1, keepdim=True)),
    "normalise": ("v", "v", lambda w, a: F.normalize(a, dim=-1)),
    "cumulate": ("v", "v", lambda w, a: a.cumsum(-1) / H),
    # views, joins
    "shift": ("v", "v", lambda w, a: torch.cat([a[:, 1:], a[:, :1]], -1)),
    "flip": ("v", "v", lambda w, a: a.flip(-1)),
    "order": ("v", "v", lambda w, a: a[:, ORDER]),
    "parts": ("v", "v", lambda w, a: torch.cat(a.split([2, 4, 1], -1)[::-1], -1)),
    "halves": ("vv", "v", lambda w, a, b: torch.cat([a[:, : H // 2], b[:, H // 2 :]], -1)),
    "stack": ("vv", "v", lambda w, a, b: torch.stack([a, b], 1).mean(1)),
    "expand": ("v", "v", lambda w, a: a.unsqueeze(1).expand(-1, 3, -1).sum(1) / 3),
    "join": ("vv", "v", lambda w, a, b: torch.cat([a, b], -1) @ torch.cat([w[0], w[1]], 0)),
    # with weights
    "matmul": ("v", "v", lambda w, a: a @ w[0]),
    "transposed": ("v", "v", lambda w, a: a @ w[1].T),
    "linear": ("v", "v", lambda w, a: F.linear(a, w[2], w[0][0])),
    "product": ("v", "v", lambda w, a: a @ (w[0] @ w[1].T / H)),
    "scaled": ("v", "v", lambda w, a: a * w[2][0]),
    "einsum": ("v", "v", lambda w, a: torch.einsum("bi,ji->bj", a, w[1])),
    "convolve": (
        "v", "v", lambda w, a: F.conv1d(a.unsqueeze(1), w[0][:1, None, :3], padding=1).squeeze(1)
    ),
    "embed": ("i", "v", lambda w, n: F.embedding(n % 4, w[2])),
    # matrices, counts
    "outer": ("vv", "m", lambda w, a, b: a.unsqueeze(2) * b.unsqueeze(1)),
    "fade": ("m", "m", lambda w, m: 0.5 * m),
    "sum": ("mm", "m", lambda w, m, n: m + n),
    "gate rows": ("mv", "m", lambda w, m, a: m * torch.sigmoid(a).unsqueeze(2)),
    "read": ("mv", "v", lambda w, m, a: torch.bmm(m, a.unsqueeze(2)).squeeze(2)),
    "row": ("m", "v", lambda w, m: m[:, 1] + m.mean(1)),
    "count": ("v", "i", lambda w, a: (a > 0).sum(-1)),
    "plus": ("ii", "i", lambda w, n, k: (n + k) % 5),
    # elementwise, seldom met
    "leaky": ("v", "v", lambda w, a: F.leaky_relu(a, 0.1)),
    "elu": ("v", "v", lambda w, a: F.elu(a)),
    "selu": ("v", "v", lambda w, a: F.selu(a)),
    "mish": ("v", "v", lambda w, a: F.mish(a)),
    "hard tanh": ("v", "v", lambda w, a: F.hardtanh(a)),
    "hard swish": ("v", "v", lambda w, a: F.hardswish(a)),
    "soft sign": ("v", "v", lambda w, a: F.softsign(a)),
    "parametric": ("v", "v", lambda w, a: F.prelu(a, w[1][0])),
    "error function": ("v", "v", lambda w, a: torch.erf(a)),
    "logarithm": ("v", "v", lambda w, a: torch.log1p(a.abs())),
    "less one": ("v", "v", lambda w, a: torch.expm1(-a.abs())),
    "sine": ("v", "v", lambda w, a: torch.sinc(a)),
    "remainder": ("v", "v", lambda w, a: a % 0.7),
    "round": ("v", "v", lambda w, a: a + (a.round() - a).detach()),
    "sign": ("v", "v", lambda w, a: a.sign() * a.square()),
    "power": ("vv", "v", lambda w, a, b: (a.abs() + 0.1) ** torch.tanh(b)),
    "angle": ("vv", "v", lambda w, a, b: torch.atan2(a, b.abs() + 0.1)),
    "hypotenuse": ("vv", "v", lambda w, a, b: torch.hypot(a, b + 0.1)),
    "divide": ("vv", "v", lambda w, a, b: a / (1 + b * b)),
    "logaddexp": ("vv", "v", lambda w, a, b: torch.logaddexp(a, b)),
    "fused multiply": ("vvv", "v", lambda w, a, b, c: torch.addcmul(a, b, c, value=0.5)),
    "complex": ("vv", "v", lambda w, a, b: (torch.complex(a, b) * torch.complex(b, a)).imag),
    "fill": ("bv", "v", lambda w, c, a: a.masked_fill(c, 0.2)),
    "not": ("b", "b", lambda w, c: ~c),
    "either": ("bb", "b", lambda w, c, d: c | d),
    "any": ("b", "b", lambda w, c: c.any(-1, keepdim=True).expand(-1, H)),
    # over the features, seldom met
    "variance": ("v", "v", lambda w, a: a / (a.var(-1, keepdim=True) + 0.1).sqrt()),
    "logsumexp": ("v", "v", lambda w, a: a - a.logsumexp(-1, keepdim=True)),
    "products": ("v", "v", lambda w, a: torch.sigmoid(a).cumprod(-1)),
    "highest so far": ("v", "v", lambda w, a: a.cummax(-1).values),
    "sort": ("v", "v", lambda w, a: a.sort(dim=-1, stable=True).values),
    "gather": ("vi", "v", lambda w, a, n: a.gather(-1, (n.unsqueeze(1) + torch.arange(H)) % H)),
    "scatter": (
        "vi", "v",
        lambda w, a, n: torch.zeros_like(a).scatter_add(
            -1, (n.unsqueeze(1) * torch.arange(H)) % H, a
        ),
    ),
    "some added": ("vv", "v", lambda w, a, b: a.index_add(1, torch.tensor([0, 2, 0]), b[:, :3])),
    "average": ("v", "v", lambda w, a: F.avg_pool1d(a.unsqueeze(1), 3, 1, 1).squeeze(1)),
    "pool": ("v", "v", lambda w, a: F.max_pool1d(a.unsqueeze(1), 3, 1, 1).squeeze(1)),
    "windows": ("v", "v", lambda w, a: F.pad(a.unfold(-1, 3, 1).prod(-1), (1, 1))),
    "reflect": ("v", "v", lambda w, a: F.pad(a[:, 1:-1], (1, 1), mode="reflect")),
    "roll": ("v", "v", lambda w, a: a.roll(2, -1)),
    "repeat": ("v", "v", lambda w, a: a.repeat(1, 2)[:, 3 : 3 + H]),
    "interleave": ("v", "v", lambda w, a: a.repeat_interleave(2, -1)[:, :H]),
    "group norm": ("v", "v", lambda w, a: F.group_norm(a, 1, w[0][0], w[0][1])),
    "fourier": ("v", "v", lambda w, a: torch.fft.irfft(0.5 * torch.fft.rfft(a), n=H)),
    "inner gradient": (
        "v", "v", lambda w, a: torch.func.grad(lambda b: torch.tanh(b @ w[0]).square().sum())(a)
    ),
    # written in place
    "in place": ("vv", "v", lambda w, a, b: a.clone().mul_(0.5).add_(b)),
    "column": ("vv", "v", _with_column),
    "marked": ("bv", "v", _with_marked),
    # with weights, seldom met
    "bilinear": ("vv", "v", lambda w, a, b: F.bilinear(a, b, torch.stack([*w, *w, w[0]]))),
    "add product": ("vv", "v", lambda w, a, b: torch.addmm(a, b, w[1], beta=0.5, alpha=0.3)),
    "normed weight": ("v", "v", lambda w, a: a @ (w[0] / w[0].norm(dim=0, keepdim=True))),
    "embed in bags": ("i", "v", lambda w, n: w[1][torch.stack([n % 3, n % 4], 1)].sum(1)),
    # matrices, counts, seldom met
    "attend": (
        "vm", "v",
        lambda w, a, m: F.scaled_dot_product_attention(a.unsqueeze(1), m, m).squeeze(1),
    ),
    "solve": (
        "mv", "v", lambda w, m, a: torch.linalg.solve(torch.tanh(m) / 9 + 2 * torch.eye(H).to(m), a)
    ),
    "diagonal": ("m", "v", lambda w, m: m.diagonal(dim1=1, dim2=2)),
    "lower": ("m", "m", lambda w, m: m.tril()),
    "turn": ("m", "m", lambda w, m: m.mT),
    "matrix product": ("mm", "m", lambda w, m, n: m @ n / H),
    "weigh": ("m", "m", lambda w, m: m.softmax(1)),
    "store": ("mvi", "m", lambda w, m, a, n: m.index_put((torch.arange(B), n % H), a)),
    "recall": ("mi", "v", lambda w, m, n: m[torch.arange(B), n % H]),
    "one hot": ("i", "v", lambda w, n: F.one_hot(n % H, H).double()),
    "best": ("v", "i", lambda w, a: a.argmax(-1)),
    "next": ("i", "i", lambda w, n: n + 1),
}  # fmt: skip
