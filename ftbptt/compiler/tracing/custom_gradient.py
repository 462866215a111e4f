"""``torch.autograd.Function`` in a step: a node with the gradient that the Function's author wrote.

Spiking networks have the surrogate gradient of their spikes this way. The Function's forward is
traced like the rest of the step. A node after it passes on its results and, when the graph is
differentiated, calls the Function's backward, whose operations are then traced as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..._compat.functions import (
    CustomOperator,
    FunctionAtLevel,
    applying_functions_by,
    functions_at_one_level,
)
from ..._trees import differentiable, tree_flatten, tree_map, tree_unflatten
from .errors import explain_trace_errors

# (all tensors of a gradient, which of the arguments need one, the gradients of the results) -> the
# gradients of all tensors.
Backward = Callable[[Sequence[Tensor], Sequence[bool], Sequence[Any]], Sequence[Tensor | None]]


@dataclass(eq=False)
class CustomGradient:
    """The target of a node: the values of some results -> the same, with a gradient of its own.

    It is called with the tensors that ``backward`` reads, of which the last ``results`` are the
    results. ``non_differentiable`` are numbers of results.
    """

    name: str
    backward: Backward
    results: int
    non_differentiable: list[int]
    materialize_grads: bool

    def __post_init__(self) -> None:
        self.__name__ = f"gradient_of_{self.name}"  # in the code of its graph

    def __call__(self, *tensors: Tensor) -> Any:
        gradients = _recorded.get()
        if gradients is not None:
            gradients.append(self)
            return torch.ops.ftbptt.custom_gradient(tensors, len(gradients) - 1, self.results)
        with functions_at_one_level():
            return _WithGradient.apply(self, *tensors)  # type: ignore[attr-defined]


class _WithGradient(FunctionAtLevel):
    @staticmethod
    def forward(ctx: Any, gradient: CustomGradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(gradient.materialize_grads)
        first = len(tensors) - gradient.results
        results = [torch.ops.aten.alias(tensor) for tensor in tensors[first:]]
        ctx.mark_non_differentiable(*(results[i] for i in gradient.non_differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needs_grad = ctx.needs_input_grad[1:]
        with torch.no_grad():  # as ``once_differentiable`` wants it
            return (None, *ctx.gradient.backward(ctx.saved_tensors, needs_grad, grads))


# -- while a graph is traced that will be differentiated ------------------------------------------

# Its gradients. The operator stands for them in the meantime: ``index`` is a number in this list.
_recorded: ContextVar[list[CustomGradient] | None] = ContextVar("recorded", default=None)
_library = torch.library.Library("ftbptt", "FRAGMENT")
_library.define("custom_gradient(Tensor[] tensors, int index, int results) -> Tensor[]")


def _results(tensors: Sequence[Tensor], index: int, results: int) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors[len(tensors) - results :]]


def _vmapped(
    info: Any, in_dims: Any, tensors: Sequence[Tensor], index: int, results: int
) -> tuple[list[Tensor], list[int]]:
    """The gradient of a batch: all tensors get its axis, for a backward that is vmapped."""
    gradients = _recorded.get()
    assert gradients is not None
    gradient, size = gradients[index], info.batch_size
    batched = [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims[0], strict=True)
    ]

    def backward(tensors: Any, needs_grad: Any, grads: Any) -> list[Tensor | None]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        returned: list[int] = []

        def of_one(tensors: Any, present_grads: Any) -> list[Tensor]:
            of_results: list[Any] = [None] * results
            for i, grad in zip(present, present_grads, strict=True):
                of_results[i] = grad
            found = gradient.backward(tensors, needs_grad, of_results)
            returned[:] = [i for i, grad in enumerate(found) if grad is not None]
            return [grad for grad in found if grad is not None]

        found = torch.func.vmap(of_one)(tuple(tensors), [grads[i] for i in present])
        by_tensor: list[Tensor | None] = [None] * len(tensors)
        for i, grad in zip(returned, found, strict=True):
            by_tensor[i] = grad
        return by_tensor

    return list(replace(gradient, backward=backward)(*batched)), [0] * results


torch.library.register_fake("ftbptt::custom_gradient", _results, lib=_library)
torch.library.register_vmap("ftbptt::custom_gradient", _vmapped, lib=_library)


@contextmanager
def custom_gradients_as_nodes() -> Iterator[Callable[[fx.Graph], None]]:
    """Within it, a traced function may apply Functions. What it yields puts them into the graph."""
    gradients: list[CustomGradient] = []

    def put_into(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.ftbptt.custom_gradient.default:
                tensors, index, _ = node.args
                node.target, node.args = gradients[index], tuple(tensors)

    token = _recorded.set(gradients)
    try:
        with applying_functions_by(_apply):
            yield put_into
    finally:
        _recorded.reset(token)


# -- a Function and its context -------------------------------------------------------------------


class _Context:
    """The ``ctx`` of a Function's forward and backward. Its attributes go from one to the other."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.non_differentiable: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """For derivatives in forward mode, which a segment does not take."""

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.non_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise RuntimeError(
            "ctx.mark_dirty: a Function that writes to its arguments cannot be compiled. Return a "
            "new tensor from its forward."
        )


