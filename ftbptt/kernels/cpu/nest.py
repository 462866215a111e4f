"""Loops over one row in C++: vectorized with ``at::vec`` where all values have one type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..expressions import Apply, Expression, Literal, Unsupported, parts
from ..rowloop import Map, Memory, Read, Reduce, Value, compute_dtype, is_same_index
from .schedule import Nest

_C_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16",
    torch.float16: "c10::Half", torch.bool: "bool", torch.int64: "int64_t",
    torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t", torch.uint8: "uint8_t",
    torch.complex64: "c10::complex<float>", torch.complex128: "c10::complex<double>",
}  # fmt: skip

_NEUTRAL = {"sum": "0", "product": "1"}
# Primitives with a vectorized form for complex numbers.
_COMPLEX_VECTORS = {"add", "sub", "mul", "neg", "conj"}


def c_type(dtype: torch.dtype) -> str:
    if dtype not in _C_TYPES:
        raise Unsupported(f"CPU kernels do not support {dtype}")
    return _C_TYPES[dtype]


def memory_name(memory: Memory) -> str:
    return f"{memory.kind}{memory.index}"


class NestPrinter:
    """Prints one nest. Pointers ``row_<memory>`` to the row's part of each memory are in scope.

    ``stored``: the values that are written to memory. ``type``: that of the vectors; None if the
    nest is scalar.
    """

    def __init__(self, nest: Nest, stored: set[Value]) -> None:
        self.nest, self.stored = nest, stored
        self.mapped = {op.value for op in nest.operations if isinstance(op, Map)}
        # (memory, offset, strides) of a load -> its variable. ``loaded`` is set for each loop body.
        self.hoisted: dict[tuple[Any, ...], str] = {}
        self.type = self._vector_type()
        # The loop over vectors: the innermost, or the last over what reductions keep.
        self.axis = nest.vector_axis(stored) if self.type is not None else None
        if self.axis is None:
            self.type = None

    def lines(self) -> Iterator[str]:
        yield "{"
        if self.type is not None:
            yield f"using V = Vec<{c_type(self.type)}>;"
        yield from self._loops(0, "")
        yield "}"

    def _loops(self, axis: int, left: str) -> Iterator[str]:
        """The loops over this axis and those inside. ``left``: see ``_body``."""
        reductions = [op for op in self.nest.operations if isinstance(op, Reduce)]
        is_reduced = axis == self.nest.outer
        if is_reduced:
            yield from self._open(reductions)
        if axis == len(self.nest.shape):
            yield from self._body(left)
        elif axis == self.axis:
            yield from self._vectors(axis)
        else:
            yield f"for (int64_t i{axis} = 0; i{axis} < {self.nest.shape[axis]}; ++i{axis}) {{"
            yield from self._loops(axis + 1, left)
            yield "}"
        if is_reduced:
            yield from self._close(reductions, left)

    def _vectors(self, axis: int) -> Iterator[str]:
        """The loop over the elements of an axis: vectors, then a partial one for the tail."""
        n = self.nest.shape[axis]
        whole, partial = list(self._loops(axis + 1, "")), list(self._loops(axis + 1, ", left"))
        yield from self._hoist()
        yield "int64_t j = 0;"
        yield f"for (; j + V::size() <= {n}; j += V::size()) {{"
        yield from whole
        yield "}"
        yield f"if constexpr ({n} % V::size() != 0) {{"
        yield f"constexpr int64_t left = {n} % V::size();"
        yield from partial
        yield "}"

    def _vector_type(self) -> torch.dtype | None:
        """The common compute dtype of all values, if there are vectors of it."""
        dtypes = self.nest.dtypes()
        if len(dtypes) != 1:
            return None
        dtype = dtypes.pop()
        if dtype.is_complex:
            expressions = [op.expression for op in self.nest.operations]
            names = {p.name for e in expressions for p in parts(e) if isinstance(p, Apply)}
            only_maps = all(isinstance(op, Map) for op in self.nest.operations)
            return dtype if only_maps and names <= _COMPLEX_VECTORS else None
        return dtype if dtype.is_floating_point else None

    # -- one iteration ----------------------------------------------------------------------------

    def _body(self, left: str) -> Iterator[str]:
        """``left``: the last argument of loads and stores of a partial vector, or empty."""
        self.loaded: dict[tuple[Any, ...], str] = {}
        self.loads: list[str] = []
        for op in self.nest.operations:
            value = self._print(op.expression, left)
            value = self._cast(value, op.expression.dtype, op.value.dtype)
            yield from self.loads
            self.loads = []
            name = f"v_{op.value.name}"
            if isinstance(op, Reduce):
                # Where lanes are elements that are kept, those after the last are never stored.
                lanes = left if self.axis == len(self.nest.shape) - 1 else ""
                fold = f"{op.kind}_of(total_{op.value.name}, {value}"
                yield f"total_{op.value.name} = {fold}{lanes});"
                continue
            yield f"const auto {name} = {self._as_vector(op, value)};"
            if op.value in self.stored:
                index = self._index(op.value.offset, op.value.strides)
                assert op.value.memory is not None
                pointer = f"row_{memory_name(op.value.memory)} + {index}"
                function = "add_" if op.value.memory.kind == "total" else "store_"
                yield f"{function}({pointer}, {name}{left});"

    def _as_vector(self, op: Map, value: str) -> str:
        """The value as a vector, as stores need it: it may be a constant or one scalar per row."""
        if self.type is None:
            return f"static_cast<{c_type(compute_dtype(op.value.dtype))}>({value})"
        if op.value.dtype == torch.bool:
            return f"as_mask<V>({value})"
        return f"V({value})"

    def _print(self, expr: Expression, left: str) -> str:
        if isinstance(expr, Literal):
            return self._literal(expr)
        if isinstance(expr, Read):
            return self._load(expr, left)
        if expr.name == "cast":
            return self._cast(self._print(expr.args[0], left), expr.args[0].dtype, expr.dtype)
        args = [self._print(arg, left) for arg in expr.args]
        if self.type is not None and expr.name == "where" and expr.dtype == torch.bool:
            args[1:] = (f"as_mask<V>({arg})" for arg in args[1:])
        return f"{expr.name}_({', '.join(args)})"

    def _cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        if compute_dtype(source) == compute_dtype(target):
            return text
        if self.type is not None:  # all but masks have one type
            return f"to_mask<V>({text})" if target == torch.bool else f"from_mask<V>({text})"
        return f"cast_<{c_type(compute_dtype(target))}>({text})"

    def _literal(self, literal: Literal) -> str:
        text = _number(literal.value, compute_dtype(literal.dtype))
        return text if self.type is None or literal.dtype == torch.bool else f"V({text})"

    def _load(self, read: Read, left: str) -> str:
        source, memory, offset = read.source, read.memory, read.start
        if source in self.mapped and is_same_index(read, self.nest.shape):
            return f"v_{source.name}"
        assert memory is not None
        key = (memory, offset, read.strides)
        pointer = f"row_{memory_name(memory)} + {self._index(offset, read.strides)}"
        if self.axis is None:
            return f"load_({pointer})"
        if read.strides[self.axis] == 0 and self.axis == len(read.strides) - 1:
            return self.hoisted.setdefault(key, f"u{len(self.hoisted)}")
        if key not in self.loaded:
            name = self.loaded[key] = f"x{len(self.loaded)}"
            if read.strides[self.axis] == 0:
                self.loads.append(self._broadcast(name, memory, offset, read.strides))
            else:
                self.loads.append(f"const auto {name} = load_<V>({pointer}{left});")
        return self.loaded[key]

    def _broadcast(self, name: str, memory: Memory, offset: int, strides: tuple[int, ...]) -> str:
        """The variable ``name``: one element in all lanes, or a bool, which is no vector."""
        load = f"load_(row_{memory_name(memory)} + {self._index(offset, strides)})"
        return f"const auto {name} = {load if memory.dtype == torch.bool else f'V({load})'};"

    def _hoist(self) -> Iterator[str]:
        """Loads that do not depend on the innermost index, before the innermost loop."""
        for (memory, offset, strides), name in self.hoisted.items():
            yield self._broadcast(name, memory, offset, strides)

    def _index(self, offset: int, strides: tuple[int, ...]) -> str:
        """The index of an element; j counts the elements of vectors."""
        terms = [str(offset)] if offset else []
        for axis, stride in enumerate(strides):
            if stride:
                name = "j" if axis == self.axis else f"i{axis}"
                terms.append(name if stride == 1 else f"{name} * {stride}")
        return " + ".join(terms) or "0"

    # -- reductions -------------------------------------------------------------------------------

    def _open(self, reductions: list[Reduce]) -> Iterator[str]:
        for op in reductions:
            t = c_type(compute_dtype(op.value.dtype))
            neutral = _NEUTRAL.get(op.kind) or f"{op.kind}_neutral<{t}>()"
            total_type = t if self.type is None else f"Vec<{t}>"
            yield f"{total_type} total_{op.value.name}({neutral});"

    def _close(self, reductions: list[Reduce], left: str) -> Iterator[str]:
        is_vector = self.axis is not None and self.axis < (self.nest.outer or 0)
        for op in reductions:
            name, memory = op.value.name, op.value.memory
            assert memory is not None
            pointer = (
                f"row_{memory_name(memory)} + {self._index(op.value.offset, op.value.strides)}"
            )
            if self.axis is None or is_vector:
                yield f"store_({pointer}, total_{name}{left});"
            else:
                yield f"store_({pointer}, {op.kind}_all(total_{name}));"


def _number(value: Any, dtype: torch.dtype) -> str:
    t = c_type(dtype)
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_complex:
        part = dtype.to_real()
        number = complex(value)
        return f"{t}({_number(number.real, part)}, {_number(number.imag, part)})"
    if not dtype.is_floating_point:
        return f"{t}({int(value)})"
    value = float(value)
    if value != value:
        return f"std::numeric_limits<{t}>::quiet_NaN()"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}std::numeric_limits<{t}>::infinity()"
    return f"{t}({value!r})"
