"""From what the user has (a module, a torch cell or layer, a function) to a :class:`Step`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._checks import check_int
from .._compat.modules import uncompiled
from .._trees import Tree, tree_leaves, tree_map
from .step import Step, StepFunction, layers_of, out_and_state


def as_step(
    step: nn.Module | StepFunction | Step,
    *,
    sequence: bool = False,
    batch_first: bool | None = None,
    state_batch_dim: int | None = None,
) -> Step:
    """as_step : module or function -> Step

    - a function ``step(params, x_t, state) -> (out_t, state)``;
    - a module called ``module(x_t, state) -> (out_t, state)``;
    - torch's ``nn.RNNCell``, ``nn.GRUCell``, ``nn.LSTMCell`` (``out_t`` is the new ``h``; a class
      derived from one may return a pair as above) and ``nn.RNN``, ``nn.GRU``, ``nn.LSTM``, with
      the state they use in torch;
    - with ``sequence=True``, a module that takes a chunk, ``module(x[K, ...], state) ->
      (out[K, ...], state)``: it is called on chunks of one step, so no layer in it may mix steps,
      as a convolution over time does (a segment's first call sees that), and noise is drawn anew
      for each step: a mask of variational dropout is for the state to carry.

    ``batch_first`` says that the chunk is ``[B, K, ...]`` (default: what the recurrent modules
    inside say); ``state_batch_dim`` is the axis of the rows in a state leaf, which ``reset`` and
    ``mask`` of shape ``[K, B]`` need (default: 1 for leaves like the ``[L, B, H]`` of a torch
    recurrent layer inside, else 0).

    Raises TypeError for what is none of these, such as a module of TorchScript, and for an option
    that has no meaning for it; ValueError for a negative axis, and for a layer that reads time in
    both directions.

    >>> as_step(nn.LSTMCell(3, 5)).name
    'LSTMCell'
    """
    options = {
        "sequence": sequence or None,
        "batch_first": batch_first,
        "state_batch_dim": state_batch_dim,
    }
    if isinstance(step, Step):
        _refuse(options, "what as_step has made")
        return step
    if state_batch_dim is not None:  # counted from the front: leaves differ in their axes
        state_batch_dim = check_int("state_batch_dim", state_batch_dim, 0)
    if isinstance(step, type) or not callable(step):
        raise TypeError(
            f"step: expected a module, or a function step(params, x_t, state) -> (out_t, state), "
            f"found {step!r}."
        )
    if not isinstance(step, nn.Module):
        if sequence:
            raise TypeError(
                "as_step(sequence=True) needs an nn.Module; for a function, call it on a chunk of "
                "one step yourself: step(params, x_t, state)."
            )
        _refuse(options, "a function", but=["state_batch_dim"])
        return Step(step, state_batch_dim=state_batch_dim)
    step = uncompiled(step)  # what torch.compile wraps is compiled here, as part of the segment
    layers = layers_of(step)
    _refuse_modules(step, sequence, layers)
    if batch_first is None:
        batch_first = any(layer.batch_first for layer in layers)
    if isinstance(step, nn.RNNCellBase):
        _refuse(options, f"{type(step).__name__}, which takes one step")
        call = _call_lstm_cell if isinstance(step, nn.LSTMCell) else _call_cell
        return Step(None, step, call, zero_state=partial(_zero_cell_state, step))
    if isinstance(step, nn.RNNBase):
        _refuse(options, f"{type(step).__name__}", but=["sequence", "batch_first"])
        zero_state = partial(_zero_layer_state, step)
        call_layer = partial(_call_one_step, batch_first)
        return Step(None, step, call_layer, batch_first, None, zero_state)
    if sequence:
        return Step(
            None, step, partial(_call_one_step, batch_first), batch_first, state_batch_dim,
            call_chunk=partial(_call_chunk, batch_first),
        )  # fmt: skip
    _refuse(options, "a module that takes one step", but=["state_batch_dim"])
    return Step(None, step, state_batch_dim=state_batch_dim)


def _refuse_modules(step: nn.Module, sequence: bool, layers: Sequence[nn.RNNBase]) -> None:
    """Raises what :func:`as_step` does for modules of which no step can be made."""
    for path, module in step.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"step{path and '.' + path}: a module of torch.jit.script or torch.jit.trace "
                "cannot be run with other parameters than its own. Pass the module that it was "
                "made from."
            )
    if isinstance(step, (nn.DataParallel, DistributedDataParallel)):
        raise TypeError(
            f"step: {type(step).__name__} runs a batch on several devices, and reduces gradients "
            "by itself. Pass the module inside, step.module; for several processes there is "
            "train_stream(..., mesh=)."
        )
    for layer in layers:
        # In a module that takes one step, it may read along another axis than time.
        if layer.bidirectional and (layer is step or sequence):
            raise ValueError(
                f"step: {type(layer).__name__}(bidirectional=True) cannot be trained by TBPTT: "
                "its backward direction reads the sequence from the end, which a segment of K "
                "steps does not hold, so no state can be carried to the next segment. Use "
                "bidirectional=False, or train on whole sequences with autograd."
            )


def _refuse(options: dict[str, Any], what: str, but: Sequence[str] = ()) -> None:
    for name, value in options.items():
        if value is not None and name not in but:
            raise TypeError(f"as_step: {name}={value!r} has no meaning for {what}. Leave it out.")


def _call_cell(cell: nn.Module, x_t: Tensor, h: Tree) -> tuple[Tree, Tree]:
    if isinstance(cell, (nn.RNNCell, nn.GRUCell)):
        _check_is_tensor(cell, h)
    result = cell(x_t, h)
    # A class of the caller's may return a pair, as any module does.
    return (result, result) if isinstance(result, Tensor) else result


def _call_lstm_cell(cell: nn.Module, x_t: Tensor, state: Tree) -> tuple[Tree, Tree]:
    h, c = cell(x_t, tuple(state))
    if not isinstance(c, Tensor):  # as above: the output, and (h, c)
        return h, c
    return h, type(state)((h, c)) if type(state) in (tuple, list) else (h, c)


def _check_is_tensor(module: nn.Module, state: Tree) -> None:
    if not isinstance(state, Tensor):
        raise TypeError(
            f"state: expected the tensor h of {type(module).__name__}, found "
            f"{type(state).__name__}. An LSTM has a pair (h, c)."
        )


def _call_one_step(
    batch_first: bool, module: nn.Module, x_t: Tree, state: Tree
) -> tuple[Tree, Tree]:
    """Calls a module that takes chunks on a chunk of one step."""
    if isinstance(module, nn.LSTM) and isinstance(state, Tensor):
        raise TypeError(
            f"state: expected the pair (h, c) of an LSTM, found a tensor {list(state.shape)}. "
            "Give state=(h, c), both [layers, B, units]."
        )
    if isinstance(module, (nn.GRU, nn.RNN)):
        _check_is_tensor(module, state)

    def axis(leaf: Tensor) -> int:
        return _time_axis(batch_first, module, leaf.dim())

    result = module(tree_map(lambda leaf: leaf.unsqueeze(axis(leaf)), x_t), state)
    out, state = out_and_state(result, f"{type(module).__name__} to return (out, state)", "out")
    out_axis = max(map(axis, tree_leaves(x_t)))
    return tree_map(lambda leaf: leaf.squeeze(out_axis), out), state


def _call_chunk(batch_first: bool, module: nn.Module, x: Tree, state: Tree) -> tuple[Tree, Tree]:
    """Calls a module that takes chunks; here time is axis 0, wherever the module has it."""

    def axis(leaf: Tensor) -> int:
        return _time_axis(batch_first, module, leaf.dim() - 1)

    result = module(tree_map(lambda leaf: leaf.movedim(0, axis(leaf)), x), state)
    out, state = out_and_state(result, f"{type(module).__name__} to return (out, state)", "out")
    out_axis = max(map(axis, tree_leaves(x)))
    return tree_map(lambda leaf: leaf.movedim(out_axis, 0), out), state


def _time_axis(batch_first: bool, module: nn.Module, dims: int) -> int:
    """The axis of time in a chunk, of steps with ``dims`` axes.

    An unbatched chunk of torch's own layers is [K, D] whatever ``batch_first`` says.
    """
    least = 2 if isinstance(module, nn.RNNBase) else 1
    return 1 if batch_first and dims >= least else 0


def _zero_cell_state(cell: nn.RNNCellBase, x_t: Tensor) -> Tree:
    h = x_t.new_zeros((*x_t.shape[:-1], cell.hidden_size))
    return (h, torch.zeros_like(h)) if isinstance(cell, nn.LSTMCell) else h


def _zero_layer_state(layer: nn.RNNBase, x_t: Tensor) -> Tree:
    rows = x_t.shape[:-1]
    hidden = layer.proj_size or layer.hidden_size
    h = x_t.new_zeros((layer.num_layers, *rows, hidden))
    if isinstance(layer, nn.LSTM):
        return h, x_t.new_zeros((layer.num_layers, *rows, layer.hidden_size))
    return h
