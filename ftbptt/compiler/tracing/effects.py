"""Side effects of a step or loss: variables that it rebinds and containers that it changes.

It is traced once, so an effect would happen once instead of at each step or call. It is undone,
since what was stored are fake tensors, and the step or loss is refused. But an attribute may serve
it as a place for a value of one step or call, as in libraries of spiking neurons: one that it
always assigns before it reads it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, fx, nn

from ..._compat.modules import attributes_set_by_hooks_of_torch
from ..._random_state import random_state_outside_torch, same_random_state
from ..._reach import is_cache, names_read_by, reached_by
from ..._trees import tree_map
from ..._warnings import warn
from ..graphs import has_same_code
from .constants import Constants, item_name
from .random_draws import draws_of_this_thread
from .variables import ABSENT, Place, scopes_of

T = TypeVar("T")


FROM_STEP_TO_LOSS = "Return it in the step's out, which the loss gets."
FROM_LOSS_TO_STEP = "Compute it from the result of the call, and pass it to the next in its state."


@dataclass(frozen=True)
class _Effect:
    """A change of a variable or of a container, which was undone; ``redo`` makes it again."""

    description: str
    redo: Callable[[], None]
    is_tensor: bool = False  # what the variable was bound to
    # What it assigned; None if that is not all that it did.
    places: list[Place] | None = None


def without_effects(
    name: str, root: Any, trace: Callable[[], fx.GraphModule], remedy: str, constants: Constants
) -> fx.GraphModule:
    """Calls ``trace``, which runs ``root``, a function or module, and returns its result.

    What that changes outside of it is undone. Raises RuntimeError if it changed something that the
    next step or call could read, or if it drew from the random numbers of Python or NumPy.
    ``name`` and ``remedy`` are for the message. ``constants``: those of the trace; it leaves out
    what the trace does not read.
    """
    random_before = random_state_outside_torch()
    result, effects = _trace_and_undo(root, trace)
    random_after = random_state_outside_torch()
    # NumPy may have been imported meanwhile: then there is no state to compare with.
    drew = any(not same_random_state(random_before[x], random_after[x]) for x in random_before)
    if not effects and not drew:
        return result
    # Another thread may have done it. It does it again, and draws in this thread.
    with draws_of_this_thread() as drawn:
        result, effects_again = _trace_and_undo(root, trace)
    names = {e.description for e in effects} & {e.description for e in effects_again}
    repeated = [e for e in effects_again if e.description in names]
    places = _places_of(repeated)
    if repeated and (places is None or not _assigns_first(root, trace, result, places)):
        description = min(names)
        if any(e.is_tensor for e in repeated if e.description == description):
            remedy += (
                " Compute a constant before the first call. For a weight that is computed from "
                "parameters use torch.nn.utils.parametrizations (it has weight_norm), or "
                "torch.func.functional_call on the inner module."
            )
        raise RuntimeError(
            f"{name} changes {description}. {_a(name.split()[0])} is a pure function: {remedy}"
        )
    if drawn:
        raise RuntimeError(
            f"{name} draws from {max(drawn)}, so that it would use the same numbers every time. "
            "Draw with torch, for example torch.rand, or pass the numbers in x."
        )
    for effect in (*effects, *effects_again):
        if effect.description not in names:
            effect.redo()
    if places:
        constants.leave_out(root, places)
        constants.assigned += places
    if assigned := sorted(p.description for p in places or () if not _is_of_torch(p)):
        warn(
            f"ftbptt: {name} assigns {_some(assigned)}, which has its old value again after a "
            "segment. Return what you want to see of it in out.",
            RuntimeWarning,
        )
    return result


def _a(noun: str) -> str:
    return f"{'An' if noun[0] in 'aeiou' else 'A'} {noun}"


def _is_of_torch(place: Place) -> bool:
    """Whether no code of the user assigns it, but a hook of torch.nn.utils before each call."""
    holder = place.holder
    is_module = isinstance(holder, nn.Module)
    return is_module and place.name in attributes_set_by_hooks_of_torch(holder)


def _some(descriptions: Sequence[str]) -> str:
    more = len(descriptions) - 1
    return descriptions[0] + (f" (and {more} more)" if more else "")


def _places_of(effects: Sequence[_Effect]) -> list[Place] | None:
    """All that the effects assigned; None if one of them did more than that."""
    places: list[Place] = []
    for effect in effects:
        if effect.places is None:
            return None
        places += effect.places
    return places


def _assigns_first(
    root: Any, trace: Callable[[], fx.GraphModule], result: fx.GraphModule, places: list[Place]
) -> bool:
    """Whether a trace assigns all these places, reads none of them before, and gives ``result``.

    So must one that finds there what the first left, of another class perhaps, as the next step
    does: a step can ask for that without reading it.
    """
    assigned: list[set[str]] = []
    for value_at in (lambda _: _Unread(), _unread_after):
        effects = _effects_without_reading(root, trace, result, places, value_at)
        found = None if effects is None else _places_of(effects)
        if found is None:
            return False
        assigned.append({place.description for place in found})
    descriptions = {place.description for place in places}
    # In the next step the same number is no effect.
    return assigned[0] == descriptions and assigned[1] <= descriptions


def forbid_reading_places(
    name: str,
    root: Any,
    trace: Callable[[], fx.GraphModule],
    result: fx.GraphModule,
    constants: Constants,
) -> None:
    """Raises RuntimeError if ``root`` reads what the step, which was traced before, assigns.

    ``result`` is what ``trace`` gave.
    """
    places = constants.assigned
    if not places:
        return
    if _effects_without_reading(root, trace, result, places, _unread_after) is None:
        assigned = _some(sorted(place.description for place in places))
        raise RuntimeError(
            f"{name} reads {assigned}, which the step assigns, and would find there what was "
            f"before the call. {FROM_STEP_TO_LOSS}"
        )
    constants.leave_out(root, places)


def _effects_without_reading(
    root: Any,
    trace: Callable[[], fx.GraphModule],
    result: fx.GraphModule,
    places: Sequence[Place],
    value_at: Callable[[Place], Any],
) -> list[_Effect] | None:
    """The effects of a trace that finds other values in these places.

    None if it reads one of them: then it fails, or does not give ``result``.
    """
    _Unread.was_read = False
    before = [place.get() for place in places]  # the caller may have put something else there
    try:
        for place in places:
            place.bind(value_at(place))
        again, effects = _trace_and_undo(root, trace)
        is_same = has_same_code(again.graph, result.graph, same_values=True)
    except Exception:
        return None
    finally:
        for place, value in zip(places, before, strict=True):
            place.bind(value)
    return None if _Unread.was_read or not is_same else effects


def forbid_naming_places(
    name: str, root: Any, places: Sequence[Place], other: str, remedy: str
) -> None:
    """Raises RuntimeError if code of ``root`` names one of these places, which ``other`` assigns.

    Where no trace can tell whether it reads them.
    """
    if not places:
        return
    reached = list(reached_by(root))
    holders, names = {id(value) for value in reached}, names_read_by(reached)
    for place in places:
        if id(place.holder) in holders and place.name in names:
            raise RuntimeError(
                f"{name} names {place.description}, which the {other} assigns, and would find "
                f"there what was before the call. {remedy}"
            )


class _Unread(Tensor):
    """A value that cannot be read; whether it is there, and of which class, can be."""

    was_read = False  # also if the step has caught the error

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        _Unread.was_read = True
        raise RuntimeError("is read")

    def __hash__(self) -> int:
        _Unread.was_read = True
        raise RuntimeError("is read")


def _unread_after(place: Place) -> Any:
    """What was assigned there, its tensors unread."""
    return tree_map(lambda v: _Unread() if isinstance(v, Tensor) else v, place.after)


def _trace_and_undo(root: Any, trace: Callable[[], T]) -> tuple[T, list[_Effect]]:
    """The result of ``trace``, and the effects that it had, which are undone."""
    reached = list(reached_by(root))
    scopes = [(scope, scope.read()) for scope in scopes_of(root, reached)]
    caches = [(value, value.cache_info().misses) for value in reached if is_cache(value)]
    containers = [
        (scope, name, value, _content(value))
        for scope, variables in scopes
        for name, value in variables.items()
        if isinstance(value, (list, dict, set, deque))
    ]
    effects = []
    try:
        result = trace()
    finally:
        for scope, before in scopes:
            after = scope.read()
            for name in before.keys() | after.keys():
                value, old_value = after.get(name, ABSENT), before.get(name, ABSENT)
                if value is not old_value:
                    redo = partial(scope.bind, name, value)
                    description, owner = scope.describe(name), scope.owner
                    places = None
                    if scope.is_of_object and value is not ABSENT:
                        places = [Place(owner, name, description, vars(owner), name, value)]
                    effects.append(_Effect(description, redo, isinstance(value, Tensor), places))
                    scope.bind(name, old_value)
        for cached, misses in caches:
            if cached.cache_info().misses != misses:  # it holds fake tensors now
                cached.cache_clear()
        for scope, name, container, old_content in containers:
            content = _content(container)
            if not _is_same(content, old_content):
                description = scope.describe(name)
                places = None
                if scope.is_of_object and isinstance(container, dict):
                    places = _assigned_items(description, container, old_content)
                redo = partial(_refill, container, content)
                effects.append(_Effect(description, redo, places=places))
                _refill(container, old_content)
    return result, effects


def _assigned_items(
    description: str, container: dict[Any, Any], old_content: dict[Any, Any]
) -> list[Place] | None:
    """The items of a dict that were assigned; None if its keys, or their order, are others now."""
    if list(container) != list(old_content):
        return None
    return [
        Place(
            container,
            item_name(key),
            f"{item_name(key)} of {description}",
            container,
            key,
            container[key],
        )
        for key, value in old_content.items()
        if container[key] is not value
    ]


def _content(container: Any) -> Any:
    """A shallow copy: what the container holds now."""
    return dict(container) if isinstance(container, dict) else list(container)


def _is_same(content: Any, other: Any) -> bool:
    """Whether both contain the same objects; equal ones do not count as the same."""
    if isinstance(content, dict):
        if list(content) != list(other):
            return False
        content, other = content.values(), other.values()
    return len(content) == len(other) and all(map(operator.is_, content, other))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
