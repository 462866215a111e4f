"""What a step must return, and what it and a loss must not do: checked when they are traced."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..._compat.running import is_fake
from ..._trees import (
    Tree,
    in_order_of,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from ...contract.step import Step, out_and_state
from ..graphs import Node, aten, inputs_of, needed_for, owner_of, value_of, written_by
from ..signature import Leaf
from .detached_writes import written_outside


def floating_dtypes(leaves: Sequence[Leaf]) -> set[torch.dtype]:
    return {leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point}


def checked_pair(result: Any, state: Tree, x_only: set[torch.dtype]) -> tuple[Tree, Tree]:
    """``(out_t, next state)`` as the step returned it, the state with its dicts in order.

    ``x_only``: dtypes that x has, but no parameter. Raises TypeError or ValueError if it is not
    such a pair, or if the state comes out with another structure, dtype or shape.
    """
    out, state_after = out_and_state(result, "(out_t, state)", "out_t")
    state_after = in_order_of(state, state_after)
    leaves_before, spec_before = tree_flatten_with_path(state)
    leaves_after, spec_after = tree_flatten_with_path(state_after)
    if spec_before != spec_after:
        raise TypeError(
            "step: the state must keep its structure, so that it can be carried.\n"
            f"  went in:  {_outline(state)}\n  came out: {_outline(state_after)}\n"
            "Return the next state in the structure of the state that the step received."
        )
    for (path, before), (_, after) in zip(leaves_before, leaves_after, strict=True):
        _check_state_leaf(f"state{keystr(path)}", before, after, x_only)
    return out, state_after


def _check_state_leaf(name: str, before: Tensor, after: Any, x_only: set[torch.dtype]) -> None:
    if not isinstance(after, Tensor):
        raise TypeError(f"step: {name} came out as {type(after).__name__}, not a tensor.")
    if before.dtype != after.dtype:
        if after.dtype in x_only:
            remedy = f"That is the dtype of x, but of no parameter: give x as {before.dtype}."
        elif before.dtype in x_only:  # as the zeros of state=None have it from x
            remedy = (
                f"x is {before.dtype} too, but no parameter is: give x and the state as "
                f"{after.dtype}."
            )
        else:
            remedy = (
                f"The carried state must keep its dtype: give it in as {after.dtype}, or return "
                f"`.to({before.dtype})`."
            )
        raise TypeError(
            f"step: {name} went in as {before.dtype} and came out as {after.dtype}. {remedy}"
        )
    if before.shape != after.shape:
        remedy = "give it in with the shape that the step returns."
        if before.shape == after.shape[1:]:  # as of a learned start, which a reset would broadcast
            remedy = (
                f"it went in without rows, so expand it over them, to {list(after.shape)}, also "
                "in initial_state= if state=None starts from that."
            )
        raise ValueError(
            f"step: {name} went in with shape {list(before.shape)} and came out with "
            f"{list(after.shape)}. The carried state must keep its shape: {remedy}"
        )


def _outline(tree: Tree) -> str:
    """The tree, with the shape of each tensor in its place."""
    leaves, spec = tree_flatten(tree)
    return str(tree_unflatten([_Outlined(leaf) for leaf in leaves], spec))


class _Outlined:
    """A leaf that prints as its shape, or its type if it is not a tensor."""

    def __init__(self, leaf: Any) -> None:
        self.text = str(list(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__

    def __repr__(self) -> str:
        return self.text


def forbid_mutation(argument: str, module: fx.GraphModule, changed: Callable[[int], str]) -> None:
    """Raises RuntimeError if ``argument``, as it was traced, writes into a tensor from outside.

    Be it one that it closes over or an input: ``changed`` is what to say of the input's number.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    for node in module.graph.nodes:
        for owner in map(owner_of, written_by(node)):
            if owner.op == "get_attr":
                raise written_outside(argument)
            if owner.op == "placeholder":
                raise RuntimeError(changed(inputs.index(owner)))


CHANGED_BY_LOSS = (
    "loss: changes out or y in place, which it would do to the result of the call as well. Write "
    "out = out - a instead of out -= a, or work on a clone."
)


def changed_by_step(step: Step, name: str) -> str:
    """What to say of a step that writes into its input of this name."""
    if not name.startswith("buffers["):
        return (
            f"step {step.name} changes {name} in place. A step is a pure function: work on a "
            "clone, or return the new value."
        )
    buffer = name[len("buffers") :].strip("[]")
    remedy = "call module.eval(), or carry the value in the state and return it."
    if (weight := _spectral_norm_of(name)) is not None:
        remedy = (
            "let spectral_norm iterate before each segment (of some steps, so more than once): "
            f"module.train(); module.{weight}; module.eval()."
        )
    return (
        f"step {step.name} changes its buffer {buffer} in place (BatchNorm in train mode does). "
        f"Buffers are constants of a segment: {remedy}"
    )


def _spectral_norm_of(buffer: str) -> str | None:
    """The weight whose spectral norm torch's parametrization estimates in a buffer."""
    found = re.fullmatch(r"buffers\['(.*\.)?parametrizations\.(\w+)\.\d+\._[uv]'\]", buffer)
    return None if found is None else f"{found[1] or ''}{found[2]}"


_STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default)


