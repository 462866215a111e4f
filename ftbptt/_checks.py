"""What a caller gives, checked alike everywhere: numbers, flags, an initial state."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._trees import keystr, tree_flatten_with_path
from ._warnings import warn


def check_int(name: str, value: Any, least: int | None) -> int:
    """check_int : name of the argument, what was given, the least allowed if any -> int

    NumPy's integers are whole numbers too. Raises TypeError for what is none, and ValueError for
    one that is too small.

    >>> check_int("k1", 3, 1)
    3
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, found {value!r}.")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, found {number}.")
    return number


def kind_of(value: Any) -> str:
    """What a value is, for a message that expected an object.

    >>> kind_of(3), kind_of(int)
    ('int', 'the class int itself')
    """
    return f"the class {value.__name__} itself" if isinstance(value, type) else type(value).__name__


def check_tensors(name: str, tree: Any, remedy: str) -> None:
    """Raises TypeError for a tree whose leaves are not all tensors."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name}{keystr(path)}: expected a tensor, found {type(leaf).__name__}. {remedy}"
            )


def check_device(device: Any) -> torch.device | None:
    """The device of that name, or None. Raises ValueError for a name that torch does not know.

    TypeError for what is no device.
    """
    if device is None:
        return None
    if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
        raise TypeError(f"device: expected a name such as 'cuda', found {device!r}.")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a name such as 'cuda', found {device!r}.") from error


def check_time_dim(time_dim: Any) -> None:
    """Raises ValueError if that is no axis of time that a segment can have."""
    is_number = not isinstance(time_dim, bool) and hasattr(time_dim, "__index__")
    if time_dim is not None and not (is_number and time_dim in (0, 1)):
        raise ValueError(
            f"time_dim: expected 0 or 1, or None for the step's own, found {time_dim!r}."
        )


def check_initial_state(initial_state: Any) -> None:
    """Raises TypeError for a state that is not made of tensors.

    Raises ValueError for one that asks for a gradient, which only a function of params gets.
    """
    if initial_state is None or callable(initial_state):
        return
    check_tensors(
        "initial_state", initial_state,
        "Leave initial_state= out to start from zeros; else give tensors, or a function of params.",
    )  # fmt: skip
    for path, leaf in tree_flatten_with_path(initial_state)[0]:
        if leaf.requires_grad:
            raise ValueError(
                f"initial_state{keystr(path)}: requires a gradient, but a state given as tensors "
                "gets none. To learn it, give a function of the parameters, such as "
                "initial_state=lambda params: params['h0'], with 'h0' among params; else detach it."
            )


def warn_of_lost_training(state: Any) -> None:
    """Warns of a tensor in a state that is to be trained, which a segment detaches.

    Not of one that was computed, and is carried on with its history: cutting that is TBPTT.
    """
    for path, leaf in tree_flatten_with_path(state)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
            warn(
                f"ftbptt: state{keystr(path)} requires a gradient, but a segment detaches the "
                "state that it is given, so that it would not be trained. To learn where sequences "
                "start, pass it among params and give a function of these, such as "
                "make_train_segment(..., initial_state=lambda params: params['h0']), with "
                "state=None or a reset at the first step; else detach it.",
                RuntimeWarning,
            )


def check_function(name: str, value: Any, arguments: str) -> None:
    """Raises TypeError for what is no function, and for a class in place of an object of it.

    ``arguments`` are those that it is called with, as in "(out, y)".
    """
    expected = f"{name}: expected a function {name}{arguments}, found"
    if isinstance(value, type):
        raise TypeError(
            f"{expected} the class {value.__name__}. Make an object of it, such as "
            f"{value.__name__}(...)."
        )
    if not callable(value):
        raise TypeError(f"{expected} {type(value).__name__}.")


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError for what is neither True nor False, such as the text "no"."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, found {value!r}.")


def check_one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError for what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {value!r}.")


def check_number(name: str, value: Any) -> None:
    """Raises TypeError for what is no number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a number, found {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raises TypeError for what is no number, and ValueError for one that is not above 0."""
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name}: expected a number above 0, found {value}.")
