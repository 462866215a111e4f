"""What a module's Python reads and changes besides its arguments.

A compiled chunk replays the operations of one trace; Python itself does not run again. A counter in
``forward``, a hook or a ``print`` would take effect once only, and a number changed from outside,
such as a dropout rate, would keep its old value. This module detects both.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.modules import (
    any_global_module_hook,
    has_hooks,
    has_module_hooks,
    own_buffers,
    own_parameters,
)
from ..._compat.running import version_of
from ..._random_state import random_state, same_random_state
from ..._reach import names_in

# (owner, attribute or global or closed-over name, a number that tells equal names apart)
Location = tuple[str, str, int]
Snapshot = dict[Location, Any]

_DEPTH, _LENGTH = 3, 64  # limits on the containers and objects that a snapshot looks into
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.MethodType)
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}


class _Identity:
    """Equal for the same object only. Once the object is gone, equal to nothing."""

    __slots__ = ("_resolve",)

    def __init__(self, value: Any) -> None:
        try:
            self._resolve: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._resolve = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return False
        value = self._resolve()
        return value is not None and value is other._resolve()

    __hash__ = None  # type: ignore[assignment]


def _fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Compares equal as long as the value is unchanged, as far as can be told."""
    kind = type(value)
    if kind in _PLAIN:
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return _Identity(value), version_of(value)
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        if not depth or len(value) > _LENGTH:
            return _Identity(value), len(value)
        parts = value.items() if isinstance(value, dict) else value
        return kind, [_fingerprint(part, depth - 1) for part in parts]
    is_opaque = isinstance(value, (*_CODE, nn.Module))
    attributes = None if is_opaque else getattr(value, "__dict__", None)
    if attributes and depth and len(attributes) <= _LENGTH:
        parts = attributes.items()
        return _Identity(value), [(key, _fingerprint(part, depth - 1)) for key, part in parts]
    return _Identity(value)