def forbid_strided_memory(step: Step, module: fx.GraphModule) -> None:
    """Raises RuntimeError if the step reads or writes by strides, which hold for its trace only."""
    if any(node.target in _STRIDED for node in module.graph.nodes):
        raise RuntimeError(
            f"step {step.name} writes into a part of a tensor inside torch.func.grad (or vjp, "
            "jacrev), or calls as_strided: that is compiled as places in memory, which differ when "
            "all steps run at once. Write it without: torch.where, torch.cat, index_put, unfold."
        )


def forbid_change_of_params(step: Step, given: Tree, after: Tree) -> None:
    """Raises RuntimeError if the step has put something else into its ``params``."""
    leaves, spec = tree_flatten_with_path(given)
    leaves_after, spec_after = tree_flatten_with_path(after)
    changed = [""]
    if spec == spec_after:
        pairs = zip(leaves, leaves_after, strict=True)
        changed = [keystr(path) for (path, before), (_, now) in pairs if now is not before]
    if changed:
        raise RuntimeError(
            f"step {step.name} puts other values into params{changed[0]}, which the next step "
            "would read. A step is a pure function: work on a copy (dict(params)), or return such "
            "a value in the state."
        )


def forbid_trained_captures(argument: str, module: fx.GraphModule, remedy: str) -> None:
    """Raises ValueError if a captured tensor would get a gradient in the loop: here it gets none.

    Raises TypeError if it has no values, because it was made by the function that is traced.
    """
    graph = module.graph
    detached = graph.find_nodes(op="call_function", target=aten.detach.default)
    with_gradient = needed_for([graph.output_node()], stop=detached)
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if is_fake(value):
            raise TypeError(
                f"{argument}: uses a tensor of shape {list(value.shape)} that it makes as an "
                "nn.Parameter or a module of its own, or that was made while it was traced and "
                "kept, such as a table that the first call computes. Make it before, and pass it "
                "in or close over it."
            )
        if value.requires_grad and node in with_gradient:
            raise untrained(argument, value, remedy)


def untrained(argument: str, value: Tensor, remedy: str) -> ValueError:
    """The error for a tensor outside that would get no gradient."""
    kind = "an nn.Parameter" if isinstance(value, nn.Parameter) else "a tensor"
    return ValueError(
        f"{argument}: uses {kind} of shape {list(value.shape)} that requires grad but was not "
        f"taken from params, so it would get no gradient. {remedy}"
    )


# Operations whose operands must have one dtype, which fake tensors do not check for all of them.
_ONE_DTYPE = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default,
}  # fmt: skip
_CONVERSIONS = {
    torch.float64: "double", torch.float32: "float", torch.float16: "half",
    torch.bfloat16: "bfloat16",
}  # fmt: skip


def forbid_mixed_dtypes(step: Step, module: fx.GraphModule, names: Sequence[str]) -> None:
    """Raises TypeError if a product or convolution has operands of different dtypes.

    Run on real tensors such an operation fails, in another way on each backend. ``names``: one for
    each input of the graph.
    """
    for node in module.graph.nodes:
        if node.target not in _ONE_DTYPE:
            continue
        first, *others = (arg for arg in inputs_of(node) if "val" in arg.meta)
        for other in others:
            if value_of(other).dtype != value_of(first).dtype:
                inputs = dict(zip(module.graph.find_nodes(op="placeholder"), names, strict=True))
                raise TypeError(
                    _wrong_leaves(step, inputs, first, other)
                    or _wrong_leaves(step, inputs, other, first)
                    or f"step: {step.name} calls {node.target} on operands of different dtypes, "
                    f"{value_of(first).dtype} and {value_of(other).dtype}. Convert one of them "
                    "with .to()."
                )


def _wrong_leaves(step: Step, inputs: dict[Node, str], operand: Node, other: Node) -> str | None:
    """The error if ``operand`` has the dtype of leaves of x or the state, ``other`` of parameters.

    ``inputs`` are the graph's, with the name of each leaf.
    """
    dtype, expected = value_of(operand).dtype, value_of(other).dtype

    def leaves(group: str, dtype: torch.dtype) -> dict[str, Node]:
        return {
            name: node
            for node, name in inputs.items()
            if re.match(rf"{group}\b", name) and value_of(node).dtype == dtype
        }

    if leaves("params", dtype) or not leaves("params", expected):
        return None
    read = needed_for([operand])
    x, state = leaves("x", dtype), leaves("state", dtype)
    wrong = [name for name, node in x.items() if node in read]
    if any(node in read for node in state.values()):
        wrong = [*x, *state]  # the zeros of state=None have the dtype of x
    if not wrong:
        return None
    verb = "is" if len(wrong) == 1 else "are"
    convert_params = "."
    if dtype.is_floating_point:
        call = "" if step.module is None else f" (module.{_conversion(dtype)})"
        convert_params = f", or the parameters as {dtype}{call}."
    return (
        f"step: {' and '.join(wrong)} {verb} {dtype}, but the parameters are {expected}, and "
        f"{step.name} multiplies the two. Give {wrong[0]} as {expected} "
        f"({wrong[0]}.{_conversion(expected)}){convert_params}"
    )


def _conversion(dtype: torch.dtype) -> str:
    return f"{_CONVERSIONS[dtype]}()" if dtype in _CONVERSIONS else f"to({dtype})"
