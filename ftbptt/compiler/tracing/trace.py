"""step -> StepGraph: one time step as a graph of ATen operations, traced once with fake tensors.

Nothing is computed. A step that needs the value of a tensor in Python (a data-dependent branch,
``.item()``) or changes something outside itself cannot become a graph; the error names the line
of the step and a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..._compat.graph_modules import GraphModule, tracing_without_code
from ..._compat.tracing import (
    UNTRACEABLE,
    FakeTensorMode,
    calling_compiled_as_written,
    constant_gradients_in_no_grad,
    enable_python_dispatcher,
    knowing_values,
    make_fx,
    unseen_by_tools,
    unvalidated_distributions,
    without_log_of_failures,
)
from ..._garbage import without_garbage_collection
from ..._interrupt import uninterrupted
from ..._locks import LockOverForks
from ..._trees import (
    Tree,
    TreeSpec,
    in_groups,
    leaf_names,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from ...contract.step import Step
from ..graphs import aten, written_by
from ..signature import Signature, with_autocast
from .captures import lift_captures
from .constants import Constants, noting_tensors_read
from .custom_gradient import custom_gradients_as_nodes
from .decompositions import BEFORE_AUTOGRAD, past_autograd
from .effects import without_effects
from .errors import explain_trace_errors
from .function_overrides import FunctionOverrides
from .known_values import KNOWN, KnownTensors, fold
from .linalg_checks import failures_as_nan, is_check
from .random_ops import RANDOM_OPS
from .step_checks import (
    changed_by_step,
    checked_pair,
    floating_dtypes,
    forbid_change_of_params,
    forbid_mixed_dtypes,
    forbid_mutation,
    forbid_strided_memory,
)
from .variables import places_of_buffers

# torch traces by patching itself, for all threads: one at a time.
TRACING = LockOverForks()


@dataclass(frozen=True)
class StepGraph:
    """``module(*params, *buffers, *x_t, *state) -> [*out_t, *state]``, on flat lists of tensors.

    ``captures`` are tensors that the step closes over: they follow the buffers as inputs.
    """

    module: fx.GraphModule
    captures: list[Tensor]
    out_spec: TreeSpec
    outs: int


def trace_function(
    function: Callable[..., Any],
    examples: Sequence[Tensor],
    mode: FakeTensorMode,
    *,
    before_autograd: bool = False,
    functional: bool = False,
    differentiated: fx.GraphModule | None = None,
    constants: Constants | None = None,
    known_values: bool = False,
) -> fx.GraphModule:
    """trace_function : function, fake examples of its arguments -> its graph, in core operations

    ``before_autograd``: a graph that will be differentiated keeps the operations that autograd
    knows. (They decompose into prims, which ``torch.func.vjp`` does not take; and the gradient of
    a ``split`` is one ``cat``, that of its slices a sum.)
    ``functional``: the function writes nothing in place. It may then use the vmap rules of
    ``time_axis.batching``, which functionalize does not take.
    ``differentiated``: the graph whose gradient the function computes.
    ``constants``: gets the numbers that are read from tensors outside.
    ``known_values``: Python may read tensors that the function makes of numbers alone, and the
    graph holds what it would compute of such.
    """
    if isinstance(function, fx.GraphModule):
        forward = function.forward  # a call of the module prints errors, also of a mere attempt

        def function(*args: Tensor) -> Any:
            return forward(*args)

    tensors_read: list[Tensor] = []
    table = {
        **(BEFORE_AUTOGRAD if before_autograd else past_autograd()),
        **RANDOM_OPS,
        **noting_tensors_read(tensors_read),
        **(KNOWN if known_values else {}),
    }
    custom_gradients = custom_gradients_as_nodes() if before_autograd else nullcontext()
    # Attention as products and a softmax: its fused operation has no vmap rule.
    plain_attention = sdpa_kernel(SDPBackend.MATH)
    with (
        TRACING,
        without_garbage_collection(),
        uninterrupted(),  # torch's modes and transforms do not survive Ctrl-C
        unseen_by_tools(),
        mode,
        enable_python_dispatcher() if mode.shape_env is not None else nullcontext(),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),  # it reads values
        calling_compiled_as_written(),
        constant_gradients_in_no_grad(),
        unvalidated_distributions(),
        knowing_values() if known_values else nullcontext(),
        plain_attention,
        without_log_of_failures(),
        tracing_without_code(),
        custom_gradients as put_custom_gradients_into,
    ):
        if differentiated is not None and _has_fourier_transform(differentiated.graph):
            # functionalize mistakes a size in autograd's formula of one, but not in its graph.
            function = make_fx(function)(*examples)
        # Some of autograd's formulas write in place: without mutation, nodes can be moved.
        pure = function if functional else torch.func.functionalize(function)
        module = make_fx(pure, decomposition_table=table)(*examples)
        if _writes_in_place(module.graph):  # as some decompositions do
            pure = torch.func.functionalize(module)
            module = make_fx(pure, decomposition_table=table)(*examples)
        if _drop_layouts(module.graph):
            _make_batchable(module.graph)  # such as a view that these allow
            module.recompile()
            module = make_fx(module.forward, decomposition_table=table)(*examples)
        if put_custom_gradients_into is not None:
            put_custom_gradients_into(module.graph)
    if constants is not None:
        constants.add_tensors_read(tensors_read)
    if known_values:
        fold(module)
    _make_batchable(module.graph)
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or is_check(node))
    return GraphModule(module, module.graph)


def _has_fourier_transform(graph: fx.Graph) -> bool:
    return any(str(node.target).startswith("aten._fft_") for node in graph.nodes)


def _writes_in_place(graph: fx.Graph) -> bool:
    """Whether an operation changes an intermediate value; writes into inputs do not count."""
    return any(
        any(written.op != "placeholder" for written in written_by(node)) for node in graph.nodes
    )


def _drop_layouts(graph: fx.Graph) -> bool:
    """Takes ``memory_format=torch.channels_last`` out of a graph; returns whether it had any.

    It is for four axes, which a value of all steps has not, and changes no number.
    """
    nodes = [n for n in graph.nodes if n.kwargs.get("memory_format") in _LAYOUTS]
    for node in nodes:
        node.kwargs = {name: v for name, v in node.kwargs.items() if name != "memory_format"}
    return bool(nodes)


_LAYOUTS = (torch.channels_last, torch.channels_last_3d)


def _make_batchable(graph: fx.Graph) -> None:
    """Replaces operations for which vmap has no rule, or a wrong one, by equivalent ones."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # a batched value may have other strides
        elif node.target is aten.sym_size.int:
            node.target = _size
        elif node.target is aten.sym_numel.default:
            node.target = torch.numel
        elif node.target is aten.as_strided.default and _is_reshape(node):
            node.target, node.args = aten.reshape.default, node.args[:2]
        elif node.target in (aten.slice.Tensor, aten.slice_scatter.default):
            _normalize_slice_bounds(node)
        elif node.target is aten._conj.default and isinstance(node.args[0], complex):
            _put_number(node, node.args[0].conjugate())
        elif node.target is aten.view_as_real.default and node.args[0].target is aten._conj.default:
            # Of a tensor outside with a conjugation pending, which programs are given resolved.
            node.args[0].target = aten._conj_physical.default
        elif node.target is aten.embedding.default:
            node.args = node.args[:4]  # without sparse=True: a segment's gradients are dense


