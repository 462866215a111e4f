"""Kernels are built once, whatever happens meanwhile: others that build, a kill, damage."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from ftbptt.kernels.cpu import build, toolchain
from ftbptt.kernels.cpu.build import load

SOURCE = """#include <cstdint>
extern "C" void run(void* const* memory, const int64_t* numbers) {
  *static_cast<double*>(memory[0]) = 0.5 * numbers[0];
}
"""
BUILD = """
from tests.kernels.test_build import half_of
print(half_of({source!r}, 6))
"""
FORK = """
import multiprocessing
from tests.kernels.test_build import SOURCE, half_of
print(half_of(SOURCE, 6))
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.apply(half_of, (SOURCE.replace("0.5", "2.5"), 6)))
"""
ROOT = Path(__file__).parents[2]


def library_of(source: str) -> Path:
    library = build.start(source)
    build.finish()
    return library


def half_of(source: str, number: int) -> float:
    """What the library of ``source`` writes."""
    result = ctypes.c_double(0)
    memory = (ctypes.c_void_p * 1)(ctypes.addressof(result))
    load(str(library_of(source)))(memory, (ctypes.c_int64 * 1)(number))
    return result.value


def start(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    """Python in a process group of its own, with an empty cache of kernels."""
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-W", "default", "-c", code], env={**own, **environment}, cwd=ROOT,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def output_of(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which nothing is, for this process."""
    monkeypatch.setattr(build, "kernel_cache_dir", lambda: tmp_path / "kernels")
    return tmp_path / "kernels"


def test_in_a_process_that_was_forked_after_a_build(tmp_path: Path) -> None:
    """The threads that build are not there."""
    assert output_of(start(FORK, tmp_path)).split() == ["3.0", "15.0"]


def test_built_once_and_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert half_of(SOURCE, 6) == 3
    (library,) = empty_cache.iterdir()

    def refuse(*_: object) -> None:
        raise AssertionError("it is built again")

    monkeypatch.setattr(build, "_build", refuse)
    assert library_of(SOURCE) == library
    with pytest.raises(AssertionError, match="built again"):
        library_of(SOURCE + "// another")


def test_loaded_in_no_time(empty_cache: Path, tmp_path: Path) -> None:
    library, took = library_of(SOURCE), []
    for i in range(3):  # the best counts: other work on the machine should not
        copied = shutil.copy2(library, tmp_path / f"{i}.so")  # the same file is loaded only once
        began = time.perf_counter()
        assert library_of(SOURCE) == library
        load(str(copied))
        took.append(time.perf_counter() - began)
    assert min(took) < 0.3


