"""Every torch-private name this package uses, with the reason and the versions it was read in.

Nothing else in the package imports a private torch module. Read in torch 2.11 and 2.13.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# enable_python_dispatcher: without it, some operations (Fourier transforms, triangular systems) ask
# for their shapes in C++ code that takes no symbolic K. As torch.compile does (2.0 to 2.13).
from torch._dispatch.python import enable_python_dispatcher

# What torch.func.vjp makes of an autograd Function: one that acts on the tensors of one transform.
from torch._functorch.autograd_function import (
    enable_single_level_autograd_function as functions_at_one_level,
)

# FakeTensorMode: shapes and dtypes without data; public only through torch.compile and export.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.function import _SingleLevelFunction as FunctionAtLevel
from torch.distributions import Distribution

# make_fx: the ATen graph of a Python function, through vmap and vjp. "Experimental" since 1.11.
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

# A mode that sees every operation; torch documents it, in a module whose name is private.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils.data import DataLoader

__all__ = [
    "COMPILED_PREFIX",
    "UNTRACEABLE",
    "FakeTensorMode",
    "FunctionAtLevel",
    "TorchDispatchMode",
    "TreeSpec",
    "any_global_module_hook",
    "applying_functions_by",
    "calling_compiled_as_written",
    "calls_in_cpp",
    "clear_cublas_workspaces",
    "compile_cache_dir",
    "copy_all",
    "cpp_command",
    "enable_python_dispatcher",
    "end_recording",
    "forget_compile_paths",
    "forget_unscaled",
    "functions_at_one_level",
    "has_hooks",
    "has_module_hooks",
    "has_workers",
    "header_command",
    "holds_for",
    "inductor_compile",
    "inductor_decompositions",
    "inside_derivative",
    "inside_functorch",
    "is_fake",
    "is_pinned",
    "is_view_of",
    "keystr",
    "make_fx",
    "may_be_a_view",
    "memory_of",
    "not_traced",
    "object_command",
    "own_buffers",
    "own_parameters",
    "symbolic_steps",
    "timeout_of",
    "torch_decompositions",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "uncompiled",
    "unvalidated_distributions",
    "version_of",
    "versions_of",
    "while_loop",
    "with_workers",
    "without_log",
    "without_log_of_failures",
    "writes_in_place",
]


# -- trees ----------------------------------------------------------------------------------------
#
# Pytrees of any nesting, with key paths for error messages.
#
# torch has no public pytree module; this one has kept its signatures since 2.3 and is what
# torch.func uses. The package takes them from _trees.py.

# -- modules --------------------------------------------------------------------------------------
#
# What a module holds, and what is hung on it.

# How torch.compile(module) names the module inside it, in front of the names of its parameters.
COMPILED_PREFIX = "_orig_mod."


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


def any_global_module_hook() -> bool:
    """Whether a hook was registered for every module (``register_module_forward_hook``, ...)."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def has_module_hooks(module: nn.Module) -> bool:
    """Whether a hook is registered on this module itself; torch has no public way to ask."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def has_hooks(tensor: Tensor) -> bool:
    """Whether autograd calls something of the user for a leaf; torch has no public way to ask."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """As ``named_parameters(recurse=False)`` and those that are None, without its slow walk."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """As ``named_buffers(recurse=False)``; see :func:`own_parameters`."""
    return module._buffers


# -- running --------------------------------------------------------------------------------------
#
# What torch knows of the call that runs: its transforms, its tensors, its device and its ranks.


def inside_functorch() -> bool:
    """Whether a ``torch.func`` transform (vmap, grad, ...) is active around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_derivative() -> bool:
    """Whether ``torch.func.grad``, ``vjp`` or ``jvp`` is among the active transforms."""
    functorch = torch._C._functorch
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(level.key() in kinds for level in functorch.get_interpreter_stack() or ())