def _put_number(node: fx.Node, number: complex) -> None:
    """Has what reads a node read a number instead.

    In a compiled program the conjugate of 1j, as a gradient has it, was a tensor of 1j, whose
    pending conjugation was lost.
    """
    for user in list(node.users):
        if user.op == "call_function":
            user.args = fx.node.map_aggregate(user.args, lambda a: number if a is node else a)


def _is_reshape(as_strided: fx.Node) -> bool:
    """Whether it reads all of a contiguous tensor in order, as torch's group norm does."""
    source, result = as_strided.args[0].meta["val"], as_strided.meta["val"]
    is_static = all(isinstance(size, int) for size in (*source.shape, *result.shape))
    if not is_static or source.numel() != result.numel() or len(as_strided.args) > 3:
        return False
    return source.is_contiguous() and result.is_contiguous()


def _normalize_slice_bounds(node: fx.Node) -> None:
    """vmap's rules take no bound from the end, nor the largest integer for "to the end"."""
    dim_index = 1 if node.target is aten.slice.Tensor else 2  # slice_scatter: (x, source, dim, ...)
    if len(node.args) <= 2:
        return
    size = node.args[0].meta["val"].shape[node.args[dim_index]]
    for bound_index in (dim_index + 1, dim_index + 2):
        bound = node.args[bound_index] if len(node.args) > bound_index else None
        if isinstance(size, int) and isinstance(bound, int):
            from_start = bound + size if bound < 0 else bound
            node.update_arg(bound_index, min(max(from_start, 0), size))


def _size(tensor: Tensor, dim: int) -> Any:
    return tensor.shape[dim]


