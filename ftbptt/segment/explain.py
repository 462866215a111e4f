"""An executable plan as text: what ``train_segment.explain`` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

from torch import fx

from .._trees import leaf_names
from ..backends import Backend
from ..compiler.blocks import Block, DistributedLoop, MapBlock, ShiftBlock
from ..compiler.gemms import gemm_flops, gemm_text, is_gemm
from ..compiler.graphs import VIEWS, Node, is_getitem, nbytes
from ..compiler.plan import Plan
from ..compiler.time_axis.reduction import ConvolutionGradient, Gemm, LoopTotal
from .execute import Executable


@dataclass(frozen=True)
class BlockReport:
    """One block: ``flops`` of its GEMMs and ``bytes`` it reads and writes, for the K steps."""

    phase: str
    kind: str  # "map", "scan", "linear scan", "shift", "invariant", "sum"
    title: str
    gemms: list[str]
    other_operations: int
    flops: int
    bytes: int
    runs: str


@dataclass(frozen=True)
class Explanation:
    """What a segment will do, to be printed; ``blocks`` has the parts.

    ``flops`` are those of the GEMMs in all steps. ``chunk`` is the number of steps that run at
    once, None if the segment is never cut. ``saved`` names what the forward loop keeps for the
    reverse loop, in all steps ``saved_bytes``; ``without_gradient`` the parameters that the loss
    does not depend on. ``compiles_loss``: else it runs as it is written.

    >>> import torch, ftbptt
    >>> cell, x = torch.nn.RNNCell(3, 5), torch.randn(7, 2, 3)
    >>> train_segment = ftbptt.make_train_segment(
    ...     cell, lambda out, y: out.square().mean(), backend="eager"
    ... )
    >>> explanation = train_segment.explain(dict(cell.named_parameters()), None, x, None)
    >>> explanation.saved, [block.kind for block in explanation.blocks]
    (['state'], ['map', 'scan', 'scan', 'map', 'sum'])
    """

    step: str
    backend: str
    steps: int
    chunk: int | None
    blocks: list[BlockReport]
    saved: list[str]
    saved_bytes: int
    without_gradient: list[str]
    compiles_loss: bool

    @property
    def flops(self) -> int:
        """The floating point operations of all GEMMs."""
        return sum(block.flops for block in self.blocks)

    def __str__(self) -> str:
        cut = "in one piece" if self.chunk is None else f"in chunks of up to {self.chunk} steps"
        lines = [
            f"{self.step}: K={self.steps} steps, backend {self.backend}, {cut}",
            f"  {_count(self.flops, 'FLOP')} in GEMMs, {_count(self.saved_bytes, 'B')} saved from "
            "forward for reverse",
        ]
        phase = ""
        for block in self.blocks:
            if block.phase != phase:
                phase = block.phase
                lines.append(phase)
            head = f"  {block.kind:12}{block.title}"
            work = [f"{len(block.gemms)} GEMM" + ("s" if len(block.gemms) != 1 else "")]
            work += [f"{block.other_operations} other operations"] if block.other_operations else []
            work += [_count(block.flops, "FLOP")] if block.flops else []
            work += [_count(block.bytes, "B")] if block.bytes else []
            lines += [head, f"  {'':12}{', '.join(work)}; {block.runs}"]
            lines += [f"  {'':14}{gemm}" for gemm in block.gemms]
        lines.append(f"saved: {', '.join(self.saved) or 'nothing'}")
        if self.without_gradient:
            lines.append(f"without a gradient: {', '.join(self.without_gradient)}")
        if not self.compiles_loss:
            lines.append("loss: as it is written, in eager torch")
        return "\n".join(lines)


def explain(executable: Executable, step_name: str, steps: int) -> Explanation:
    """explain : an executable plan, K -> Explanation"""
    plan, backend = executable.plan, executable.backend
    names = _names(plan)
    blocks: list[BlockReport] = []
    preparation = plan.preparation
    if preparation is not None:
        blocks.append(_invariant(preparation.prepare, "once per segment", backend))
    for phase, loop, count in (
        ("forward", executable.forward, steps),
        *_reverse(executable, steps),
    ):
        if loop.hoisted is not None:
            blocks.append(_invariant(loop.hoisted, phase, backend))
        blocks += [_block(block, phase, names, count, backend) for block in loop.blocks]
        blocks += _sums(loop, count, phase)
    forward = plan.loops.forward
    after = dict(zip(forward.next_carries, forward.carries, strict=True))
    # The state after a step is the one before the next, and is saved once.
    saved = [node for node in plan.loops.saved if after.get(node) not in plan.loops.saved]
    params = leaf_names("params", plan.signature.specs.params)
    return Explanation(
        step=step_name,
        backend=backend.name,
        steps=steps,
        chunk=None if executable.uncut or plan.sliding is not None else executable.chunk,
        blocks=blocks,
        saved=[names.get(node, node.name) for node in saved],
        saved_bytes=steps * sum(map(nbytes, saved)),
        without_gradient=[params[i] for i in plan.params_without_gradient],
        compiles_loss=plan.loss.is_traced,
    )


def _reverse(executable: Executable, steps: int) -> list[tuple[str, DistributedLoop, int]]:
    """The phases of the reverse loop, and how many steps each of them does."""
    sliding = executable.plan.sliding
    if sliding is None:
        return [("reverse", executable.reverse, steps)]
    windows = -(-steps // sliding.stride)
    at_once = min(executable.windows, windows)
    phase = f"reverse, in {windows} windows of {sliding.length} steps, up to {at_once} at once"
    split = executable.split_reverse
    in_windows = (phase, split.recurrences, windows * sliding.length)
    return [in_windows, ("reverse, over all steps", split.rest, steps)]


def _names(plan: Plan) -> dict[Node, str]:
    """What the caller calls a value: the leaves of x, the state and out, and their gradients."""
    names: dict[Node, str] = {}
    carries = iter(plan.loops.forward.carries)
    state_names: list[str] = []
    leaves = leaf_names("state", plan.signature.specs.state)
    for leaf, packing in zip(leaves, plan.packings, strict=True):
        for i in range(packing.count):
            part = f"[part {i}]" if packing.dim is not None else ""
            state_names.append(f"{leaf}{part}")
            names[next(carries)] = state_names[-1]
    for node, i in zip(plan.loops.reverse.carries, plan.loops.trained_carries, strict=True):
        names[node] = f"d {state_names[i]}"
    outs = compress(leaf_names("out", plan.out_spec), plan.loss.with_grad)
    names |= {node: f"d {out}" for node, out in zip(plan.loops.d_outs, outs, strict=True)}
    for i, node in enumerate(plan.loops.forward.sequences):
        names[node] = f"x leaf {i}" if i < len(plan.signature.x) else "reset or mask"
    return names


def _block(
    block: Block, phase: str, names: dict[Node, str], steps: int, backend: Backend
) -> BlockReport:
    def title(nodes: Iterable[Node]) -> str:
        return ", ".join(names.get(node, node.name) for node in nodes)

    if isinstance(block, ShiftBlock):
        size = 2 * steps * nbytes(block.carry)
        return BlockReport(
            phase, "shift", title([block.carry]), [], 0, 0, size, "no loop: a value one step late"
        )
    if isinstance(block, MapBlock):
        gemms, other, flops = _work(block.module, steps, f"over {steps} steps at once")
        size = steps * sum(map(nbytes, [*block.sequences, *block.outputs]))
        shown = title(block.sequences[:3]) + (", ..." if len(block.sequences) > 3 else "")
        runs = f"{backend.name}: needs no carry of its own, all steps in one call"
        return BlockReport(phase, "map", f"of {shown}", gemms, other, flops, size, runs)
    gemms, other, flops = _work(block.module, steps, f"{steps} times")
    size = steps * sum(map(nbytes, [*block.sequences, *block.emits, *block.with_history]))
    size += steps * sum(map(nbytes, block.invariants))
    kind = "linear scan" if block.linear else "scan"
    why = "elementwise affine in its carry" if block.linear else "its carry feeds itself"
    runs = f"{backend.name}: {why}, {backend.describe(block)}"
    return BlockReport(phase, kind, f"over {title(block.carries)}", gemms, other, flops, size, runs)


def _invariant(module: fx.GraphModule, phase: str, backend: Backend) -> BlockReport:
    gemms, other, flops = _work(module, 1, "once")
    return BlockReport(
        phase,
        "invariant",
        "work on parameters alone",
        gemms,
        other,
        flops,
        0,
        f"{backend.name}: once",
    )


def _sums(loop: DistributedLoop, steps: int, phase: str) -> list[BlockReport]:
    """The parameters' gradients: each a GEMM over all steps and rows, or a sum."""
    gemms, sums, flops = [], 0, 0
    for term in loop.sums.terms.values():
        if isinstance(term, (Gemm, ConvolutionGradient)):
            flops += steps * gemm_flops(term.node)
            gemms.append(gemm_text(term.node, f"contracted over {steps} steps and rows at once"))
        elif not isinstance(term, LoopTotal):  # one of those was summed inside its loop
            sums += 1
    if not gemms and not sums:
        return []
    title = "of each step's share in the parameters' gradients"
    return [BlockReport(phase, "sum", title, gemms, sums, flops, 0, "one GEMM per weight")]


def _work(module: fx.GraphModule, steps: int, how_often: str) -> tuple[list[str], int, int]:
    """The GEMMs of a block, its other operations but views, and the FLOPs of ``steps`` steps."""
    gemms, other, flops = [], 0, 0
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target in VIEWS or is_getitem(node):
            continue
        if is_gemm(node):
            gemms.append(gemm_text(node, how_often))
            flops += steps * gemm_flops(node)
        else:
            other += 1
    return gemms, other, flops


def _count(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}"
