"""What a step does besides returning something: traced once, it would be done once for all steps.

So it is refused, and undone: what a step keeps while it is traced are fake tensors.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from .._step import Step

T = TypeVar("T")
_ABSENT = object()


@dataclass(frozen=True)
class Variables:
    """Names that a step can bind anew: ``words`` says what one of them is called in an error."""

    words: Callable[[str], str]
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], None]


@dataclass(frozen=True)
class Change:
    """Of a variable or of what a container holds, undone: ``again`` does it once more."""

    words: str
    again: Callable[[], None]


def without_effects(step: Step, trace: Callable[[], T]) -> T:
    """What ``trace`` returns, which runs the step. What that changes outside of it is undone.

    Raises RuntimeError if there was something, or if the step has drawn from Python's or NumPy's
    random numbers.
    """
    before = _random_states()
    result, changes = _observed(step, trace)
    now = _random_states()
    if not changes and all(now[words] == before.get(words, now[words]) for words in now):
        return result
    # Or was it another thread? What the step does it does again, and it draws in this one.
    with _draws_of_this_thread() as drawn:
        result, own = _observed(step, trace)
    blamed = {change.words for change in changes} & {change.words for change in own}
    if blamed:
        raise RuntimeError(
            f"step {step.name} changes {min(blamed)}. A step is a pure function: take what it "
            "keeps from the state and return it in the next state."
        )
    if drawn:
        raise RuntimeError(
            f"step {step.name} draws from {max(drawn)}, which would be one number for all steps. "
            "Draw with torch, as torch.rand does, or give the numbers in x."
        )
    for change in (*changes, *own):
        change.again()
    return result


def _observed(step: Step, trace: Callable[[], T]) -> tuple[T, list[Change]]:
    places = [(place, place.read()) for place in _variables_of(step)]
    containers = [
        (place.words(name), value, _content(value))
        for place, names in places
        for name, value in names.items()
        if isinstance(value, (list, dict, set, deque))
    ]
    changes = []
    try:
        result = trace()
    finally:
        for place, before in places:
            after = place.read()
            for name in before.keys() | after.keys():
                found = after.get(name, _ABSENT)
                if found is not before.get(name, _ABSENT):
                    changes.append(Change(place.words(name), partial(place.write, name, found)))
                    place.write(name, before.get(name, _ABSENT))
        for words, container, content in containers:
            found = _content(container)
            if not _is_same(found, content):
                changes.append(Change(words, partial(_refill, container, found)))
                _refill(container, content)
    return result, changes


@contextmanager
def _draws_of_this_thread() -> Iterator[set[str]]:
    """The modules whose random numbers are drawn within it, but not by other threads."""
    drawn: set[str] = set()
    own = random.random.__self__  # type: ignore[attr-defined]

    def note(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is own:
            drawn.add("random")

    before = sys.getprofile()  # which is one for each thread
    sys.setprofile(note)
    try:
        with _numpys_draws(drawn):
            yield drawn
    finally:
        sys.setprofile(before)


@contextmanager
def _numpys_draws(drawn: set[str]) -> Iterator[None]:
    """NumPy's functions are none that a profile sees; but they lock their generator."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    generator = numpy.random.get_bit_generator()
    watched = _Watched(generator, drawn)
    numpy.random.set_bit_generator(watched)
    watched.thread = threading.get_ident()  # from here on: to set it takes the lock as well
    try:
        yield
    finally:
        watched.thread = None
        numpy.random.set_bit_generator(generator)


class _Watched:
    """A generator of NumPy's, in the same state, and its lock: notes draws of one thread."""

    def __init__(self, generator: Any, drawn: set[str]) -> None:
        self.generator, self.drawn = generator, drawn
        self.thread: int | None = None
        self.lock = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def __enter__(self) -> None:
        if threading.get_ident() == self.thread:
            self.drawn.add("numpy.random")
        self.generator.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.generator.lock.release()


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
