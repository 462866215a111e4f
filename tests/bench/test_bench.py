"""The benchmark itself: its peers compute the same function, and its targets are evaluated."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import (
    charlm,
    gpu,
    gpu_cases,
    gpu_peers,
    gpu_report,
    inside,
    limits,
    oracle,
    report,
    run,
    streams,
)
from bench.calls import Skip
from bench.cases import Case, build
from bench.cells import KINDS
from bench.charmodel import CharLM
from bench.peers import find
from bench.suites import SUITES
from bench.targets import targets
from bench.text import TextError
from bench.worker import arrays
from ftbptt.training import ContiguousStreams

RESULTS = Path(run.__file__).with_name("results")

PEERS = ("eager", "engine-eager", "torch-func", "library", "jax")
CASES = (
    *(Case(kind, kind, 5, 3, 4, 6) for kind in KINDS),
    *(Case(f"{kind}-2-layers", kind, 5, 3, 4, 6, layers=2) for kind in KINDS),
    Case("models", "lstm", 5, 3, 4, 6, models=4),
    Case("bfloat16", "lstm", 5, 3, 4, 6, dtype=torch.bfloat16),
    Case("sequences", "lstm", 5, 3, 4, 6, per_sequence=True),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_peer_passes_the_gate(case: Case) -> None:
    results: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in PEERS:
        try:
            call = find(name).make(build(case))
        except Skip:
            continue
        results[name] = arrays(call)
        rows[name] = {"status": "ok"}
    assert ("library" in rows) == (case.kind in ("lstm", "gru") and not case.per_sequence)
    oracle.check(case, results, "eager", PEERS, rows)
    assert {name: row.get("why") for name, row in rows.items()} == dict.fromkeys(rows)


def test_jax_runs_where_the_problem_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, the bench of the CPU skipped it, or timed it on the GPU."""
    pytest.importorskip("jax")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    value, _ = find("jax").make(build(CASES[0]))()
    assert {device.platform for device in value.devices()} == {"cpu"}


def _results(**of_peer: tuple[float, ...]) -> dict[str, Any]:
    """One case of the fused suite, its peers by their milliseconds in each round."""
    rows: dict[str, dict[str, Any]] = {}
    for name, times in of_peer.items():
        peer = find(name.replace("_at_", "@"))
        rows[peer.name] = {"label": peer.label, "status": "ok", "round_ms": list(times)}
        if peer.threads:
            rows[peer.name]["threads"] = peer.threads
    case = {"title": "LSTM", "batch": 32, "peers": rows}
    return {"suite": "fused", "cases": {"lstm-one-row": case}}


def test_the_best_peer_of_the_rounds_is_the_measure() -> None:
    results = _results(engine=(1.0, 2.0, 1.0), library=(3.0, 6.0, 9.0), jax=(2.5, 5.0, 2.5))
    (row,) = targets(results)
    assert row["what"] == "LSTM: ftbptt, vs JAX scan, jit"
    assert (row["measured"], row["verdict"]) == (2.5, "ok")
    del results["cases"]["lstm-one-row"]["peers"]["library"]
    (row,) = targets(results)
    assert (row["measured"], row["verdict"]) == (None, "not measured")


def test_threads_are_compared_with_the_fewest() -> None:
    results = _results(engine_at_2=(1.0,), engine_at_1=(1.5,))
    (row,) = targets(results)
    assert row["what"] == "LSTM: ftbptt, 2 threads, vs 1"
    assert (row["measured"], row["verdict"]) == (1.5, "short")
    results["cases"]["lstm-one-row"]["batch"] = 1
    assert targets(results)[0]["verdict"] == ""


def test_a_peer_with_all_threads_is_compared_with_itself_on_fewer() -> None:
    results = _results(engine=(1.0,), engine_at_1=(1.8,))
    results["cases"]["lstm-one-row"]["peers"]["engine"]["all_threads"] = 2
    rows = {row["what"]: row["measured"] for row in targets(results)}
    assert rows["LSTM: ftbptt, 2 threads, vs 1"] == 1.8


def test_threads_are_compared_while_the_machine_has_them() -> None:
    results = _results(engine_at_1=(2.0, 2.0, 2.0, 2.0), engine_at_2=(1.0, 1.9, 1.0, 1.0))
    many = results["cases"]["lstm-one-row"]["peers"]["engine@2"]
    many["thread_gains"] = [1.9, 1.0, 1.7, 1.8]
    (row,) = targets(results)
    assert row["what"] == (
        "LSTM: ftbptt, 2 threads, vs 1 (3 of 4 rounds, in which the GEMM gained 1.80x)"
    )
    assert (row["measured"], row["verdict"]) == (2.0, "ok")
    many["thread_gains"] = [1.9, 1.0, 1.2, 1.8]
    (row,) = targets(results)
    assert (row["measured"], row["verdict"]) == (None, "not measured")


