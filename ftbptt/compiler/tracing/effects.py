"""Side effects of a step or loss: variables that it rebinds and containers that it changes.

It is traced once, so an effect would happen once instead of at each step or call. It is undone,
since what was stored are fake tensors, and the step or loss is refused.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ..._random_state import random_state_outside_torch, same_random_state
from ..._reach import is_cache, reached_by
from .random_draws import draws_of_this_thread
from .variables import ABSENT, scopes_of

T = TypeVar("T")


@dataclass(frozen=True)
class _Effect:
    """A change of a variable or of a container, which was undone; ``redo`` makes it again."""

    description: str
    redo: Callable[[], None]
    is_tensor: bool = False  # what the variable was bound to


def without_effects(name: str, root: Any, trace: Callable[[], T], remedy: str) -> T:
    """Calls ``trace``, which runs ``root``, a function or module, and returns its result.

    What that changes outside of it is undone. Raises RuntimeError if it changed something, or if
    it drew from the random numbers of Python or NumPy. ``name`` and ``remedy`` are for the message.
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
    repeated = {e.description for e in effects} & {e.description for e in effects_again}
    if repeated:
        description = min(repeated)
        if any(e.is_tensor for e in effects_again if e.description == description):
            remedy += (
                " Compute a constant before the first call. For a weight that is computed from "
                "parameters use torch.nn.utils.parametrizations (it has weight_norm), or "
                "torch.func.functional_call on the inner module."
            )
        raise RuntimeError(
            f"{name} changes {description}. A {name.split()[0]} is a pure function: {remedy}"
        )
    if drawn:
        raise RuntimeError(
            f"{name} draws from {max(drawn)}, so that it would use the same numbers every time. "
            "Draw with torch, for example torch.rand, or pass the numbers in x."
        )
    for effect in (*effects, *effects_again):
        effect.redo()
    return result


def _trace_and_undo(root: Any, trace: Callable[[], T]) -> tuple[T, list[_Effect]]:
    """The result of ``trace``, and the effects that it had, which are undone."""
    reached = list(reached_by(root))
    scopes = [(scope, scope.read()) for scope in scopes_of(root, reached)]
    caches = [(value, value.cache_info().misses) for value in reached if is_cache(value)]
    containers = [
        (scope.describe(name), value, _content(value))
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
                    effects.append(_Effect(scope.describe(name), redo, isinstance(value, Tensor)))
                    scope.bind(name, old_value)
        for cached, misses in caches:
            if cached.cache_info().misses != misses:  # it holds fake tensors now
                cached.cache_clear()
        for description, container, old_content in containers:
            content = _content(container)
            if not _is_same(content, old_content):
                effects.append(_Effect(description, partial(_refill, container, content)))
                _refill(container, old_content)
    return result, effects


def _content(container: Any) -> Any:
    """A shallow copy: what the container holds now."""
    return dict(container) if isinstance(container, dict) else list(container)


def _is_same(content: Any, other: Any) -> bool:
    """Whether both contain the same objects; equal ones do not count as the same."""
    if isinstance(content, dict):
        if content.keys() != other.keys():
            return False
        content, other = content.values(), other.values()
    return len(content) == len(other) and all(map(operator.is_, content, other))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
