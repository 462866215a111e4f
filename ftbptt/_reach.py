"""What a function reads besides its arguments."""

from __future__ import annotations

import dis
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, partial, partialmethod, singledispatchmethod
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

_MOST_ITEMS = 1000  # of a container: what is longer holds data
# Methods that Python calls, but not for a step or a loss.
_NOT_OF_STEPS = {
    "__init__", "__new__", "__del__", "__init_subclass__", "__class_getitem__", "__set_name__",
    "__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__copy__", "__deepcopy__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
}  # fmt: skip
_CACHE = type(cache(lambda: None))
_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


def reached_by(root: Any) -> Iterator[Any]:
    """reached_by : function, module or what is called as one -> functions, modules, others

    The others are objects and classes.

    Itself and what it reads, each once. A function reads what it closes over, its defaults, and
    what it names as globals, if these are modules, containers, or the caller's own, that is, of
    the same file (classes too); a method what it is bound to, a ``partial`` what it binds, an
    object of the caller's what it holds, and a module its submodules and such objects. Of the
    classes of all these: the methods whose names occur in the code of any function so far, and
    those that Python and torch call; none of torch's own.
    """
    seen: dict[int, Any] = {}  # kept alive, so that no other object gets their ids
    owners: dict[int, Any] = {}  # of methods
    files = set[str]()  # those of the functions and modules so far
    classes: dict[type, None] = {}  # in order
    names = {"forward", "backward", "setup_context"}  # that torch calls; then those in code
    waiting = [root]
    # Methods come last: what names one may be reached after its class.
    while waiting := waiting or [m for m in _methods_of(classes, names) if id(m) not in seen]:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            yield value
            files.add(type(value).__module__)
            classes |= dict.fromkeys(own_classes(type(value)))
            waiting += value.children()
            waiting += [part for part in vars(value).values() if _is_own(part, files)]
        elif isinstance(value, MethodType):
            waiting.append(value.__func__)
            owners[id(value.__self__)] = value.__self__
            waiting.append(value.__self__)
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            yield value
            files.add(value.__module__)
            names.update(names_in(value.__code__))
            waiting += [cell.cell_contents for cell in value.__closure__ or () if is_bound(cell)]
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            waiting += _globals_of(value)
        elif isinstance(value, (list, tuple)):
            waiting += value[:_MOST_ITEMS]
        elif isinstance(value, dict):
            waiting += islice(value.values(), _MOST_ITEMS)
        elif isinstance(value, type):
            if value.__module__ in files or id(value) in owners:
                yield value
                classes |= dict.fromkeys(own_classes(value))
        elif hasattr(value, "__dict__") and (
            callable(value) or id(value) in owners or _is_own(value, files)
        ):
            yield value
            classes |= dict.fromkeys(own_classes(type(value)))
            waiting += vars(value).values()


def modules_read_by(function: Any) -> list[nn.Module]:
    """modules_read_by : function, module or what is called as one -> the modules it reads

    >>> linear = nn.Linear(2, 2)
    >>> modules_read_by(lambda params, x, h: linear(x))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    return [value for value in reached_by(function) if isinstance(value, nn.Module)]


def names_in(code: CodeType) -> Iterator[str]:
    """The names that code, and the code nested in it, may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def globals_in(code: CodeType) -> Iterator[str]:
    """The global variables that code, and the code nested in it, reads or binds."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OF_GLOBALS:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_in(constant)


def is_bound(cell: CellType) -> bool:
    """Whether a variable that a function closes over has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def own_classes(kind: type) -> list[type]:
    """A class and those that it is derived from, but torch's and built-in ones."""
    return [
        base
        for base in kind.__mro__
        if base.__module__ != "builtins" and base.__module__.partition(".")[0] != "torch"
    ]


def is_cache(value: Any) -> bool:
    """Whether it is what ``functools.cache`` and ``lru_cache`` make of a function."""
    return isinstance(value, _CACHE)


def _globals_of(function: FunctionType) -> list[Any]:
    own = function.__globals__
    values = [own.get(name) for name in names_in(function.__code__)]
    return [
        value
        for value in values
        if isinstance(value, (nn.Module, MethodType, partial, list, tuple, dict))
        or (isinstance(value, FunctionType) and value.__globals__ is own)
        or (isinstance(value, type) and value.__module__ == function.__module__)
        or is_cache(value)
        or _is_own(value, {function.__module__})
    ]


def _is_own(value: Any, files: set[str]) -> bool:
    """Whether its class is the caller's, or has nothing but attributes."""
    return type(value).__module__ in files or isinstance(value, (SimpleNamespace, Namespace))


def _methods_of(classes: Iterable[type], names: set[str]) -> Iterator[Any]:
    """The classes' methods, not their bases', of these names, and those that Python calls."""
    members = (member for kind in classes for member in vars(kind).items())
    for name, method in members:
        if name == "__len__" and "len" not in names:
            continue
        if name in names or (name.startswith("__") and name not in _NOT_OF_STEPS):
            if isinstance(method, (classmethod, staticmethod)):
                method = method.__func__
            elif isinstance(method, property):
                method = method.fget
            elif isinstance(method, (cached_property, partialmethod, singledispatchmethod)):
                method = method.func
            if isinstance(method, (FunctionType, _CACHE)):
                yield method
