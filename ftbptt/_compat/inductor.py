"""Compiling a graph by Inductor, past torch.compile's public front."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .logs import without_log
from .tracing import FakeTensorMode


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
    # It keeps no guards on K, the size of inputs and none itself (2.13): what it finds there would
    # be run for a K that its indices of 32 bits are too small for.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    # Elements of a loop for each thread. Less gains little, even if the threads are awake: in the
    # body of a recurrence they are woken at every step, and waited for where their cores are busy.
    "cpp.min_chunk_size": 65536,
    # The code around the kernels is long where these are many, and gains nothing from optimization.
    "cpp_wrapper_build_separate": True,
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
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import CppCompileError

    from .instructions import reported_instructions
    from .strides import polynomial_strides

    on_cpu = all(e.device.type == "cpu" for e in examples)
    in_cpp = on_cpu and not calls_python and not (_has_loop(graph) and _loses_written_carries())
    options = {"cpp_wrapper": in_cpp, **_INDUCTOR_OPTIONS}
    if shutil.which("openssl") is None:  # by which Inductor tells headers that have changed
        options["cpp_cache_precompile_headers"] = False

    def compiled(instructions: AbstractContextManager[None]) -> Any:
        with (
            instructions,
            mode,
            tracing(TracingContext(mode)),
            config.patch(options),
            _keeping_mutations(),
            polynomial_strides(),
            warnings.catch_warnings(),
            without_log("torch._inductor.ir", "missing a c-shim"),
        ):
            # It runs complex operations by torch's own kernels, which is what is wanted of it.
            warnings.filterwarnings("ignore", message=".*code generation for complex")
            # The precision of products is the user's to choose.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # Of its own use of what torch is about to remove, as for a diagonal (2.13).
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
            return compile_fx_inner(graph, list(examples), cpp_wrapper=in_cpp)

    try:
        program = compiled(reported_instructions())
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), CppCompileError):
            raise  # whose message is clearer than that of a second attempt
        program = compiled(nullcontext())  # Inductor asks what the compiler knows

    # Examples that are no dense tensors stand for arguments with the same strides.
    is_strided = [not (_has_symbols(e) or e.is_contiguous()) for e in examples]

    def run(*args: Tensor) -> list[Tensor]:
        pairs = zip(args, is_strided, strict=True)
        return list(program([arg if flag else arg.contiguous() for arg, flag in pairs]))

    return run


def _has_symbols(tensor: Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)


def _has_loop(graph: torch.fx.GraphModule) -> bool:
    from torch._higher_order_ops.while_loop import while_loop_op

    return bool(graph.graph.find_nodes(op="call_function", target=while_loop_op))


def _loses_written_carries() -> bool:
    """The C++ wrapper of 2.11 and 2.12 takes no ``while_loop`` whose body writes into a carry."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    return not hasattr(CppWrapperCpu, "_get_while_loop_carried_output_names")


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

    with patch.object(SchedulerNode, "recompute_size_and_body", recompute):
        yield


def calls_in_cpp(op: Any, definition: str) -> Any:
    """A context in which compiled programs call a custom operator by a C++ function of their own.

    Without it they would call Python. Inductor copies the text into the program, behind "extern",
    where it expects the declaration of ``aoti_torch_cpu_<operator>`` (AOTInductor's C shim).
    """
    from torch._inductor import config

    text = f'"C++" {{\n{definition}\n}}'
    others = config.aot_inductor.custom_ops_to_c_shims
    return config.patch({"aot_inductor.custom_ops_to_c_shims": {**others, op: [text]}})
