"""Looking inside a step: named tensors whose value and gradient are wanted at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .._messages import describe_type
from .._trees import Tree, differentiable


class Tap(NamedTuple):
    """A tensor of a step at every step, ``[K, ...]``, and the gradient of the loss by it.

    The gradient is the whole one: through the step's output and through all later steps. It is
    None where no gradient was asked for (``evaluate``).

    >>> import torch, ftbptt
    >>> cell, x = torch.nn.RNNCell(3, 5), torch.randn(7, 2, 3)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager", taps=["h"]
    ... )
    >>> h = train_segment.evaluate(dict(cell.named_parameters()), None, x, None).taps["h"]
    >>> h.value.shape, h.grad
    (torch.Size([7, 2, 5]), None)
    """

    value: Tensor
    grad: Tensor | None


@dataclass
class Collector:
    """Takes the tensors that a step taps, while one step is traced.

    ``probes`` are zeros that are added to them: the gradient by a probe is that by the tensor.
    ``owners`` says which module a parameter belongs to, by the parameter's identity.
    """

    wanted: Sequence[str] | None  # None: all
    probes: dict[str, Tensor] | None
    owners: dict[int, str]
    values: dict[str, Tensor] = field(default_factory=dict)
    offered: list[str] = field(default_factory=list)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        self.offered.append(name)
        if self.wanted is not None and name not in self.wanted:
            return tensor
        if name in self.values:
            raise ValueError(
                f"tap: the name {name!r} is used twice in one step. Give each tensor its own, such "
                f"as {name + '.1'!r}."
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"tap: {name!r} is {describe_type(tensor)}, and no tensor. Tap each tensor of it "
                "under a name of its own."
            )
        if not differentiable(tensor):
            raise TypeError(
                f"tap: {name!r} is {tensor.dtype}, which has no gradient. Tap a floating point "
                "tensor, or return this one as a part of out_t."
            )
        if self.probes is not None:
            tensor = tensor + self.probes[name]
        self.values[name] = tensor
        return tensor

    def check(self) -> None:
        """Raises ValueError for a name that the step did not tap."""
        for name in self.wanted or ():
            if name not in self.values:
                known = ", ".join(map(repr, self.offered)) or "none"
                raise ValueError(f"taps: the step has no tap {name!r}; it has {known}.")


_active: ContextVar[Collector | None] = ContextVar("active", default=None)


def tap(name: str, tensor: Tensor) -> Tensor:
    """tap : name, tensor of a step -> the same tensor

    Marks a tensor inside a step. A segment made with ``make_train_segment(..., taps=[name])`` also
    returns its value and its gradient at every step; else, this does nothing.

    Raises TypeError for a name that is no string; and when such a segment is traced, TypeError for
    what is no tensor, or one without a gradient, ValueError for a name used twice in a step.

    >>> import torch, ftbptt
    >>> def step(params, x_t, h):
    ...     h = torch.tanh(ftbptt.tap("before tanh", x_t @ params["w"] + h @ params["u"]))
    ...     return h, h
    >>> train_segment = ftbptt.make_train_segment(
    ...     step, lambda out, y: (out - y).square().mean(), backend="eager", taps=["before tanh"]
    ... )
    >>> params = {"w": torch.randn(3, 5), "u": torch.randn(5, 5)}
    >>> x, y, h = torch.randn(7, 2, 3), torch.randn(7, 2, 5), torch.zeros(2, 5)
    >>> taps = train_segment(params, h, x, y).taps
    >>> taps["before tanh"].grad.shape
    torch.Size([7, 2, 5])
    """
    if not isinstance(name, str):
        raise TypeError(f"tap: expected tap(name, tensor), found a {type(name).__name__} as name.")
    collector = _active.get()
    return tensor if collector is None else collector.take(name, tensor)


def tap_of(weight: Tensor, name: str, tensor: Tensor) -> Tensor:
    """Taps a tensor of the recurrent layer or cell that ``weight`` belongs to."""
    collector = _active.get()
    if collector is None or id(weight) not in collector.owners:
        return tensor
    name, uses = collector.owners[id(weight)] + name, 0
    while (unique := f"{name}.{uses}" if uses else name) in collector.offered:
        uses += 1  # a cell that is called more than once in a step
    return collector.take(unique, tensor)


@contextmanager
def collecting(collector: Collector) -> Iterator[Collector]:
    """Within it, tensors that are tapped go to the collector."""
    token = _active.set(collector)
    try:
        yield collector
    finally:
        _active.reset(token)


def owners(params: Tree) -> dict[int, str]:
    """How the taps of torch's own cells and layers begin, by the identity of their weights.

    ``cells.0.weight_ih`` -> ``cells.0.``, ``lstm.weight_ih_l1`` -> ``lstm.l1.``, and
    ``weight_ih_l0`` of a layer that is the step itself -> ``l0.``.
    """
    prefixes = {}
    for name, tensor in params.items() if isinstance(params, dict) else ():
        if isinstance(name, str) and "weight_ih" in name:
            owner, _, layer = name.rpartition("weight_ih")
            prefixes[id(tensor)] = owner + (layer.removeprefix("_") + "." if layer else "")
    return prefixes
