"""What a trace of a step or loss has for constants, and whether these have changed since.

A graph holds the operations of one trace: variables and attributes that Python read, such as a
dropout rate, are numbers in it, and so is what torch reads from a tensor outside (``float(scale)``,
``x.roll(n)``). Tensors outside are inputs of the graph: of them it is constant which they are.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from numbers import Number
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..._compat.modules import (
    hooks_of,
    own_buffers,
    own_hooks_for_all_modules,
    own_modules,
    own_parameters,
)
from ..._compat.running import version_of
from ..._compat.tracing import FakeTensor
from ..._reach import (
    methods_called_unnamed,
    names_asked_by,
    names_read_by,
    own_classes,
    reached_by,
)
from ...contract.held_tensors import HOLDING, names_of_shared
from ..graphs import aten, has_equal_values
from .variables import Place, Scope, scopes_of

_VALUES = (Number, bool, str, bytes, type(None), torch.dtype, torch.device)
_COMPARED = (frozenset, range, slice, CodeType)
_CONTAINERS = (dict, list, set, deque)
_MOST_ITEMS = 64  # of a container: what is longer holds data


class Constants:
    """The constants of all traces of these functions and modules, as they are now."""

    def __init__(self, roots: Iterable[Any], given: nn.Module | None) -> None:
        """``given``: the module whose parameters and buffers the first of them, the step, gets."""
        self._watched: list[_Watched] = []
        self._variables: dict[int, list[_Watched]] = {}  # the watched ones by the root's id
        modules: dict[nn.Module, None] = {}  # in order
        with_tensors: dict[nn.Module, None] = {}  # those that it reads itself
        all_reached: dict[int, Any] = {}
        passed = set() if given is None else set(given.modules())
        for root in roots:
            reached = list(reached_by(root))
            all_reached |= {id(value): value for value in reached}
            own = dict.fromkeys(v for v in reached if isinstance(v, nn.Module))
            modules |= own
            with_tensors |= dict.fromkeys(module for module in own if module not in passed)
            passed = set()
            self._variables[id(root)] = list(_watched_in(root, reached))
            self._watched += self._variables[id(root)]
        self._watched.append(_code_of(all_reached.values()))
        self._children = _Parts("submodule", [(own_modules(m), m) for m in modules])
        outside = [(held, m) for m in with_tensors for held in _tensors_of(m)]
        hooks = [held for m in modules for held in hooks_of(m)]
        # They have numbers for names, which do not come again.
        names_of_hooks = partial(chain.from_iterable, hooks)
        self._watched.append(_Watched(repeat(""), names_of_hooks, lambda _: "a module's hook"))
        if modules:
            of_all = lambda _: "a hook of all modules"  # noqa: E731
            self._watched.append(_Watched(repeat(""), own_hooks_for_all_modules, of_all))
        # There is a trace for each mode of the modules that there were when it was made.
        modes = partial(map, operator.attrgetter("training"), [*modules])
        self._watched.append(_Watched(range(len(modules)), modes, lambda _: "a module's mode"))
        if outside:
            self._watched.append(_Parts("parameter or buffer", outside))
        if given is not None and (names := names_of_shared(given)):  # a trace has them once
            self._watched.append(_registered(given, names))
        self._tensors_read: list[_TensorRead] = []
        self.assigned: list[Place] = []  # by what was traced so far, before it read them

    def change(self) -> Change | None:
        """The first that has changed; None if none has.

        Raises RuntimeError for a submodule that was replaced: more than a trace depends on that.
        """
        with HOLDING:
            if (replaced := self._children.change()) is not None:
                raise RuntimeError(
                    f"step or loss: {replaced.name} was replaced, added or removed since the "
                    "segment was made. Make a new segment, by make_train_segment."
                )
            for watched in self._watched:
                if (change := watched.change()) is not None:
                    return change
        for tensor_read in self._tensors_read:
            if tensor_read.has_changed():
                return Change("the number in a tensor from outside", is_read=True)
        return None

    def add_buffers(self, module: nn.Module) -> None:
        """Adds the buffers of the module that a call is given: a trace has read their numbers."""
        self._watched.append(_Parts("buffer", [(own_buffers(m), m) for m in module.modules()]))

    def leave_out(self, root: Any, places: Iterable[Place]) -> None:
        """Does not watch these for a root, which does not read what was there before a call."""
        for watched in self._variables[id(root)]:
            watched.left_out.update(p.name for p in places if p.holder is watched.holder)

    def take_over(self, other: Constants) -> None:
        """The values that those of a later trace have, which gave the same graph."""
        self._watched = other._watched
        self.add_tensors_read(tensor for read in other._tensors_read if (tensor := read.tensor()))

    def add_tensors_read(self, tensors: Iterable[Tensor]) -> None:
        """Adds tensors outside whose numbers a trace has read."""
        known = [read.tensor() for read in self._tensors_read]
        for tensor in tensors:
            if not any(tensor is other for other in known):
                self._tensors_read.append(_TensorRead(tensor))


class Change(NamedTuple):
    """What has changed, and whether a trace is known to have read it."""

    name: str
    is_read: bool


class _Watched:
    """Variables or items. ``read()`` gives their values, quickly: it is for each call.

    ``describe(name)`` is for messages; None: there are more or fewer of them. ``holder``: the
    object that has the variables, or the container of the items.
    """

    def __init__(
        self,
        names: Iterable[Any],
        read: Callable[[], Iterable[Any]],
        describe: Callable[[Any], str],
        holder: Any = None,
    ) -> None:
        self.read, self.values, self.holder = read, [*read()], holder
        self.left_out: set[Any] = set()
        self._names, self._describe = names, describe

    def change(self) -> Change | None:
        """The first variable that is another one; equal numbers are taken for the same."""
        values = [*self.read()]
        if len(values) == len(self.values) and all(map(operator.is_, values, self.values)):
            return None
        for name, value, before in zip(self._names, values, self.values, strict=False):
            if not _is_same(value, before) and name not in self.left_out:
                return Change(self._describe(name), is_read=False)
        if len(values) != len(self.values):
            return Change(self._describe(None), is_read=False)
        self.values = values
        return None


class _Parts(_Watched):
    """What modules hold apart from their attributes, each in a dict that changes with them."""

    def __init__(self, what: str, parts: Sequence[tuple[dict[str, Any], nn.Module]]) -> None:
        names = [(name, type(owner).__name__) for held, owner in parts for name in held]
        dicts = [held for held, _ in parts]

        def describe(name: Any) -> str:
            return f"a {what}" if name is None else f"the {what} {name[0]!r} of {name[1]}"

        super().__init__(
            names, lambda: chain.from_iterable([held.values() for held in dicts]), describe
        )


def _registered(module: nn.Module, names: list[str]) -> _Watched:
    """Parameters and buffers of a module, by their names in it."""
    places = []
    for name in names:
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        places += [(held, key) for held in _tensors_of(owner) if key in held]
    return _Watched(
        names,
        lambda: [held.get(key) for held, key in places],
        lambda name: f"the parameter or buffer {name!r}",
    )


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return own_parameters(module), own_buffers(module)


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, _COMPARED):
        return bool(value == other)
    return isinstance(value, _VALUES) and repr(value) == repr(other)  # tells 0.0 from -0.0


class _TensorRead:
    """A tensor outside whose numbers were read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = ref(tensor)
        self._version, self._values = version_of(tensor), tensor.detach().clone()

    def has_changed(self) -> bool:
        tensor = self.tensor()
        if tensor is None:
            return False
        # The version does not count writes through .data or NumPy; reading it waits for a GPU.
        if tensor.is_cuda and version_of(tensor) == self._version and not tensor.is_inference():
            return False
        if not has_equal_values(tensor, self._values):
            return True
        self._version = version_of(tensor)  # written to, with the same numbers
        return False


