"""What a trace of a step or loss has for constants, and whether these have changed since.

A graph holds the operations of one trace: variables and attributes that Python read, such as a
dropout rate, are numbers in it, and so is what torch reads from a tensor outside (``float(scale)``,
``x.roll(n)``). Tensors outside are inputs of the graph: of them it is constant which they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..._compat.modules import own_modules
from ..._compat.running import version_of
from ..._compat.tracing import FakeTensor
from ..._reach import modules_read_by, names_in, own_classes, reached_by
from ..graphs import aten
from .variables import Scope, scopes_of

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_WATCHED = (*_PLAIN, *_CONTAINERS, *_FUNCTIONS, tuple, Tensor)
_MOST_ITEMS = 64  # of a container: what is longer holds data


class Constants:
    """The constants of all traces of these functions and modules, as they are now."""

    def __init__(self, roots: Iterable[Any]) -> None:
        roots = list(roots)
        self._watched = [watched for root in roots for watched in _watched_in(root)]
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
        for watched in self._watched:
            if (change := watched.change()) is not None:
                return change
        for number in self._numbers:
            if number.has_changed():
                return Change("the number in a tensor from outside", is_read=True)
        return None

    def take_over(self, other: Constants) -> None:
        """The values that those of a later trace have, which gave the same graph."""
        self._watched = other._watched
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


class _Watched:
    """Variables or items. ``read()`` gives their values, quickly: it is for each call."""

    def __init__(
        self,
        names: Sequence[Any],
        read: Callable[[], Iterable[Any]],
        describe: Callable[[Any], str],
    ) -> None:
        self.read, self.values = read, [*read()]
        self._names, self._describe = names, describe

    def change(self) -> Change | None:
        """The first variable that is another one; equal numbers are taken for the same."""
        if all(map(operator.is_, self.read(), self.values)):
            return None
        values = [*self.read()]
        for name, value, before in zip(self._names, values, self.values, strict=False):
            if not _is_same(value, before):
                return Change(self._describe(name), is_read=False)
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


def _watched_in(root: Any) -> Iterator[_Watched]:
    """The variables that are read by a function or module, and by what it calls."""
    reached = list(reached_by(root))
    codes = [value.__code__ for value in reached if isinstance(value, FunctionType)]
    named = {name for code in codes for name in names_in(code)}
    own = {id(value) for value in reached}
    for scope in scopes_of(root, reached):
        # Of an object whose attributes are watched it is also watched which it is.
        names = sorted(
            name
            for name in _named_of(scope, named)
            if isinstance(value := scope.get(name), _WATCHED) or id(value) in own
        )
        if names:
            yield _Watched(names, partial(map, scope.get, names), scope.describe)
        for name in names:
            yield from _items(scope.get(name), scope.describe(name))


def _named_of(scope: Scope, named: set[str]) -> Iterable[str]:
    """Those of a scope that code names. The code of torch's own modules is not known: all."""
    names, owner = scope.names(), scope.owner
    if owner is None:
        return names
    if not isinstance(owner, nn.Module):
        return named.intersection(names)
    kind = type(owner)
    is_of_torch = {*kind.__mro__} - {*own_classes(kind), nn.Module, object}
    read = [n for n in names if (not n.startswith("_") if is_of_torch else n in named)]
    return [name for name in read if name != "training"]  # there is a trace for each mode


def _children_of(module: nn.Module) -> _Watched:
    children, owner = own_modules(module), type(module).__name__
    return _Watched([*children], children.values, lambda n: f"the submodule {n!r} of {owner}")


def _items(container: Any, name: str) -> Iterator[_Watched]:
    """What a dict or a list holds, such as a configuration."""
    if not isinstance(container, _CONTAINERS) or len(container) > _MOST_ITEMS:
        return
    keys = container if isinstance(container, dict) else range(len(container))
    items = container.values if isinstance(container, dict) else container.copy
    names = ["the length", *(f"the item {key!r}" for key in keys)]
    yield _Watched(names, lambda: (len(container), *items()), lambda n: f"{n} of {name}")
