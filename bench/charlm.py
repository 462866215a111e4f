"""A character-level LSTM language model, trained by truncated backpropagation through time.

    python -m bench.charlm                        Python's standard library, about two minutes
    python -m bench.charlm --text BOOK --minutes 10

The engine gives the gradients of one segment; a stock ``torch.optim`` optimizer uses them; the
state goes from segment to segment. At the end: held-out bits per character against count models, a
sampled passage, a loss curve, and the time of one segment compiled and eager. Ctrl-C at any time
leaves the model and the curve as they are then.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ftbptt import as_step, make_train_segment

from .charmodel import CharLM, sample, save_model
from .counts import count_baselines
from .plots import plot_curve
from .speed import compare_speed
from .text import TextError, Vocabulary, read_text, split_codes, streams

HELD_OUT = 0.05
SHOW_SECONDS = 0.5  # between two displays, each of which waits for the device once


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of the segment, in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Curve:
    """The training loss, kept on the device and read only when it is shown."""

    def __init__(self) -> None:
        self.characters: list[int] = []
        self.bits: list[float] = []
        self.smoothed: float | None = None
        self._waiting: list[Tensor] = []
        self._trained = 0

    def add(self, value: Tensor, characters: int) -> None:
        self._trained += characters
        self._waiting.append(value)

    def read(self) -> float | None:
        """Waits for the losses since the last time; the smoothed bits per character."""
        if not self._waiting:
            return self.smoothed
        recent = torch.stack(self._waiting).double().cpu() / math.log(2)
        self._waiting.clear()
        for bits in recent.tolist():
            self.smoothed = bits if self.smoothed is None else 0.98 * self.smoothed + 0.02 * bits
        self.characters.append(self._trained)
        self.bits.append(float(recent.mean()))
        return self.smoothed


def learning_rate(peak: float, done: float) -> float:
    """Warm-up over the first 3 % of the time, then a cosine down to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return peak * min(done / 0.03, 1.0) * cosine


def train(
    model: CharLM, train_segment: Any, codes: Tensor, options: argparse.Namespace, curve: Curve
) -> None:
    """Trains ``model`` in place until ``options.minutes`` are over, the first compile included."""
    x, y = streams(codes, options.batch, options.segment, options.device)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    state = model.zero_state(x.shape[1])
    began = time.perf_counter()
    ends = began + 60 * options.minutes
    first: float | None = None  # when the first segment was done: what came before is compiling
    start = shown = 0.0
    position = 0
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed} {postfix}"
    with tqdm(total=1.0, desc="compiling", bar_format=form, dynamic_ncols=True) as bar:
        while (now := time.perf_counter()) < ends:
            if position + options.segment > len(x):
                position, state = 0, model.zero_state(x.shape[1])  # the text from the start again
            part = slice(position, position + options.segment)
            position += options.segment

            result = train_segment(params, state, x[part].long(), y[part].long())
            state = result.state
            for name, p in params.items():
                p.grad = result.grads[name]
            nn.utils.clip_grad_norm_(params.values(), 1.0)
            for group in optimizer.param_groups:
                done = 0.0 if first is None else (now - first) / (ends - first)
                group["lr"] = learning_rate(options.lr, done)
            optimizer.step()
            curve.add(result.loss, x[part].numel())

            now = time.perf_counter()
            if first is None:
                first = start = now
                bar.set_description("training")
            if now - shown > SHOW_SECONDS:
                shown = now
                bits = curve.read()
                speed = curve.characters[-1] / max(now - start, 1e-9)
                bar.n = min((now - began) / (ends - began), 1.0)
                bar.set_postfix_str(f"{bits:.3f} bits/char, {speed:,.0f} chars/s")
        curve.read()
        bar.n = 1.0
        bar.refresh()
    if first is not None:
        trained = curve.characters[-1]
        print(
            f"trained on {trained:,} characters ({trained / x.numel():.1f} times the text) in "
            f"{time.perf_counter() - first:.0f} s, after {first - began:.1f} s to the first update"
        )


def held_out_bits(
    model: CharLM, train_segment: Any, codes: Tensor, options: argparse.Namespace
) -> float:
    """Bits per character on the held-out text, the state carried from segment to segment."""
    x, y = streams(codes, options.batch, options.segment, options.device)
    params, state = dict(model.named_parameters()), model.zero_state(x.shape[1])
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for start in tqdm(range(0, len(x), options.segment), desc="held-out text", leave=False):
        part = slice(start, start + options.segment)
        result = train_segment.evaluate(params, state, x[part].long(), y[part].long())
        state = result.state
        total += result.loss.double() * y[part].numel()
    return float(total) / y.numel() / math.log(2)


def print_table(title: str, rows: dict[str, str]) -> None:
    """A title and two aligned columns."""
    width, right = max(map(len, rows)), max(map(len, rows.values()))
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value:>{right}}")


def run(options: argparse.Namespace) -> None:
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
        f"{options.device}"
    )

    curve = Curve()
    bits = count_baselines(training.long().numpy(), held.long().numpy(), len(vocabulary))
    settings = {name: getattr(options, name) for name in ("hidden", "layers", "segment", "seed")}
    stage = "the training"
    try:
        train(model, train_segment, training, options, curve)
        save_model(options.out / "model.pt", model, vocabulary, settings)
        stage = "the held-out text"
        bits["this model"] = held_out_bits(model, train_segment, held, options)
        print_table(
            "held-out bits per character (less is better)",
            {name: f"{value:.3f}" for name, value in bits.items()},
        )
        stage = "the sampling"
        print(f"\nsampled at temperature {options.temperature}:\n")
        print(sample(model, vocabulary, 600, options.temperature, options.seed))
        stage = "the timing"
        x, y = streams(training, options.batch, options.segment, options.device)
        x, y = x[: options.segment].long(), y[: options.segment].long()
        print_table(
            f"one segment, forward and backward ({options.segment} steps, {x.shape[1]} streams)",
            compare_speed(model, train_segment, loss, x, y),
        )
    except KeyboardInterrupt:
        print(f"\nstopped during {stage}; saving what there is")
        curve.read()
        save_model(options.out / "model.pt", model, vocabulary, settings)
    plot_curve(options.out / "curve.png", curve.characters, curve.bits, bits, source)
    print(f"\nmodel: {options.out / 'model.pt'}\ncurve: {options.out / 'curve.png'}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a message if they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m bench.charlm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--text", nargs="+", metavar="FILE", help="text files (default: Python's own library)")
    add("--minutes", type=float, default=2.0, help="of training and compiling (default 2)")
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
        if not getattr(options, name) > 0:
            parser.error(f"--{name} must be above 0, found {getattr(options, name)}")
    if not 2 <= options.vocabulary <= 2000:
        parser.error(f"--vocabulary must be from 2 to 2000, found {options.vocabulary}")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out must be a folder, found the file {options.out}")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        parser.error(f"--device {options.device} cannot be used here: {reason}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    options = parse(arguments)
    try:
        run(options)
    except TextError as error:
        print(f"charlm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped before everything was saved", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
