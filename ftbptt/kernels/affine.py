"""How a carry's next value depends on it, where that is ``scale * carry + shift`` in each element.

Such steps compose into one of the same form, so those of a stretch of time can be composed in any
order, many at once (Blelloch, "Prefix Sums and Their Applications", 1990, section 1.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .expressions import Apply, Expression, Literal
from .rowloop import Map, Memory, Read, RowLoop, Value


@dataclass(frozen=True)
class Affine:
    """``scale * carry + shift``.

    Without a ``scale`` the carry is not in it at all; without a ``shift`` that is zero. ``cut`` is
    true where the carry has no part in it, be it infinite (a reset); ``scale`` says nothing there.
    """

    scale: Expression | None
    shift: Expression | None
    cut: Expression


TRUE, FALSE = Literal(True, torch.bool), Literal(False, torch.bool)


def affine_next(loop: RowLoop) -> Affine | None:
    """affine_next : RowLoop -> how its carry goes on, or None if it is not of this form

    The loop has one carry of one real number a row, kept as it is computed, and all its operations
    are maps of such numbers. The expressions read sequences and invariants only.
    """
    maps = [op for op in loop.operations if isinstance(op, Map) and op.value.size == 1]
    if len(loop.carries) != 1 or len(maps) < len(loop.operations):
        return None
    (carry,), (after,) = loop.carries, loop.nexts
    if carry.size != 1 or carry.dtype not in (torch.float32, torch.float64):
        return None
    found: dict[Value | Memory, Affine | None] = {
        carry: Affine(Literal(1.0, carry.dtype), None, FALSE)
    }
    for op in maps:
        found[op.value] = _affine(op.expression, found)
    (last,) = (op.value for op in maps if op.value.memory is after)
    own = found[last]
    return own if own is not None and own.scale is not None else None


def _affine(expr: Expression, found: dict[Value | Memory, Affine | None]) -> Affine | None:
    if isinstance(expr, Read) and expr.source in found:
        return found[expr.source]
    if not isinstance(expr, Apply):
        return Affine(None, expr, TRUE)
    args = [own for own in (_affine(arg, found) for arg in expr.args) if own is not None]
    if len(args) < len(expr.args):
        return None
    name, dtype = expr.name, expr.dtype
    with_carry = [i for i, own in enumerate(args) if own.scale is not None]
    if not with_carry:
        return Affine(None, Apply(name, tuple(own.shift for own in args), dtype), TRUE)
    if name in ("add", "sub"):
        return _sum(name, args[0], args[1], dtype)
    if name == "where" and 0 not in with_carry:
        return _where(args[0].shift, args[1], args[2], dtype)
    if len(with_carry) > 1 or name not in _LINEAR_IN.get(with_carry[0], ()):
        return None
    (i,) = with_carry
    others = [own.shift for own in args]

    def apply(x: Expression | None) -> Expression | None:
        return None if x is None else Apply(name, (*others[:i], x, *others[i + 1 :]), dtype)

    return Affine(apply(args[i].scale), apply(args[i].shift), args[i].cut)


# What is linear in its first operand, and in its second one.
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
    """Their conjunction, without an operation where one is known."""
    if a is TRUE or b is FALSE:
        return b
    return a if b is TRUE or a is FALSE else Apply("bit_and", (a, b), torch.bool)
