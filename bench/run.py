"""The benchmark: cases crossed with peers in one run.

    python -m bench.run                     everything, about ten minutes; writes bench/results/
    python -m bench.run --quick             three cases, few rounds; writes runs/bench/
    python -m bench.run --suite fused       the fused kernels against nn.LSTM and JAX
    python -m bench.run --backends compile,fused --threads 1
                                            two backends side by side, and how each scales

For each case: the machine's floor; then every peer in a fresh process, so that its first call shows
its compile time; then each result against the loop in float64 (a wrong peer is not timed); then
rounds in which the peers take turns; then the memory of a call.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import limits, oracle, report
from .cases import Case, build
from .options import check_can_draw, check_folder, folder_for, parser_of
from .peers import Peer, find
from .suites import SUITES
from .targets import targets
from .worker import serve

BASE = "eager"  # the peer that ratios and errors are taken against
TURN = 0.15  # seconds of calls that a peer gets in a round
LOST = 1.0  # several threads gain less over one: another machine has the cores


@dataclass
class Worker:
    """The other end of a worker process."""

    peer: Peer
    pipe: Any
    process: Any
    cache: tempfile.TemporaryDirectory[str]
    row: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, case: Case, peer: Peer, cache: tempfile.TemporaryDirectory[str] | None = None
    ) -> Worker:
        """``cache`` is what another one has left; without it compilers start with empty folders."""
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        if cache is None:
            cache = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        process = context.Process(target=serve, args=(other, case, peer.name, cache.name))
        process.start()
        other.close()
        row: dict[str, Any] = {"label": peer.label, "status": "ok"}
        if peer.threads:
            row["threads"] = peer.threads
        elif peer.name.startswith("engine"):
            row["all_threads"] = torch.get_num_threads()
        return cls(peer, pipe, process, cache, row)

    def ask(self, *command: Any) -> Any:
        """The answer, or None once the peer has skipped or failed; the row says so."""
        if self.row["status"] != "ok":
            return None
        try:
            self.pipe.send(command)
            status, answer = self.pipe.recv()
        except (EOFError, OSError):
            status, answer = "error", "the process died"
        if status == "ok":
            return answer
        self.row.update(status=status, why=answer)
        return None

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(("stop",))
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.cache.cleanup()


def run_case(case: Case, peers: Sequence[Peer], rounds: int, bar: tqdm[Any]) -> dict[str, Any]:
    """Everything about one case, as it goes into the results."""
    bar.set_postfix_str("machine's floor")
    parameters = sum(p.numel() for p in build(case).model.parameters())
    floor = limits.floor(case, parameters)
    workers: list[Worker] = []
    try:
        results = {}
        for peer in peers:
            bar.set_postfix_str(f"{peer.label}: first call")
            worker = Worker.begin(case, peer)
            workers.append(worker)
            times = worker.ask("start")
            if times is not None:
                worker.row.update(times, compile_s=max(times["first_s"] - times["warm_s"], 0))
                results[peer.name] = worker.ask("result")
        bar.set_postfix_str("float64 oracle")
        strict = [peer.name for peer in peers if peer.name.startswith("engine")]
        oracle.check(case, results, BASE, strict, {w.peer.name: w.row for w in workers})
        times_of, repeated = take_rounds(workers, rounds, bar)
        for worker in workers:
            bar.set_postfix_str(f"{worker.peer.label}: memory")
            peak = worker.ask("memory")
            if peak is not None:
                worker.row["peak_bytes"] = peak
        for worker in workers:
            if worker.row["status"] == "ok":
                _summarise(worker.row, times_of[worker.peer.name], times_of[BASE], floor.seconds)
    finally:
        for worker in workers:
            worker.end()
    return {
        "title": case.title,
        "batch": case.batch,
        "floor": asdict(floor),
        "repeated": repeated,
        "peers": {worker.peer.name: worker.row for worker in workers},
    }


def take_rounds(
    workers: list[Worker], rounds: int, bar: tqdm[Any]
) -> tuple[dict[str, list[list[float]]], int]:
    """Seconds of each peer's calls in each round, and how many rounds were repeated.

    A round is repeated if the machine lost its cores: several threads were slower than one before
    or after a turn. At most ``rounds`` are repeated; after that, such rounds count.
    """
    threads, scaling = torch.get_num_threads(), any(worker.peer.threads for worker in workers)
    times_of: dict[str, list[list[float]]] = {worker.peer.name: [] for worker in workers}
    done = repeated = 0
    while done < rounds:
        bar.set_postfix_str(f"round {done + 1} of {rounds}")
        gains, taken = [], []
        for worker in workers:
            peer_threads = worker.peer.threads or 1
            count = peer_threads if peer_threads > 1 else threads
            before = limits.thread_gain(count)
            taken.append(worker.ask("time", TURN))
            gains.append(min(before, limits.thread_gain(count)))
        if threads > 1 and min(gains) < LOST and repeated < rounds:
            repeated += 1
            continue
        done += 1
        for worker, times, gain in zip(workers, taken, gains, strict=True):
            if times is not None:
                times_of[worker.peer.name].append(times)
            if scaling and (worker.peer.threads or worker.row.get("all_threads") or 1) > 1:
                worker.row.setdefault("thread_gains", []).append(gain)
    return times_of, repeated


def _summarise(
    row: dict[str, Any], rounds: list[list[float]], base: list[list[float]], floor: float
) -> None:
    """Median milliseconds over all calls; the ratio is the median over the rounds' own ratios."""
    medians = [statistics.median(times) for times in rounds]
    every = [seconds for times in rounds for seconds in times]
    row["ms"] = 1e3 * statistics.median(every)
    row["best_ms"] = 1e3 * min(every)
    row["round_ms"] = [1e3 * seconds for seconds in medians]
    row["of_floor"] = 1e3 * floor / row["ms"]
    if len(base) == len(rounds):  # not if the eager loop itself failed
        pairs = zip(base, medians, strict=True)
        row["ratio"] = statistics.median(statistics.median(b) / m for b, m in pairs)