def test_rounds_without_the_machines_cores_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = 2.0
    monkeypatch.setattr(limits, "thread_gain", lambda _: gain)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    class FakeWorker:
        def __init__(self, name: str) -> None:
            self.peer, self.row, self.turns = find(name), {"all_threads": 2}, 0

        def ask(self, *_: Any) -> list[float]:
            nonlocal gain
            self.turns += 1  # another machine comes in the second turn and in those from the fourth
            gain = 0.5 if self.turns == 2 or self.turns > 3 else 1.9
            return [float(self.turns)]

    engine, eager, alone = FakeWorker("engine"), FakeWorker("eager"), FakeWorker("engine@1")
    alone.row = {}
    workers: Any = [engine, eager, alone]
    times, repeated = run.take_rounds(workers, 3, run.tqdm(disable=True))
    assert times["engine"] == times["eager"] == [[1.0], [5.0], [6.0]]
    assert repeated == 3
    assert engine.row["thread_gains"] == [1.9, 0.5, 0.5]
    assert "thread_gains" not in alone.row


def test_the_gain_of_threads_leaves_their_number() -> None:
    threads = torch.get_num_threads()
    limits.thread_gain(threads + 1)
    assert 0.1 < limits.thread_gain(1) < 10  # however busy the machine
    assert torch.get_num_threads() == threads


def test_the_floor_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch on a Mac; and it takes no bfloat16 on a processor without AVX-512."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("to_mkldnn: ATen not compiled with MKLDNN support")

    monkeypatch.setattr(torch.Tensor, "to_mkldnn", refuse)
    assert limits.floor(CASES[0], 100).gemm_seconds > 0


def test_every_target_is_of_a_case_and_its_peers() -> None:
    for suite in SUITES.values():
        assert set(suite.targets) <= {case.name for case in suite.cases}
        assert all(find(name).name == name for name in suite.peers)
        for bests in suite.targets.values():
            assert all(set(peers) <= set(suite.peers) for peers, _ in bests)


def test_recorded_results_still_render() -> None:
    for path in RESULTS.glob("*.json"):
        results = json.loads(path.read_text())
        renderer: Any = gpu_report if results["suite"] == "gpu" else report
        assert renderer.markdown(results) == path.with_suffix(".md").read_text()
        assert renderer.tag(results) == path.stem