def test_an_error_in_a_source_is_told(empty_cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no kernel could be compiled.*nonsense"):
        library_of("nonsense;")
    assert list(empty_cache.iterdir()) == []


def test_of_several_failed_builds_none_is_told_with_a_later_one(empty_cache: Path) -> None:
    for source in ("nonsense;", "more of it;"):
        build.start(source)
    with pytest.raises(RuntimeError, match="no kernel could be compiled"):
        build.finish()
    assert half_of(SOURCE, 6) == 3


def test_what_is_cancelled_is_not_begun(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C nobody waits for the kernels that were still to be compiled."""
    begun: list[str] = []
    may_end = threading.Event()

    def wait_for_the_end(source: str, library: Path) -> None:
        begun.append(source)
        may_end.wait()

    with ThreadPoolExecutor(1) as builders:
        monkeypatch.setattr(build, "_builders", builders)
        monkeypatch.setattr(build, "_build", wait_for_the_end)
        for source in ("first", "second", "third"):
            build.start(source)
        build.start_ahead("fourth")
        build.cancel()
        may_end.set()
    assert begun in ([], ["first"])


def test_what_is_begun_ahead_is_not_waited_for_until_it_is_asked_for(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    may_end = threading.Event()

    def wait_for_the_end(source: str, library: Path) -> None:
        begun.append(source)
        if source == "later":
            assert may_end.wait(60)

    monkeypatch.setattr(build, "_build", wait_for_the_end)
    build.start_ahead("later")
    build.start("now")
    build.finish()
    assert sorted(begun) == ["later", "now"]
    build.start("later")
    threading.Timer(0.2, may_end.set).start()
    build.finish()
    assert may_end.is_set()
    assert len(begun) == 2


def test_an_error_in_what_is_begun_ahead_is_told_where_it_is_asked_for(empty_cache: Path) -> None:
    build.start_ahead("nonsense;")
    assert half_of(SOURCE, 6) == 3
    with pytest.raises(RuntimeError, match=r"no kernel could be compiled.*nonsense"):
        library_of("nonsense;")


def test_what_failed_ahead_is_begun_again(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full has room again when the same is called once more."""

    def on_a_full_disk(source: str, library: Path) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(build, "_build", on_a_full_disk)
        build.start_ahead(SOURCE)
        with pytest.raises(OSError, match="No space left"):
            library_of("forward")
    build.start_ahead(SOURCE)
    assert half_of(SOURCE, 6) == 3


@pytest.mark.parametrize("damage", ["nothing", "text", "half"])
def test_a_damaged_library_is_built_anew(damage: str, empty_cache: Path) -> None:
    library = library_of(SOURCE)
    content = library.read_bytes()
    load.cache_clear()
    library.unlink()  # what was loaded stays as it is in memory
    left = {"nothing": b"", "text": b"not a library", "half": content[: len(content) // 2]}
    library.write_bytes(left[damage])
    assert half_of(SOURCE, 8) == 4
    assert len(library.read_bytes()) == len(content)


def test_two_processes_build_the_same(tmp_path: Path) -> None:
    both = [start(BUILD.format(source=SOURCE), tmp_path) for _ in range(2)]
    assert [output_of(process) for process in both] == ["3.0\n", "3.0\n"]
    assert len(list(tmp_path.rglob("ftbptt/**/*.so"))) == 1
    assert not list(tmp_path.rglob("build-*"))


def test_a_killed_build_leaves_nothing_that_is_taken_for_a_library(tmp_path: Path) -> None:
    """The compiler has written half of its output when it and all around it is killed."""
    compiler, cache = tmp_path / "g++", tmp_path / "cache"
    compiler.write_text(f"""#!/bin/sh
case "$*" in */build-*)
  if [ ! -e {tmp_path}/began ]; then
    for word in "$@"; do case "$word" in *.so) printf half > "$word";; esac; done
    touch {tmp_path}/began; sleep 600
  fi;;
esac
exec g++ "$@"
""")
    compiler.chmod(0o755)
    code = BUILD.format(source=SOURCE)
    process = start(code, cache, CXX=str(compiler))
    until = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(cache.rglob("ftbptt/**/build-*/*.so")), "it was killed while it wrote"
    assert not list(cache.rglob("ftbptt/*/*.so"))
    assert output_of(start(code, cache, CXX=str(compiler))) == "3.0\n"
    assert len(list(cache.rglob("ftbptt/*/*.so"))) == 1


WITHOUT_COMPILER = """
import warnings
import torch
from ftbptt import make_train_segment, reference_segment
from tests.cells import problem

given = problem("elman")
try:
    make_train_segment(given.step, given.loss, backend="fused")(*given.data(3))
except RuntimeError as error:
    print(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    segment = make_train_segment(given.step, given.loss)
    found = [segment(*given.data(3)) for _ in range(2)]
wanted = reference_segment(given.step, given.loss, *given.data(3))
for own in found:
    torch.testing.assert_close(own.grads, wanted.grads)
print(*[f"{w.category.__name__} {w.message}" for w in caught], sep="\\n")
"""


@pytest.mark.parametrize(
    "environment",
    [{"PATH": "/nowhere"}, pytest.param({"CXX": "/nowhere/g++"}, marks=pytest.mark.slow)],
)
def test_no_compiler(environment: dict[str, str], tmp_path: Path) -> None:
    """``fused`` says what is missing and what to do; ``auto`` warns once, and is right."""
    environment = {"CXX": "g++", **environment}
    said = output_of(start(WITHOUT_COMPILER, tmp_path, **environment)).splitlines()
    assert len(said) == 2
    for line in said:
        assert "needs a C++ compiler" in line
        assert "Install g++ or clang++" in line
        assert "backend='eager' needs none" in line
    assert said[1].startswith("RuntimeWarning ftbptt: the fused backend failed for step")


def test_the_cache_is_beside_inductors_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folder = build.kernel_cache_dir()
    assert folder.is_relative_to(tmp_path)
    assert folder.name == torch.backends.cpu.get_cpu_capability()


def test_another_processor_has_kernels_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder at home may be that of many machines."""
    found = []
    for flags in ("fpu sse avx2", "fpu sse avx2 avx512f", "fpu sse avx2"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(toolchain, "Path", lambda name: tmp_path / Path(name).name)
        toolchain._instructions.cache_clear()
        found.append(toolchain.key_of(SOURCE))
    toolchain._instructions.cache_clear()
    assert found[0] == found[2] != found[1]


# -- the compiled header --------------------------------------------------------------------------

WITH_HEADER = '#include "rows.h"\n' + SOURCE


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled header, as a process makes it that builds kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "kernel_cache_dir", lambda: folder)
        patch.setattr(toolchain, "_WORTH_PRECOMPILING", 2)
        library_of(SOURCE)
        assert not list(folder.glob("*.?ch")), "one kernel does not pay for it"
        library_of(SOURCE + "// another")
    until = time.monotonic() + 120
    while not list(folder.glob("*.h.?ch")):  # begun by then, and nobody waits for it
        assert time.monotonic() < until
        time.sleep(0.05)
    (made,) = folder.glob("*.h.?ch")
    return made


@pytest.fixture
def header(made_once: Path, empty_cache: Path) -> Path:
    """The same in a cache of its own."""
    empty_cache.mkdir()
    for path in (made_once.with_suffix(""), made_once, *made_once.parent.glob("*.o")):
        shutil.copy2(path, empty_cache)
    return empty_cache / made_once.name


def commands_of(empty_cache: Path) -> list[list[str]]:
    return toolchain.commands(empty_cache / "a.cpp", empty_cache / "a.so", empty_cache)


def test_many_kernels_share_a_compiled_header(header: Path, empty_cache: Path) -> None:
    with_header, without = commands_of(empty_cache)
    (panels,) = empty_cache.glob("*.o")
    assert str(panels) in with_header
    assert str(panels) not in without
    assert str(header.with_suffix("")) in with_header
    assert str(header.with_suffix("")) not in without
    text = header.with_suffix("")
    text.write_text("#error the text is read\n")  # and not the compiled form
    path = empty_cache / "a.cpp"
    path.write_text(WITH_HEADER)
    assert subprocess.run(with_header, capture_output=True).returncode == 0
    assert half_of(WITH_HEADER, 6) == 3


@pytest.mark.parametrize("damage", ["cut", "text"])
def test_a_damaged_header_is_done_without(damage: str, header: Path, empty_cache: Path) -> None:
    content = header.read_bytes()
    header.write_bytes(content[: len(content) // 2] if damage == "cut" else b"not a header")
    assert half_of(WITH_HEADER + f"// {damage}", 6) == 3
    if damage == "cut":  # what is no header at all is passed over by the compiler itself
        assert len(commands_of(empty_cache)) == 1, "it was deleted"


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_panels_are_done_without(damage: str, header: Path, empty_cache: Path) -> None:
    (panels,) = empty_cache.glob("*.o")
    content = bytearray(panels.read_bytes())
    content[len(content) // 2] ^= 1
    panels.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    assert len(commands_of(empty_cache)) == 1
    assert half_of(WITH_HEADER + f"// {damage} panels", 6) == 3


def test_of_several_processes_one_compiles_the_header(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_WORTH_PRECOMPILING", 1)
    empty_cache.mkdir()
    (empty_cache / "a.so").touch()
    precompile = toolchain.precompilation(empty_cache)
    assert precompile
    with FileLock(empty_cache / f"{toolchain.key_of('')}.lock"):
        precompile()
    assert [path.name for path in empty_cache.iterdir() if path.suffix != ".lock"] == ["a.so"]
