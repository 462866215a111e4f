"""Running Python on tensors without data, and recording what it does."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch

# enable_python_dispatcher: without it, some operations (Fourier transforms, triangular systems) ask
# for their shapes in C++ code that takes no symbolic K. As torch.compile does (2.0 to 2.13).
from torch._dispatch.python import enable_python_dispatcher

# What torch.func.grad and vjp do with their results, and the transform that runs (2.11 to 2.15).
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import GradInterpreter, retrieve_current_functorch_interpreter

# How large the constants are whose values are known while tracing.
from torch._subclasses import fake_tensor

# FakeTensorMode: shapes and dtypes without data; public only through torch.compile and export.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor

# make_fx: the ATen graph of a Python function, through vmap and vjp. "Experimental" since 1.11.
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

# Hooks for all modules, which torch lets a caller add and remove, but not suspend.
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

# A mode that sees every operation; torch documents it, in a module whose name is private. What
# suspends all modes, torch.compile uses as well (2.11 to 2.15).
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .logs import without_log
from .modules import is_of_torch
from .trees import tree_map

__all__ = [
    "LARGEST_KNOWN",
    "UNTRACEABLE",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "TorchDispatchMode",
    "calling_compiled_as_written",
    "constant_gradients_in_no_grad",
    "enable_python_dispatcher",
    "holds_for",
    "is_operation",
    "is_pinned",
    "knowing_values",
    "known_value",
    "make_fx",
    "may_be_a_view",
    "most_indexed",
    "not_traced",
    "symbolic_steps",
    "unseen_by_tools",
    "unvalidated_distributions",
    "without_log_of_failures",
    "written_arguments",
]


# What tracing raises when Python needs the value of a tensor (`if`, `.item()`, boolean index).
UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


@contextmanager
def calling_compiled_as_written() -> Iterator[None]:
    """Within it, what ``torch.compile`` made runs as the Python it was made of, when traced."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it takes a second
        yield
        return
    from torch._dynamo import config

    with config.patch(error_on_nested_fx_trace=False):
        yield


def symbolic_steps(example: int) -> tuple[FakeTensorMode, Any]:
    """A fake tensor mode and, in it, a number of steps K that is a symbol (above 1).

    Where torch needs a number to go on, it is ``example``.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    # What it would remember no other trace can read: keys have symbols of this one. That costs more
    # than the few operations that come twice (2.11 to 2.15).
    mode.cache_enabled = False
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    probe = mode.from_tensor(torch.empty(example, 0), symbolic_context=context)
    return mode, probe.shape[0]


def is_pinned(steps: Any) -> bool:
    """Whether tracing has fixed the symbol ``steps`` to a number."""
    symbol = steps.node.expr
    return not symbol.free_symbols or symbol in steps.node.shape_env.replacements


def holds_for(steps: Any, value: int) -> bool:
    """Whether what was traced with the symbol ``steps`` is also right for ``value``, above 1."""
    if is_pinned(steps):
        return int(steps) == value
    guards = steps.node.shape_env.guards
    return all(guard.expr.subs(steps.node.expr, value) != False for guard in guards)  # noqa: E712


def most_indexed(steps: Any, example: int) -> float:
    """The most steps, in powers of two times ``example``, that a compiled program can index.

    Inductor indexes by 32 bits where that is enough for the example, and leaves a guard for it:
    that sizes are at most 2**31 - 1, less a constant. Infinite without such guards.
    """
    env, symbol = steps.node.shape_env, steps.node.expr
    guards = [guard.expr for guard in env.guards if symbol in guard.expr.free_symbols]
    guards = [expr for expr in guards if any(n > 1 << 30 for n in expr.atoms(sympy.Integer))]
    most = example
    while most < 1 << 48:
        if any(expr.subs(symbol, 2 * most) != True for expr in guards):  # noqa: E712
            return most
        most *= 2
    return math.inf


def not_traced() -> Any:
    """A context in which tensor operations are none of the trace's that is being made."""
    return _disable_current_modes()


def is_operation(target: Any) -> bool:
    """Whether a node's target is an operation of torch, not a function of Python."""
    return isinstance(target, torch._ops.OpOverload)


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """The arguments that an operation changes: their places, and their names."""
    if not is_operation(target):
        return []
    arguments = enumerate(target._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def may_be_a_view(target: Any) -> bool:
    """Whether a node's target is an operation whose result may lie in its argument's memory."""
    if not is_operation(target):
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def without_log_of_failures() -> AbstractContextManager[None]:
    """Within it, an error of an operation on fake tensors is raised, and not logged as well."""
    return without_log("torch._subclasses.fake_tensor", "failed while attempting to run meta")


LARGEST_KNOWN = 1 << 18  # numbers


@contextmanager
def knowing_values() -> Iterator[None]:
    """Within it, a trace knows the values of small tensors that are made of tensors it holds.

    Else only those of single numbers (2.11 to 2.15).
    """
    with (
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", LARGEST_KNOWN),
        patch.object(proxy_tensor, "CONSTANT_NUMEL_LIMIT", LARGEST_KNOWN),
    ):
        yield


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor of a trace, within :func:`knowing_values`, if it is known.

    The trace knows it also where the fake tensor has lost it (2.13, after a write in place).
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None or not isinstance(tensor, FakeTensor):
        return tensor
    slot = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.constant


def unvalidated_distributions() -> AbstractContextManager[Any]:
    """``torch.distributions`` do not look at values, which are not there while tracing.

    Their default has a setter, but no getter (2.11 to 2.13).
    """
    return patch.object(Distribution, "_validate_args", False)


@contextmanager
def constant_gradients_in_no_grad() -> Iterator[None]:
    """Within it, what ``torch.func.grad`` and ``vjp`` return under ``no_grad`` is detached.

    Inside them gradients are on, so that a trace takes what they compute for differentiable.
    """
    undo = eager_transforms._undo_create_differentiable

    def detached(results: Any, level: int | None = None) -> Any:
        running = retrieve_current_functorch_interpreter()
        if isinstance(running, GradInterpreter) and not running.prev_grad_mode():
            results = tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, results
            )
        return undo(results, level)

    with patch.object(eager_transforms, "_undo_create_differentiable", detached):
        yield


@contextmanager
def unseen_by_tools() -> Iterator[None]:
    """Within it, modes and torch's own hooks for all modules rest; ``FlopCounterMode`` has both.

    They would count what is traced and compiled, and fail at a ``while_loop``, or at a tensor that
    has no history. Hooks of the caller are part of what a step computes, and stay.
    """
    before = [(hooks, dict(hooks)) for hooks in (_global_forward_pre_hooks, _global_forward_hooks)]
    with _disable_current_modes():
        try:
            for hooks, all_hooks in before:
                for key, hook in all_hooks.items():
                    if is_of_torch(hook):
                        del hooks[key]
            yield
        finally:
            for hooks, all_hooks in before:
                hooks.clear()
                hooks.update(all_hooks)
