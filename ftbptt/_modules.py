"""The modules that a function reads besides its arguments."""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def modules_read_by(function: Any) -> list[nn.Module]:
    """modules_read_by : function, or anything that is called as one -> its modules

    Those that it closes over, that it names as globals, that are bound to it as ``self`` or by
    ``partial``, or that a callable object holds, each with its submodules. Functions among those
    are searched too, if they are the caller's own, that is, of the same file.

    >>> linear = nn.Linear(2, 2)
    >>> modules_read_by(lambda params, x, h: linear(x))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            modules |= {id(module): module for module in value.modules()}
        elif isinstance(value, MethodType):
            bound_to = value.__self__
            waiting += [value.__func__, bound_to, *getattr(bound_to, "__dict__", {}).values()]
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            waiting += [cell.cell_contents for cell in value.__closure__ or () if is_bound(cell)]
            waiting += _globals_of(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            waiting += [*vars(value).values(), type(value).__call__]
    return list(modules.values())


def _globals_of(function: FunctionType) -> list[Any]:
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [
        value
        for value in values
        if isinstance(value, (nn.Module, MethodType, partial))
        or (isinstance(value, FunctionType) and value.__globals__ is function.__globals__)
    ]


def is_bound(cell: CellType) -> bool:
    """Whether a variable that a function closes over has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
