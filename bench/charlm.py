"""A character-level LSTM language model, trained by truncated backpropagation through time.

    python -m bench.charlm                        Python's standard library, about two minutes
    python -m bench.charlm --text BOOK --minutes 10
    torchrun --nproc-per-node 2 -m bench.charlm   two processes, each with half of the rows

The text runs through the model in rows, window by window, the state carried from one to the next; a
stock ``torch.optim`` optimizer uses the gradients. At the end: held-out bits per character against
count models, a sampled passage, a loss curve, and the time of one segment compiled and eager.
Ctrl-C at any time leaves the model and the curve as they are then; ``--resume`` goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh
from tqdm import tqdm

from ftbptt import TrainSegment, as_step, make_train_segment
from ftbptt.distributed import use_own_cores
from ftbptt.training import ContiguousStreams, Stream, evaluate_stream, train_stream

from .charmodel import CharLM, sample, save_model
from .counts import count_baselines
from .options import check_can_draw, check_folder, parser_of
from .plots import plot_curve
from .speed import compare_speed
from .text import TextError, Vocabulary, read_text, split_codes

HELD_OUT = 0.05
CHECKPOINT_EVERY = 500  # updates


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of the segment, in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def learning_rate(peak: float, done: float) -> float:
    """Warm-up over the first 3 % of the time, then a cosine down to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return peak * min(done / 0.03, 1.0) * cosine


