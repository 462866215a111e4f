"""The functions that a segment needs are compiled at the same time, before one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch._inductor import codecache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError

from ftbptt import SegmentOutput, make_train_segment
from ftbptt.backends import EAGER
from ftbptt.backends import compile as compile_backend
from ftbptt.segment import execute

from ..cells import REPRESENTATIVE, problem
from ..cells.problems import Problem
from ..oracle import assert_close, check, reference


@pytest.fixture(autouse=True)
def several_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment is one program."""
    monkeypatch.setattr(execute, "_UNCUT_BYTES", 0)


Build = Callable[[Callable[..., Any], Sequence[Tensor], Any], Callable[..., Any]]


def of_backend(
    monkeypatch: pytest.MonkeyPatch, build: Build, name: str = "elman", **options: Any
) -> tuple[Problem, Any]:
    """A cell, and its segment on a backend that builds so."""
    backend = replace(EAGER, build=build, at_once=nullcontext)
    monkeypatch.setattr("ftbptt.segment.executables.choose", lambda name: backend)
    given = problem(name)
    return given, make_train_segment(given.step, given.loss, backend="eager", **options)


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "weight_normalised"])
@pytest.mark.parametrize("options", [{}, {"taps": True}, {"recompute": True}], ids=str)
def test_all_are_built_before_one_runs(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    ran: list[Any] = []

    def build(function: Callable[..., Any], examples: Sequence[Tensor], mode: Any) -> Any:
        assert not ran
        built.append(function)

        def run(*args: Tensor) -> Any:
            ran.append(function)
            return function(*args)

        return run

    given, segment = of_backend(monkeypatch, build, name, **options)
    found = segment(*given.data(5))
    assert_close(SegmentOutput(*found[:4]), reference(given, 5))
    assert segment.compile_count == len(built) == len(ran) > 2


def in_background() -> bool:
    return threading.current_thread() is not threading.main_thread()


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("the library is there")


@pytest.fixture
def no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """torch has precompiled none, as on a new machine."""
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / "headers" / "locks"))
    forget = codecache._precompile_header.cache_clear
    forget()
    yield
    forget()


@pytest.mark.slow
@pytest.mark.usefixtures("no_headers")
def test_the_first_call_on_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Headers are precompiled meanwhile, and programs are compiled with them."""
    test_the_compiler_works_while_programs_are_written(monkeypatch, tmp_path)
    assert len(list((tmp_path / "headers").rglob("*.gch"))) >= 2  # for wrappers, for kernels


def test_the_compiler_works_while_programs_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    all_written, written = threading.Event(), [0]
    waited: list[bool] = []
    inductor_compile, compile_it = compile_backend.inductor_compile, CppBuilder.build

    def write(*given: Any) -> Any:
        program = inductor_compile(*given)
        written[0] += 1
        if written[0] == 3:  # forward, loss, reverse
            all_written.set()
        return program

    def build(builder: CppBuilder) -> None:
        if in_background():
            waited.append(all_written.wait(60))
        compile_it(builder)

    monkeypatch.setattr(compile_backend, "inductor_compile", write)
    monkeypatch.setattr(CppBuilder, "build", build)
    monkeypatch.setattr(codecache.CppWrapperCodeCache, "cache", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given = problem("elman")
    segment = make_train_segment(given.step, given.loss, backend="fused")
    check(segment, given, 5)
    assert segment.compile_count == written[0] == 3
    assert waited
    assert all(waited)

    # Another process finds all of it on disk: nothing is compiled, and no header looked at.
    monkeypatch.setattr(codecache.CppWrapperCodeCache, "cache", {})
    monkeypatch.setattr(codecache, "_precompile_header", refuse)
    monkeypatch.setattr(CppBuilder, "build", refuse)
    check(make_train_segment(given.step, given.loss, backend="fused"), given, 5)


@pytest.mark.slow
def test_each_is_compiled_for_itself_if_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_it, failed = CppBuilder.build, []

    def build(builder: CppBuilder) -> None:
        if in_background():
            failed.append(builder)
            raise CppCompileError(["c++"], "too many processes")
        compile_it(builder)

    monkeypatch.setattr(CppBuilder, "build", build)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given = problem("elman")
    segment = make_train_segment(given.step, given.loss, backend="fused")
    check(segment, given, 5)
    assert segment.compile_count == 3
    assert failed


def test_interrupted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call builds all."""
    built: list[Any] = []

    def build(function: Callable[..., Any], examples: Sequence[Tensor], mode: Any) -> Any:
        built.append(function)
        if len(built) == 2:
            raise KeyboardInterrupt
        return function

    given, segment = of_backend(monkeypatch, build)
    with pytest.raises(KeyboardInterrupt):
        segment(*given.data(5))
    assert segment.compile_count == 0
    check(segment, given, 5)
    assert segment.compile_count == len(built) - 2 == 3
