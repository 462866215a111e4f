"""A plan and a backend -> a segment that runs, in chunks of steps.

Long segments run chunk by chunk, so that what only lives inside a chunk (projected inputs, the
gradients of the gates) does not grow with K, and stays in the cache. A small cell's segment is one
program from the parameters to their gradients: there, what a call costs counts most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .._trees import in_groups
from ..backends import Backend
from ..compiler.adjoint import Loop
from ..compiler.blocks import DistributedLoop, MapBlock, ScanBlock
from ..compiler.graphs import Node, aten, nbytes, owner_of, reachable_from
from ..compiler.loss import ANY_STEPS
from ..compiler.plan import Plan
from ..contract.output import EarlyGradients
from .early_gradients import can_hand_over, hand_over, reverse_in_parts
from .phases import Chunk, Forward, LoopInputs, LoopOutputs
from .programs import Builder, Count, Programs
from .reverse_windows import reverse_windows

# What lives only inside a chunk should fit in a CPU's outer cache; but each chunk has a cost that
# more threads do not lower. Nor does the allocator keep a larger tensor for the next segment, see
# ``backends.compile``. With ``recompute`` memory matters more than time.
_CHUNK_BYTES = 30 << 20
_CHUNK_BYTES_RECOMPUTE = 16 << 20
# Each chunk reads the weights, and adds its gradients to those of the chunks before: it should have
# so many times their bytes.
_TIMES_GRADIENTS = 4
_TIMES_GRADIENTS_RECOMPUTE = 1
# A GPU is best given as much at once as its memory easily holds.
_CHUNK_BYTES_GPU = 1 << 30
# A segment whose blocks hand each other fewer bytes per step than this is never cut.
_UNCUT_BYTES = 64 << 10


class Executable(Programs):
    """Runs segments of one plan on one backend; each function is built when first needed."""

    def __init__(self, plan: Plan, backend: Backend, compiled: Count | None = None) -> None:
        super().__init__(plan, backend, compiled)
        self.instead: Executable | None = None  # runs the segments from now on
        loops = plan.loops
        self.shared_outs = _in_shared_memory(loops.forward, loops.outs)
        self.shared_probes = _in_shared_memory(loops.reverse, len(loops.reverse.stacked))
        bytes_per_step = max(_passing_bytes(self.forward), _passing_bytes(self.reverse), 1)
        most, times = _CHUNK_BYTES, _TIMES_GRADIENTS
        if plan.recompute:
            most, times = _CHUNK_BYTES_RECOMPUTE, _TIMES_GRADIENTS_RECOMPUTE
        most = max(most, times * sum(map(nbytes, plan.loops.reverse.summed)))
        if plan.signature.x[0].device.type == "cuda":
            most = _CHUNK_BYTES_GPU
        self.chunk = max(1, most // bytes_per_step)
        if plan.sliding is not None:
            self.windows = max(1, self.chunk // plan.sliding.length)  # that run at once
        # In one piece, and one program.
        is_small = bytes_per_step <= _UNCUT_BYTES
        self.uncut = is_small and plan.sliding is None and plan.loss.is_traced
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
        out, d_probes = (
            [leaf.clone() if i in shared else leaf for i, leaf in enumerate(leaves)]
            for leaves, shared in (
                (result.out, self.shared_outs), (result.d_probes, self.shared_probes)
            )
        )  # fmt: skip
        grads = self._of_params(result.grads) if with_grad else []
        if early is not None and in_parts is None:
            hand_over(early, result.loss, grads)
        return [*grads, *self._packed(result.carries), result.loss, *out, *d_probes]

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
        loss = self.plan.loss.graphs_for(inputs.x[0].shape[0]).program(with_grad)
        name = ("segment" if with_grad else "evaluate", loss.key)
        given = [*inputs, loss.captured]
        args = [tensor for group in given for tensor in group]
        if name not in self.functions:
            as_written, sizes = self.as_written, [len(group) for group in given]

            def function(*args: Tensor) -> list[Tensor]:
                *groups, captured = in_groups(args, sizes)
                own, own_loss = LoopInputs(*groups), loss._replace(captured=captured)
                result = as_written.run_phases(own, [None], own_loss, with_grad)
                return [
                    *result.grads, *result.carries, result.loss, *result.out, *result.d_probes
                ]  # fmt: skip

            first = len(inputs.fixed)
            last = first + len(inputs.x) + len(inputs.targets) if loss.key is ANY_STEPS else first
            self.build_at_once(lambda: self.build_once(name, function, args, first, last))
            self.build_once(name, function, args, first, last)
        flat = self.functions[name](*args)
        n_probes = len(self.reverse.loop.stacked) if with_grad else 0
        after_grads = [len(inputs.carries), 1, self.plan.loops.outs, n_probes]
        groups = in_groups(flat, [len(flat) - sum(after_grads), *after_grads])
        grads, carries, (value,), out, d_probes = groups
        return LoopOutputs(grads, carries, value, out, d_probes)

    def _run_in_chunks(
        self, inputs: LoopInputs, with_grad: bool, early: EarlyGradients | None
    ) -> LoopOutputs:
        steps = inputs.x[0].shape[0]
        # The windows of a sliding gradient read from all steps.
        chunks = _chunks(steps, self.chunk if self.plan.sliding is None else steps)
        loss = self.plan.loss.graphs_for(steps).program(with_grad)
        last_function = "reverse" if with_grad else "evaluate"
        if early is None and self.plan.sliding is None and last_function not in self.functions:
            self.begin_kernels(with_grad)
            self.build_at_once(lambda: Builder(self).run_phases(inputs, [None], loss, with_grad))
        return self.run_phases(inputs, chunks, loss, with_grad, early)

    def run_reverse(
        self,
        chunks: Sequence[Chunk],
        forward: Forward,
        d_outs: list[Tensor],
        loss: Tensor,
        early: EarlyGradients | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """In windows, or with gradients handed over from the first chunk, if that is asked for."""
        sliding, invariants = self.plan.sliding, forward.invariants
        if sliding is not None:
            sequences = [*forward.x, *forward.saved[0]]
            grads = reverse_windows(self, sliding, self.windows, invariants, sequences, d_outs)
            return grads, []
        if early is None:
            return super().run_reverse(chunks, forward, d_outs, loss, early)
        first, *later = chunks
        d_carries, sums, _ = self.reverse_chunks(later, forward, d_outs)
        sequences = forward.last_read(first, d_outs)
        return reverse_in_parts(self, early, loss, invariants, sequences, d_carries, sums), []

    def _of_params(self, grads: list[Tensor]) -> list[Tensor]:
        """The parameters' gradients, zero for those that have none.

        ``grads``: of the trained invariants, then of the parameters that the preparation reads.
        """
        plan, s = self.plan, self.plan.signature
        trained = plan.loops.trained_invariants
        by_index = dict(zip(trained, grads, strict=False))
        if plan.preparation is not None and plan.finish is not None:
            for i, grad in zip(plan.preparation.trained, grads[len(trained) :], strict=True):
                by_index[i] = by_index[i] + grad
        axes = [level.size for level in reversed(s.levels)]
        return [
            by_index[i].contiguous()
            if i in by_index
            else torch.zeros((*axes, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
            for i, leaf in enumerate(s.params)
        ]

    def _parts(self, state: list[Tensor]) -> list[Tensor]:
        """The parts of the state, each with the axis of every level of vmap."""
        s, parts = self.plan.signature, []
        axes = s.batch_axes
        for leaf, info, packing in zip(state, s.state, self.plan.packings, strict=True):
            for i, (level, has_axis) in enumerate(s.axes_of(info) if axes else ()):
                if not has_axis:
                    leaf = leaf.unsqueeze(i).expand(*leaf.shape[:i], level.size, *leaf.shape[i:])
            parts += packing.unpack(leaf, axes)
        return [part.contiguous() for part in parts]

    def _packed(self, parts: list[Tensor]) -> list[Tensor]:
        """The leaves of the state, from their parts."""
        packings, axes = self.plan.packings, self.plan.signature.batch_axes
        groups = in_groups(parts, [packing.count for packing in packings])
        return [p.pack(own, axes) for p, own in zip(packings, groups, strict=True)]


def _chunks(steps: int, chunk: int) -> list[Chunk]:
    """Nearly equal chunks of about ``chunk`` steps; a few may be half as long again."""
    count = max(1, round(steps / chunk))
    edges = [steps * i // count for i in range(count + 1)]
    return [None] if count == 1 else [slice(*bounds) for bounds in pairwise(edges)]


# Views of which several elements may lie at one place in memory.
_OVERLAPPING = {aten.expand.default, aten.unfold.default, aten.as_strided.default}


def _in_shared_memory(loop: Loop, outs: int) -> set[int]:
    """The outputs that are an input, the same at every step, or in the memory of another output.

    And those of which elements share memory: a caller may write to one of them.
    """
    varying = reachable_from([*loop.sequences, *loop.carries], loop.graph.nodes)
    # The states before and after the steps are in one tensor.
    after = dict(zip(loop.next_carries, loop.carries, strict=True))
    seen: set[Node] = set()
    shared = set()
    for i, node in enumerate(loop.stacked[:outs]):
        owner = owner_of(node, {*after, *loop.carries})
        owner = after.get(owner, owner)
        is_input = node not in varying or owner_of(node) in loop.sequences
        if is_input or owner in seen or _overlaps(node):
            shared.add(i)
        seen.add(owner)
    return shared


def _overlaps(node: Node) -> bool:
    owner = owner_of(node)
    while node is not owner:
        if node.target in _OVERLAPPING:
            return True
        node = node.args[0]
    return False


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
