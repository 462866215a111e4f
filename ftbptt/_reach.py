"""What a function reads besides its arguments."""

from __future__ import annotations

import dis
import site
import sys
import sysconfig
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import (
    cache,
    cached_property,
    lru_cache,
    partial,
    partialmethod,
    singledispatchmethod,
)
from itertools import chain, islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from ._compat.modules import own_modules

_MOST_ITEMS = 1000  # of a container: what is longer holds data
# Methods that Python calls, but not for a step or a loss.
_NOT_OF_STEPS = {
    "__init__", "__new__", "__del__", "__init_subclass__", "__class_getitem__", "__set_name__",
    "__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__copy__", "__deepcopy__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
}  # fmt: skip
_CALLED_BY_TORCH = {"forward", "backward", "setup_context"}
_CACHE = type(cache(lambda: None))
_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_BY_NAME = {"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__"}  # given as strings
# With one of these, code comes to submodules that it does not name.
_TO_SUBMODULES = {
    "children", "named_children", "modules", "named_modules", "_modules", "get_submodule", "apply",
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "functional_call",
    "deepcopy", "__getattr__", "__getattribute__", "eval", "exec", "methodcaller", *_BY_NAME,
}  # fmt: skip
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OWN_PACKAGE = __name__.partition(".")[0]
_NOT_OF_CALLER = {"torch", "functorch", "numpy", _OWN_PACKAGE, *sys.stdlib_module_names}
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {*site.getsitepackages(), site.getusersitepackages(), "/usr/lib/python3/dist-packages"}
)


def reached_by(root: Any) -> Iterator[Any]:
    """reached_by : function, module or what is called as one -> functions, modules, others

    The others are objects, classes, ``partial`` functions, and Python modules.

    Itself and what it reads, each once. A function reads what it closes over, its defaults, and
    what it names as globals; a method what it is bound to, a ``partial`` what it binds, a module
    or an object what it holds, a container its items, and a Python module what any code so far
    names. Of a module of the program, the submodules that code names; all of them, if any code may
    come to them otherwise. All of this only where it is a module, a container, or the caller's
    own: of the program that runs, of the root's package, or of a file of what is reached. Of the
    classes of all these: the methods whose names occur in any code so far, and those that Python
    and torch call.
    """
    seen: dict[int, Any] = {}  # kept alive, so that no other object gets their ids
    own = _Own()
    classes: dict[type, None] = {}  # in order
    python_modules: dict[ModuleType, None] = {}
    names = {*_CALLED_BY_TORCH}  # then those in code as well
    by_name: list[nn.Module] = []  # whose submodules are read if their names are in code
    waiting = [root]

    def wait_for(values: Iterable[Any]) -> None:
        waiting.extend(value for value in values if id(value) not in seen and own.follows(value))

    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, nn.Module):
                yield value
                own.add_file(type(value).__module__)
                classes |= dict.fromkeys(own_classes(type(value)))
                if _names_submodules(type(value)):
                    by_name.append(value)
                else:
                    wait_for(value.children())  # all of them, unlike what a container holds
                wait_for(held for name, held in vars(value).items() if name != "_modules")
            elif isinstance(value, MethodType):
                waiting += [value.__func__, value.__self__]
            elif isinstance(value, partial):
                yield value
                wait_for([value.func, *value.args, *value.keywords.values()])
            elif isinstance(value, FunctionType):
                yield value
                own.add_file(value.__module__)
                names.update(names_in(value.__code__))
                wait_for(_read_by(value))
            elif isinstance(value, _SEQUENCES):
                wait_for(islice(value, _MOST_ITEMS))
            elif isinstance(value, dict):
                wait_for(islice(value.values(), _MOST_ITEMS))
            elif isinstance(value, ModuleType):
                yield value
                python_modules[value] = None
            elif isinstance(value, type):
                yield value
                classes |= dict.fromkeys(own_classes(value))
            elif hasattr(value, "__dict__"):
                yield value
                classes |= dict.fromkeys(own_classes(type(value)))
                wait_for(vars(value).values())
        if not waiting:  # what code names comes last: that may be reached after its owner
            wait_for(vars(m)[name] for m in python_modules for name in vars(m).keys() & names)
            are_all = not names.isdisjoint(_TO_SUBMODULES)
            for module in by_name:
                held = own_modules(module).items()  # one that it holds twice has two names
                wait_for(child for name, child in held if are_all or name in names)
            waiting += [method for method in _methods_of(classes, names) if id(method) not in seen]


def _names_submodules(kind: type[nn.Module]) -> bool:
    """Whether code that is followed reads the submodules of such a module, by their names.

    Those of torch's own modules, such as ``Sequential``, are read by code that is not, and so may
    be those of installed libraries.
    """
    packages = {_package(base.__module__) for base in kind.__mro__ if base is not nn.Module}
    return _is_of_program(kind.__module__) and "torch" not in packages


