"""Caches of compiled code that cannot be used: a warning and a slower start, and right results."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ftbptt.backends import cache_folder
from ftbptt.backends.cache_folder import built_somewhere

from ..kernels.test_build import output_of, start

RUN = """
import os, torch, warnings
from ftbptt import make_train_segment, reference_segment
from tests.cells import problem

if not {headers}:  # else not imported before ftbptt has seen the cache, which fails if it is a file
    import torch._inductor.config
    torch._inductor.config.cpp_cache_precompile_headers = False
given = problem("elman")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", RuntimeWarning)
    segment = make_train_segment(given.step, given.loss, backend={backend!r})
    found = [segment(*given.data(steps)) for steps in (3, 5)]
for own, steps in zip(found, (3, 5)):
    wanted = reference_segment(given.step, given.loss, *given.data(steps))
    torch.testing.assert_close(own.grads, wanted.grads)
    torch.testing.assert_close(own.out, wanted.out)
print(*[str(w.message) for w in caught], sep="\\n")
print("built", segment.compile_count)
"""


def said(
    cache: Path, backend: str = "fused", headers: bool = True, **environment: str
) -> list[str]:
    """The warnings of a process that compiles, with precompiled ``headers``, and is right."""
    code = RUN.format(backend=backend, headers=headers)
    lines = output_of(start(code, cache, **environment)).splitlines()
    assert lines.pop() == "built 1"
    return [line for line in lines if line]


def assert_says_so(lines: list[str], cache: Path) -> None:
    assert len(lines) == 1
    assert lines[0].startswith(f"ftbptt: the cache of compiled code in {cache} cannot be used (")
    assert "This process compiles in a temporary folder." in lines[0]


@pytest.mark.slow
def test_a_file_in_its_place(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("not a folder")
    assert_says_so(said(cache), cache)


@pytest.mark.slow
def test_a_full_one(tmp_path: Path) -> None:
    """The compiler cannot write there, as if the disk were full."""
    compiler, cache = tmp_path / "g++", tmp_path / "cache"
    compiler.write_text(f"""#!/bin/sh
case "$*" in *"-o {cache}/"*)
  echo "ld: final link failed: No space left on device" >&2; exit 1;;
esac
exec g++ "$@"
""")
    compiler.chmod(0o755)
    assert_says_so(said(cache, CXX=str(compiler)), cache)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_one_on_a_full_disk(tmp_path: Path) -> None:
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)])
    if made.returncode:
        pytest.skip("this machine does not mount")
    try:
        assert_says_so(said(tmp_path / "cache"), tmp_path / "cache")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_one_that_may_not_be_written(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    assert_says_so(said(cache), cache)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "headers"), [("cut", False), ("cut", True), ("text", True)])
def test_a_damaged_one(damage: str, headers: bool, tmp_path: Path) -> None:
    """All that is in it is cut off in the middle, or is something else."""
    assert said(tmp_path, headers=headers) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert any(path.name.endswith(".main.so") for path in files)
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"what is this\n")
    lines = said(tmp_path, headers=headers)
    if lines:
        assert_says_so(lines, tmp_path)
    if damage == "text":
        assert len(said(tmp_path)) <= 1  # and once more


# -- what is tried again --------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton" / "0"))  # as Inductor does
    return str(tmp_path)


def test_an_error_of_the_program_is_not_the_caches(own_cache: str) -> None:
    calls: list[int] = []

    def build() -> None:
        calls.append(1)
        raise ValueError("my own mistake")

    with pytest.raises(ValueError, match="my own mistake"):
        built_somewhere(build)
    assert len(calls) == 1


def test_what_fails_elsewhere_too_is_told_as_it_was(own_cache: str) -> None:
    where: list[str] = []

    def build() -> None:
        where.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        raise OSError(f"failed {len(where)}")

    with pytest.raises(OSError, match="failed 1"):
        built_somewhere(build)
    assert len(set(where)) == 2
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == own_cache
    assert os.environ["TRITON_CACHE_DIR"].startswith(own_cache)


def test_once_in_a_temporary_folder_it_stays_there(own_cache: str) -> None:
    def build() -> str:
        if os.environ["TORCHINDUCTOR_CACHE_DIR"] == own_cache:
            raise RuntimeError("no module") from PermissionError("not here")
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    with pytest.warns(RuntimeWarning, match=r"cannot be used \(RuntimeError: no module\)"):
        folder = built_somewhere(build)
    assert built_somewhere(build) == folder


@pytest.mark.parametrize("of_the_user", [False, True])
def test_triton_writes_there_too(
    own_cache: str, of_the_user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has named a folder for it that is elsewhere."""
    if of_the_user:
        monkeypatch.setenv("TRITON_CACHE_DIR", f"{own_cache}-of-the-user")

    def build() -> tuple[str, str]:
        if os.environ["TORCHINDUCTOR_CACHE_DIR"] == own_cache:
            raise PermissionError("not here")
        return os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]

    with pytest.warns(RuntimeWarning, match="cannot be used"):
        folder, of_triton = built_somewhere(build)
    wanted = f"{own_cache}-of-the-user" if of_the_user else os.path.join(folder, "triton")
    assert of_triton == wanted


def test_only_libraries_that_nobody_builds_are_deleted(tmp_path: Path) -> None:
    from filelock import FileLock

    for name in ("ab/a.main.so", "ab/b.main.so", "ab/b.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x7fELF")
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "b.lock"):
        cache_folder._remove_cut_libraries(str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "ab").iterdir()) == ["b.main.so", "b.so"]
