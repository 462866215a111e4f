"""A pure function of one time step, ``apply(params, buffers, x_t, state) -> (out_t, state)``.

With what the engine must know of it: its module, where time lies in its data, where the rows of the
batch lie in its state, and its zero state if it is known. ``as_step`` makes one of what users have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.modules import COMPILED_PREFIX, is_persistent, own_buffers, own_parameters
from .._messages import describe_type, registering
from .._reach import attributes_set_by
from .._trees import Tree, keystr, tree_flatten_with_path
from .held_tensors import (
    HOLDING,
    WatchedBuffers,
    aliases_in,
    call_with,
    tied_places,
    watching_buffers,
)
from .taps import Collector, collecting, owners

StepFunction = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
StateCall = Callable[[Tree, Tree], tuple[Tree, Tree]]  # (x_t, state) -> (out_t, state)
ModuleCall = Callable[[nn.Module, Tree, Tree], tuple[Tree, Tree]]
Around = Callable[[Tree, StateCall, Tree, Tree], tuple[Tree, Tree]]  # also params and the step
_Owned = tuple[str, nn.Module, str]  # a tensor's name, the module that has it, its name there


def _call_module(module: nn.Module, x_t: Tree, state: Tree) -> tuple[Tree, Tree]:
    out: tuple[Tree, Tree] = module(x_t, state)
    return out


def _call_around(
    around: Around, function: StepFunction, params: Tree, x_t: Tree, state: Tree
) -> tuple[Tree, Tree]:
    return around(params, partial(function, params), x_t, state)


def _call_module_around(
    around: Around, call: ModuleCall, module: nn.Module, x_t: Tree, state: Tree
) -> tuple[Tree, Tree]:
    return around(dict(module.named_parameters()), partial(call, module), x_t, state)


def _tapping(
    wanted: Sequence[str] | None, params: Tree, call: StateCall, x_t: Tree, state: Tree
) -> tuple[Tree, Tree]:
    x_t, probes = x_t
    with collecting(Collector(wanted, probes or None, owners(params))) as collector:
        out, after = call(x_t, state)
    collector.check()
    return (out, collector.values), after


@dataclass(frozen=True)
class Step:
    """One time step of a recurrent model, and the layout of its data.

    Built by :func:`as_step`; ``make_train_segment`` calls that for you.

    >>> import torch, ftbptt
    >>> cell = nn.GRUCell(3, 5)
    >>> step = ftbptt.as_step(cell)
    >>> params, x_t = dict(cell.named_parameters()), torch.randn(2, 3)
    >>> out, state = step.apply(params, step.buffers(), x_t, step.zero_state(x_t))
    >>> step.name, out.shape, state.shape
    ('GRUCell', torch.Size([2, 5]), torch.Size([2, 5]))
    """

    function: StepFunction | None
    module: nn.Module | None = None
    call_module: ModuleCall = _call_module
    batch_first: bool = False  # batched data is [B, K, ...] unless time_dim says otherwise
    state_batch_dim: int | None = None  # the axis of the rows in the state leaves, if it is given
    zero_state: Callable[[Tree], Tree] | None = None
    has_gradient_factors: bool = False  # x is (x, factor), see with_gradient_factors
    # Of a caller's module that takes chunks: (module, x[K, ...], state) -> (out[K, ...], state).
    call_chunk: ModuleCall | None = None
    wrapped: Step | None = None  # the step that this one calls, if it was made of another

    @property
    def root(self) -> Any:
        """What the caller gave as the step: a module or a function."""
        return self.function if self.module is None else self.module

    @property
    def name(self) -> str:
        """The name of the module's class, or of the function."""
        if self.module is not None:
            return type(self.module).__name__
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def batched_axes(self) -> int:
        """The fewest axes of ``x`` with rows: torch's own modules have features after them."""
        return 3 if isinstance(self.module, (nn.RNNBase, nn.RNNCellBase)) else 2

    def row_axis(self, leaf: Tensor) -> int:
        """The axis of the batch's rows in a state leaf."""
        if self.state_batch_dim is not None:
            return self.state_batch_dim
        return 1 if self._is_of_a_layer(leaf) else 0

    def _is_of_a_layer(self, leaf: Tensor) -> bool:
        """Whether it looks like the ``[L, B, H]`` of one of torch's recurrent layers inside."""
        return leaf.dim() == 3 and any(
            leaf.shape[0] == layer.num_layers
            and leaf.shape[2] in (layer.hidden_size, layer.proj_size)
            for layer in self._layers
        )

    def may_be_rows_first(self, leaf: Tensor, state: Sequence[Tensor]) -> bool:
        """Whether a leaf that looks like ``[L, B, H]`` may as well be ``[B, M, H]``.

        Not if ``state_batch_dim`` says it, nor if the state has as many such leaves as the layers
        have states.
        """
        if self.state_batch_dim is not None or not leaf.shape[0] == leaf.shape[1] > 1:
            return False
        count = sum(map(self._is_of_a_layer, state))
        layers = sum(2 if isinstance(layer, nn.LSTM) else 1 for layer in self._layers)
        return self._is_of_a_layer(leaf) and count != layers

    def has_no_rows(self, state: Sequence[Tensor]) -> bool:
        """Whether it can only be the state of one sequence, as torch's cells and layers take it.

        A plain function, and a layer in a module of the caller's, may have rows there.
        """
        if isinstance(self.module, nn.RNNBase):
            return all(leaf.dim() == 2 for leaf in state)
        return all(leaf.dim() == 1 and len(leaf) in self._cell_sizes for leaf in state)

    # Read at every call, so looked up once: walking a module takes longer than a small segment.

    @cached_property
    def parameter_names(self) -> list[str] | None:
        """The keys that ``params`` must have, or None for a plain function."""
        if self.module is None:
            return None
        return [name for name, _ in self.module.named_parameters()]

    @cached_property
    def _buffer_owners(self) -> list[_Owned]:
        return [] if self.module is None else _owned(self.module, own_buffers)

    @cached_property
    def assigned_buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """Those that it has assigned so far: the module, and what it calls them."""
        return {}

    @cached_property
    def _parameter_owners(self) -> list[_Owned]:
        return [] if self.module is None else _owned(self.module, own_parameters)

    @cached_property
    def _assigning(self) -> list[nn.Module]:
        """The modules with a buffer that some code assigns, as far as its name shows that."""
        if not self._buffer_owners:
            return []
        assigned = attributes_set_by(self.module)
        owners = (owner for _, owner, key in self._buffer_owners if key in assigned)
        return list(dict.fromkeys(owners))

    @cached_property
    def _layers(self) -> list[nn.RNNBase]:
        return [] if self.module is None else layers_of(self.module)

    @cached_property
    def _cell_sizes(self) -> set[int]:
        modules = [] if self.module is None else self.module.modules()
        return {cell.hidden_size for cell in modules if isinstance(cell, nn.RNNCellBase)}

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers: constants of a segment, read anew at each call.

        Raises RuntimeError for one that is no longer there.
        """
        if not self._buffer_owners:
            return {}
        try:
            with HOLDING:
                buffers = {name: getattr(owner, key) for name, owner, key in self._buffer_owners}
        except AttributeError as error:
            gone = [name for name, owner, key in self._buffer_owners if not hasattr(owner, key)]
            raise RuntimeError(
                f"step {self.name}: its buffer {gone[0]!r} was removed since the segment was made. "
                "Make a new segment, by make_train_segment."
            ) from error
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def saved_buffers(self) -> dict[str, Tensor]:
        """Those that the module's ``state_dict`` has: the others are computed again."""
        owners = self._buffer_owners
        saved = {name for name, owner, key in owners if is_persistent(owner, key)}
        return {name: buffer for name, buffer in self.buffers().items() if name in saved}

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Gives the module's buffers these values, in place where they can be written."""
        for name, owner, key in self._buffer_owners:
            if name in values:
                buffer = getattr(owner, key)
                try:
                    with torch.no_grad():
                        buffer.copy_(values[name])
                except (RuntimeError, AttributeError):  # expanded, of inference mode, or None
                    setattr(owner, key, values[name].to(buffer.device))

    def with_states(self, tapped: bool = False) -> Step:
        """The same step, its output ``(out_t, state)``: with the state that it was called with.

        ``tapped``: what it taps stays beside the two.
        """

        def run(params: Tree, call: StateCall, x_t: Tree, state: Tree) -> tuple[Tree, Tree]:
            out, after = call(x_t, state)
            return ((out[0], state), out[1]) if tapped else (out, state), after

        return self._wrapped(run)

    def with_taps(self, wanted: Sequence[str] | None) -> Step:
        """The same step on ``(x_t, probes)``, its output ``(out_t, tapped tensors by name)``.

        ``probes`` are added to the tensors that it taps, see :class:`Collector`.
        """
        return self._wrapped(partial(_tapping, wanted))

    def with_gradient_factors(self) -> Step:
        """The same step on ``(x_t, factor)``.

        The gradient at the state that the step before returned is multiplied by the factor; that
        of a state that a reset puts in its place is not. So it is done where the reset is.
        """
        zeros = self.zero_state
        start = None if zeros is None else lambda x: zeros(x[0])
        step = self._wrapped(lambda params, call, x, state: call(x[0], state))
        return replace(step, zero_state=start, has_gradient_factors=True)

    def _wrapped(self, around: Around) -> Step:
        """The step as ``around(params, call, x_t, state)``; ``call(x_t, state)`` is the step."""
        # With partial, since a function made here could not be pickled.
        if self.module is None:
            assert self.function is not None
            function = partial(_call_around, around, self.function)
            function.__name__ = self.name  # type: ignore[attr-defined]
            return replace(self, function=function)
        call_module = partial(_call_module_around, around, self.call_module)
        return replace(self, call_module=call_module, wrapped=self.wrapped or self)

    def misfit(self, params: dict[str, Tensor]) -> str | None:
        """What to say of the first parameter that has another shape than the module's own."""
        if self.module is None:
            return None
        own = dict(self.module.named_parameters())
        for name, value in own_names(params).items():
            if name in own and value.shape != own[name].shape:
                return (
                    f"params[{name!r}]: has shape {list(value.shape)}, but that of {self.name} is "
                    f"{list(own[name].shape)}. Pass dict(module.named_parameters()) of the module "
                    "that the segment was made of."
                )
        return None

    def other_name(self, name: str) -> str | None:
        """The first name of a parameter that is tied to it under ``name``."""
        return None if self.module is None else dict(tied_places(self.module)).get(name)

    def apply(self, params: Tree, buffers: dict[str, Tensor], x_t: Tree, state: Tree) -> Any:
        """Runs the step once, with these parameters and buffers: ``(out_t, state)``.

        Raises RuntimeError if the module assigns to a parameter, or to a buffer that it has read.
        One that it assigns first, as a place for a value of this step, is afterwards what it was.
        """
        if self.module is None:
            assert self.function is not None
            return self.function(params, x_t, state)
        module = self.module
        given = self._by_name(params, buffers)

        def run() -> Any:
            with watching_buffers(self._assigning) as watched:
                result = self.call_module(module, x_t, state)
            self._check_assigned(given, watched)
            return result

        return self.holding(params, buffers, run)

    def _check_assigned(
        self, given: Mapping[str, Tensor], watched: Mapping[nn.Module, WatchedBuffers]
    ) -> None:
        """Raises what :meth:`apply` does for tensors that the module was given and has assigned."""
        for name, owner, key in self._buffer_owners:
            is_carried = getattr(owner, key) is not given.get(name)
            if owner in watched:
                is_carried = watched[owner].carries_over(key)
                if watched[owner].has_assigned(key):
                    self.assigned_buffers[name] = owner, key
            if is_carried:
                raise RuntimeError(
                    f"step {self.name} assigns to its buffer {name!r}. Buffers are constants of a "
                    "segment: carry the value in the state and return it, or compute it from the "
                    "result of the call."
                )
        for name, owner, key in self._parameter_owners:
            if name in given and own_parameters(owner).get(key) is not given[name]:
                raise RuntimeError(
                    f"step {self.name} assigns to its parameter {name!r}. Parameters are those of "
                    "the call at each step: carry the value in the state and return it."
                )

    def holding(self, params: Tree, buffers: dict[str, Tensor], run: Callable[[], Any]) -> Any:
        """``run()``, while the module has these tensors."""
        if self.module is None:
            return run()
        with HOLDING:
            # Found anew each time: the caller, or the step before, may have put others there.
            aliases = aliases_in(self.module)
            return call_with(self.module, self._by_name(params, buffers), aliases, run)

    def _by_name(self, params: Tree, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the module, which it has, by all of their names."""
        assert self.module is not None
        params = own_names(params)
        values = {**buffers, **params}  # a buffer may be among the parameters
        tied = tied_places(self.module)
        return values | {name: values[first] for name, first in tied if name not in params}


def _owned(module: nn.Module, tensors_of: Callable[[nn.Module], dict[str, Any]]) -> list[_Owned]:
    """The module's parameters or buffers. Of several names for one: they may get other tensors."""
    return [
        (f"{path}.{key}" if path else key, owner, key)
        for path, owner in module.named_modules()
        for key in tensors_of(owner)
    ]


def own_names(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """``params`` by the names of the module; torch.compile puts a prefix before them."""
    return {name.removeprefix(COMPILED_PREFIX): value for name, value in params.items()}


def layers_of(module: nn.Module) -> list[nn.RNNBase]:
    return [m for m in module.modules() if isinstance(m, nn.RNNBase)]


def out_and_state(result: Any, expected: str, out: str) -> tuple[Tree, Tree]:
    """``(out, state)`` as a step, or a module that takes chunks, returned it.

    Raises TypeError for anything else, also for a Tensor or a dict, which would be taken apart as
    well. ``expected`` and ``out``, the name of the output, are for its message.
    """
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise TypeError(
            f"step: expected {expected}, found {describe_type(result)}. Return the output and the "
            "next state as a pair; a step without output returns its state twice."
        )
    for path, leaf in tree_flatten_with_path(result[0])[0]:
        if not isinstance(leaf, Tensor):
            registered = registering(leaf)
            remedy = "Return tensors in dicts, tuples or lists"
            raise TypeError(
                f"step: expected tensors in {out}, found {type(leaf).__name__} at "
                f"out{keystr(path)}. {remedy}{registered and ', or '}{registered}."
            )
    return result[0], result[1]


def start_of(step: Step, initial_state: Any, params: Tree, x_t: Tree) -> Tree:
    """The state that ``state=None`` means. Raises TypeError where it is not known."""
    if callable(initial_state):
        return initial_state(params)
    if initial_state is not None:
        return initial_state
    if step.zero_state is None:
        raise TypeError(
            f"state: None is known only for torch's own cells and layers, but the step is "
            f"{step.name}. Pass the state, or make_train_segment(initial_state=...)."
        )
    return step.zero_state(x_t)