class Surroundings:
    """The modules, and the values that functions refer to, of the model and the loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self.model = model
        self._roots: list[nn.Module] = [model]
        self._watched: list[tuple[Location, Callable[[], Any]]] = []
        self._followed: set[int] = set()  # ids of classes and functions
        kinds = [*map(type, model.modules()), type(loss), loss]
        packages = {(getattr(kind, "__module__", None) or "").partition(".")[0] for kind in kinds}
        self._user_packages = packages - {"torch", "builtins", "functools"}
        self._watch("loss", "itself", partial(_itself, loss))
        for root in self._roots:  # _watch appends the modules that functions refer to
            for module in root.modules():
                self._follow_class(type(module), nn.Module)
                for value in list(vars(module).values()):
                    if isinstance(value, _FUNCTIONS):
                        self._follow(value)

    def _follow_class(self, kind: type, base: type) -> None:
        """Watches a class's attributes and follows its methods, up to ``base`` or torch's own."""
        for cls in kind.__mro__:
            if cls is base or _is_of_torch(cls.__module__):
                return
            if id(cls) in self._followed:
                continue
            self._followed.add(id(cls))
            for key, value in list(vars(cls).items()):
                if isinstance(value, property):
                    value = value.fget
                elif isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if isinstance(value, types.FunctionType):
                    self._follow(value)
                elif not key.startswith("__") and key != "_abc_impl":
                    self._watch(cls.__name__, key, partial(getattr, cls, key, None))

    def _follow(self, function: Any) -> None:
        """Watches what a function refers to, and follows the functions that it calls."""
        while isinstance(function, (partial, types.MethodType)):
            if isinstance(function, types.MethodType):
                self._watch(f"{function.__name__}()", "self", _attribute(function, "__self__"))
                function = function.__func__
            else:
                self._watch("partial", "args", _attribute(function, "args"))
                self._watch("partial", "keywords", _attribute(function, "keywords"))
                function = function.func
        if id(function) in self._followed:
            return
        self._followed.add(id(function))
        if not isinstance(function, types.FunctionType):
            if hasattr(function, "__wrapped__"):
                self._follow(function.__wrapped__)
            elif not isinstance(function, _CODE):  # an object with __call__
                self._watch(type(function).__name__, "self", partial(_itself, function))
                self._follow_class(type(function), object)
            return
        if not self._is_user_code(function.__module__, function.__code__.co_filename):
            return
        name = function.__name__
        for key in ("__defaults__", "__kwdefaults__", "__dict__"):
            self._watch(name, key, _attribute(function, key))
        cells = function.__closure__ or ()
        for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
            self._watch(name, key, partial(_contents, cell))
        names = set(names_in(function.__code__))
        for key in names & function.__globals__.keys():
            value = function.__globals__[key]
            self._watch(name, key, partial(function.__globals__.get, key))
            if isinstance(value, types.ModuleType) and self._is_user_code(
                value.__name__, getattr(value, "__file__", None) or ""
            ):
                for other in names & vars(value).keys():
                    self._watch(value.__name__, other, partial(vars(value).get, other))

    def _is_user_code(self, module: str | None, file: str) -> bool:
        """Whether code is the program's or the model's package's, not an installed library's."""
        package = (module or "").partition(".")[0]
        return package in self._user_packages or not (
            file.startswith(_INSTALLED) or file.startswith("<")
        )

    def _watch(self, owner: str, key: str, read: Callable[[], Any]) -> None:
        """Adds what ``read`` returns to the snapshots, and follows it."""
        value = read()
        if isinstance(value, nn.Module):
            if not any(value is module for root in self._roots for module in root.modules()):
                self._roots.append(value)
        elif isinstance(value, _FUNCTIONS) or (key == "itself" and callable(value)):
            self._follow(value)
        if not isinstance(value, _CODE):
            self._watched.append(((owner, key, len(self._watched)), read))

    def modules(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Yields (name, module, a number that is unique to its root)."""
        for i, root in enumerate(self._roots):
            for name, module in root.named_modules():
                yield name or type(root).__name__, module, -i

    def obstacle(self) -> str | None:
        """Why a chunk runs more than the operations of ``forward``; None if it does not."""
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

    def snapshot(self) -> Snapshot:
        """Everything watched, as it is now, without the values of parameters and buffers."""
        snapshot: Snapshot = {}
        for name, module, i in self.modules():
            for key, value in vars(module).items():
                # torch's recurrent layers also list their parameters in _flat_weights.
                if key not in _MODULE_INTERNALS and not key.startswith("_flat_weight"):
                    snapshot[name, key, i] = _fingerprint(value)
            for key, p in own_parameters(module).items():
                snapshot[name, key, i] = (
                    None if p is None else (_Identity(p), p.requires_grad, p.dtype)
                )
            for key, b in own_buffers(module).items():
                snapshot[name, key, i] = None if b is None else (b.shape, b.dtype)
        # The tensors of a module outside the model are constants in the compiled code.
        for i, root in enumerate(self._roots[1:]):
            for path, value in (*root.named_parameters(), *root.named_buffers()):
                snapshot[type(root).__name__, path, i] = _Identity(value), version_of(value)
        for location, read in self._watched:
            snapshot[location] = _fingerprint(read())
        return snapshot

    def versions(self, *, parameters: bool) -> Snapshot:
        """Identity and version counter of each buffer and, if asked for, each parameter."""
        versions: Snapshot = {}
        for name, module, i in self.modules():
            tensors: dict[str, Tensor | None] = dict(own_buffers(module))
            if parameters:
                tensors |= own_parameters(module)
            for key, value in tensors.items():
                if value is not None:
                    versions[name, key, i] = _Identity(value), version_of(value)
        return versions


def first_change(before: Snapshot, after: Snapshot) -> str | None:
    """The name and owner of a value that changed; None if none did."""
    for location in after.keys() | before.keys():
        is_new = location not in before or location not in after
        if is_new or before[location] != after[location]:
            owner, key, _ = location
            return f"{key!r} of {owner}"
    return None


class SideEffects:
    """The side effects of what runs within :meth:`watching`.

    ``description``: the first one found; None if there was none. ``drew``: whether torch's random
    numbers were drawn, which is no side effect.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self.description: str | None = None
        self.drew = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        surroundings = self._surroundings
        snapshot = surroundings.snapshot()
        versions = surroundings.versions(parameters=True)
        random_before = random_state()
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
        random_after = random_state()
        drawn = {
            name
            for name, state in random_before.items()
            if not same_random_state(state, random_after[name])
        }
        self.drew = not drawn.isdisjoint(("torch", "cuda"))
        change = first_change(snapshot, surroundings.snapshot()) or first_change(
            versions, surroundings.versions(parameters=True)
        )
        if change is not None:
            self.description = f"it changes {change}"
        elif out.written or records:
            self.description = "it prints or logs"
        elif not drawn.isdisjoint(("python", "numpy")):
            self.description = "it draws from Python's or NumPy's random numbers"


class _Listener:
    """A stream that records whether anything is written to it, and passes it on."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.written = stream, False

    def write(self, text: str) -> Any:
        self.written = True
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_of_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"


def _itself(value: Any) -> Any:
    return value


def _attribute(value: Any, name: str) -> Callable[[], Any]:
    return partial(getattr, value, name)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