@pytest.mark.parametrize("policy", ["passive", "PASSIVE", "active", None])
def test_threads_that_sleep_are_told(policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They slow down what waits for threads at each step, so that a peer would look slow."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    results = {"machine": report.machine(), "suite": "streams", "rounds": 1, "targets": []}
    is_told = "**Threads slept when they had to wait**" in report.markdown(results)
    assert is_told == (policy in ("passive", "PASSIVE"))


def test_backends_stand_side_by_side() -> None:
    threads = torch.get_num_threads()  # the plain peers have as many
    choice = ["--backends", "compile,other", "--threads", f"{threads + 1},{threads},{threads + 2}"]
    options = run.parse(["--suite", "fused", *choice])
    assert [peer.name for peer in options.peers] == [
        *("engine-compile", "engine-other", "eager", "library", "jax"),
        *(f"engine-compile@{threads + 1}", f"engine-compile@{threads + 2}"),
        *(f"engine-other@{threads + 1}", f"engine-other@{threads + 2}"),
    ]
    with pytest.raises(Skip, match="found 'other'"):
        options.peers[1].make(build(CASES[0]))


@pytest.mark.parametrize("wrong", [["--peers", "jaxx"], ["--peers", "jax@2"], ["--threads", "0"]])
def test_a_wrong_choice_is_an_error(wrong: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run.parse(wrong)
    assert "--peers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "begin", [run.main, inside.main, lambda arguments: gpu.main(["--quick", *arguments])]
)
def test_a_folder_that_cannot_be_written_is_told_at_once(
    begin: Callable[[list[str]], int], tmp_path: Path, capsys: Any
) -> None:
    """All that was measured was lost at the end."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit):
        begin(["--out", str(file)])
    assert f"--out: no file can be written in {file}: File exists" in capsys.readouterr().err


def test_what_was_measured_before_an_interruption_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """But not where results of the full benchmark go."""
    measured = json.loads(next(RESULTS.glob("*-fused.json")).read_text())["cases"]
    cases = iter(list(measured.values())[:2])

    def run_case(*_: Any) -> Any:
        for case in cases:
            return case
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.chdir(tmp_path)
    assert run.main(["--suite", "fused"]) == 130
    assert "stopped after 2 of 31 cases" in capsys.readouterr().err
    (written,) = tmp_path.rglob("*.json")
    assert written.parent == tmp_path / "runs" / "bench"
    assert len(json.loads(written.read_text())["cases"]) == 2
    written.unlink()
    assert run.main(["--suite", "fused"]) == 130  # before anything was measured
    assert not list(tmp_path.rglob("*.json"))


def test_a_library_that_errs_with_the_problem_is_marked_and_kept() -> None:
    """Where rounding is amplified, other libraries may have a larger error than this package."""
    case = CASES[0]
    expected = oracle.exact(case)

    def erring(by: float) -> tuple[Any, dict[str, Any]]:
        grads = {name: grad for name, grad in expected.items() if name != "loss"}
        return expected["loss"], {name: grad * (1 + by) for name, grad in grads.items()}

    results = {"eager": erring(1e-5), "jax": erring(5e-5), "engine": erring(5e-5)}
    results["library"] = erring(2e-4)
    rows: dict[str, dict[str, Any]] = {name: {"status": "ok"} for name in results}
    oracle.check(case, results, "eager", ["engine"], rows)
    assert {name: (row["status"], "why" in row) for name, row in rows.items()} == {
        "eager": ("ok", False),
        "jax": ("ok", True),
        "engine": ("wrong", True),
        "library": ("wrong", True),
    }


def _dies(steps: int, pipe: Any) -> None:
    os._exit(3)


def _hangs(steps: int, pipe: Any) -> None:
    time.sleep(600)


def test_a_memory_process_that_dies_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_send_peak_memory", _dies)
    with pytest.raises(RuntimeError, match="memory over 100 steps ended with exit code 3"):
        streams.memory(100, 100)
    monkeypatch.setattr(streams, "_send_peak_memory", _hangs)
    monkeypatch.setattr(streams, "MEMORY_TIMEOUT", 0.1)
    with pytest.raises(RuntimeError, match="memory over 100 steps has not answered within 0"):
        streams.memory(100, 100)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The benches that draw nothing do without it: on a GPU there is nothing to install."""
    code = "import sys; sys.modules['matplotlib'] = None; import bench.gpu, bench.streams"
    root = Path(run.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for begin in (run.main, inside.main):
        with pytest.raises(SystemExit):
            begin(["--out", str(tmp_path)])
        assert "pictures need matplotlib" in capsys.readouterr().err


def test_a_part_of_the_gpu_bench_replaces_no_full_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a run leaves out is to be run with --cases, which wrote over that run's results."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    assert gpu.parse([]).out == Path("bench/results")
    assert gpu.parse(["--cases", "lstm,vmap"]).out == Path("runs/bench")


@pytest.mark.parametrize("minutes", ["inf", "nan", "0"])
def test_charlm_trains_for_some_minutes(minutes: str, tmp_path: Path, capsys: Any) -> None:
    """For ever, the learning rate would never rise from 0."""
    with pytest.raises(SystemExit):
        charlm.parse(["--out", str(tmp_path), "--minutes", minutes])
    assert f"--minutes must be a number above 0, found {float(minutes)}" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [False, True])
def test_only_an_error_of_resuming_is_told_as_one(
    resume: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also fewer rows than processes were one."""
    monkeypatch.setattr(charlm, "train_stream", _refuse)
    arguments = ["--out", str(tmp_path), "--hidden", "2", *(["--resume"] if resume else [])]
    options, model = charlm.parse(arguments), CharLM(3, 2, 1)
    data: Any = ContiguousStreams(torch.zeros(100, dtype=torch.int16), 1)
    segment: Any = None
    with pytest.raises(TextError) as caught:
        charlm.begin(model, segment, data, options, None)
    assert str(caught.value) == ("--resume: mesh: few rows" if resume else "mesh: few rows")


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError("mesh: few rows")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gpu_peer_that_returns_no_number_is_wrong(number: float) -> None:
    expected = torch.tensor(1.0), {"w": torch.ones(3), "b": torch.ones(3)}
    found = torch.tensor(1.0), {"w": torch.tensor([1.0, number, 1.0]), "b": torch.ones(3)}
    assert gpu.error(expected, expected) == 0.0
    assert gpu.error(found, expected) == math.inf


@pytest.mark.parametrize(
    "name, found, status, marked",
    [
        ("fused", 2e-3, "ok", False), ("fused", 4e-3, "wrong", True), ("jax", 4e-3, "ok", True),
        ("jax", 2e-2, "wrong", True), ("library", math.inf, "wrong", True),
    ],
)  # fmt: skip
def test_gpu_peers_of_others_may_err_more(
    name: str, found: float, status: str, marked: bool
) -> None:
    row = gpu.judged(name, found, 1e-3, torch.float32)
    assert row["status"] == status
    assert ("why" in row) == marked


@pytest.mark.slow
def test_gpu_peers_agree() -> None:
    """Every peer of the GPU benchmark, at sizes that a CPU runs quickly."""
    seen = set()
    for gpu_case in map(gpu_cases.quick, gpu_cases.cases()):
        problem, reset = build(gpu_case.case), gpu_cases.resets(gpu_case)
        expected = gpu_peers.PEERS["eager"](problem, reset)()
        for name in set(gpu_case.peers) - {*gpu_cases.OURS, "eager", "jax"} - seen:
            seen.add(name)
            assert gpu.error(gpu_peers.PEERS[name](problem, reset)(), expected) < 1e-5, name
    assert seen == {"library", "split", "scan", "vmap"}
