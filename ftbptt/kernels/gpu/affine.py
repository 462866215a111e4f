"""Recognizes steps that are affine in the carry: ``scale * carry + shift``, element by element.

The composition of two such steps has the same form, and composition is associative, so many steps
can be computed at once by a parallel scan (Blelloch, "Prefix Sums and Their Applications", 1990,
section 1.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..expressions import Apply, Expression, Literal
from ..rowloop import Map, Memory, Read, RowLoop, Value, reads


@dataclass(frozen=True)
class Affine:
    """``scale * carry + shift``.

    ``scale`` None: the expression does not read the carry. ``shift`` None: zero. ``cut``: a boolean
    expression, true where the result is independent of the carry even if the carry is infinite or
    NaN (a reset). ``scale`` is meaningless there.
    """

    scale: Expression | None
    shift: Expression | None
    cut: Expression


TRUE, FALSE = Literal(True, torch.bool), Literal(False, torch.bool)


def affine_next(loop: RowLoop) -> Affine | None:
    """affine_next : RowLoop -> the next carry as an affine function of the carry, or None

    Only for a loop with one float32 or float64 carry of one element per row, whose operations are
    all maps of one element, and read no values joined by ``cat``: those lie in memory, which has
    room for one step. The expressions of the result read only sequences and invariants.
    """
    maps = [op for op in loop.operations if isinstance(op, Map) and op.value.size == 1]
    if len(loop.carries) != 1 or len(maps) < len(loop.operations):
        return None
    computed = {op.value for op in maps}
    sources = {read.source for op in maps for read in reads(op.expression)}
    if any(isinstance(source, Value) for source in sources - computed):
        return None
    (carry,), (next_carry,) = loop.carries, loop.nexts
    if carry.size != 1 or carry.dtype not in (torch.float32, torch.float64):
        return None
    forms: dict[Value | Memory, Affine | None] = {
        carry: Affine(Literal(1.0, carry.dtype), None, FALSE)
    }
    for op in maps:
        forms[op.value] = _affine(op.expression, forms)
    (last,) = (op.value for op in maps if op.value.memory is next_carry)
    form = forms[last]
    return form if form is not None and form.scale is not None else None


def _affine(expr: Expression, forms: dict[Value | Memory, Affine | None]) -> Affine | None:
    """The expression in affine form, given the ``forms`` of the values that it reads."""
    if isinstance(expr, Read) and expr.source in forms:
        return forms[expr.source]
    if not isinstance(expr, Apply):
        return Affine(None, expr, TRUE)
    args = [form for form in (_affine(arg, forms) for arg in expr.args) if form is not None]
    if len(args) < len(expr.args):
        return None
    name, dtype = expr.name, expr.dtype
    with_carry = [i for i, arg in enumerate(args) if arg.scale is not None]
    if not with_carry:
        return Affine(None, Apply(name, tuple(arg.shift for arg in args), dtype), TRUE)
    if name in ("add", "sub"):
        return _sum(name, args[0], args[1], dtype)
    if name == "where" and 0 not in with_carry:
        return _where(args[0].shift, args[1], args[2], dtype)
    if len(with_carry) > 1 or name not in _LINEAR_IN.get(with_carry[0], ()):
        return None
    (i,) = with_carry
    others = [arg.shift for arg in args]

    def apply(x: Expression | None) -> Expression | None:
        return None if x is None else Apply(name, (*others[:i], x, *others[i + 1 :]), dtype)

    return Affine(apply(args[i].scale), apply(args[i].shift), args[i].cut)


# Operand index -> the primitives that are linear in that operand.
_LINEAR_IN = {0: ("neg", "mul", "div"), 1: ("mul",)}


def _sum(name: str, a: Affine, b: Affine, dtype: torch.dtype) -> Affine:
    def add(x: Expression | None, y: Expression | None) -> Expression | None:
        if y is None:
            return x
        if x is None:
            return y if name == "add" else Apply("neg", (y,), dtype)
        return Apply(name, (x, y), dtype)

    cut = _both(a.cut, b.cut)
    return Affine(add(a.scale, b.scale), add(a.shift, b.shift), cut)


def _where(condition: Expression, a: Affine, b: Affine, dtype: torch.dtype) -> Affine:
    def choose(x: Expression | None, y: Expression | None) -> Expression | None:
        if x is None and y is None:
            return None
        zero = Literal(0.0, dtype)
        operands = (zero if x is None else x, zero if y is None else y)
        return Apply("where", (condition, *operands), dtype)

    cut = a.cut
    if a.cut is not b.cut:
        cut = Apply("where", (condition, a.cut, b.cut), torch.bool)
    return Affine(choose(a.scale, b.scale), choose(a.shift, b.shift), cut)


def _both(a: Expression, b: Expression) -> Expression:
    """``a & b``, simplified where one of them is constant."""
    if a is TRUE or b is FALSE:
        return b
    return a if b is TRUE or a is FALSE else Apply("bit_and", (a, b), torch.bool)