def noting_tensors_read(tensors: list[Tensor]) -> dict[Any, Callable[..., Any]]:
    """Decompositions that add those to ``tensors`` whose numbers are read, and no fake ones."""

    def note(*args: Any, **_: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in given):
            tensors.extend(given)
        return NotImplemented

    reading = (aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default)
    return dict.fromkeys(reading, note)


def _watched_in(root: Any, reached: list[Any]) -> Iterator[_Watched]:
    """The variables that are read by a function or module, and by what it calls."""
    named, asked = names_read_by(reached), names_asked_by(reached)
    for scope in scopes_of(root, reached):
        read = _read_in(scope, named, asked)
        names = sorted(name for name in read if not isinstance(scope.get(name), ModuleType))
        if names:
            read_now = partial(map, scope.get, names)
            yield _Watched(names, read_now, scope.describe, scope.owner)
        for name in names:
            yield from _items(scope.get(name), scope.describe(name))


def _code_of(reached: Iterable[Any]) -> _Watched:
    """What reloading a file, as in a notebook, replaces in objects that stay the same."""
    functions = [value for value in reached if isinstance(value, FunctionType)]
    kinds = (FunctionType, ModuleType, type)
    others = [value for value in reached if not isinstance(value, kinds)]
    objects = [value for value in others if own_classes(type(value))]
    parts = {"code": "__code__", "defaults": "__defaults__", "keyword defaults": "__kwdefaults__"}
    parts_of = operator.attrgetter(*parts.values())
    names = [f"the {part} of {function.__qualname__}" for function in functions for part in parts]
    names += [f"the class of a {type(value).__name__}" for value in objects]

    def read() -> Iterator[Any]:
        return chain(*map(parts_of, functions), map(type, objects))

    return _Watched(names, read, str)


def _read_in(scope: Scope, named: set[str], asked: set[str]) -> Iterable[str]:
    """The variables of a scope that code names, or asks for.

    Also those that are not there yet, but would hide one of a class.
    """
    names, owner = {*scope.names()}, scope.owner
    if owner is None:
        return names
    kind = owner if isinstance(owner, type) else type(owner)
    of_classes = {name for base in own_classes(kind) for name in vars(base)}
    read = (names | {name for name in of_classes if not name.startswith("__")}) & named
    if owner is kind:
        return read | methods_called_unnamed(owner)
    read |= asked
    if isinstance(owner, nn.Module):
        read.add("forward")  # which torch calls; the code of torch's own modules is not known
        kinds = [kind for kind in type(owner).__mro__ if kind is not nn.Module]
        if any(kind.__module__.startswith("torch.") for kind in kinds):
            read |= {name for name in names if not name.startswith("_")}
        read.discard("training")  # there is a trace for each mode
    return read


def _items(container: Any, name: str) -> Iterator[_Watched]:
    """What a dict, a list or a set holds, such as a configuration."""
    if not isinstance(container, _CONTAINERS) or len(container) > _MOST_ITEMS:
        return
    keys = container if isinstance(container, dict) else range(len(container))
    names = [*map(item_name, keys)]
    if isinstance(container, dict):
        names += [f"the key {key!r}" for key in keys]
    yield _Watched(
        names,
        partial(_content, container),
        lambda n: f"the length of {name}" if n is None else f"{n} of {name}",
        container,
    )


def item_name(key: Any) -> str:
    """What the item of a dict or list is called."""
    return f"the item {key!r}"


def _content(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.values(), *container]
    return list(container)
