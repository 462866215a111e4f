"""An affine recurrence -> Triton: a function that runs many steps at once, for batches of few rows.

A program processes a few rows, in tiles of [STEPS, ROWS]. For each tile it first computes the carry
before every step: by an associative scan over the affine maps of the steps (``affine``), in
logarithmic depth; or step by step, where the numbers are so large that a product of scales might
overflow. Then it computes all operations for the full tile at once, as the loop in
``loop`` does for one step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..expressions import Literal, cast
from ..rowloop import Map, RowLoop
from .affine import FALSE, Affine
from .placement import Space
from .printer import TilePrinter, name_of

_COMPOSED = """

@triton.jit
def composed(scale, shift, scale_after, shift_after):
    return scale_after * scale, scale_after * shift + shift_after


@triton.jit
def composed_or_cut(scale, shift, cut, scale_after, shift_after, cut_after):
    composed_shift = tl.where(cut_after != 0, shift_after, scale_after * shift + shift_after)
    return scale_after * scale, composed_shift, cut | cut_after


@triton.jit
def one_by_one(scale, shift, cut, carry, STEPS: tl.constexpr):
    step, before = tl.arange(0, STEPS)[:, None], tl.zeros_like(shift)
    for i in range(STEPS):
        shift_i = tl.sum(tl.where(step == i, shift, 0), 0)[None, :]
        after = tl.sum(tl.where(step == i, scale, 0), 0)[None, :] * carry + shift_i
        carry = tl.where(tl.sum(tl.where(step == i, cut, 0), 0)[None, :] != 0, shift_i, after)
        before = tl.where(step == i, carry, before)
    return before


"""
# A bound on the numbers in a tile that is composed. Below it nothing in the tile overflows, and
# what underflows is negligible even if it is multiplied by the largest number.
_LARGEST = {torch.float32: 2.0**60, torch.float64: 2.0**500}


def print_scan(loop: RowLoop, affine: Affine) -> str:
    """print_scan : RowLoop x its next carry -> source

    The function ``run_composed(*memory, *numbers, ROWS, STEPS)``, to append to the module of
    ``run``. It takes the same memory and numbers.
    """
    return _Printer(loop).text(affine)


class _Printer(TilePrinter):
    shape, element_mask, step_mask = "(STEPS, ROWS)", "here", "now"

    def text(self, affine: Affine) -> str:
        # Row i of the tile composes the maps of the tile's first i steps, so it loads the map of
        # step i - 1. Row 0 is the identity.
        self._select_steps("step - 1", "(step > first) & (step <= steps)")
        self._compose(affine)
        self._select_steps("step", "step < steps")
        for op in self.loop.operations:
            assert isinstance(op, Map)
            self._map(op)
        (next_carry,) = self.tiles.next_carries.values()
        self.body += [
            "end = tl.minimum(first + STEPS, steps) - 1",
            f"carry = tl.sum(tl.where(step == end, {name_of(next_carry)}, 0), 0)[None, :]",
        ]
        lines = [
            *self._signature("run_composed", "ROWS", "STEPS"),
            *(f"    {line}" for line in (*self._rows(), *self._load_carry(), *self.prologue)),
            "    for first in range(0, steps, STEPS):",
            "        step = first + tl.arange(0, STEPS)[:, None]",
            *(f"        {line}" for line in self.body),
            "    tl.store(final0 + row, carry, mask=inside)",
        ]
        return _COMPOSED + "\n".join(lines) + "\n"

    def _rows(self) -> Iterator[str]:
        yield "last = tl.cast(steps, tl.int64)  # 64 bits, like all offsets computed from it"
        yield f"total = {' * '.join(self._axis_names()) or '1'}"
        yield "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]"
        yield "inside = row < total"
        for name in self.spaces.values():
            yield f"{name} = tl.arange(0, 1)[None, :]"

    def _load_carry(self) -> Iterator[str]:
        (memory,) = self.loop.carries
        yield "carry = tl.load(start0 + row, mask=inside, other=0)"
        if self.tiles.history[0]:
            first = self._slot("history0", "last" if self.loop.reverse else "0", memory)
            yield f"tl.store({first} + row, carry, mask=inside)"

    def _select_steps(self, step: str, now: str) -> None:
        """From here on, ``t`` are these steps, and ``now`` masks those that exist."""
        self.loaded = {key: name for key, name in self.loaded.items() if key[0].kind == "invariant"}
        t = f"steps - 1 - ({step})" if self.loop.reverse else step
        self.body += [f"t = tl.cast({t}, tl.int64)", f"now = {now}", "here = now & inside"]

    def _compose(self, affine: Affine) -> None:
        """Computes ``carry0``, the carry before each step of the tile."""
        dtype = self.loop.carries[0].dtype
        shift = affine.shift or Literal(0.0, dtype)
        cut = cast(affine.cut, torch.int32)
        parts = [("scale", affine.scale, 1), ("shift", shift, 0), ("cut", cut, 0)]
        for name, part, neutral in parts:
            masked = f"tl.where(here, {self._expression(part, Space(()))}, {neutral})"
            self.body.append(f"{name} = tl.broadcast_to({masked}, {self.shape})")
        names, function = "scale, shift, cut", "composed_or_cut"
        if affine.cut is FALSE:
            names, function = "scale, shift", "composed"
        self.body += [
            "growth = tl.where((cut == 0) & (tl.abs(scale) > 1), tl.abs(scale), 1)",
            "largest = tl.maximum(tl.max(tl.abs(shift), 0), tl.max(tl.abs(carry), 0))",
            "reached = tl.reduce(growth, 0, multiplied) * tl.maximum(largest, 1)",
            f"if tl.max(reached, 0) <= {_LARGEST[dtype]}:",
            f"    {names} = tl.associative_scan(({names}), 0, {function})",
            "    carry0 = tl.where(cut != 0, shift, scale * carry + shift)",
            "else:",
            "    carry0 = one_by_one(scale, shift, cut, carry, STEPS)",
        ]
