"""step -> StepGraph: one time step as a graph of ATen operations, traced once with fake tensors.

Nothing is computed. A step that needs the value of a tensor in Python (a data-dependent branch,
``.item()``) or changes something outside itself cannot become a graph; it gets an error that
names the line of the step and the way out.
"""

from __future__ import annotations

import linecache
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._compat import (
    UNTRACEABLE,
    FakeTensorMode,
    calling_compiled_as_written,
    make_fx,
    unvalidated_distributions,
    without_log_of_failures,
    writes_in_place,
)
from .._interrupt import uninterrupted
from .._step import Step
from .._trees import (
    TreeSpec,
    in_order_of,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from .decompositions import BEFORE_AUTOGRAD, past_autograd
from .effects import without_effects
from .function_overrides import Composed
from .graphs import aten
from .signature import Autocast, under
from .vmap_rewrites import REWRITES

Tree = Any
# torch traces by patching itself, for all threads: one at a time.
TRACING = threading.RLock()
_OWN = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


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
) -> fx.GraphModule:
    """The graph of ``function(*examples)``, in core operations.

    ``before_autograd``: a graph that is still to be differentiated keeps the operations that
    autograd knows. (Their parts are prims, which ``torch.func.vjp`` does not take; and the
    gradient of a ``split`` is one ``cat``, that of its slices a sum.) ``functional``: a function
    that writes nothing in place, and may have rules of our own for vmap (functionalize takes none).
    ``differentiated``: the graph whose gradient the function takes.
    """
    table = {
        **(BEFORE_AUTOGRAD if before_autograd else past_autograd()),
        **REWRITES,
    }
    # Attention as products and a softmax: its fused operation has no rule for vmap.
    plain_attention = sdpa_kernel(SDPBackend.MATH)
    with (
        TRACING,
        uninterrupted(),  # torch's modes and transforms do not survive Ctrl-C
        mode,
        torch.enable_grad(),
        calling_compiled_as_written(),
        unvalidated_distributions(),
        plain_attention,
        without_log_of_failures(),
    ):
        # Some of autograd's own formulas write in place: without mutation, nodes can be moved.
        if differentiated is not None and _has_fourier_transform(differentiated.graph):
            # In autograd's formula of one, functionalize mistakes a size: let it see a graph.
            function = make_fx(function)(*examples)
        pure = function if functional else torch.func.functionalize(function)
        module = make_fx(pure, decomposition_table=table)(*examples)
        if _writes_in_place(module.graph):  # as decompositions do
            again = torch.func.functionalize(module)
            module = make_fx(again, decomposition_table=table)(*examples)
    _make_batchable(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _has_fourier_transform(graph: fx.Graph) -> bool:
    return any(str(node.target).startswith("aten._fft_") for node in graph.nodes)


def _writes_in_place(graph: fx.Graph) -> bool:
    """Whether an operation changes a value of the graph; not if that is one of its inputs."""
    return any(
        writes_in_place(node.target) and node.args[0].op != "placeholder" for node in graph.nodes
    )


def _make_batchable(graph: fx.Graph) -> None:
    """Operations that vmap has no rule for, or a wrong one, in words that it understands."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # a batched value may lie differently in memory
        elif node.target is aten.sym_size.int:
            node.target = _size
        elif node.target is aten.sym_numel.default:
            node.target = torch.numel
        elif node.target in (aten.slice.Tensor, aten.slice_scatter.default):
            # vmap's rules take no bound from the end, nor the largest integer for "to the end".
            dim_at = 1 if node.target is aten.slice.Tensor else 2
            size = node.args[0].meta["val"].shape[node.args[dim_at]] if len(node.args) > 2 else None
            for at in (dim_at + 1, dim_at + 2):
                bound = node.args[at] if len(node.args) > at else None
                if isinstance(size, int) and isinstance(bound, int):
                    inside = bound + size if bound < 0 else bound
                    node.update_arg(at, min(max(inside, 0), size))


def _size(tensor: Tensor, dim: int) -> Any:
    return tensor.shape[dim]


def trace_step(
    step: Step,
    mode: FakeTensorMode,
    params: Tree,
    buffers: dict[str, Tensor],
    x_t: Tree,
    state: Tree,
    autocast: Autocast | None,
) -> StepGraph:
    """trace_step : step, fake params, buffers, x_t and state, the caller's autocast -> StepGraph

    Raises TypeError or ValueError if the step does not return ``(out_t, state)`` with the state as
    it was given, RuntimeError if it cannot be traced.
    """
    groups = (params, buffers, x_t, state)
    flat, specs = zip(*(tree_flatten(group) for group in groups), strict=True)
    names = [
        f"{name}{keystr(path)}"
        for name, group in zip(("params", "buffers", "x", "state"), groups, strict=True)
        for path, _ in tree_flatten_with_path(group)[0]
    ]
    sizes = [len(leaves) for leaves in flat]
    out_spec: list[TreeSpec] = []

    def run(*leaves: Tensor) -> list[Tensor]:
        trees, start = [], 0
        for size, spec in zip(sizes, specs, strict=True):
            trees.append(tree_unflatten(list(leaves[start : start + size]), spec))
            start += size
        with Composed("step"), under(autocast):
            result = step.apply(*trees)
        out, after = _checked_pair(result, state, _dtypes(x_t) - _dtypes(params))
        out_leaves, spec = tree_flatten(out)
        out_spec[:] = [spec]
        return [*out_leaves, *tree_flatten(after)[0]]

    examples = [leaf for leaves in flat for leaf in leaves]
    with own_words("step", step):
        module = without_effects(
            step, lambda: trace_function(run, examples, mode, before_autograd=True)
        )
    _forbid_input_mutation(step, module, names)
    captures = lift_captures(
        "step",
        module,
        after=sizes[0] + sizes[1],
        remedy="Pass it in params (for a module use torch.func.functional_call, or give the module "
        "itself as step), or detach it.",
    )
    outs = len(module.graph.output_node().args[0]) - sizes[3]
    return StepGraph(module, captures, out_spec[0], outs)


def _dtypes(tree: Tree) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_flatten(tree)[0] if leaf.is_floating_point()}


def _checked_pair(result: Any, state: Tree, foreign: set[torch.dtype]) -> tuple[Tree, Tree]:
    """``foreign``: dtypes of the inputs that no parameter has."""
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        found = f"a {type(result).__name__}"
        if isinstance(result, (tuple, list)):
            found += f" of {len(result)}"
        raise TypeError(
            f"step: expected (out_t, state), found {found}. Return the output and the next state "
            "as a pair; a step without output returns its state twice."
        )
    out, after = result
    for path, leaf in tree_flatten_with_path(out)[0]:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"step: expected tensors in out_t, found {type(leaf).__name__} at "
                f"out{keystr(path)}."
            )
    after = in_order_of(state, after)
    before_leaves, before_spec = tree_flatten_with_path(state)
    after_leaves, after_spec = tree_flatten_with_path(after)
    if before_spec != after_spec:
        raise TypeError(
            "step: the state must keep its structure, so that it can be carried.\n"
            f"  went in:  {_outline(state)}\n  came out: {_outline(after)}\n"
            "Return the next state in the structure of the state that was given."
        )
    for (path, a), (_, b) in zip(before_leaves, after_leaves, strict=True):
        if not isinstance(b, Tensor):
            raise TypeError(
                f"step: state{keystr(path)} came out as {type(b).__name__}, not a tensor."
            )
        if a.dtype != b.dtype:
            remedy = (
                f"That is the dtype of x, but of no parameter: give x as {a.dtype}."
                if b.dtype in foreign
                else f"The carried state must keep its dtype: give it in as {b.dtype}, or return "
                f"`.to({a.dtype})`."
            )
            raise TypeError(
                f"step: state{keystr(path)} went in as {a.dtype} and came out as {b.dtype}. "
                + remedy
            )
        if a.shape != b.shape:
            raise ValueError(
                f"step: state{keystr(path)} went in with shape {list(a.shape)} and came out with "
                f"{list(b.shape)}. The carried state must keep its shape: give it in with the "
                "shape that the step returns."
            )
    return out, after


def _outline(tree: Tree) -> str:
    leaves, spec = tree_flatten(tree)
    return str(tree_unflatten([_Named(leaf) for leaf in leaves], spec))


class _Named:
    def __init__(self, leaf: Any) -> None:
        self.text = str(list(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__

    def __repr__(self) -> str:
        return self.text


# What an `if`, `.item()` and a boolean index come to.
_READS_VALUES = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default,
    aten.nonzero.default, aten.index.Tensor, aten.masked_select.default,
}  # fmt: skip


# What torch says of torch.autograd.grad and of backward().
_DIFFERENTIATES = (
    "does not require grad and does not have a grad_fn",
    "backward() called inside a functorch transform",
)


@contextmanager
def own_words(argument: str, function: Any) -> Iterator[None]:
    """Turns what tracing says of a value-dependent function into its line and a remedy."""
    name = getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)
    try:
        yield
    except Exception as error:
        dependent = isinstance(error, UNTRACEABLE) or "tracing tensor" in str(error)
        where = _user_line(error)
        if "autograd.Function" in str(error) or "custom_function_call" in str(error):
            raise RuntimeError(
                f"{argument} {name} uses a torch.autograd.Function, as full backward hooks and "
                f"samples of Beta and Dirichlet do, whose backward cannot be traced\n  {where}\n"
                "For a gradient of your own write soft + (hard - soft).detach(): the value of "
                "`hard` with the gradient of `soft`."
            ) from error
        if any(words in str(error) for words in _DIFFERENTIATES):
            raise RuntimeError(
                f"{argument} {name} takes a gradient of its own by torch.autograd, which cannot be "
                f"traced\n  {where}\n"
                "Write it as torch.func.grad(f)(x), whose gradient is taken in turn; for the "
                "gradient of the loss at a tensor inside the step give "
                "make_train_segment(..., taps=)."
            ) from error
        if "mutating a non-functional tensor" in str(error):
            raise RuntimeError(
                f"{argument} {name} changes in place a tensor that is not among its arguments. "
                f"Carry it in the state and return it.\n  {where}"
            ) from error
        if dependent:
            operation = getattr(error, "func", None)
            if operation is not None and operation not in _READS_VALUES:
                raise RuntimeError(
                    f"{argument} {name} cannot be compiled: what {operation} does, or the shape of "
                    f"its result, depends on the values of a tensor, which are not there while "
                    f"tracing\n  {where}\nWrite it by other operations; reference_segment runs it "
                    "as it is."
                ) from error
            raise RuntimeError(
                f"{argument} {name} cannot be compiled: it needs the value of a tensor in Python "
                f"(an `if` or `while` on a tensor, `.item()`, int(tensor), a boolean index)\n"
                f"  {where}\n"
                "Only one branch could be traced, so none is. Write it with torch.where, or "
                "multiply by the condition; for restarts and padding use reset= and mask=."
            ) from error
        if not str(error).startswith(f"{argument}: "):
            error.add_note(f"while {argument} {name} was traced\n  {where}")
        raise


def _user_line(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN) and not frame.filename.startswith("<")
    ]
    if not frames:
        return "(no line of the step is on the stack)"
    last = frames[-1]
    text = linecache.getline(last.filename, last.lineno or 0).strip()
    return f'File "{last.filename}", line {last.lineno}, in {last.name}\n    {text}'


def _forbid_input_mutation(step: Step, module: fx.GraphModule, names: list[str]) -> None:
    """functionalize writes a mutated input back with copy_: find which one that is."""
    placeholders = module.graph.find_nodes(op="placeholder")
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in placeholders:
            name = names[placeholders.index(node.args[0])]
            if name.startswith("buffers["):
                buffer = name[len("buffers") :].strip("[]")
                raise RuntimeError(
                    f"step {step.name} changes its buffer {buffer} in place (BatchNorm in train "
                    "mode does). Buffers are constants of a segment: call module.eval(), or carry "
                    "the value in the state and return it."
                )
            raise RuntimeError(
                f"step {step.name} changes {name} in place. A step is a pure function: work on a "
                "clone, or return the new value."
            )


def lift_captures(argument: str, module: fx.GraphModule, after: int, remedy: str) -> list[Tensor]:
    """Makes tensors that ``argument`` closes over inputs, right after the first ``after`` ones."""
    placeholders = module.graph.find_nodes(op="placeholder")
    nodes = module.graph.find_nodes(op="get_attr")
    values = [getattr(module, node.target) for node in nodes]
    if any(isinstance(value, torch.Generator) for value in values):
        raise TypeError(
            f"{argument}: draws from a torch.Generator, which a graph cannot hold. Draw from "
            "torch's own one, which torch.manual_seed sets."
        )
    if not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"{argument}: uses an operation with graphs of its own, such as torch.cond, which "
            "cannot be done for all steps at once. Write it with torch.where."
        )
    forbid_trained_captures(argument, values, remedy)
    for i, node in enumerate(nodes):
        with module.graph.inserting_before(placeholders[after]):
            lifted = module.graph.placeholder(f"captured_{i}")
            lifted.meta = dict(node.meta)
        node.replace_all_uses_with(lifted)
        module.graph.erase_node(node)
    module.recompile()
    return values


def forbid_trained_captures(argument: str, values: Sequence[Tensor], remedy: str) -> None:
    """A tensor that is closed over and wants a gradient would silently get none."""
    for value in values:
        if value.requires_grad:
            kind = "an nn.Parameter" if isinstance(value, nn.Parameter) else "a tensor"
            raise ValueError(
                f"{argument}: uses {kind} of shape {list(value.shape)} that requires grad but was "
                f"not taken from params, so it would get no gradient. {remedy}"
            )
