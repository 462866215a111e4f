"""The variables that the Python of a step or loss can read and rebind, scope by scope.

``effects`` sees what a trace rebinds, ``constants`` what is bound to another value afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..._compat.modules import own_buffers
from ..._reach import globals_in, is_bound, names_read_by, own_classes

ABSENT: Any = object()  # the value of a variable that is not bound


@dataclass(frozen=True)
class Scope:
    """The variables of one scope.

    ``names()``: those that are bound now; ``get(name)``: what one of them is bound to, quickly.
    ``bind(name, value)`` binds it to another value, or to none (``ABSENT``). ``describe(name)`` is
    for messages. ``owner``: the object whose attributes they are; None for other variables.
    """

    names: Callable[[], Iterable[str]]
    get: Callable[[str], Any]
    bind: Callable[[str, Any], None]
    describe: Callable[[str], str]
    owner: Any = None

    @property
    def is_of_object(self) -> bool:
        """Whether they are the attributes of an object, which is no class or function."""
        return self.owner is not None and not isinstance(self.owner, (type, FunctionType))

    def read(self) -> dict[str, Any]:
        """What each is bound to now."""
        return {name: self.get(name) for name in self.names()}


@dataclass(frozen=True)
class Place:
    """An attribute of an object, or an item of a dict that is one, which a trace assigned.

    ``holder`` is the object or dict; ``variables[key]`` is what it is bound to, ``after`` what the
    trace assigned.
    """

    holder: Any
    name: str
    description: str
    variables: dict[Any, Any]
    key: Any
    after: Any

    def get(self) -> Any:
        return self.variables.get(self.key, ABSENT)

    def bind(self, value: Any) -> None:
        _bind(self.variables, self.key, value)


def places_of_buffers(assigned: dict[str, tuple[nn.Module, str]]) -> list[Place]:
    """Of buffers, by their names in the step's module: the module that has each, and its name."""
    after = torch.empty(0)  # what is assigned is a tensor
    return [
        Place(owner, key, f"the buffer {name!r}", own_buffers(owner), key, after)
        for name, (owner, key) in assigned.items()
    ]


def scopes_of(root: Any, reached: Collection[Any]) -> Iterator[Scope]:
    """scopes_of : a function or module, what is reached from it -> the scopes of all that

    ``reached`` is what ``_reach.reached_by`` finds. The attributes of a submodule are described by
    its path in the root.
    """
    paths = dict(_paths(root)) if isinstance(root, nn.Module) else {}
    names = names_read_by(reached)
    classes: dict[type, None] = {}  # in order
    for value in reached:
        if isinstance(value, FunctionType):
            yield _captured(value)
            yield _defaults(value)
            yield _globals(value)
            yield _in_dict(vars(value), _attribute(f"the function {value.__name__}"), value)
        elif isinstance(value, partial):
            yield _fixed({str(i): arg for i, arg in enumerate(value.args)}, _argument_of_partial)
            yield _in_dict(value.keywords, _argument_of_partial)
        elif isinstance(value, ModuleType):
            yield _in_dict(vars(value), _variable_of(value.__name__), names=names)
        elif isinstance(value, type):
            classes |= dict.fromkeys(own_classes(value))
        else:
            is_module = isinstance(value, nn.Module)  # of which torch's code binds attributes too
            path = paths.get(value) if is_module else None
            owner = type(value).__name__ if path is None else type(root).__name__
            describe = _attribute(owner, path or "")
            yield _in_dict(vars(value), describe, value, None if is_module else names)
            classes |= dict.fromkeys(own_classes(type(value)))
    yield from map(_of_class, classes)


def _paths(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return ((module, f"{path}.") for path, module in root.named_modules() if path)


def _attribute(owner: str, path: str = "") -> Callable[[str], str]:
    return lambda name: f"the attribute {path + name!r} of {owner}"


def _variable_of(module: str) -> Callable[[str], str]:
    return lambda name: f"the variable {name!r} of the module {module}"


def _argument_of_partial(name: str) -> str:
    return f"the argument {name} of a partial"


def _in_dict(
    variables: dict[str, Any],
    describe: Callable[[str], str],
    owner: Any = None,
    names: Collection[str] | None = None,
) -> Scope:
    """``names``: those of the scope, if it is not all of the dict."""

    def bound() -> Iterable[str]:
        if names is not None:
            return variables.keys() & names
        # torch's recurrent layers keep lists of their weights, which functional_call replaces.
        return [name for name in variables if not name.startswith("_flat_weight")]

    return Scope(bound, variables.get, partial(_bind, variables), describe, owner)


def _bind(variables: dict[Any, Any], name: Any, value: Any) -> None:
    if value is ABSENT:
        variables.pop(name, None)
    else:
        variables[name] = value


def _globals(function: FunctionType) -> Scope:
    names = set(globals_in(function.__code__))
    return _in_dict(function.__globals__, lambda name: f"the global variable {name!r}", names=names)


def _of_class(owner: type) -> Scope:
    attributes = vars(owner)

    def bind(name: str, value: Any) -> None:
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    return Scope(
        lambda: [name for name in attributes if not name.startswith("__")],
        attributes.get,
        bind,
        _attribute(f"the class {owner.__name__}"),
        owner,
    )


def _defaults(function: FunctionType) -> Scope:
    values, last = function.__defaults__ or (), function.__code__.co_argcount
    names = function.__code__.co_varnames[last - len(values) : last]
    defaults = dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
    return _fixed(defaults, lambda name: f"the default of {name!r} of {function.__name__}")


def _fixed(variables: dict[str, Any], describe: Callable[[str], str]) -> Scope:
    """Of variables that are bound for good: what they are bound to may change."""
    return Scope(variables.keys, variables.get, lambda *_: None, describe)


def _captured(function: FunctionType) -> Scope:
    cells: dict[str, CellType] = dict(
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )

    def get(name: str) -> Any:
        cell = cells[name]
        return cell.cell_contents if is_bound(cell) else None

    def bind(name: str, value: Any) -> None:
        if value is not ABSENT:
            cells[name].cell_contents = value

    def bound() -> Iterable[str]:
        return [name for name, cell in cells.items() if is_bound(cell)]

    return Scope(bound, get, bind, lambda name: f"the captured variable {name!r}")
