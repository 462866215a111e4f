"""What a trace of a step or loss has for constants, and whether these have changed since.

A graph holds the operations of one trace: variables and attributes that Python read, such as a
dropout rate, are numbers in it, and so is what torch reads from a tensor outside (``float(scale)``,
``x.roll(n)``). Tensors outside are inputs of the graph: of them it is constant which they are.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..._compat.modules import own_modules
from ..._compat.running import version_of
from ..._compat.tracing import FakeTensor
from ..._reach import is_bound, modules_read_by, names_in, own_classes, reached_by
from ..graphs import aten

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_WATCHED = (*_PLAIN, *_CONTAINERS, *_FUNCTIONS, tuple, Tensor)
_MOST_ITEMS = 64  # of a container: what is longer holds data
# Whether it is noticed that a variable with a value is bound to another one.
IsWatched = Callable[[Any], bool]


class Constants:
    """The constants of all traces of these functions and modules, as they are now."""

    def __init__(self, roots: Iterable[Any]) -> None:
        roots = list(roots)
        self._scopes = [scope for root in roots for scope in _scopes_of(root)]
        modules = (module for root in roots for module in modules_read_by(root))
        self._children = [_children_of(module) for module in modules if own_modules(module)]
        self._numbers: list[_Number] = []

    def change(self) -> Change | None:
        """The first that has changed; None if none has.

        Raises RuntimeError for a submodule that was replaced: more than a trace depends on that.
        """
        for children in self._children:
            if (replaced := children.change()) is not None:
                raise RuntimeError(
                    f"step or loss: {replaced.name} was replaced since the segment was made. Make "
                    "a new segment, by make_train_segment."
                )
        for scope in self._scopes:
            if (change := scope.change()) is not None:
                return change
        for number in self._numbers:
            if number.has_changed():
                return Change("the number in a tensor from outside", is_read=True)
        return None

    def take_over(self, other: Constants) -> None:
        """The values that those of a later trace have, which gave the same graph."""
        self._scopes = other._scopes
        self._numbers += [n for n in other._numbers if not any(map(n.is_of_same, self._numbers))]

    def add_numbers(self, tensors: Iterable[Tensor]) -> None:
        """Adds the numbers of tensors outside, which a trace has read."""
        for tensor in tensors:
            number = _Number(tensor)
            if not any(map(number.is_of_same, self._numbers)):
                self._numbers.append(number)


class Change(NamedTuple):
    """What has changed, and whether a trace is known to have read it."""

    name: str
    is_read: bool


class _Scope:
    """Variables of one scope. ``read()`` gives their values, quickly: it is for each call."""

    def __init__(
        self, names: Sequence[Any], read: Callable[[], Iterable[Any]], description: str
    ) -> None:
        self.read, self.values = read, [*read()]
        self._names, self._description = names, description

    def change(self) -> Change | None:
        """The first variable that is another one; equal numbers are taken for the same."""
        if all(map(operator.is_, self.read(), self.values)):
            return None
        values = [*self.read()]
        for name, value, before in zip(self._names, values, self.values, strict=False):
            if not _is_same(value, before):
                return Change(self._description.format(name), is_read=False)
        self.values = values
        return None


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return isinstance(value, _PLAIN) and value == other


class _Number:
    """The number in a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = ref(tensor)
        self._version, self._value = version_of(tensor), tensor.item()

    def is_of_same(self, other: _Number) -> bool:
        return self.tensor() is other.tensor()

    def has_changed(self) -> bool:
        tensor = self.tensor()
        if tensor is None or (version_of(tensor) == self._version and not tensor.is_inference()):
            return False
        if tensor.item() != self._value:
            return True
        self._version = version_of(tensor)  # written to, with the same number
        return False