def clear_cublas_workspaces() -> None:
    """Forgets the memory that cuBLAS works in, which it gets anew when it is next called.

    What it gets in a capture lies in the graph's pool, and must not outlive that; torch's own
    graphs in torch._inductor.cudagraph_trees do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_recording(device: torch.device, pool: Any) -> None:
    """After a capture that failed: allocations no longer go to its pool."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def is_view_of(tensor: Tensor, memory: Tensor) -> bool:
    """Whether a tensor is a view of another, and no copy, as far as autograd knows."""
    return tensor._base is memory


def memory_of(tensor: Tensor) -> int:
    """What tensors in the same memory share, also while tracing, where none has an address."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place, as autograd counts it."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The same of many, quicker."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one of inference mode has none
        return [version_of(tensor) for tensor in tensors]


def is_fake(value: Tensor) -> bool:
    """Whether a tensor has no values of its own: it was made while something was traced."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(value) or torch._is_functional_tensor(value)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, in one kernel for those of one dtype.

    What ``torch.optim`` uses for its ``foreach`` variants; torch has no public name for it. Given
    several dtypes at once, it copies one tensor after the other.
    """
    by_dtype: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        own = by_dtype.setdefault((target.dtype, source.dtype), ([], []))
        own[0].append(target)
        own[1].append(source)
    for own_targets, own_sources in by_dtype.values():
        torch._foreach_copy_(own_targets, own_sources)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives wait for a rank.

    A group tells it to nobody else than its backends, and another one for the same ranks should
    have the same (2.11 to 2.13: ``ProcessGroup._get_backend(device).options._timeout``).
    """
    device = torch.device("cpu" if "gloo" in dist.get_backend_config(group) else "cuda")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


# -- tracing --------------------------------------------------------------------------------------
#
# Running Python on tensors without data, and recording what it does.

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


def not_traced() -> Any:
    """A context in which tensor operations are none of the trace's that is being made."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def writes_in_place(target: Any) -> bool:
    """Whether a node's target is an operation that changes one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def may_be_a_view(target: Any) -> bool:
    """Whether a node's target is an operation whose result may lie in its argument's memory."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def without_log_of_failures() -> AbstractContextManager[None]:
    """Within it, an error of an operation on fake tensors is raised, and not logged as well."""
    return without_log("torch._subclasses.fake_tensor", "failed while attempting to run meta")


@contextmanager
def without_log(logger: str, words: str) -> Iterator[None]:
    """Within it, torch does not log messages with these words, of which users can make nothing.

    The names of its loggers are those of its modules (2.11 to 2.13).
    """

    def wanted(record: logging.LogRecord) -> bool:
        return words not in str(record.msg)

    logging.getLogger(logger).addFilter(wanted)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(wanted)


@contextmanager
def applying_functions_by(run: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
    """Within it, ``F.apply(*args)`` of an autograd Function is ``run(F, args)`` in this thread.

    Where functionalize is the innermost transform, for which torch has no rule (2.11 to 2.13): its
    ``Function.apply`` takes the way that it takes outside of all transforms, and that ends here.
    """
    from torch._functorch.pyfunctorch import TransformType, retrieve_current_functorch_interpreter
    from torch.nn.modules._functions import BackwardHookFunction

    thread = threading.get_ident()
    active = torch._C._are_functorch_transforms_active

    def is_transformed() -> bool:
        if not active() or threading.get_ident() != thread:
            return active()
        return retrieve_current_functorch_interpreter().key() != TransformType.Functionalize

    def applied(function: Any, *args: Any) -> Any:
        if threading.get_ident() != thread or not issubclass(function, torch.autograd.Function):
            return super(FunctionAtLevel, function).apply(*args)
        if function is BackwardHookFunction:  # whose hooks read a graph that is not there
            raise RuntimeError("autograd.Function of a full backward hook")
        return run(function, args)

    torch._C._are_functorch_transforms_active = is_transformed
    FunctionAtLevel.apply = classmethod(applied)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._are_functorch_transforms_active = active
        del FunctionAtLevel.apply  # type: ignore[attr-defined]


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """``torch.distributions`` do not look at values, which are not there while tracing.

    Their default has a setter, but no getter (2.11 to 2.13).
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