def step_trees(
    s: Signature, buffer_names: Sequence[str], leaves: Sequence[Tensor]
) -> tuple[Tree, dict[str, Tensor], Tree, Tree]:
    """What a step is called with, from its leaves: ``(params, buffers, x_t, state)``."""
    sizes = [len(group) for group in (s.params, s.buffers, s.x, s.state)]
    params, buffers, x_t, state = in_groups(leaves, sizes)
    return (
        tree_unflatten(params, s.specs.params),
        dict(zip(buffer_names, buffers, strict=True)),
        tree_unflatten(x_t, s.specs.x),
        tree_unflatten(state, s.specs.state),
    )


def trace_step(
    step: Step,
    s: Signature,
    buffer_names: Sequence[str],
    mode: FakeTensorMode,
    constants: Constants,
) -> StepGraph:
    """trace_step : step, signature of a call -> StepGraph

    Raises TypeError or ValueError if the step does not return ``(out_t, state)`` with the state in
    the structure, dtypes and shapes it came in with, or if it multiplies tensors of different
    dtypes; RuntimeError if it cannot be traced.
    """
    with mode:
        examples = [leaf.example() for leaf in (*s.params, *s.buffers, *s.x, *s.state)]
    params_before, _, x_before, state_before = step_trees(s, buffer_names, examples)
    out_specs: list[TreeSpec] = []  # one, once run() was called

    def run(*leaves: Tensor, known: KnownTensors | None = None) -> list[Tensor]:
        params, buffers, x_t, state = step_trees(s, buffer_names, leaves)
        given = tree_map(lambda leaf: leaf, params)
        overrides = FunctionOverrides("step", tree_leaves((buffers, x_t)))
        with known or nullcontext(), overrides, with_autocast(s.autocast):
            if known is not None:
                buffers = step.buffers()
            result = step.apply(params, buffers, x_t, state)
        if known is not None:
            known.forbid_writes()
        forbid_change_of_params(step, given, params)
        x_only = floating_dtypes(s.x) - floating_dtypes(s.params)
        out, state_after = checked_pair(result, state_before, x_only)
        out_leaves, spec = tree_flatten(out)
        out_specs[:] = [spec]
        return [*out_leaves, *tree_flatten(state_after)[0]]

    given = {"x_t": x_before, "state": state_before, "params": params_before}

    def traced(knows_values: bool) -> fx.GraphModule:
        known = KnownTensors() if knows_values else None
        try:
            with explain_trace_errors("step", step, **given):
                graph = trace_function(
                    partial(run, known=known),
                    examples,
                    mode,
                    before_autograd=True,
                    constants=constants,
                    known_values=knows_values,
                )
        except Exception as error:
            if isinstance(error.__cause__, UNTRACEABLE) and not knows_values:
                raise error.__cause__ from None  # another attempt knows the values
            misfit = step.misfit(params_before)
            if misfit is None:
                raise
            raise ValueError(misfit) from error
        if known is not None:
            constants.add_tensors_read(known.read)
        return graph

    def attempt(knows_values: bool) -> fx.GraphModule:
        return without_effects(
            f"step {step.name}",
            step.root,
            partial(traced, knows_values),
            "read such a value from the state and return it in the next state.",
            constants,
        )

    try:
        module = attempt(knows_values=False)
    except UNTRACEABLE:
        module = attempt(knows_values=True)
        if step.module is not None:
            constants.add_buffers(step.module)
    failures_as_nan(module)
    _check_step(step, module, s, buffer_names)
    constants.assigned += places_of_buffers(step.assigned_buffers)
    captures = lift_captures(
        "step",
        module,
        after=len(s.params) + len(s.buffers),
        remedy="Pass it in params (for a module use torch.func.functional_call, or give the module "
        "itself as step), or detach it.",
    )
    outs = len(module.graph.output_node().args[0]) - len(s.state)
    return StepGraph(module, captures, out_specs[0], outs)


def _check_step(
    step: Step, module: fx.GraphModule, s: Signature, buffer_names: Sequence[str]
) -> None:
    """Raises what :func:`trace_step` does for what the step does, as its graph shows it."""
    names = [
        *leaf_names("params", s.specs.params),
        *(f"buffers[{name!r}]" for name in buffer_names),
        *leaf_names("x", s.specs.x),
        *leaf_names("state", s.specs.state),
    ]
    forbid_mutation("step", module, lambda i: changed_by_step(step, names[i]))
    forbid_strided_memory(step, module)
    if s.autocast is None:
        forbid_mixed_dtypes(step, module, names)
