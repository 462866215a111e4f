"""An affine recurrence -> Triton: a function for many steps at once, where rows are too few.

A program takes some rows through the steps tile by tile, of [STEPS, ROWS]. How the carry comes from
a tile's first step to each of the others is composed in logarithmic depth (``affine``), or, where
its numbers are so large that products of scales might not be finite, found step by step; then the
whole step is done for all of the tile at once, as the loop in ``triton_source`` does it for one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .affine import FALSE, Affine
from .expressions import Literal, cast
from .rowloop import Map, RowLoop
from .tiles import Space
from .triton_tiles import TilePrinter, name_of

_COMPOSED = """

@triton.jit
def composed(scale, shift, scale_after, shift_after):
    return scale_after * scale, scale_after * shift + shift_after


@triton.jit
def composed_or_cut(scale, shift, cut, scale_after, shift_after, cut_after):
    own = tl.where(cut_after != 0, shift_after, scale_after * shift + shift_after)
    return scale_after * scale, own, cut | cut_after


@triton.jit
def one_by_one(scale, shift, cut, carry, STEPS: tl.constexpr):
    step, before = tl.arange(0, STEPS)[:, None], tl.zeros_like(shift)
    for i in range(STEPS):
        own = tl.sum(tl.where(step == i, shift, 0), 0)[None, :]
        after = tl.sum(tl.where(step == i, scale, 0), 0)[None, :] * carry + own
        carry = tl.where(tl.sum(tl.where(step == i, cut, 0), 0)[None, :] != 0, own, after)
        before = tl.where(step == i, carry, before)
    return before


"""
# How large numbers may get in a tile that is composed: then nothing in it overflows, and what
# underflows, be it multiplied by the largest, is far below what else there is.
_LARGEST = {torch.float32: 2.0**60, torch.float64: 2.0**500}


def print_scan(loop: RowLoop, history: list[bool], affine: Affine, *, reverse: bool) -> str:
    """print_scan : RowLoop, which carries have a history, how its carry goes on -> source

    The function is ``run_composed(*memory, *numbers, ROWS, STEPS)``, for the same module and with
    the same memory and numbers as the loop's own.
    """
    return _Printer(loop, history, reverse).text(affine)


class _Printer(TilePrinter):
    shape, here, now = "(STEPS, ROWS)", "here", "now"

    def text(self, affine: Affine) -> str:
        self._begin("step - 1", "(step > first) & (step <= steps)")
        self._compose(affine)
        self._begin("step", "step < steps")
        for op in self.loop.operations:
            assert isinstance(op, Map)
            self._map(op)
        (after,) = self.tiles.carried.values()
        self.body += [
            "end = tl.minimum(first + STEPS, steps) - 1",
            f"carry = tl.sum(tl.where(step == end, {name_of(after)}, 0), 0)[None, :]",
        ]
        axes = self._axis_names()
        fixed = ", ".join(f'"{name}"' for name in ("steps", *axes))
        lines = [
            f"@triton.jit(do_not_specialize=[{fixed}])",
            f"def run_composed({', '.join(self._arguments())}, ROWS: tl.constexpr, "
            "STEPS: tl.constexpr):",
            *(f"    {line}" for line in (*self._rows(), *self._start(), *self.before)),
            "    for first in range(0, steps, STEPS):",
            "        step = first + tl.arange(0, STEPS)[:, None]",
            *(f"        {line}" for line in self.body),
            "    tl.store(final0 + row, carry, mask=inside)",
        ]
        return _COMPOSED + "\n".join(lines) + "\n"

    def _rows(self) -> Iterator[str]:
        yield "last = tl.cast(steps, tl.int64)  # so are all numbers of elements behind it"
        yield f"total = {' * '.join(self._axis_names()) or '1'}"
        yield "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]"
        yield "inside = row < total"
        for name in self.spaces.values():
            yield f"{name} = tl.arange(0, 1)[None, :]"

    def _start(self) -> Iterator[str]:
        (memory,) = self.loop.carries
        yield "carry = tl.load(start0 + row, mask=inside, other=0)"
        if self.tiles.history[0]:
            first = self._slot("history0", "last" if self.reverse else "0", memory)
            yield f"tl.store({first} + row, carry, mask=inside)"

    def _begin(self, step: str, now: str) -> None:
        """From here on ``t`` is of these steps."""
        kept = {key: name for key, name in self.loaded.items() if key[0].kind == "invariant"}
        self.loaded = kept
        t = f"steps - 1 - ({step})" if self.reverse else step
        self.body += [f"t = tl.cast({t}, tl.int64)", f"now = {now}", "here = now & inside"]

    def _compose(self, affine: Affine) -> None:
        """Names ``carry0`` what the carry is before each step of the tile."""
        dtype = self.loop.carries[0].dtype
        shift = affine.shift or Literal(0.0, dtype)
        cut = cast(affine.cut, torch.int32)
        parts = [("scale", affine.scale, 1), ("shift", shift, 0), ("cut", cut, 0)]
        for name, part, neutral in parts:
            own = f"tl.where(here, {self._expression(part, Space(()))}, {neutral})"
            self.body.append(f"{name} = tl.broadcast_to({own}, {self.shape})")
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
