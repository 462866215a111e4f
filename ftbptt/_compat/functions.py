"""What an autograd Function does that is applied while a step is traced, and a custom operator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

# What torch.func.vjp makes of an autograd Function: one that acts on the tensors of one transform.
from torch._functorch.autograd_function import (
    enable_single_level_autograd_function as functions_at_one_level,
)
from torch._functorch.pyfunctorch import TransformType, retrieve_current_functorch_interpreter

# A custom operator's gradient (2.11 to 2.15); torch's own use of it takes no transform.
from torch._library.custom_ops import OPDEFS
from torch.autograd.function import _SingleLevelFunction as FunctionAtLevel
from torch.nn.modules._functions import BackwardHookFunction

__all__ = [
    "CustomOperator",
    "FunctionAtLevel",
    "applying_functions_by",
    "as_custom_operator",
    "functions_at_one_level",
    "is_left_to_python",
]


def is_left_to_python(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` was called for a function, or for a module's forward.

    torch marks it, and has no name for that (2.11 to 2.15).
    """
    called = (function, getattr(function, "forward", None))
    return any(getattr(own, "_torchdynamo_disable", False) for own in called)


class CustomOperator(NamedTuple):
    """An operator made by ``torch.library.custom_op``, and what ``register_autograd`` was given."""

    name: str
    arguments: Sequence[Any]  # of its schema
    backward: Callable[..., Any] | None
    setup_context: Callable[..., Any] | None


def as_custom_operator(func: Any) -> CustomOperator | None:
    """None for other functions, and for an operator that writes, which has no gradient."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.name not in OPDEFS:
        return None
    schema, definition = func._schema, OPDEFS[func._schema.name]
    if schema.is_mutable:
        return None
    return CustomOperator(
        schema.name, schema.arguments, definition._backward_fn, definition._setup_context_fn
    )


@contextmanager
def applying_functions_by(run: Callable[..., Any]) -> Iterator[None]:
    """Within it, ``F.apply(...)`` of an autograd Function is ``run(F, ...)`` in this thread.

    Where functionalize is the innermost transform, for which torch has no rule (2.11 to 2.15). The
    rules of the other transforms ask ``torch._C`` whether there is one, and end in ``apply`` if
    not. Also for an ``apply`` that was looked up beforehand.
    """
    thread = threading.get_ident()
    active = torch._C._are_functorch_transforms_active

    def is_ours() -> bool:
        if not active() or threading.get_ident() != thread:
            return False
        return retrieve_current_functorch_interpreter().key() == TransformType.Functionalize

    def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is BackwardHookFunction:  # whose hooks read a graph that is not there
            raise RuntimeError("autograd.Function of a full backward hook")
        return run(function, *args, **kwargs)

    in_cpp = hasattr(torch.autograd.function, "_call_custom_function_call")
    instead = _instead_of_apply_in_cpp if in_cpp else _instead_of_apply
    name = "_are_functorch_transforms_active"
    with (
        patch.object(torch._C, name, lambda: active() and not is_ours()),
        instead(is_ours, applied),
    ):
        yield


@contextmanager
def _instead_of_apply(is_ours: Callable[[], bool], applied: Callable[..., Any]) -> Iterator[None]:
    """Up to 2.13, ``Function.apply`` is Python's, and ends in that of its base class."""

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours() and issubclass(function, torch.autograd.Function):
            return applied(function, *args, **kwargs)
        return super(FunctionAtLevel, function).apply(*args, **kwargs)

    with patch.object(FunctionAtLevel, "apply", classmethod(apply)):
        yield


@contextmanager
def _instead_of_apply_in_cpp(
    is_ours: Callable[[], bool], applied: Callable[..., Any]
) -> Iterator[None]:
    """Since 2.14 it is C++, which calls two functions of this module for a transform.

    But not for a Function without a ``setup_context`` of its own, which it tells by its identity.
    """
    module: Any = torch.autograd.function
    bind, call = module._bind_default_args, module._call_custom_function_call
    inherited = torch.autograd.Function.setup_context

    class OwnSetupContext:
        def __get__(self, _: Any, function: Any) -> Any:
            return self if is_ours() else inherited

    def bound(function: Any, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if is_ours() else bind(function, args, kwargs)

    def called(function: Any, args: Any, kwargs: Any) -> Any:
        if is_ours():
            return applied(function, *args, **(kwargs or {}))
        return call(function, args, kwargs)

    with (
        patch.object(module, "_bind_default_args", bound),
        patch.object(module, "_call_custom_function_call", called),
        patch.object(torch.autograd.Function, "setup_context", OwnSetupContext()),
    ):
        yield
