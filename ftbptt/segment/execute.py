"""A plan and a backend -> a segment that runs, in chunks of steps.

Long segments run chunk by chunk, so that what only lives inside a chunk (projected inputs, the
gradients of the gates) does not grow with K, and stays in the cache. A small cell's segment is one
program from the parameters to their gradients: there, what a call costs counts most.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import Backend
from ..compiler.adjoint import Loop
from ..compiler.blocks import DistributedLoop, MapBlock, ScanBlock
from ..compiler.graphs import Node, nbytes, owner_of, reachable_from
from ..compiler.plan import Plan
from ..compiler.program import run_loop
from ..contract.output import EarlyGradients
from .early_gradients import can_hand_over, hand_over, reverse_in_parts
from .programs import Count, Programs
from .sliding_window import reverse_windows

# What lives only inside a chunk should fit in a CPU's outer cache; but each chunk has a cost that
# more threads do not lower. With ``recompute`` memory matters more than time.
_CHUNK_BYTES = 36 << 20
_CHUNK_BYTES_RECOMPUTE = 16 << 20
# A GPU is best given as much at once as its memory easily holds.
_CHUNK_BYTES_GPU = 1 << 30
_LEAST_STEPS = 16
# A segment whose blocks hand each other fewer bytes per step than this is never cut.
_UNCUT_BYTES = 64 << 10


class LoopInputs(NamedTuple):
    """What the loops of a segment read."""

    fixed: list[Tensor]  # parameters, buffers, captured tensors, initial state
    x: list[Tensor]  # with reset and mask
    targets: list[Tensor]  # what the loss reads besides the outputs: y and mask
    carries: list[Tensor]


class LoopOutputs(NamedTuple):
    """What the loops of a segment return; no ``grads`` and ``d_probes`` without a gradient."""

    grads: list[Tensor]  # of the trained invariants
    carries: list[Tensor]
    loss: Tensor
    out: list[Tensor]
    d_probes: list[Tensor]  # at every step


class Executable(Programs):
    """Runs segments of one plan on one backend; each function is built when first needed."""

    def __init__(self, plan: Plan, backend: Backend, compiled: Count | None = None) -> None:
        super().__init__(plan, backend, compiled)
        self.instead: Executable | None = None  # runs the segments from now on
        self.shared_outs = _in_shared_memory(plan.loops.forward, plan.loops.outs)
        bytes_per_step = max(_passing_bytes(self.forward), _passing_bytes(self.reverse), 1)
        most = _CHUNK_BYTES_RECOMPUTE if plan.recompute else _CHUNK_BYTES
        if plan.signature.x[0].device.type == "cuda":
            most = _CHUNK_BYTES_GPU
        self.chunk = max(_LEAST_STEPS, most // bytes_per_step)
        if plan.sliding is not None:
            self.windows = max(1, self.chunk // plan.sliding.length)  # that run at once
        self.uncut = bytes_per_step <= _UNCUT_BYTES and plan.sliding is None
        self.hands_over = not self.uncut and can_hand_over(plan)  # gradients in parts

    def run(
        self,
        groups: dict[str, list[Tensor]],
        *,
        with_grad: bool,
        early: EarlyGradients | None = None,
    ) -> list[Tensor]:
        """``[*grads, *state, loss, *out, *d_probes]``, without gradients if not ``with_grad``."""
        inputs = self.inputs(groups)
        in_parts = early if self.hands_over else None
        if self.uncut:
            result = self._run_as_one_program(inputs, with_grad)
        else:
            result = self._run_in_chunks(inputs, with_grad, in_parts)
        out = [leaf.clone() if i in self.shared_outs else leaf for i, leaf in enumerate(result.out)]
        grads = self._of_params(result.grads) if with_grad else []
        if early is not None and in_parts is None:
            hand_over(early, result.loss, grads)
        return [*grads, *self._packed(result.carries), result.loss, *out, *result.d_probes]

    def inputs(self, groups: dict[str, list[Tensor]]) -> LoopInputs:
        """The loops' inputs, from the groups of a call's tensors."""
        captures = self.plan.captures
        return LoopInputs(
            [*groups["params"], *groups["buffers"], *captures, *groups["initial_state"]],
            [*groups["x"], *groups["reset"], *groups["mask"]],
            [*groups["y"], *groups["mask"]],
            self._parts(groups["state"]),
        )

    def _run_as_one_program(self, inputs: LoopInputs, with_grad: bool) -> LoopOutputs:
        """From the parameters to their gradients, in one call."""
        loops = self.plan.loops
        key, graphs = self.plan.loss.graphs_for(inputs.x[0].shape[0])
        loss = graphs.program(with_grad)
        name = ("segment" if with_grad else "evaluate", key)
        args = [*inputs.fixed, *inputs.x, *inputs.targets, *inputs.carries, *loss.captured]
        if name not in self.functions:
            first = len(inputs.fixed)
            last = first + len(inputs.x) + len(inputs.targets)
            function = self._segment_program(inputs, loss.graph, with_grad)
            self.build_once(name, function, args, first, last if key is None else first)
        flat = self.functions[name](*args)
        n_probes = len(self.reverse.loop.stacked) if with_grad else 0
        first_probe = len(flat) - n_probes
        first_out = first_probe - loops.outs
        first_carry = first_out - 1 - len(inputs.carries)
        return LoopOutputs(
            flat[:first_carry],
            flat[first_carry : first_out - 1],
            flat[first_out - 1],
            flat[first_out:first_probe],
            flat[first_probe:],
        )

    def _segment_program(
        self, inputs: LoopInputs, loss_graph: Callable[..., list[Tensor]], with_grad: bool
    ) -> Callable[..., list[Tensor]]:
        """``(*inputs, *captured by the loss) -> [*grads, *carries, loss, *out, *d_probes]``."""
        plan, run_scan = self.plan, self.backend.run_scan
        forward, reverse = self.forward if with_grad else self.evaluate, self.reverse
        ends = list(accumulate(map(len, inputs)))

        def function(*args: Tensor) -> list[Tensor]:
            fixed, x = args[: ends[0]], args[ends[0] : ends[1]]
            targets, carries = args[ends[1] : ends[2]], args[ends[2] : ends[3]]
            of_loss = [*targets, *args[ends[3] :]]
            steps = x[0].shape[0]
            prepared = plan.preparation.prepare(*fixed) if plan.preparation is not None else []
            invariants = [*fixed, *prepared]
            finals, stacked, _ = run_loop(forward, run_scan, invariants, x, carries, steps)
            out, saved = stacked[: plan.loops.outs], stacked[plan.loops.outs :]
            if not with_grad:
                return [*finals, *loss_graph(*out, *of_loss), *out]
            loss, *d_outs = loss_graph(*out, *of_loss)
            d_carries = plan.loops.zero_gradients(x[0].device)
            sequences = [*x, *saved, *d_outs]
            _, d_probes, grads = run_loop(
                reverse, run_scan, invariants, sequences, d_carries, steps
            )
            if plan.finish is not None:
                grads += plan.finish(*fixed, *plan.of_prepared(grads, len(fixed)))
            return [*grads, *finals, loss, *out, *d_probes]

        return function

    def _run_in_chunks(
        self, inputs: LoopInputs, with_grad: bool, early: EarlyGradients | None
    ) -> LoopOutputs:
        """In chunks of steps: all of them forward, the loss, all of them in reverse."""
        plan, (fixed, x, targets, carries) = self.plan, inputs
        prepared: list[Tensor] = []
        if plan.preparation is not None:
            prepared = self.call("prepare", plan.preparation.prepare, fixed)
        invariants = [*fixed, *prepared]
        steps = x[0].shape[0]
        # The windows of a sliding gradient read from all steps.
        bounds = _chunks(steps, self.chunk if plan.sliding is None else steps)

        name, loop = ("forward", self.forward) if with_grad else ("evaluate", self.evaluate)
        n_carries, n_outs = len(carries), plan.loops.outs
        outs: list[list[Tensor]] = []
        saved: list[list[Tensor]] = []
        for first, last in bounds:
            x_chunk = [leaf[first:last] for leaf in x] if len(bounds) > 1 else x
            result = self.run_chunk(name, loop, invariants, x_chunk, carries)
            carries = result[:n_carries]
            outs.append(result[n_carries : n_carries + n_outs])
            saved.append(result[n_carries + n_outs :])
        out = [_joined(chunks) for chunks in zip(*outs, strict=True)]
        key, graphs = plan.loss.graphs_for(steps)
        graph, captured = graphs.program(with_grad)
        n_symbolic = len(out) + len(targets) if key is None else 0
        loss, *d_outs = self.call(
            ("loss", with_grad, key), graph, [*out, *targets, *captured], n_symbolic
        )
        if not with_grad:
            return LoopOutputs([], carries, loss, out, [])
        d_probes: list[Tensor] = []
        if plan.sliding is not None:
            sequences = [*x, *saved[0]]
            grads = reverse_windows(self, plan.sliding, self.windows, invariants, sequences, d_outs)
        else:
            grads, d_probes = self._reverse(bounds, invariants, x, saved, d_outs, loss, early)
        if plan.finish is not None:
            d_prepared = plan.of_prepared(grads, len(fixed))
            grads += self.call("finish", plan.finish, [*fixed, *d_prepared])
        return LoopOutputs(grads, carries, loss, out, d_probes)

    def _reverse(
        self,
        bounds: list[tuple[int, int]],
        invariants: list[Tensor],
        x: list[Tensor],
        saved: list[list[Tensor]],
        d_outs: list[Tensor],
        loss: Tensor,
        early: EarlyGradients | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradient of each trained invariant, and that of each probe at every step.

        The last chunk comes first; the gradients of invariants are summed over the chunks.
        """
        loop = self.reverse
        d_carries = self.plan.loops.zero_gradients(x[0].device)
        n_carries, n_probes = len(d_carries), len(loop.loop.stacked)
        sums: list[Tensor] = []
        probes: list[list[Tensor]] = []
        for first, last in reversed(bounds):
            x_chunk, d_chunk = x, d_outs
            if len(bounds) > 1:
                x_chunk, d_chunk = ([leaf[first:last] for leaf in part] for part in (x, d_outs))
            sequences = [*x_chunk, *saved.pop(), *d_chunk]
            if early is not None and first == 0:
                grads = reverse_in_parts(self, early, loss, invariants, sequences, d_carries, sums)
                return grads, []
            result = self.run_chunk("reverse", loop, invariants, sequences, d_carries)
            d_carries = result[:n_carries]
            probes.insert(0, result[n_carries : n_carries + n_probes])
            chunk_sums = result[n_carries + n_probes :]
            sums = [p + q for p, q in zip(sums, chunk_sums, strict=True)] if sums else chunk_sums
        return sums, [_joined(chunks) for chunks in zip(*probes, strict=True)]

    def _of_params(self, grads: list[Tensor]) -> list[Tensor]:
        """The parameters' gradients, zero for those that have none.

        ``grads``: of the trained invariants, then of the parameters that the preparation reads.
        """
        plan, s = self.plan, self.plan.signature
        trained = plan.loops.trained_invariants
        by_index = dict(zip(trained, grads, strict=False))
        if plan.preparation is not None and plan.preparation.finish is not None:
            for i, grad in zip(plan.preparation.trained, grads[len(trained) :], strict=True):
                by_index[i] = by_index[i] + grad
        axes = [level.size for level in reversed(s.levels)]
        of_params: list[Tensor] = []
        seen: set[int] = set()
        for i, leaf in enumerate(s.params):
            if i in by_index:
                grad = by_index[i]
            else:
                grad = torch.zeros((*axes, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
            grad = grad.contiguous()
            if grad.data_ptr() in seen:  # equal gradients, such as of b_ih and b_hh, share memory
                grad = grad.clone()
            seen.add(grad.data_ptr())
            of_params.append(grad)
        return of_params

    def _parts(self, state: list[Tensor]) -> list[Tensor]:
        """The parts of the state, each with the axis of every level of vmap."""
        s, parts = self.plan.signature, []
        shared = 1 if s.shared is not None else 0
        for leaf, info, packing in zip(state, s.state, self.plan.packings, strict=True):
            for i, level in enumerate(reversed(s.levels)):
                if not info.batched[len(s.levels) - 1 - i]:
                    leaf = leaf.unsqueeze(i).expand(*leaf.shape[:i], level.size, *leaf.shape[i:])
            if s.shared is not None and not info.shared:
                i = len(s.levels)
                leaf = leaf.unsqueeze(i).expand(*leaf.shape[:i], s.shared.size, *leaf.shape[i:])
            parts += packing.unpack(leaf.detach(), len(s.levels) + shared)
        return [part.contiguous() for part in parts]

    def _packed(self, parts: list[Tensor]) -> list[Tensor]:
        """The leaves of the state, from their parts."""
        s, leaves, rest = self.plan.signature, [], list(parts)
        axes = len(s.levels) + (1 if s.shared is not None else 0)
        for packing in self.plan.packings:
            leaves.append(packing.pack(rest[: packing.count], axes))
            rest = rest[packing.count :]
        return leaves


def _joined(chunks: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(chunks) if len(chunks) > 1 else chunks[0]


def _chunks(steps: int, chunk: int) -> list[tuple[int, int]]:
    """Bounds of nearly equal chunks of about ``chunk`` steps; a few may be half as long again."""
    count = max(1, round(steps / chunk))
    edges = [steps * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _in_shared_memory(loop: Loop, outs: int) -> set[int]:
    """The outputs that are an input, the same at every step, or in the memory of another output."""
    varying = reachable_from([*loop.sequences, *loop.carries], loop.graph.nodes)
    # The states before and after the steps are in one tensor.
    after = dict(zip(loop.next_carries, loop.carries, strict=True))
    seen: set[Node] = set()
    shared = set()
    for i, node in enumerate(loop.stacked[:outs]):
        owner = owner_of(node, {*after, *loop.carries})
        owner = after.get(owner, owner)
        if node not in varying or owner_of(node) in loop.sequences or owner in seen:
            shared.add(i)
        seen.add(owner)
    return shared


def _passing_bytes(distributed: DistributedLoop) -> int:
    """Bytes per step that live only inside a chunk: what blocks hand to each other."""
    stored: set[Node] = {*distributed.loop.stacked, *distributed.loop.sequences}
    made: set[Node] = set()
    for block in distributed.blocks:
        if isinstance(block, MapBlock):
            made |= set(block.outputs)
        elif isinstance(block, ScanBlock):
            made |= set(block.emits)
    return sum(nbytes(node) for node in made - stored)
