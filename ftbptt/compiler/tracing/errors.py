"""Errors of tracing, reworded: the line of the step or loss that caused them, and a remedy.

torch's own messages name its internals. The table of causes below recognises those with a known
cause by their type or a part of their text; all other errors pass with a note that has the line.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..._compat.tracing import UNTRACEABLE
from ..._trees import keystr, tree_flatten_with_path
from ..._warnings import PACKAGE_FOLDER
from ..graphs import aten

# Frames in these folders are not the user's. The separator keeps a neighbour such as
# ``torchvision`` apart from ``torch``.
_LIBRARY_FOLDERS = (os.path.join(os.path.dirname(torch.__file__), ""), PACKAGE_FOLDER)
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = os.path.join(sysconfig.get_path("purelib"), "")  # may be in the standard library's
# Code without a file that torch, dataclasses and the import system generate. What a user types at
# a prompt has no file either (``<stdin>``, ``<ipython-input-...>``), but is theirs.
_GENERATED_CODE = ("<eval_with_key>", "<string>", "<frozen ")

# What an `if`, `.item()` and a boolean index come to.
_READ_VALUES = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default,
    aten.nonzero.default, aten.index.Tensor, aten.index_put.default,
    aten.masked_select.default,
}  # fmt: skip

# What vmap says of a mask that selects elements.
_DYNAMIC_SHAPE = "operators that can output dynamic shape"

_MOST_SHAPES = 12  # in a note


class _Cause(NamedTuple):
    """A known cause of a failed trace.

    ``message`` has the fields ``{function}`` ("step LSTM"), ``{line}`` (the user's) and
    ``{operation}`` (the ATen operation that failed, if torch names it). Its last line is a remedy.
    """

    matches: Callable[[Exception], bool]
    message: str


def _says(*texts: str) -> Callable[[Exception], bool]:
    return lambda error: any(text in str(error) for text in texts)


def _reads_values(error: Exception) -> bool:
    # Without a type of exception for it: "tracing tensor" of torch/fx/experimental/proxy_tensor.py
    # (2.13) and of function_overrides, and vmap's (aten/src/ATen/functorch/BatchRulesDynamic.cpp).
    return isinstance(error, UNTRACEABLE) or _says("tracing tensor", _DYNAMIC_SHAPE)(error)


def _operation(error: Exception) -> Any:
    return getattr(error, "func", None)


def _is_value_dependent_operation(error: Exception) -> bool:
    """Whether one operation needs values, which the user did not ask for in Python."""
    operation = _operation(error)
    return _reads_values(error) and operation is not None and operation not in _READ_VALUES


# The first match is reported. The comments say where torch 2.13 has the text that is looked for.
_CAUSES = [
    _Cause(
        lambda error: _operation(error) is aten._pack_padded_sequence.default,
        "{function} packs sequences, and a PackedSequence has no single step\n  {line}\n"
        "Give padded data with reset= and mask= instead.",
    ),
    _Cause(
        # not torch's: applying_functions_by
        _says("autograd.Function of a full backward hook"),
        "{function} calls a module that has a full backward hook, which cannot be compiled\n"
        "  {line}\n"
        "Remove it, by remove() of what register_full_backward_hook returned. For the gradient of "
        "the loss at a tensor inside the step use make_train_segment(..., taps=) and ftbptt.tap.",
    ),
    _Cause(
        # torch/_functorch/autograd_function.py
        _says("autograd.Function", "custom_function_call"),
        "{function} uses a torch.autograd.Function inside another gradient or vmap (a full "
        "backward hook is one too), which cannot be traced\n  {line}\n"
        "To choose the gradient yourself write soft + (hard - soft).detach(): the value of `hard` "
        "with the gradient of `soft`.",
    ),
    _Cause(
        # torch.autograd.grad (libtorch), backward() (torch/autograd/__init__.py), requires_grad_ in
        # the backward of an autograd.Function (libtorch)
        _says(
            "does not require grad and does not have a grad_fn",
            "backward() called inside a functorch transform",
            "attempting to call Tensor.requires_grad_()",
        ),
        "{function} takes a gradient by torch.autograd, which cannot be traced\n  {line}\n"
        "Write it as torch.func.grad(f)(x), or torch.func.vjp, which can be differentiated again; "
        "for the gradient of the loss at a tensor inside the step use "
        "make_train_segment(..., taps=).",
    ),
    _Cause(
        # torch/_dynamo/exc.py
        _says("This higher order operator doesn't work"),
        "{function} uses an operator that contains graphs, such as while_loop, which cannot be "
        "compiled\n  {line}\n"
        "Write it with torch.where: instead of a loop until something has converged, one of a "
        "fixed number of iterations, in which what has converged stays as it is.",
    ),
    _Cause(
        # FunctionalizeFallbackKernel (libtorch)
        _says("mutating a non-functional tensor"),
        "{function} changes in place a tensor that is not among its arguments. Carry it in the "
        "state and return it.\n  {line}",
    ),
    _Cause(
        # torch/_subclasses/fake_tensor.py, for data that a fake tensor does not have
        _says("invalid python storage"),
        "{function} writes into a tensor outside of it, such as that of a metric or a log, which "
        "would happen only once, while it is traced\n  {line}\n"
        "Compute it from the result of the call; in a Lightning module use self.log in on_chunk.",
    ),
    _Cause(
        # torch/nn/modules/rnn.py
        _says("For unbatched 2-D input, hx"),
        "{function} gives x_t, the rows of one step, to a layer that takes them for the steps of "
        "a sequence\n  {line}\n"
        "A module that takes chunks is as_step(module, sequence=True); for one step use a cell, "
        "or x_t.unsqueeze(0).",
    ),
    _Cause(
        # cross_entropy and nll_loss (aten/src/ATen/native/LossNLL.cpp)
        _says("Expected target size"),
        "{function} has the classes on axis 1, where out [K, B, classes] has the rows\n  {line}\n"
        "Put time and rows on one axis: cross_entropy(out.flatten(0, 1), y.flatten()).",
    ),
    _Cause(
        _says(_DYNAMIC_SHAPE),
        "{function} selects by a mask, of which vmap would need one number of elements for all "
        "its entries\n  {line}\n"
        "Multiply by the mask instead, or use torch.where.",
    ),
    _Cause(
        _is_value_dependent_operation,
        "{function} cannot be compiled: what {operation} does, or the shape of its result, depends "
        "on the values of a tensor, which are not known while tracing\n  {line}\n"
        "Write it with other operations; reference_segment runs it unchanged.",
    ),
    _Cause(
        _reads_values,
        "{function} cannot be compiled: it needs the value of a tensor in Python (an `if` or "
        "`while` on a tensor, `.item()`, int(tensor), a boolean index)\n  {line}\n"
        "Only one branch could be traced, so none is. Write it with torch.where, or multiply by "
        "the condition, and a loop until something has converged as one of a fixed number of "
        "iterations; for restarts and padding use reset= and mask=.",
    ),
]


@contextmanager
def explain_trace_errors(argument: str, function: Any, **given: Any) -> Iterator[None]:
    """Around the trace of ``function``, which the caller passed as ``argument``.

    ``given``: trees of what it is called with, by name, of which a note tells the shapes.
    """
    name = getattr(function, "name", None) or getattr(function, "__name__", type(function).__name__)
    try:
        yield
    except Exception as error:
        at = _user_line(error)
        line = at or f"(no line of the {argument} is on the stack)"
        for cause in _CAUSES:
            if cause.matches(error):
                message = cause.message.format(
                    function=f"{argument} {name}", line=line, operation=_operation(error)
                )
                raise RuntimeError(message) from error
        if at or not str(error).startswith(f"{argument}: "):
            error.add_note(f"while {argument} {name} was traced" + (f"\n  {at}" if at else ""))
            if given:
                error.add_note(f"It was given {_shapes(given)}.")
        raise


def needs_values(argument: str, error: RuntimeError) -> bool:
    """Whether it tells, as :func:`explain_trace_errors` does, that a function needs values."""
    cause = error.__cause__
    is_of = str(error).startswith(f"{argument} ")
    return is_of and isinstance(cause, Exception) and _reads_values(cause)


def _shapes(trees: dict[str, Any]) -> str:
    """The leaves of trees with their shapes, the first ``_MOST_SHAPES`` of them."""
    leaves = [
        f"{name}{keystr(path)} {list(leaf.shape)}"
        for name, tree in trees.items()
        for path, leaf in tree_flatten_with_path(tree)[0]
        if isinstance(leaf, torch.Tensor)
    ]
    return ", ".join(leaves[:_MOST_SHAPES] + ["..."] * (len(leaves) > _MOST_SHAPES))


def _user_line(error: BaseException) -> str | None:
    """The innermost line of the traceback that is not torch's or this package's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_library(frame.filename)
    ]
    if not frames:
        return None
    last = frames[-1]
    text = linecache.getline(last.filename, last.lineno or 0).strip()
    return f'File "{last.filename}", line {last.lineno}, in {last.name}\n    {text}'.rstrip()


def _is_library(filename: str) -> bool:
    if filename.startswith(_STANDARD_LIBRARY) and not filename.startswith(_INSTALLED):
        return True
    return filename.startswith((*_LIBRARY_FOLDERS, *_GENERATED_CODE))
