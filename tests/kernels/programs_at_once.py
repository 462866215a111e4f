"""Programs of one launch that wait for each other, in Triton's interpreter, which knows no such.

Each is a thread. One at a time runs, until it looks whether the others have arrived: so each runs
ahead of the others as far as it can, and a place where it should have waited for them shows.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

_POLLS = 100  # of each program since the last arrival: they wait for each other in vain


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the test, kernels of several ``PARTS`` run so."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    own = threading.local()
    rewrite, atomic = InterpretedFunction.rewrite, InterpreterBuilder.create_atomic_rmw

    def rewritten(self: Any) -> Any:
        function = rewrite(self)
        is_kernel = function.__name__ == "run" and function.__globals__.get("PARTS", 1) > 1
        return Launch(function, own) if is_kernel else function

    def atomic_then_turn(self: Any, operation: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        found = atomic(self, operation, pointer, value, *rest)
        launch = getattr(own, "launch", None)
        if launch is not None:
            launch.polled() if not value.data.any() else launch.arrived()
        return found

    index = property(lambda _: own.index, lambda _, index: setattr(own, "index", index))
    monkeypatch.setattr(InterpreterBuilder, "grid_idx", index, raising=False)
    monkeypatch.setattr(InterpretedFunction, "rewrite", rewritten)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", atomic_then_turn)


class Launch:
    """In place of a kernel's function: calls of it begin programs; the last call runs them all."""

    backwards = False  # whether the last program runs first

    def __init__(self, function: Callable[..., None], own: threading.local) -> None:
        self.function, self.own = function, own
        self.__name__, self.__globals__ = function.__name__, function.__globals__
        self.__annotations__ = function.__annotations__
        self.__signature__ = inspect.signature(function)
        self.programs: list[threading.Thread] = []
        self.turns: list[threading.Semaphore] = []
        self.running: list[int] = []
        self.polls, self.error = 0, None

    def __call__(self, **arguments: Any) -> None:
        from triton.runtime.interpreter import interpreter_builder

        index = interpreter_builder.grid_idx
        turn = threading.Semaphore(0)
        context = contextvars.copy_context()  # with what numpy is to ignore
        program = threading.Thread(target=context.run, args=(self._run, index, arguments))
        self.programs.append(program)
        self.turns.append(turn)
        program.start()
        if index[0] + 1 == interpreter_builder.grid_dim[0]:
            self._run_all()

    def _run_all(self) -> None:
        self.running = list(range(len(self.programs)))
        if self.backwards:
            self.running.reverse()
        self.turns[self.running[0]].release()
        for program in self.programs:
            program.join()
        if self.error is not None:
            raise self.error

    def _run(self, index: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        self.own.index, self.own.launch = index, self
        self.turns[index[0]].acquire()
        try:
            if self.error is None:
                self.function(**arguments)
        except BaseException as error:
            self.error = self.error or error
        place = self.running.index(index[0])
        self.running.remove(index[0])
        if self.running:
            self.turns[self.running[place % len(self.running)]].release()

    def arrived(self) -> None:
        self.polls = 0

    def polled(self) -> None:
        """The next program's turn."""
        self.polls += 1
        if self.polls > _POLLS * len(self.running):
            raise RuntimeError("the programs wait for each other in vain")
        own = self.own.index[0]
        following = self.running[(self.running.index(own) + 1) % len(self.running)]
        if following != own:
            self.turns[following].release()
            self.turns[own].acquire()
        if self.error is not None:
            raise RuntimeError("another program failed")
