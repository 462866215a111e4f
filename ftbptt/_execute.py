"""A plan and a backend -> a segment that runs, in chunks of steps.

Long segments run chunk by chunk, so that what only lives inside a chunk (projected inputs, the
gradients of the gates) does not grow with K, and stays in the cache. A small cell's segment is one
program from the parameters to their gradients: there, what a call costs counts most.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ._early_gradients import can_hand_over, reverse_in_parts
from ._output import EarlyGradients
from ._programs import Programs
from ._sliding_window import reverse_windows
from .backends import Backend
from .compiler.adjoint import Loop
from .compiler.distribute import DistributedLoop, MapBlock, ScanBlock
from .compiler.graphs import Node, nbytes, owner_of, reachable_from
from .compiler.plan import Plan
from .compiler.program import run_loop

# What lives only inside a chunk should stay in a CPU's outer cache; but each chunk costs something
# that more threads do not make less. With ``recompute`` memory counts more than time.
_CHUNK_BYTES = 36 << 20
_CHUNK_BYTES_RECOMPUTE = 16 << 20
# A GPU wants as much at once as its memory holds without noticing.
_CHUNK_BYTES_GPU = 1 << 30
_LEAST_STEPS = 16
# A step that hands on so little is not worth cutting, at any length.
_UNCUT_BYTES = 64 << 10
# Gradients of the trained invariants, parts of the state, loss, outputs, gradients at every step.
Result = tuple[list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]]


class Executable(Programs):
    """Runs segments of one plan on one backend; each function is built when first needed."""

    def __init__(self, plan: Plan, backend: Backend, count_compile: Callable[[], None]) -> None:
        super().__init__(plan, backend, count_compile)
        self.instead: Executable | None = None  # what runs since this one has failed
        self.shared_outs = _in_shared_memory(plan.loops.forward, plan.loops.outs)
        per_step = max(_passing_bytes(self.forward), _passing_bytes(self.reverse), 1)
        most = _CHUNK_BYTES_RECOMPUTE if plan.recompute else _CHUNK_BYTES
        if plan.signature.x[0].device.type == "cuda":
            most = _CHUNK_BYTES_GPU
        self.chunk = max(_LEAST_STEPS, most // per_step)
        if plan.sliding is not None:  # windows that run at once
            self.windows = max(1, self.chunk // plan.sliding.length)
        self.uncut = per_step <= _UNCUT_BYTES and plan.sliding is None

    def run(
        self,
        groups: dict[str, list[Tensor]],
        *,
        with_grad: bool,
        early: EarlyGradients | None = None,
    ) -> list[Tensor]:
        """``[*grads, *state, loss, *out, *d_probes]``, without gradients if not ``with_grad``."""
        inputs = self.inputs(groups)
        one_by_one = None if self.uncut or not can_hand_over(self.plan) else early
        if self.uncut:
            grads, carries, loss, out, d_probes = self._whole(*inputs, with_grad)
        else:
            grads, carries, loss, out, d_probes = self._chunked(*inputs, with_grad, one_by_one)
        state = self._packed(carries)
        if self.shared_outs:
            out = [leaf.clone() if i in self.shared_outs else leaf for i, leaf in enumerate(out)]
        grads = self._of_params(grads) if with_grad else []
        if early is not None and one_by_one is None:
            for part in early.parts:
                early.ready(loss, [grads[i] for i in part])
        return [*grads, *state, loss, *out, *d_probes]

    def inputs(
        self, groups: dict[str, list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """What the loops are given: invariants, the step's inputs, the loss's, the carries."""
        captures = self.plan.captures
        given = [*groups["params"], *groups["buffers"], *captures, *groups["initial_state"]]
        x = [*groups["x"], *groups["reset"], *groups["mask"]]
        return given, x, [*groups["y"], *groups["mask"]], self._parts(groups["state"])

    def _whole(
        self,
        given: list[Tensor],
        x: list[Tensor],
        rest: list[Tensor],
        carries: list[Tensor],
        with_grad: bool,
    ) -> Result:
        """The segment as one program."""
        plan = self.plan
        key, graphs = plan.loss.graphs_for(x[0].shape[0])
        loss_graph = graphs.joint if with_grad else graphs.value
        n_given, n_x, n_rest, n_outs = len(given), len(x), len(rest), plan.loops.outs

        def function(*args: Tensor) -> list[Tensor]:
            given, sequences = args[:n_given], args[n_given : n_given + n_x + n_rest]
            carries, x, rest = args[n_given + n_x + n_rest :], sequences[:n_x], sequences[n_x:]
            steps = x[0].shape[0]
            prepared = plan.preparation.prepare(*given) if plan.preparation is not None else []
            invariants = [*given, *prepared]
            loop = self.forward if with_grad else self.evaluate
            finals, stacked, _ = run_loop(
                loop, self.backend.run_scan, invariants, x, carries, steps
            )
            out, saved = stacked[:n_outs], stacked[n_outs:]
            if not with_grad:
                return [*finals, *loss_graph(*out, *rest), *out]
            loss, *d_outs = loss_graph(*out, *rest)
            _, d_probes, sums = run_loop(
                self.reverse,
                self.backend.run_scan,
                invariants,
                [*x, *saved, *d_outs],
                self.zero_gradients(x[0].device),
                steps,
            )
            d_prepared = [
                sums[i] for i, at in enumerate(plan.loops.trained_invariants) if at >= n_given
            ]
            finish = plan.preparation.finish if plan.preparation is not None else None
            more = finish(*given, *d_prepared) if finish is not None else []
            return [*sums, *more, *finals, loss, *out, *d_probes]

        name = ("segment" if with_grad else "evaluate", key)
        if name not in self.functions:
            last = n_given + n_x + n_rest if key is None else n_given
            self.build_once(name, function, [*given, *x, *rest, *carries], n_given, last)
        result = self.functions[name](*given, *x, *rest, *carries)
        n_probes = len(self.reverse.loop.stacked) if with_grad else 0
        result, d_probes = result[: len(result) - n_probes], result[len(result) - n_probes :]
        n_grads = len(result) - len(carries) - 1 - n_outs
        grads, result = result[:n_grads], result[n_grads:]
        n = len(carries)
        return grads, result[:n], result[n], result[n + 1 :], d_probes

    def _chunked(
        self,
        given: list[Tensor],
        x: list[Tensor],
        rest: list[Tensor],
        carries: list[Tensor],
        with_grad: bool,
        early: EarlyGradients | None,
    ) -> Result:
        """The segment in chunks of steps: all forward, the loss, all in reverse."""
        plan = self.plan
        prepared: list[Tensor] = []
        if plan.preparation is not None:
            prepared = self.call("prepare", plan.preparation.prepare, given)
        invariants = [*given, *prepared]
        steps = x[0].shape[0]
        # The windows of a sliding gradient read from all steps.
        bounds = _chunks(steps, self.chunk if plan.sliding is None else steps)

        loop = self.forward if with_grad else self.evaluate
        outs: list[list[Tensor]] = []
        saved: list[list[Tensor]] = []
        for a, b in bounds:
            own = [t[a:b] for t in x] if len(bounds) > 1 else x
            result = self.run_chunk(
                "forward" if with_grad else "evaluate", loop, invariants, own, carries
            )
            carries = result[: len(carries)]
            outs.append(result[len(carries) : len(carries) + plan.loops.outs])
            saved.append(result[len(carries) + plan.loops.outs :])
        out = [torch.cat(own) if len(own) > 1 else own[0] for own in zip(*outs, strict=True)]
        key, graphs = plan.loss.graphs_for(steps)
        graph = graphs.joint if with_grad else graphs.value
        name = ("loss", with_grad, key)
        loss, *d_outs = self.call(name, graph, [*out, *rest], time=True)
        if not with_grad:
            return [], carries, loss, out, []
        if plan.sliding is not None:
            sequences = [*x, *saved[0]]
            grads = reverse_windows(self, plan.sliding, self.windows, invariants, sequences, d_outs)
            d_probes: list[Tensor] = []
        else:
            grads, d_probes = self._reverse(bounds, invariants, x, saved, d_outs, loss, early)
        if plan.preparation is not None and plan.preparation.finish is not None:
            trained = plan.loops.trained_invariants
            d_prepared = [grad for grad, at in zip(grads, trained, strict=True) if at >= len(given)]
            grads += self.call("finish", plan.preparation.finish, [*given, *d_prepared])
        return grads, carries, loss, out, d_probes

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
        """The gradients of each trained invariant, summed over the chunks, the last first.

        And those of each probe, at every step.
        """
        loop = self.reverse
        d_carries = self.zero_gradients(x[0].device)
        sums: list[Tensor] = []
        stacked: list[list[Tensor]] = []
        for a, b in reversed(bounds):
            whole = len(bounds) == 1
            own = [*x, *d_outs] if whole else [t[a:b] for t in (*x, *d_outs)]
            sequences = [*own[: len(x)], *saved.pop(), *own[len(x) :]]
            if early is not None and a == 0:
                return reverse_in_parts(
                    self, early, loss, invariants, sequences, d_carries, sums
                ), []
            result = self.run_chunk("reverse", loop, invariants, sequences, d_carries)
            n, n_probes = len(d_carries), len(loop.loop.stacked)
            d_carries, chunk_sums = result[:n], result[n + n_probes :]
            stacked.insert(0, result[n : n + n_probes])
            sums = [p + q for p, q in zip(sums, chunk_sums, strict=True)] if sums else chunk_sums
        return sums, [torch.cat(own) for own in zip(*stacked, strict=True)]

    def _of_params(self, grads: list[Tensor]) -> list[Tensor]:
        """From the trained invariants' gradients to the parameters', zero where there is none.

        ``grads``: those that the reverse loop sums, then those that come through the preparation.
        """
        plan, s = self.plan, self.plan.signature
        trained = plan.loops.trained_invariants
        by_index = dict(zip(trained, grads, strict=False))
        if plan.preparation is not None and plan.preparation.finish is not None:
            for i, grad in zip(plan.preparation.trained, grads[len(trained) :], strict=True):
                by_index[i] = by_index[i] + grad
        axes = [level.size for level in reversed(s.levels)]
        found: list[Tensor] = []
        seen: set[int] = set()
        for i, leaf in enumerate(s.params):
            if i in by_index:
                grad = by_index[i]
            else:
                grad = torch.zeros((*axes, *leaf.shape), dtype=leaf.dtype, device=leaf.device)
            grad = grad.contiguous()
            if grad.data_ptr() in seen:  # two equal gradients, as of b_ih and b_hh: each its own
                grad = grad.clone()
            seen.add(grad.data_ptr())
            found.append(grad)
        return found

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
        s, leaves, rest = self.plan.signature, [], list(parts)
        axes = len(s.levels) + (1 if s.shared is not None else 0)
        for packing in self.plan.packings:
            leaves.append(packing.pack(rest[: packing.count], axes))
            rest = rest[packing.count :]
        return leaves


def _chunks(steps: int, chunk: int) -> list[tuple[int, int]]:
    """Bounds of nearly equal chunks of about ``chunk`` steps; a few may be half as long again."""
    count = max(1, round(steps / chunk))
    edges = [steps * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _in_shared_memory(loop: Loop, outs: int) -> set[int]:
    """The outputs that are an input, the same at every step, or in the memory of another output."""
    varying = reachable_from([*loop.sequences, *loop.carries], loop.graph.nodes)
    # The states before and after the steps lie in one history.
    after = dict(zip(loop.next_carries, loop.carries, strict=True))
    seen: set[Node] = set()
    found = set()
    for i, node in enumerate(loop.stacked[:outs]):
        owner = owner_of(node, {*after, *loop.carries})
        owner = after.get(owner, owner)
        if node not in varying or owner_of(node) in loop.sequences or owner in seen:
            found.add(i)
        seen.add(owner)
    return found


def _passing_bytes(distributed: DistributedLoop) -> int:
    """Bytes a step that live only inside a chunk: what blocks hand to each other."""
    kept: set[Node] = {*distributed.loop.stacked, *distributed.loop.sequences}
    made: set[Node] = set()
    for block in distributed.blocks:
        if isinstance(block, MapBlock):
            made |= set(block.outputs)
        elif isinstance(block, ScanBlock):
            made |= set(block.emits)
    return sum(nbytes(node) for node in made - kept)
