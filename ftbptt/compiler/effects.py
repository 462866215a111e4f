"""What a step does besides returning something: traced once, it would be done once for all steps.

So it is refused, and undone: what a step keeps while it is traced are fake tensors.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from .._step import Step

_ABSENT = object()


@dataclass(frozen=True)
class Variables:
    """Names that a step can bind anew: ``words`` says what one of them is called in an error."""

    words: Callable[[str], str]
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], None]


@contextmanager
def without_effects(step: Step) -> Iterator[None]:
    """Undoes what the step changes on its module and outside of itself.

    Raises RuntimeError if there was something, or if it has drawn from Python's or NumPy's random
    numbers.
    """
    places = [(place, place.read()) for place in _variables_of(step)]
    containers = [
        (place.words(name), value, _content(value))
        for place, names in places
        for name, value in names.items()
        if isinstance(value, (list, dict, set, deque))
    ]
    drawn = _random_states()
    changed = []
    try:
        yield
    finally:
        for place, before in places:
            after = place.read()
            for name in before.keys() | after.keys():
                if after.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    changed.append(place.words(name))
                    place.write(name, before.get(name, _ABSENT))
        for words, container, content in containers:
            if not _is_same(_content(container), content):
                changed.append(words)
                _refill(container, content)
    if changed:
        raise RuntimeError(
            f"step {step.name} changes {min(changed)}. A step is a pure function: take what it "
            "keeps from the state and return it in the next state."
        )
    for words, now in _random_states().items():
        if now != drawn.get(words, now):
            raise RuntimeError(
                f"step {step.name} draws from {words}, which would be one number for all steps. "
                "Draw with torch, as torch.rand does, or give the numbers in x."
            )


def _variables_of(step: Step) -> Iterator[Variables]:
    modules = {} if step.module is None else dict(step.module.named_modules())
    for name, module in modules.items():
        yield _attributes(module, f"{name}." if name else "")
    for function in _functions(step.function):
        if isinstance(function, FunctionType):
            yield _closed_over(function)
            yield _globals(function)
        else:
            yield _attributes(function, "")


def _functions(function: Any) -> Iterator[Any]:
    """The function, those that it closes over, and objects that are called as functions."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if isinstance(one, MethodType):
            waiting += [one.__func__, one.__self__]
        elif callable(one) and not isinstance(one, type) and id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, FunctionType):
                waiting += _contents(one).values()
                yield one
            elif hasattr(one, "__dict__"):
                yield one


def _attributes(owner: Any, prefix: str) -> Variables:
    def read() -> dict[str, Any]:
        # functional_call refreshes the weight lists of torch's recurrent layers itself.
        return {k: v for k, v in vars(owner).items() if not k.startswith("_flat_weight")}

    return Variables(
        lambda name: f"its own attribute {prefix + name!r}", read, _writer(vars(owner))
    )


def _globals(function: FunctionType) -> Variables:
    own = function.__globals__

    def read() -> dict[str, Any]:
        return {name: own[name] for name in function.__code__.co_names if name in own}

    return Variables(lambda name: f"the global variable {name!r}", read, _writer(own))


def _writer(names: dict[str, Any]) -> Callable[[str, Any], None]:
    def write(name: str, value: Any) -> None:
        if value is _ABSENT:
            names.pop(name, None)
        else:
            names[name] = value

    return write


def _closed_over(function: FunctionType) -> Variables:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def write(name: str, value: Any) -> None:
        if value is not _ABSENT:
            cells[name].cell_contents = value

    return Variables(
        lambda name: f"the variable {name!r} outside of it", lambda: _contents(function), write
    )


def _contents(function: FunctionType) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_bound(cell)}


def _is_bound(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _content(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _is_same(found: Any, before: Any) -> bool:
    """Whether these are the same objects, not others that are equal."""
    if isinstance(found, dict):
        if found.keys() != before.keys():
            return False
        found, before = found.values(), before.values()
    return len(found) == len(before) and all(map(operator.is_, found, before))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def _random_states() -> dict[str, Any]:
    """Those of the generators that are not torch's, by module."""
    found: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = name, keys.tobytes(), rest
    return found
