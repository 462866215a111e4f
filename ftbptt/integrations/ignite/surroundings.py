"""What a module's Python reads and changes besides its arguments.

A compiled chunk replays the operations of one trace; Python itself does not run again. A counter in
``forward``, a hook or a ``print`` would take effect once only, and a number changed from outside,
such as a dropout rate, would keep its old value. This module detects both.
"""

from __future__ import annotations

import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
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
from ..._reach import reached_by
from ...compiler.tracing.variables import Scope, scopes_of

# (description, a number that tells equal ones apart)
Location = tuple[str, int]
Snapshot = dict[Location, Any]

_DEPTH, _LENGTH = 3, 64  # limits on the containers and objects that a snapshot looks into
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.FunctionType, types.MethodType)
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
        self._model, self._scopes = model, list[Scope]()
        modules: dict[nn.Module, None] = {}  # in order
        for root in (model, loss):
            reached = list(reached_by(root))
            modules |= dict.fromkeys(value for value in reached if isinstance(value, nn.Module))
            scopes = scopes_of(root, reached)
            self._scopes += [s for s in scopes if not isinstance(s.owner, nn.Module)]
        own = set(model.modules())
        self._beside = [module for module in modules if module not in own]

    def modules(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Yields (name, module, a number that is unique to its root)."""
        for name, module in self._model.named_modules():
            yield name or type(module).__name__, module, 0
        for i, module in enumerate(self._beside):
            yield type(module).__name__, module, 1 + i

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
                    snapshot[_attribute(key, name), i] = _fingerprint(value)
            parameters, buffers = own_parameters(module), own_buffers(module)
            for key, p in parameters.items():
                snapshot[_attribute(key, name), i] = (
                    None if p is None else (_Identity(p), p.requires_grad, p.dtype)
                )
            for key, b in buffers.items():
                snapshot[_attribute(key, name), i] = None if b is None else (b.shape, b.dtype)
            if i:  # the tensors of a module outside the model are constants in the compiled code
                for key, value in (*parameters.items(), *buffers.items()):
                    if value is not None:
                        snapshot[_attribute(key, name), i] = _Identity(value), version_of(value)
        for i, scope in enumerate(self._scopes):
            for key, value in scope.read().items():
                snapshot[scope.describe(key), -1 - i] = _fingerprint(value)
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
                    versions[_attribute(key, name), i] = _Identity(value), version_of(value)
        return versions


def first_change(before: Snapshot, after: Snapshot) -> str | None:
    """The description of a value that changed; None if none did."""
    for location in after.keys() | before.keys():
        is_new = location not in before or location not in after
        if is_new or before[location] != after[location]:
            return location[0]
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


def _attribute(key: str, owner: str) -> str:
    return f"the attribute {key!r} of {owner}"