# -- inductor -------------------------------------------------------------------------------------
#
# Compiling a graph by Inductor, past torch.compile's public front.


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """What Inductor takes apart before it lowers a graph, and into what."""
    import torch._inductor.lowering  # noqa: F401  (2.13 reads it for max pooling)
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def torch_decompositions(operations: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own definitions of operations by simpler ones."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(operations))


def while_loop(
    again: Callable[..., Tensor],
    body: Callable[..., tuple[Tensor, ...]],
    carried: tuple[Any, ...],
    read: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """torch's while_loop operator itself, without the Dynamo trace around its public front."""
    from torch._higher_order_ops.while_loop import while_loop_op

    return while_loop_op(again, body, carried, read)


_INDUCTOR_OPTIONS = {
    # It turns a product plus a bias into addmm, which is slower in a loop than fused addition.
    "pattern_matcher": False,
    # Both take a buffer for dead that a loop has filled or will still read: wrong numbers.
    "inplace_buffers": False,
    "allow_buffer_reuse": False,
    # Random numbers by torch's own kernels: the pass for others is one of those before.
    "fallback_random": True,
    # For a convolution it copies every tensor of four axes after it to another layout: also
    # a sequence that a loop writes into, whose values it then loses.
    "layout_optimization": False,
    "triton.cudagraphs": False,  # a segment is one graph
    # A loop of fewer elements costs more to share between threads than to run: in the body of
    # a recurrence that is paid at every step.
    "cpp.min_chunk_size": 16384,
    # Half of a cold start goes into test programs for vector instructions that the processor
    # reports anyway: believe it, and ask only if the compiler then fails.
    "cpp.vec_isa_ok": True,
}


def inductor_compile(
    graph: torch.fx.GraphModule,
    examples: Sequence[Tensor],
    mode: FakeTensorMode,
    calls_python: bool,
) -> Callable[..., list[Tensor]]:
    """The graph compiled by Inductor, with its C++ wrapper on a CPU.

    Not if it ``calls_python``, by an operator that returns a list: programs of some cells with one
    ended in a segmentation fault there (seen in 2.13, cause not known), and gain nothing from it.

    ``torch.compile`` would trace the graph again through Dynamo, guard it at every call and make
    it functional, which the loops that write in place do not survive; compile_fx_inner is the
    step of torch.compile after all of those. The wrapper in C++ runs a loop without Python.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.compile_fx import compile_fx_inner

    in_cpp = not calls_python and all(e.device.type == "cpu" for e in examples)
    options = {"cpp_wrapper": in_cpp, **_INDUCTOR_OPTIONS}

    def compiled_with(options: dict[str, Any]) -> Any:
        with (
            mode,
            tracing(TracingContext(mode)),
            config.patch(options),
            _keeping_mutations(),
            warnings.catch_warnings(),
            without_log("torch._inductor.ir", "missing a c-shim"),
        ):
            # It runs complex operations by torch's own kernels, which is what is wanted of it.
            warnings.filterwarnings("ignore", message=".*code generation for complex")
            # The precision of products is the user's to choose.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            return compile_fx_inner(graph, list(examples), cpp_wrapper=in_cpp)

    try:
        compiled = compiled_with(options)
    except Exception:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        compiled = compiled_with({**options, "cpp.vec_isa_ok": None})

    def run(*args: Tensor) -> list[Tensor]:
        return list(compiled([arg.contiguous() for arg in args]))

    return run


@contextmanager
def _keeping_mutations() -> Iterator[None]:
    """Inductor (2.11 to 2.13) forgets, of a node that it fuses, that what it reads was written to.

    It computes the node's reads again for the loops of the other node, and drops the names that
    stand for "this buffer after that loop". What reads the result of a loop then ran before it.
    """
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    setattr(SchedulerNode, "recompute_size_and_body", recompute)  # noqa: B010 - mypy
    try:
        yield
    finally:
        setattr(SchedulerNode, "recompute_size_and_body", original)  # noqa: B010


def calls_in_cpp(op: Any, definition: str) -> Any:
    """A context in which compiled programs call a custom operator by a C++ function of their own.

    Without it they would call Python. Inductor copies the text into the program, behind "extern",
    where it expects the declaration of ``aoti_torch_cpu_<operator>`` (AOTInductor's C shim).
    """
    from torch._inductor import config

    text = f'"C++" {{\n{definition}\n}}'
    others = config.aot_inductor.custom_ops_to_c_shims
    return config.patch({"aot_inductor.custom_ops_to_c_shims": {**others, op: [text]}})


# -- building -------------------------------------------------------------------------------------
#
# The C++ compiler as Inductor finds it, and the folders that it keeps its work in.


def cpp_command(
    sources: Sequence[str], library: str, include: Sequence[str], header: str = ""
) -> str:
    """The command that makes a shared library of C++ and object files, as Inductor would.

    It names the compiler, vector instructions, OpenMP and torch's headers on each platform, and a
    precompiled header if there is one.
    """
    options = _cpp_options(include)
    options.precompiled_header = header or None
    return str(_cpp_builder(sources, library, options).get_command_line())


def header_command(source: str, output: str, include: Sequence[str]) -> tuple[str, str]:
    """The command that compiles a header, and the file that it makes: ``output`` with an ending."""
    builder = _cpp_builder([source], output, _cpp_options(include, precompiling=True))
    return builder.get_command_line(), builder.get_target_file_path()


def object_command(source: str, output: str, include: Sequence[str]) -> tuple[str, str]:
    """The command that compiles a C++ file without linking, and the file that it makes."""
    builder = _cpp_builder([source], output, _cpp_options(include, compile_only=True))
    return builder.get_command_line(), builder.get_target_file_path()


def _cpp_builder(sources: Sequence[str], output: str, options: Any) -> Any:
    from torch._inductor.cpp_builder import CppBuilder

    folder, name = os.path.split(os.path.splitext(output)[0])
    return CppBuilder(name=name, sources=list(sources), BuildOption=options, output_dir=folder)


def _cpp_options(
    include: Sequence[str], *, precompiling: bool = False, compile_only: bool = False
) -> Any:
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.cpp_builder import CppTorchDeviceOptions
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            return CppTorchDeviceOptions(
                vec_isa=cpu_vec_isa.pick_vec_isa(),
                device_type="cpu",
                extra_flags=["-w", *(f"-I{shlex.quote(path)}" for path in include)],
                precompiling=precompiling,
                compile_only=compile_only,
            )
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            f"a kernel needs a C++ compiler, and there is none that works ({error}). Install g++ "
            "or clang++, or name one in the environment variable CXX; backend='eager' needs none."
        ) from error


def compile_cache_dir() -> str:
    """Where Inductor keeps what it compiles: TORCHINDUCTOR_CACHE_DIR, or a folder of the user's.

    Inductor makes the folder when it is imported, and so fails if that is not possible.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return os.path.abspath(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def forget_compile_paths() -> None:
    """Inductor remembers where it has begun to compile something, even if that failed."""
    from torch._inductor.utils import clear_caches

    clear_caches()


# -- scaling --------------------------------------------------------------------------------------
#
# ``torch.amp.GradScaler`` notes for an optimizer that its gradients are unscaled, until its update.


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """The optimizer's update is not made, and begins anew: without it, unscaling would refuse.

    ``GradScaler.update`` forgets it too, but moves the scale (2.11 to 2.13).
    """
    scaler._per_optimizer_states.pop(id(optimizer), None)


# -- loading --------------------------------------------------------------------------------------
#
# The workers of a ``DataLoader``, which it keeps from epoch to epoch if they are persistent.
#
# It draws a seed for them when it starts them, and so its order after that, from the same random
# numbers: another order where they are there already. It has no public way to see that (2.11 to
# 2.13: ``DataLoader.__iter__`` and ``_iterator``).


def has_workers(data: Any) -> bool:
    """Whether there are workers that wait for the next epoch."""
    return isinstance(data, DataLoader) and data._iterator is not None


def with_workers(data: Any, wanted: bool) -> None:
    """Sees to it that there are such workers, or none; random numbers are drawn to start some."""
    if not isinstance(data, DataLoader) or not data.persistent_workers:
        return
    if not wanted:
        data._iterator = None
    elif data._iterator is None:
        iter(data)