class _SavedContext:
    """The attributes of a context after forward: its ``tensors``, and what else it holds."""

    def __init__(self, context: _Context) -> None:
        leaves, self.spec = tree_flatten(vars(context))
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[i] for i in self.places]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def restored(self, tensors: Sequence[Tensor], needs_input_grad: tuple[bool, ...]) -> _Context:
        """The context for backward, with these tensors in their places."""
        leaves, context = list(self.others), _Context(())
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        vars(context).update(tree_unflatten(leaves, self.spec))
        context.needs_input_grad = needs_input_grad
        return context


def _apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """``function.apply(...)`` while a graph is traced that will be differentiated."""
    is_old_style = function.setup_context is torch.autograd.Function.setup_context
    if not is_old_style:
        given = inspect.signature(function.forward).bind(*args, **kwargs)
        given.apply_defaults()
        args = given.args
    context = _Context(tuple(isinstance(arg, Tensor) and differentiable(arg) for arg in args))
    with torch.no_grad():
        if is_old_style:
            returned = function.forward(context, *args)
        else:
            returned = function.forward(*args)
            function.setup_context(context, args, returned)
    if not torch.is_grad_enabled():
        return returned
    results = returned if isinstance(returned, tuple) else (returned,)
    tensors = [result for result in results if isinstance(result, Tensor)]
    marked = {id(tensor) for tensor in context.non_differentiable}
    context.non_differentiable = ()
    saved = _SavedContext(context)
    gradient = CustomGradient(
        function.__name__,
        _backward_of(function, args, saved, results),
        len(tensors),
        [i for i, tensor in enumerate(tensors) if id(tensor) in marked],
        context.materialize_grads,
    )
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    passed_on = iter(gradient(*inputs, *saved.tensors, *tensors))
    results = tuple(next(passed_on) if isinstance(r, Tensor) else r for r in results)
    return results if isinstance(returned, tuple) else results[0]


def _backward_of(
    function: type[torch.autograd.Function],
    args: Sequence[Any],
    saved: _SavedContext,
    results: Sequence[Any],
) -> Backward:
    """The Function's backward, by all tensors: of the arguments, the context and the results."""
    is_input = [isinstance(arg, Tensor) for arg in args]
    is_result = [isinstance(result, Tensor) for result in results]
    inputs, before_results = sum(is_input), sum(is_input) + len(saved.tensors)

    def backward(
        tensors: Sequence[Tensor], needs_grad: Sequence[bool], grads: Sequence[Any]
    ) -> list[Tensor | None]:
        needed, of_tensors = iter(needs_grad), iter(grads)
        needs_input_grad = tuple(is_tensor and next(needed) for is_tensor in is_input)
        context = saved.restored(tensors[inputs:before_results], needs_input_grad)
        of_results = [next(of_tensors) if is_tensor else None for is_tensor in is_result]
        with explain_trace_errors(function.__name__, function.backward):
            returned = function.backward(context, *of_results)
        returned = returned if isinstance(returned, tuple) else (returned,)
        if len(returned) < len(args) or any(g is not None for g in returned[len(args) :]):
            raise RuntimeError(
                f"{function.__name__}.backward: returned {len(returned)} gradients; expected "
                f"{len(args)}, one for each argument of forward, None where there is none."
            )
        of_inputs = [g for g, is_tensor in zip(returned, is_input, strict=False) if is_tensor]
        return [*of_inputs, *([None] * (len(tensors) - len(of_inputs)))]

    return backward


# -- a custom operator ----------------------------------------------------------------------------


def apply_operator(
    call: Callable[..., Any], operator: CustomOperator, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls a custom operator, as a Function with the gradient that was registered for it."""
    name, arguments = operator.name, operator.arguments
    given = {**{a.name: a.default_value for a in arguments if a.has_default_value()}, **kwargs}
    given.update(zip((a.name for a in arguments), args, strict=False))
    positional = [given[a.name] for a in arguments if not a.kwarg_only]
    options = {a.name: given[a.name] for a in arguments if a.kwarg_only}

    def forward(ctx: Any, *inputs: Any) -> Any:
        # Detached: torch's own gradient of it cannot be traced, though nothing asks for it.
        detached = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, inputs)
        output = call(*detached, **options)
        if isinstance(output, list) or any(map(_is_list_of_tensors, inputs)):
            raise RuntimeError(
                f"{name}: an operator that takes or returns a list of tensors has no gradient in a "
                "segment. Give it single tensors, and return a tuple."
            )
        if operator.setup_context is not None:
            named = {"keyword_only_inputs": options} if options else {}
            operator.setup_context(ctx=ctx, inputs=inputs, output=output, **named)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        if operator.backward is None:
            raise RuntimeError(
                f"{name}: is differentiated, but has no gradient. Register one "
                "(torch.library.register_autograd), or give it detached tensors."
            )
        return operator.backward(ctx, *grads)

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), parts)
    return function.apply(*positional)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