def contiguous(codes: Tensor, options: argparse.Namespace) -> ContiguousStreams:
    """The text in rows; a short one in fewer, so that each has at least one full segment."""
    return ContiguousStreams(codes, max(1, min(options.batch, (len(codes) - 1) // options.segment)))


def as_indices(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Characters lie as bytes; a window of them as the indices that torch wants."""
    return x.long(), y.long()


def ranks(device: str) -> DeviceMesh | None:
    """The processes that torchrun has started; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        use_own_cores()
    dist.init_process_group()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    return init_device_mesh(torch.device(device).type, (dist.get_world_size(),))


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this is the process that prints and saves: the only one, or the first."""
    return mesh is None or mesh.get_rank() == 0


def checkpoint_of(options: argparse.Namespace, mesh: DeviceMesh | None) -> Path:
    """Where the run is saved: a file of one process, or a folder of several."""
    path: Path = options.out / ("run.pt" if mesh is None else "ranks")
    return path


def begin(
    model: CharLM,
    train_segment: TrainSegment,
    data: ContiguousStreams,
    options: argparse.Namespace,
    mesh: DeviceMesh | None,
) -> Stream:
    """The run, not yet begun; with ``options.resume`` it goes on where its checkpoint was made.

    Raises :class:`TextError` for a checkpoint of another run, or fewer rows than processes.
    """
    params = dict(model.named_parameters())
    try:
        return train_stream(
            train_segment,
            params,
            model.zero_state(data.rows),
            data,
            torch.optim.AdamW(params.values(), lr=0.0, fused=True),
            k1=options.segment,
            epochs=None,
            prepare=as_indices,
            device=options.device,
            clip_norm=1.0,
            progress=False,
            checkpoint=checkpoint_of(options, mesh),
            checkpoint_every=CHECKPOINT_EVERY,
            resume=options.resume,
            mesh=mesh,
        )
    except ValueError as error:
        raise TextError(f"--resume: {error}" if options.resume else str(error)) from error


def train(run: Stream, options: argparse.Namespace, mesh: DeviceMesh | None) -> None:
    """Trains until ``options.minutes`` are over, the first compile included.

    With ``options.resume`` the minutes before the run was cut off count as well.
    """
    began, before, total = run.seconds, run.index, 60 * options.minutes
    first: float | None = None  # when the first update was done: what came before is compiling
    start = 0.0  # of training, once it is known
    shown = len(run.history)
    set_rate(run, options.lr, began / total if before else 0.0)
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed} {postfix}"
    disable = not is_first(mesh)
    with tqdm(
        total=1.0, desc="compiling", bar_format=form, dynamic_ncols=True, disable=disable
    ) as bar:
        for _ in run if began < total else ():
            if first is None:
                first = run.seconds
                start = 0.0 if before else first
                bar.set_description("training", refresh=False)
            if len(run.history) > shown:
                shown = len(run.history)
                report = run.history[-1]
                bar.n = min(report.seconds / total, 1.0)
                bar.set_postfix_str(
                    f"{report.loss / math.log(2):.3f} bits/char, "
                    f"{report.tokens_per_second:,.0f} chars/s"
                )
            done = (run.seconds - start) / max(total - start, 1e-9)
            if done >= 1:
                break
            set_rate(run, options.lr, done)
        run.finish()
        bar.n = 1.0
        bar.refresh()
    if first is not None:
        print(
            f"{run.index:,} updates in {run.seconds:.0f} s, {first - began:.1f} s of them to the "
            "first one"
        )


def set_rate(run: Stream, peak: float, done: float) -> None:
    """The learning rate of the next update."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(peak, done)


def held_out_bits(
    model: CharLM, train_segment: TrainSegment, data: ContiguousStreams, device: str
) -> float:
    """Bits per character on the held-out text, the state carried from segment to segment."""
    params, state = dict(model.named_parameters()), model.zero_state(data.rows)
    evaluation = evaluate_stream(
        train_segment, params, state, data, prepare=as_indices, device=device, progress=True
    )
    return evaluation.loss / math.log(2)


def curve(run: Stream, data: ContiguousStreams) -> tuple[list[int], list[float]]:
    """(characters trained on, bits per character) at each report."""
    assert data.total is not None
    steps = [report.epoch * data.total + report.position for report in run.history]
    return [data.rows * n for n in steps], [r.loss / math.log(2) for r in run.history]


def print_table(title: str, rows: dict[str, str]) -> None:
    """A title and two aligned columns."""
    width, right = max(map(len, rows)), max(map(len, rows.values()))
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value:>{right}}")


def run(options: argparse.Namespace, mesh: DeviceMesh | None) -> None:
    """Everything, from the text to the report. Raises :class:`TextError` for an unusable text."""
    text, source = read_text(options.text)
    vocabulary = Vocabulary.of(text, options.vocabulary)
    codes = vocabulary.encode(text)
    training, held = split_codes(codes, HELD_OUT, options.segment)
    unknown = float((codes == 0).float().mean())
    print(
        f"text: {source}, {len(text):,} characters, the last {HELD_OUT:.0%} held out; "
        f"{len(vocabulary)} symbols, one of them for every rarer character ({unknown:.4%} of it)"
    )
    torch.manual_seed(options.seed)
    model = CharLM(len(vocabulary), options.hidden, options.layers).to(options.device)
    train_segment = make_train_segment(as_step(model, sequence=True), loss, backend=options.backend)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"model: embedding, LSTM {options.layers} x {options.hidden}, readout ({count:,} "
        f"parameters); {options.batch} streams, segments of {options.segment} steps, on "
        f"{options.device}{'' if mesh is None else f', {mesh.size()} processes'}"
    )

    data, held_data = (contiguous(codes, options) for codes in (training, held))
    stream = begin(model, train_segment, data, options, mesh)
    if stream.index:
        print(f"going on after update {stream.index:,}, {stream.seconds:.0f} s into the run")
    bits = count_baselines(training.long().numpy(), held.long().numpy(), len(vocabulary))
    settings = {name: getattr(options, name) for name in ("hidden", "layers", "segment", "seed")}
    stage = "the training"
    try:
        train(stream, options, mesh)
        if not is_first(mesh):
            return  # the rest is for one process
        save_model(options.out / "model.pt", model, vocabulary, settings)
        stage = "the held-out text"
        bits["this model"] = held_out_bits(model, train_segment, held_data, options.device)
        print_table(
            "held-out bits per character (less is better)",
            {name: f"{value:.3f}" for name, value in bits.items()},
        )
        stage = "the sampling"
        print(f"\nsampled at temperature {options.temperature}:\n")
        print(sample(model, vocabulary, 600, options.temperature, options.seed))
        stage = "the timing"
        chunk = data.read(0, options.segment)
        assert chunk is not None
        x, y = (leaf.to(options.device) for leaf in as_indices(chunk.x, chunk.y))
        print_table(
            f"one segment, forward and backward ({options.segment} steps, {x.shape[1]} streams)",
            compare_speed(model, train_segment, loss, x, y),
        )
    except KeyboardInterrupt:
        if not is_first(mesh):
            return
        goes_on = " (--resume goes on)" if checkpoint_of(options, mesh).exists() else ""
        print(f"\nstopped during {stage}; saving what there is{goes_on}")
        save_model(options.out / "model.pt", model, vocabulary, settings)
    plot_curve(options.out / "curve.png", *curve(stream, data), bits, source)
    print(f"\nmodel: {options.out / 'model.pt'}\ncurve: {options.out / 'curve.png'}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a message if they make no sense."""
    parser = parser_of("charlm", __doc__)
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE", help="text files (default: Python's own library)")
    add("--minutes", type=float, default=2.0, help="of training and compiling (default 2)")
    add("--resume", action="store_true", help="go on with the run in --out that was cut off")
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--out", type=Path, default=Path("runs/charlm"), help="folder (default runs/charlm)")
    add("--hidden", type=int, default=256, help="units per layer (default 256)")
    add("--layers", type=int, default=1, help="LSTM layers (default 1)")
    add("--batch", type=int, default=32, help="streams trained side by side (default 32)")
    add("--segment", type=int, default=64, help="steps per segment (default 64)")
    add("--vocabulary", type=int, default=100, help="symbols at most (default 100)")
    add("--lr", type=float, default=5e-3, help="peak learning rate (default 0.005)")
    add("--temperature", type=float, default=0.8, help="of the sampled passage (default 0.8)")
    add("--seed", type=int, default=0, help="of the weights and the sample (default 0)")
    add("--backend", choices=("auto", "eager", "compile"), default="auto", help="of the engine")
    options = parser.parse_args(arguments)
    for name in ("minutes", "hidden", "layers", "batch", "segment", "lr", "temperature"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name} must be a number above 0, found {getattr(options, name)}")
    if not 2 <= options.vocabulary <= 2000:
        parser.error(f"--vocabulary must be from 2 to 2000, found {options.vocabulary}")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        parser.error(f"--device {options.device} cannot be used here: {reason}")
    check_folder(parser, options.out)
    check_can_draw(parser)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    options = parse(arguments)
    mesh = ranks(options.device)
    try:
        with contextlib.ExitStack() as stack:
            if mesh is not None:
                stack.callback(dist.destroy_process_group)
                if not is_first(mesh):
                    silence = stack.enter_context(open(os.devnull, "w"))
                    stack.enter_context(contextlib.redirect_stdout(silence))
            run(options, mesh)
    except TextError as error:
        print(f"charlm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped before everything was saved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
