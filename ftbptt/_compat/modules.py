"""What a module holds, and what is hung on it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrize

# How torch.compile(module) names the module inside it, in front of the names of its parameters.
COMPILED_PREFIX = "_orig_mod."


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


def any_global_module_hook() -> bool:
    """Whether a hook was registered for every module (``register_module_forward_hook``, ...)."""
    return bool(module_hooks._has_any_global_hook())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_module_hooks(module: nn.Module) -> bool:
    """Whether a hook is registered on this module itself."""
    return any(hooks_of(module))


def has_hooks(tensor: Tensor) -> bool:
    """Whether autograd calls something of the user for a leaf; torch has no public way to ask."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """As ``named_parameters(recurse=False)`` and those that are None, without its slow walk."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """As ``named_buffers(recurse=False)``; see :func:`own_parameters`."""
    return module._buffers


def put_own_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Has the module keep its buffers in this dict: a look into one is a look-up in it."""
    module._buffers = buffers


def assigns_buffer() -> bool:
    """Whether a module is just asked for a buffer by torch, which is about to assign it.

    ``register_buffer`` looks whether there is something else of that name.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):  # __getattr__, and the wrapper around it in a trace
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code is nn.Module.register_buffer.__code__:
            return True
    return False


def is_persistent(module: nn.Module, key: str) -> bool:
    """Whether ``state_dict`` has a buffer; torch has no public way to ask but by calling it."""
    return key not in module._non_persistent_buffers_set


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """As ``named_children()``, and it changes with the module; see :func:`own_parameters`."""
    return module._modules


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """All hooks that a call of the module runs, by kind; torch has no public way to ask."""
    return [getattr(module, name) for name in _HOOKS]


def is_of_torch(hook: Any) -> bool:
    """Whether a hook is one of torch's tools, such as a counter, and not the caller's."""
    return (hook.__module__ or "").startswith("torch.")


def own_hooks_for_all_modules() -> list[int]:
    """The numbers of the caller's hooks that a call of any module runs (2.11 to 2.15)."""
    kinds = (module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks)
    return [key for hooks in kinds for key, hook in hooks.items() if not is_of_torch(hook)]


def attributes_set_by_hooks_of_torch(module: nn.Module) -> set[str]:
    """The weights that hooks of ``torch.nn.utils`` compute before each call of the module.

    Those of ``prune``, and of ``weight_norm`` and ``spectral_norm`` of the old style; each hook has
    the name of its weight, which torch has no public way to ask for.
    """
    hooks = [
        hook
        for hook in module._forward_pre_hooks.values()
        # its class, or that which a pruning method of the user is derived from
        if any(kind.__module__.startswith("torch.nn.utils.") for kind in type(hook).__mro__)
    ]
    names = [getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")]
    return {name for name in names if name is not None}


def parametrizations_kept_apart() -> AbstractContextManager[Any]:
    """Within ``parametrize.cached()``, a cache of its own; torch has one, whatever the parameters.

    Else a module that is called with other parameters, which are fake in a trace, would get the
    weights that were computed from those before, and leave its own for those after.
    """
    is_cached = parametrize._cache_enabled
    return patch.object(parametrize, "_cache", {}) if is_cached else nullcontext()
