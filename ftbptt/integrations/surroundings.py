"""What a module's Python reads and changes besides its arguments.

A compiled chunk runs the operations that Python gave once; Python itself does not run again. So a
counter in a ``forward``, a hook or a ``print`` would happen once, and a number that is changed from
outside, such as a dropout rate, would be the old one. Both must be noticed.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import (
    any_global_module_hook,
    has_hooks,
    has_module_hooks,
    own_buffers,
    own_parameters,
    version_of,
)
from ..training.checkpoint import random_state, same_random_state

Place = tuple[str, str, int]  # the owner; its attribute, global or closed-over name; which of them
Marks = dict[Place, Any]

_DEPTH, _LENGTH = 3, 64  # how far into containers and objects of the caller it is looked
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.MethodType)
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OWN = frozenset(vars(nn.Module())) - {"training"}


class _Same:
    """Equal for the same object only; an object that is gone is equal to none."""

    __slots__ = ("_find",)

    def __init__(self, value: Any) -> None:
        try:
            self._find: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._find = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        found = self._find()
        return found is not None and found is other._find()

    __hash__ = None  # type: ignore[assignment]


def _mark(value: Any, depth: int = _DEPTH) -> Any:
    """Something that is equal as long as the value is the same, as far as can be seen."""
    kind = type(value)
    if kind in _PLAIN:
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        if not depth or len(value) > _LENGTH:
            return _Same(value), len(value)
        parts = value.items() if isinstance(value, dict) else value
        return kind, [_mark(part, depth - 1) for part in parts]
    own = None if isinstance(value, (*_CODE, nn.Module)) else getattr(value, "__dict__", None)
    if own and depth and len(own) <= _LENGTH:
        return _Same(value), [(key, _mark(part, depth - 1)) for key, part in own.items()]
    return _Same(value)


class Surroundings:
    """The modules and functions that a chunk runs: the model's and the loss's."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self.model = model
        self._roots: list[nn.Module] = [model]
        self._places: list[tuple[Place, Callable[[], Any]]] = []
        self._seen: set[int] = set()
        kinds = [*map(type, model.modules()), type(loss), loss]
        homes = {(getattr(kind, "__module__", None) or "").partition(".")[0] for kind in kinds}
        self._homes = homes - {"torch", "builtins", "functools"}
        self._note("loss", "itself", partial(_itself, loss))
        for root in self._roots:  # grows: a function may refer to another module
            for module in root.modules():
                self._follow_class(type(module), nn.Module)
                for value in list(vars(module).values()):
                    if isinstance(value, _FUNCTIONS):
                        self._follow(value)

    def _follow_class(self, kind: type, base: type) -> None:
        """Notes what a class says, and what its methods refer to, up to ``base`` or torch's own."""
        for own in kind.__mro__:
            if own is base or _is_of_torch(own.__module__):
                return
            if id(own) in self._seen:
                continue
            self._seen.add(id(own))
            for key, value in list(vars(own).items()):
                if isinstance(value, property):
                    value = value.fget
                elif isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if isinstance(value, types.FunctionType):
                    self._follow(value)
                elif not key.startswith("__") and key != "_abc_impl":
                    self._note(own.__name__, key, partial(getattr, own, key, None))

    def _follow(self, function: Any) -> None:
        """Notes what a function refers to outside of itself, and the functions that it calls."""
        while isinstance(function, (partial, types.MethodType)):
            if isinstance(function, types.MethodType):
                self._note(f"{function.__name__}()", "self", _attribute(function, "__self__"))
                function = function.__func__
            else:
                self._note("partial", "args", _attribute(function, "args"))
                self._note("partial", "keywords", _attribute(function, "keywords"))
                function = function.func
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if not isinstance(function, types.FunctionType):
            if hasattr(function, "__wrapped__"):
                self._follow(function.__wrapped__)
            elif not isinstance(function, _CODE):  # an object with __call__
                self._note(type(function).__name__, "self", partial(_itself, function))
                self._follow_class(type(function), object)
            return
        if not self._is_of_user(function.__module__, function.__code__.co_filename):
            return
        name = function.__name__
        for key in ("__defaults__", "__kwdefaults__", "__dict__"):
            self._note(name, key, _attribute(function, key))
        cells = function.__closure__ or ()
        for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self._note(name, key, partial(_contents, cell))
        names = set(_names(function.__code__))
        for key in names & function.__globals__.keys():
            value = function.__globals__[key]
            self._note(name, key, partial(function.__globals__.get, key))
            if isinstance(value, types.ModuleType) and self._is_of_user(
                value.__name__, getattr(value, "__file__", None) or ""
            ):
                for other in names & vars(value).keys():
                    self._note(value.__name__, other, partial(vars(value).get, other))

    def _is_of_user(self, module: str | None, file: str) -> bool:
        """Whether it belongs to the program: not to an installed package, but for the model's."""
        top = (module or "").partition(".")[0]
        return top in self._homes or not (file.startswith(_INSTALLED) or file.startswith("<"))

    def _note(self, owner: str, key: str, read: Callable[[], Any]) -> None:
        value = read()
        if isinstance(value, nn.Module):
            if not any(value is module for root in self._roots for module in root.modules()):
                self._roots.append(value)
        elif isinstance(value, _FUNCTIONS) or (key == "itself" and callable(value)):
            self._follow(value)
        if not isinstance(value, _CODE):
            self._places.append(((owner, key, len(self._places)), read))

    def modules(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Each module by a name, and which of the roots it is in."""
        for i, root in enumerate(self._roots):
            for name, module in root.named_modules():
                yield name or type(root).__name__, module, -i

    def hindrance(self) -> str | None:
        """Why what runs here is more than the operations of a forward, or None."""
        if any_global_module_hook():
            return "a hook is registered for all modules"
        parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        for name, module, _ in self.modules():
            if has_module_hooks(module):
                return f"a hook is registered on its module {name!r}"
            if isinstance(module, parallel):
                return f"{type(module).__name__} works in hooks of the backward"
            if isinstance(module, torch.jit.ScriptModule):
                return f"its module {name!r} is TorchScript"
            for key, p in own_parameters(module).items():
                if p is not None and has_hooks(p):
                    return f"a hook is registered on its parameter '{name}.{key}'"
        return None

    def read(self) -> Marks:
        """Everything that is watched, as it is now; values of parameters and buffers apart."""
        marks: Marks = {}
        for name, module, i in self.modules():
            for key, value in vars(module).items():
                # torch's recurrent layers hold their parameters a second time in such a list.
                if key not in _OWN and not key.startswith("_flat_weight"):
                    marks[name, key, i] = _mark(value)
            for key, p in own_parameters(module).items():
                marks[name, key, i] = None if p is None else (_Same(p), p.requires_grad, p.dtype)
            for key, b in own_buffers(module).items():
                marks[name, key, i] = None if b is None else (b.shape, b.dtype)
        # The tensors of a module that is not part of the model are constants of what is compiled.
        for i, root in enumerate(self._roots[1:]):
            for path, value in (*root.named_parameters(), *root.named_buffers()):
                marks[type(root).__name__, path, i] = _Same(value), version_of(value)
        for place, read in self._places:
            marks[place] = _mark(read())
        return marks

    def versions(self, *, parameters: bool) -> Marks:
        """How often each buffer, and each parameter, was written; and which tensor it is."""
        marks: Marks = {}
        for name, module, i in self.modules():
            own: dict[str, Tensor | None] = dict(own_buffers(module))
            for key, value in (own | dict(own_parameters(module)) if parameters else own).items():
                if value is not None:
                    marks[name, key, i] = _Same(value), version_of(value)
        return marks


def difference(before: Marks, after: Marks) -> str | None:
    """The first place that is not the same, in words."""
    for place in after.keys() | before.keys():
        if place not in before or place not in after or before[place] != after[place]:
            owner, key, _ = place
            return f"{key!r} of {owner}"
    return None


class SideEffects:
    """What a call did besides what it returned: ``words`` after :meth:`watching`, None if nothing.

    ``drew`` says whether it drew from torch's random numbers, which is no side effect.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self.words: str | None = None
        self.drew = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        around = self._surroundings
        marks, versions = around.read(), around.versions(parameters=True)
        before = random_state()
        out = _Listener(sys.stdout)
        records: list[None] = []
        make_record = logging.getLogRecordFactory()

        def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            records.append(None)
            return make_record(*args, **kwargs)

        logging.setLogRecordFactory(record)
        try:
            with redirect_stdout(out):  # type: ignore[type-var]
                yield
        finally:
            logging.setLogRecordFactory(make_record)
        after = random_state()
        drawn = {name for name in before if not same_random_state(before[name], after[name])}
        self.drew = not drawn.isdisjoint(("torch", "cuda"))
        changed = difference(marks, around.read())
        changed = changed or difference(versions, around.versions(parameters=True))
        if changed is not None:
            self.words = f"it changes {changed}"
        elif out.heard or records:
            self.words = "it prints or logs"
        elif not drawn.isdisjoint(("python", "numpy")):
            self.words = "it draws from Python's or NumPy's random numbers"


class _Listener:
    """A stream that notices whether something is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.heard = stream, False

    def write(self, text: str) -> Any:
        self.heard = True
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_of_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"


def _names(code: types.CodeType) -> Iterable[str]:
    """The names that code, and the code inside it, may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _itself(value: Any) -> Any:
    return value


def _attribute(value: Any, name: str) -> Callable[[], Any]:
    return partial(getattr, value, name)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