class _Own:
    """What belongs to the caller, and what is followed."""

    def __init__(self) -> None:
        self._files: set[str] = set()  # of the functions and modules so far
        self._package: str | None = None  # that of the first which is not ours

    def add_file(self, module_name: str) -> None:
        self._files.add(module_name)
        if self._package is None and _package(module_name) not in _NOT_OF_CALLER:
            self._package = _package(module_name)

    def follows(self, value: Any) -> bool:
        kind = type(value)
        if isinstance(value, (nn.Module, MethodType, partial, dict, *_SEQUENCES, _CACHE)):
            return True
        if isinstance(value, FunctionType):
            # A wrapper, such as a decorator makes it, or one of ours around the caller's function.
            is_wrapper = value.__closure__ is not None and _package(value.__module__) != "torch"
            return is_wrapper or self._package is None or self._has(value.__module__)
        if isinstance(value, type):
            return self._has(value.__module__)
        if isinstance(value, ModuleType):
            return _is_of_program(value.__name__)
        is_callable = callable(value) and _package(kind.__module__) not in _NOT_OF_CALLER
        is_record = isinstance(value, (SimpleNamespace, Namespace))  # has nothing but attributes
        return hasattr(value, "__dict__") and (
            is_callable or is_record or self._has(kind.__module__)
        )

    def _has(self, module_name: str) -> bool:
        package = _package(module_name)
        return package not in _NOT_OF_CALLER and (
            package == self._package or module_name in self._files or _is_of_program(module_name)
        )


def _package(module_name: Any) -> str:
    """Empty where there is no name; a class may have a descriptor in its place."""
    return module_name.partition(".")[0] if isinstance(module_name, str) else ""


@cache
def _is_of_program(module_name: str) -> bool:
    """Whether a Python module is part of the program that runs, and of no installed library."""
    if module_name == "__main__":
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return (
        _package(module_name) not in _NOT_OF_CALLER
        and file is not None
        and not file.startswith(_INSTALLED)
    )


def _read_by(function: FunctionType) -> Iterator[Any]:
    """What a function closes over, its defaults, and the global variables that it reads."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if is_bound(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    variables = function.__globals__
    yield from (variables[name] for name in globals_in(function.__code__) if name in variables)


def modules_read_by(function: Any) -> list[nn.Module]:
    """modules_read_by : function, module or what is called as one -> the modules it reads

    >>> linear = nn.Linear(2, 2)
    >>> modules_read_by(lambda params, x, h: linear(x))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    return [value for value in reached_by(function) if isinstance(value, nn.Module)]


def _with_nested_code(
    names: Callable[[CodeType], Iterable[str]],
) -> Callable[[CodeType], tuple[str, ...]]:
    """Also of the code nested in it: each name once, in order.

    Kept, since a first call asks for a function's many times over.
    """

    @lru_cache(2**12)
    def names_of_all(code: CodeType) -> tuple[str, ...]:
        nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
        return tuple(dict.fromkeys(chain(names(code), *map(names_of_all, nested))))

    return names_of_all


@_with_nested_code
def _strings_in(code: CodeType) -> Iterable[str]:
    """The names that code may look up with ``getattr``, ``hasattr`` and the like."""
    if _BY_NAME.isdisjoint(code.co_names):
        return ()
    return (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())


@_with_nested_code
def names_in(code: CodeType) -> Iterable[str]:
    """The names that code may look up; also with ``getattr``."""
    return (*code.co_names, *_strings_in(code))


@_with_nested_code
def attributes_set_in(code: CodeType) -> Iterable[str]:
    """The attributes that code assigns."""
    return (i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


@_with_nested_code
def globals_in(code: CodeType) -> Iterable[str]:
    """The global variables that code reads or binds."""
    return (i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS)


def _code_in(reached: Iterable[Any]) -> Iterator[CodeType]:
    return (value.__code__ for value in reached if isinstance(value, FunctionType))


def names_read_by(reached: Iterable[Any]) -> set[str]:
    """The names that the code of functions may look up, of what :func:`reached_by` finds."""
    return {name for code in _code_in(reached) for name in names_in(code)}


def names_asked_by(reached: Iterable[Any]) -> set[str]:
    """Of these, the names that code asks for (``hasattr``), which need not be there."""
    return {name for code in _code_in(reached) for name in _strings_in(code)}


def attributes_set_by(root: Any) -> set[str]:
    """The attributes that a function or module, and what it calls, may assign."""
    return {name for code in _code_in(reached_by(root)) for name in attributes_set_in(code)}


def methods_called_unnamed(kind: type) -> set[str]:
    """Those of a class of the caller's that torch and Python call."""
    members = (member for base in own_classes(kind) for member in vars(base).items())
    methods = {name for name, value in members if isinstance(value, FunctionType)}
    dunder = {name for name in methods if name.startswith("__") and name not in _NOT_OF_STEPS}
    return methods & _CALLED_BY_TORCH | dunder


def is_bound(cell: CellType) -> bool:
    """Whether a variable that a function closes over has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def own_classes(kind: type) -> list[type]:
    """A class and those that it is derived from, but Python's, torch's and this package's."""
    return [base for base in kind.__mro__ if _package(base.__module__) not in _NOT_OF_CALLER]


def is_cache(value: Any) -> bool:
    """Whether it is what ``functools.cache`` and ``lru_cache`` make of a function."""
    return isinstance(value, _CACHE)


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
                yield from (f for f in (method.fset, method.fdel) if isinstance(f, FunctionType))
                method = method.fget
            elif isinstance(method, (cached_property, partialmethod, singledispatchmethod)):
                method = method.func
            if isinstance(method, (FunctionType, _CACHE)):
                yield method
