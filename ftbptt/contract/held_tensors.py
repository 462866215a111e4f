"""The tensors that a module holds, with others in their places while a step of it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from .._compat.modules import (
    assigns_buffer,
    own_buffers,
    parametrizations_kept_apart,
    put_own_buffers,
)
from .._locks import LockOverForks
from .._trees import TreeSpec, tree_flatten, tree_unflatten

T = TypeVar("T")

# While a thread runs a step with other tensors in its module, fake ones while it traces, all
# threads find these there. What a module has itself is read with this lock.
HOLDING = LockOverForks()


def tied_places(module: nn.Module) -> list[tuple[str, str]]:
    """Further places of parameters and buffers that have several: ``(place, name)``."""
    names: dict[int, str] = {}
    tied = []
    for path, owner in module.named_modules():
        for kind in (owner.named_parameters, owner.named_buffers):
            for place, tensor in kind(path, recurse=False, remove_duplicate=False):
                first = names.setdefault(id(tensor), place)
                if first != place:
                    tied.append((place, first))
    return tied


@dataclass(frozen=True)
class Alias:
    """``holder[key]``, in a dict or list of a module, is a parameter or buffer of it.

    Or a tuple with some among its ``leaves``; ``names`` are theirs, by the index of the leaf.
    """

    holder: Any
    key: Any
    leaves: list[Any]
    spec: TreeSpec
    names: dict[int, str]

    def held(self) -> Any:
        """What is there; None if there is no such place any more."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return None

    def with_tensors(self, values: Mapping[str, Tensor]) -> Any:
        names = self.names
        leaves = [values[names[i]] if i in names else leaf for i, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.spec)


def aliases_in(module: nn.Module) -> list[Alias]:
    """Where modules keep parameters and buffers once more: in the containers of their attributes.

    ``functional_call`` does not know of those.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    names = {id(tensor): name for name, tensor in named}
    seen: set[int] = set()
    return [
        alias
        for owner in module.modules()
        for name, value in vars(owner).items()
        # torch keeps its own up to date
        if name not in _OF_TORCH and not name.startswith("_flat_weight")
        for alias in _aliases_at(vars(owner), name, value, names, seen)
    ]


def names_of_shared(module: nn.Module) -> list[str]:
    """The parameters and buffers that it has in several places, by all their names."""
    names = {name for alias in aliases_in(module) for name in alias.names.values()}
    return sorted(names.union(*tied_places(module)))


_OF_TORCH = vars(nn.Module()).keys()
_MOST_ITEMS = 1000  # of a container: what is longer holds data


def _aliases_at(
    holder: Any, key: Any, value: Any, names: Mapping[int, str], seen: set[int]
) -> Iterator[Alias]:
    if isinstance(value, (dict, list)):
        if id(value) not in seen and len(value) <= _MOST_ITEMS:
            seen.add(id(value))
            for inner, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _aliases_at(value, inner, item, names, seen)
    elif isinstance(value, (Tensor, tuple)):
        leaves, spec = tree_flatten(value)
        found = {i: names[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in names}
        if found:
            yield Alias(holder, key, leaves, spec, found)


def call_with(
    module: nn.Module, values: Mapping[str, Tensor], aliases: list[Alias], run: Callable[[], T]
) -> T:
    """``run()``, while the module has these tensors, by the names of all their places."""
    # Tied places are given one by one: where a submodule has two names, torch's tie_weights puts a
    # tensor there twice, and leaves the first of the two in the module.
    renamed = {f"module.{name}": value for name, value in values.items()}

    def with_aliases() -> T:
        before = [alias.held() for alias in aliases]
        put = [alias.with_tensors(values) for alias in aliases]
        for alias, value in zip(aliases, put, strict=True):
            alias.holder[alias.key] = value
        try:
            return run()
        finally:
            for alias, value, own in zip(aliases, put, before, strict=True):
                if alias.held() is value:  # else the step has put something else there
                    alias.holder[alias.key] = own

    with parametrizations_kept_apart():
        result: T = functional_call(_Holder(module, with_aliases), renamed, (), tie_weights=False)
        return result


class _Holder(nn.Module):
    """What runs under ``functional_call``, with the tensors of ``module`` replaced."""

    def __init__(self, module: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self) -> Any:
        return self.run()


class WatchedBuffers(dict[str, Any]):
    """The buffers of one module, which knows what was read before it was assigned."""

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        super().__init__(buffers)
        self._given = dict(buffers)
        self._read: set[str] = set()

    def _note(self, key: str) -> None:
        if super().get(key) is self._given.get(key) and not assigns_buffer():
            self._read.add(key)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def items(self) -> Any:
        for key in self:
            self._note(key)
        return super().items()

    def values(self) -> Any:
        for key in self:
            self._note(key)
        return super().values()

    def has_assigned(self, key: str) -> bool:
        return super().get(key) is not self._given.get(key)

    def carries_over(self, key: str) -> bool:
        """Whether a buffer was read and has been assigned: its next reader would see another."""
        return key in self._read and self.has_assigned(key)


@contextmanager
def watching_buffers(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, WatchedBuffers]]:
    """Within it, the modules' own buffers are watched; after it, they are those from before."""
    before = {module: own_buffers(module) for module in modules}
    watched = {module: WatchedBuffers(buffers) for module, buffers in before.items()}
    try:
        for module in modules:
            put_own_buffers(module, watched[module])
        yield watched
    finally:
        for module in modules:
            put_own_buffers(module, before[module])