def noting_tensors_read(tensors: list[Tensor]) -> dict[Any, Callable[[Tensor], Any]]:
    """A decomposition that adds those to ``tensors`` whose number is read, and no fake ones."""

    def note(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            tensors.append(tensor)
        return NotImplemented

    return {aten._local_scalar_dense.default: note}


def _scopes_of(root: Any) -> Iterator[_Scope]:
    """The variables that are read by a function or module, and by what it calls."""
    reached = list(reached_by(root))
    codes = [value.__code__ for value in reached if isinstance(value, FunctionType)]
    named = {name for code in codes for name in names_in(code)}
    own = {id(value) for value in reached}

    def is_watched(value: Any) -> bool:
        # Of an object whose attributes are watched it is also watched which it is.
        return isinstance(value, _WATCHED) or id(value) in own

    for value in reached:
        if isinstance(value, FunctionType):
            yield from _captured(value, is_watched)
            names = set(_globals_in(value.__code__)) & value.__globals__.keys()
            yield from _variables(value.__globals__, names, "the global variable {!r}", is_watched)
            description = f"the attribute {{!r}} of {value.__name__}"
            yield from _variables(vars(value), vars(value).keys() & named, description, is_watched)
        elif isinstance(value, type):
            yield from _class_attributes(value, named, is_watched)
        else:
            yield from _attributes(value, named, is_watched)


def _captured(function: FunctionType, is_watched: IsWatched) -> Iterator[_Scope]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    bound = {name: cell.cell_contents for name, cell in cells.items() if is_bound(cell)}
    names = [name for name, value in bound.items() if is_watched(value)]
    description = "the captured variable {!r}"
    if names:
        watched = [cells[name] for name in names]
        yield _Scope(
            names, lambda: [c.cell_contents if is_bound(c) else None for c in watched], description
        )
    for name, value in bound.items():
        yield from _items(value, description.format(name))


def _children_of(module: nn.Module) -> _Scope:
    children = own_modules(module)
    description = f"the submodule {{!r}} of {type(module).__name__}"
    return _Scope([*children], children.values, description)


def _attributes(owner: Any, named: set[str], is_watched: IsWatched) -> Iterator[_Scope]:
    """Those that code names. The code of torch's own modules is not known: all of them."""
    kind = type(owner)
    names = vars(owner).keys() & named
    if isinstance(owner, nn.Module):
        if {*kind.__mro__} - {*own_classes(kind), nn.Module, object}:
            names = {name for name in vars(owner) if not name.startswith("_")}
        names.discard("training")  # there is a trace for each mode
    description = f"the attribute {{!r}} of {kind.__name__}"
    yield from _variables(vars(owner), names, description, is_watched)
    yield from _class_attributes(kind, named, is_watched)


def _class_attributes(kind: type, named: set[str], is_watched: IsWatched) -> Iterator[_Scope]:
    description = f"the attribute {{!r}} of {kind.__name__}"
    for base in own_classes(kind):
        names = {name for name in vars(base).keys() & named if not name.startswith("__")}
        yield from _variables(vars(base), names, description, is_watched)


def _variables(
    variables: Mapping[str, Any], names: Iterable[str], description: str, is_watched: IsWatched
) -> Iterator[_Scope]:
    watched = sorted(name for name in names if is_watched(variables[name]))
    if watched:
        yield _Scope(watched, lambda: map(variables.get, watched), description)
    for name in watched:
        yield from _items(variables[name], description.format(name))


def _items(container: Any, name: str) -> Iterator[_Scope]:
    """What a dict or a list holds, such as a configuration."""
    if not isinstance(container, _CONTAINERS) or len(container) > _MOST_ITEMS:
        return
    keys = container if isinstance(container, dict) else range(len(container))
    items = container.values if isinstance(container, dict) else container.copy
    names = ["the length", *(f"the item {key!r}" for key in keys)]
    yield _Scope(names, lambda: (len(container), *items()), f"{{}} of {name}")


def _globals_in(code: CodeType) -> Iterator[str]:
    """The global variables that code, and the code nested in it, reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)