def compile_seconds(case: Case, steps: int, repeats: int) -> tuple[float | None, float | None]:
    """The engine's first call of a case at another length, less a warm one.

    With empty caches, and in a new process with what is in them then: the best of some processes.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        workers: list[Worker] = []
        try:
            for found in seconds:
                cache = workers[0].cache if workers else None
                workers.append(Worker.begin(replace(case, steps=steps), find("engine"), cache))
                times = workers[-1].ask("start")
                if times is not None:
                    found.append(times["first_s"] - times["warm_s"])
        finally:
            for worker in workers:
                worker.end()
    cold, again = (min(found, default=None) for found in seconds)
    return cold, again


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; unknown names of cases and peers are errors."""
    parser = parser_of("run", __doc__)
    add = parser.add_argument
    add("--suite", choices=SUITES, default="default", help="which cases and peers (see suites.py)")
    add("--quick", action="store_true", help="only a few cases, in few rounds")
    add("--cases", help="a comma-separated choice of the suite's cases")
    add("--peers", help=f"a comma-separated choice of peers; {BASE} always takes part")
    add("--backends", help="this package's backends to time, in place of its own choice")
    add("--threads", help="also time this package with other numbers of threads, such as 1,4")
    add("--rounds", type=int, help="rounds in which the peers take turns (default 12, quick 4)")
    add("--out", type=Path, help="folder (default bench/results; for part of the bench runs/bench)")
    options = parser.parse_args(arguments)
    suite = SUITES[options.suite]
    part = bool(options.quick or options.cases or options.peers or options.backends)
    options.partial = folder_for(options.out, is_part=True)
    options.out = folder_for(options.out, is_part=part)
    options.rounds = options.rounds if options.rounds is not None else 4 if options.quick else 12
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, found {options.rounds}")
    known = [case.name for case in suite.cases]
    chosen = options.cases.split(",") if options.cases else suite.quick if options.quick else known
    for name in chosen:
        if name not in known:
            parser.error(f"--cases: no {name!r}; there are {', '.join(known)}")
    options.cases = [case for case in suite.cases if case.name in chosen]
    try:
        options.peers = choose_peers(options)
    except ValueError as error:
        parser.error(f"--peers, --backends, --threads: {error}")
    check_folder(parser, options.out)
    check_can_draw(parser)
    return options


def choose_peers(options: argparse.Namespace) -> list[Peer]:
    """This package's peers come first, the others in the suite's order."""
    order = SUITES[options.suite].peers
    names = options.peers.split(",") if options.peers else list(order)
    if options.quick and not options.peers:
        names = [name for name in names if name != "unrolled"]
    if options.backends:
        backends = [f"engine-{name}" for name in options.backends.split(",")]
        names = backends + [name for name in names if name != "engine"]
    if BASE not in names:
        names.append(BASE)
    names.sort(key=lambda name: order.index(name) if name in order else 0)
    if options.threads:
        engines = [name for name in names if name.startswith("engine") and "@" not in name]
        others = [n for n in options.threads.split(",") if n != str(torch.get_num_threads())]
        names += [f"{name}@{count}" for name in engines for count in others]
    return [find(name) for name in dict.fromkeys(names)]


def measure(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Fills in ``results`` case by case; when it is interrupted, those that are done are there."""
    suite = SUITES[options.suite]
    lengths = suite.compile_steps if suite.cases[0] in options.cases else ()
    lengths = lengths if any(peer.name == "engine" for peer in options.peers) else ()
    with tqdm(total=len(options.cases) + len(lengths), unit="case", dynamic_ncols=True) as bar:
        for case in options.cases:
            bar.set_description(case.name)
            results["cases"][case.name] = run_case(case, options.peers, options.rounds, bar)
            bar.update()
        results["compile_s"], results["compile_again_s"] = {}, {}
        for steps in lengths:
            bar.set_description("cold compile")
            bar.set_postfix_str(f"T={steps}")
            repeats = 1 if options.quick else 2
            cold, again = compile_seconds(suite.cases[0], steps, repeats)
            results["compile_s"][str(steps)] = cold
            results["compile_again_s"][str(steps)] = again
            bar.update()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 if a result was wrong."""
    options = parse(arguments)
    results: dict[str, Any] = {"machine": report.machine(), "rounds": options.rounds}
    results.update(suite=options.suite, cases={})
    for disturbance in report.disturbances(results):
        print(disturbance, file=sys.stderr)
    stopped = False
    try:
        measure(options, results)
    except KeyboardInterrupt:
        done, stopped, options.out = len(results["cases"]), True, options.partial
        print(f"\nstopped after {done} of {len(options.cases)} cases", file=sys.stderr)
        if not done:
            return 130
    results["targets"] = targets(results)
    paths = report.write(results, options.out)
    print(report.markdown(results))
    print("written: " + ", ".join(str(path) for path in paths))
    rows = [row for case in results["cases"].values() for row in case["peers"].values()]
    wrong = any(row["status"] == "wrong" for row in rows)
    return 130 if stopped else 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
