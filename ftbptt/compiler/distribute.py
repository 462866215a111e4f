"""Loop -> blocks: loop distribution (Allen and Kennedy 1987) on the graph of one step.

"Next state j reads state i" is a graph on the carries; its strongly connected components are the
only true recurrences. In topological order each becomes a scan block, which holds just the nodes
on a path from its own carries to its own next carries. Everything else is a map block, batched
over time. A carry that never feeds itself is a shift of a sequence: no loop at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import networkx as nx
from torch import fx

from .adjoint import Loop
from .fusion import Fusion, fused_nodes, keeps_rows
from .graphs import (
    CHEAP,
    VIEWS,
    Node,
    aten,
    extract,
    inputs_of,
    is_getitem,
    is_random,
    is_tuple,
    nbytes,
    needed_for,
    reachable_from,
    value_of,
)
from .time_batching import for_any_length
from .time_reduction import Term, time_sum


@dataclass
class MapBlock:
    """Needs no carry of its own: all K steps in one batched call.

    ``module(*invariants, *sequences) -> [*outputs]`` is one step of it, and ``batched`` the same
    in operations that vmap well over time.
    """

    invariants: list[Node]
    sequences: list[Node]
    outputs: list[Node]
    module: fx.GraphModule
    batched: fx.GraphModule


@dataclass(eq=False)
class ScanBlock:
    """A true recurrence: K dependent steps.

    ``module(*invariants, *sequences, *carries) -> [*next carries, *emits]`` is one step of it.
    ``history`` flags the carries whose value at every step is read elsewhere. ``linear``: the next
    carry is elementwise affine in the carry. ``totals``, behind the emits in the module, are sums
    over the rows that are handed back summed over the steps.
    """

    carries: list[Node]
    next_carries: list[Node]
    invariants: list[Node]
    sequences: list[Node]
    emits: list[Node]
    history: list[bool]
    linear: bool
    module: fx.GraphModule
    totals: list[Node] = field(default_factory=list)


@dataclass
class ShiftBlock:
    """A carry that is a value of the step before (a delay line): its sequence is a shift."""

    carry: Node
    source: Node


Block = MapBlock | ScanBlock | ShiftBlock


@dataclass
class DistributedLoop:
    """A loop as blocks in the order they run, and the sums over its steps.

    ``hoisted(*invariants) -> values of hoisted_nodes`` runs once, before the blocks.
    """

    loop: Loop
    hoisted_nodes: list[Node]
    hoisted: fx.GraphModule | None
    blocks: list[Block]
    sums: list[Term]


@dataclass
class _Analysis:
    """What each node of the loop depends on, and where in the order of blocks it runs."""

    loop: Loop
    order: list[Node]
    varying: set[Node]
    hoisted: list[Node]
    components: list[list[int]] = field(default_factory=list)
    recurrent: list[bool] = field(default_factory=list)
    cores: list[set[Node]] = field(default_factory=list)
    stage: dict[Node, int] = field(default_factory=dict)
    fused: set[Node] = field(default_factory=set)  # what the cores hold besides the recurrences
    totals: list[list[Node]] = field(default_factory=list)


def distribute(loop: Loop, fusion: Fusion | None = None) -> DistributedLoop:
    """distribute : Loop, what its recurrences can take in -> DistributedLoop

    A 3-layer LSTM becomes three scan blocks, with the input GEMM of each layer in a map between.
    """
    inputs = [*loop.invariants, *loop.sequences, *loop.carries]
    random = [n for n in loop.graph.nodes if n.op == "call_function" and is_random(n)]
    varying = reachable_from([*loop.sequences, *loop.carries, *random], loop.graph.nodes)
    sums = [time_sum(node, varying, set(inputs)) for node in loop.summed]
    leaves = [leaf for term in sums for leaf in term.leaves()]
    wanted = [*loop.next_carries, *loop.stacked, *leaves]
    needed = needed_for(wanted, stop=inputs)
    needed |= {
        u for n in needed if is_tuple(n) for u in n.users if any(v in needed for v in u.users)
    }
    order = [n for n in loop.graph.nodes if n in needed and n not in set(inputs)]
    hoisted = [n for n in order if n not in varying and _is_heavy(n, inputs)]
    hoisted = [n for n in hoisted if n in wanted or any(u in varying for u in n.users)]
    found = _Analysis(loop, [n for n in order if n in varying], varying, hoisted)
    _find_components(found)
    _assign_stages(found)
    if fusion is not None:
        for p in (p for p, recurrent in enumerate(found.recurrent) if recurrent):
            sums = _fuse(found, p, sums, fusion)
    blocks = _make_blocks(found, _at_every_step(found, sums))
    module = extract(loop.invariants, hoisted, loop.graph) if hoisted else None
    return DistributedLoop(loop, hoisted, module, blocks, sums)


def _at_every_step(found: _Analysis, sums: list[Term]) -> set[Node]:
    """Values that must exist as a sequence, whichever block makes them."""
    loop, pairs = found.loop, zip(found.components, found.recurrent, strict=True)
    shifted = {loop.next_carries[own[0]] for own, recurrent in pairs if not recurrent}
    return {*loop.stacked, *shifted, *(leaf for term in sums for leaf in term.leaves())}


def _fuse(found: _Analysis, p: int, sums: list[Term], fusion: Fusion) -> list[Term]:
    """Moves into a recurrence what it can take in of the map after it, and of the sums."""
    core, stage, (carries, afters) = found.cores[p], dict(found.stage), _carried(found, p)
    inside = {*core, *carries, *afters}
    behind = [n for n in found.order if stage[n] == 2 * p + 2]
    terms = (term for whole in sums for term in whole.all() if term.kind == "rows")
    totals = {term.node for term in terms if term.operands[0] in {*inside, *behind}}
    own, rows = {*core, *behind, *totals}, value_of(carries[0]).shape[:-1]

    def can_move(node: Node) -> bool:
        return node in totals or (fusion.operation(node) and keeps_rows(node, rows))

    def read_elsewhere(node: Node) -> bool:
        return any(user in stage and user not in own for user in node.users)

    kept = _at_every_step(found, [term.with_totals(totals) for term in sums])
    moved = fused_nodes(inside, [*behind, *totals], can_move, read_elsewhere, kept)
    if not moved:
        return sums
    fewer = [term.with_totals(moved) for term in sums]
    found.cores[p] = core | (moved - totals)
    found.stage.update(dict.fromkeys(moved - totals, 2 * p + 1))
    found.fused |= moved
    found.totals[p] = [n for n in found.loop.graph.nodes if n in moved & totals]
    block = _scan_block(found, p, _at_every_step(found, fewer))
    block.history = [True] * len(carries)
    if fusion.loop(block, found.loop.reverse):
        return fewer
    found.cores[p], found.stage, found.totals[p] = core, stage, []
    found.fused -= moved
    return sums


def _is_heavy(node: Node, inputs: list[Node]) -> bool:
    """Work on invariants that a block should not repeat: not a view, not a constant."""
    light = {*VIEWS, aten.full.default, aten.scalar_tensor.default, aten.arange.start_step}
    return any(n.target not in light and n not in inputs for n in needed_for([node], stop=inputs))


def _find_components(found: _Analysis) -> None:
    loop = found.loop
    reads = {carry: 1 << i for i, carry in enumerate(loop.carries)}
    for node in found.order:
        mask = 0
        for arg in inputs_of(node):
            mask |= reads.get(arg, 0)
        reads[node] = mask
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(loop.carries)))
    for j, after in enumerate(loop.next_carries):
        mask = reads.get(after, 0)
        graph.add_edges_from((i, j) for i in range(len(loop.carries)) if mask >> i & 1)
    condensed = nx.condensation(graph)
    members = nx.get_node_attributes(condensed, "members")
    ready = nx.lexicographical_topological_sort(condensed, key=lambda c: min(members[c]))
    for component in ready:
        own = sorted(members[component])
        found.components.append(own)
        carries, afters = _carried(found, len(found.components) - 1)
        found.recurrent.append(len(own) > 1 or graph.has_edge(own[0], own[0]))
        core: set[Node] = set()
        if found.recurrent[-1]:
            stop = [*loop.invariants, *loop.sequences, *loop.carries]
            from_carry = reachable_from(carries, found.order) - set(loop.carries)
            core = from_carry & needed_for(afters, stop=stop)
            core |= {u for n in core if is_tuple(n) for u in n.users if u in from_carry}
        found.cores.append(core)
        found.totals.append([])


def _assign_stages(found: _Analysis) -> None:
    """Even stages are maps, odd ones the components; a node runs as early as its inputs allow."""
    loop, stage = found.loop, found.stage
    core_of = {node: p for p, core in enumerate(found.cores) for node in core}
    after_carry = {
        loop.carries[i]: 2 * p + 2 for p, own in enumerate(found.components) for i in own
    }
    for node in found.order:
        if node in core_of:
            stage[node] = 2 * core_of[node] + 1
            continue
        earliest = 0
        for arg in inputs_of(node):
            arg_stage = after_carry.get(arg, stage.get(arg, 0))
            earliest = max(earliest, arg_stage + arg_stage % 2)
        stage[node] = earliest
        if is_getitem(node):  # with its operation, in the same block
            stage[node] = stage.get(node.args[0], earliest)


def _carried(found: _Analysis, p: int) -> tuple[list[Node], list[Node]]:
    """The carries of a component, and what they become."""
    loop, own = found.loop, found.components[p]
    return [loop.carries[i] for i in own], [loop.next_carries[i] for i in own]


def _make_blocks(found: _Analysis, wanted: set[Node]) -> list[Block]:
    at_every_step = set(wanted)
    recurrences: list[ScanBlock | ShiftBlock] = []
    for p, recurrent in enumerate(found.recurrent):
        if recurrent:
            block = _scan_block(found, p, wanted)
            at_every_step |= set(block.sequences)
            recurrences.append(block)
        else:
            (carry,), (after,) = _carried(found, p)
            recurrences.append(ShiftBlock(carry, after))
    maps: dict[int, list[Node]] = {}
    for node in found.order:
        if found.stage[node] % 2 == 0:
            maps.setdefault(found.stage[node], []).append(node)
    # A map whose every value went into a loop has nothing left to do: build the maps from the
    # last to the first, so that what a later one reads is known.
    blocks: list[Block] = []
    for stage in reversed(range(2 * len(found.components) + 1)):
        if stage % 2:
            blocks.append(recurrences[stage // 2])
            continue
        outputs = [n for n in maps.get(stage, []) if n in at_every_step and not is_tuple(n)]
        if outputs:
            batched = _map_block(found, outputs, set(maps[stage]))
            at_every_step |= set(batched.sequences)
            blocks.append(batched)
    for scan in recurrences:
        if isinstance(scan, ScanBlock):
            pairs = zip(scan.carries, scan.next_carries, strict=True)
            scan.history = [not at_every_step.isdisjoint(pair) for pair in pairs]
    return blocks[::-1]


def _scan_block(found: _Analysis, p: int, wanted: set[Node]) -> ScanBlock:
    core, totals, (carries, afters) = found.cores[p], found.totals[p], _carried(found, p)
    body = _sink(found, core, set(carries))
    outside = {arg for n in body for arg in inputs_of(n)} - body - set(carries)
    sequences = [n for n in _ordered(found, outside) if n in found.varying]
    emits = [
        n
        for n in found.order
        if n in core
        and n not in afters
        and not is_tuple(n)
        and (n in wanted or any(user in found.stage and user not in core for user in n.users))
    ]
    # A view of a parameter is made once, before the loop, so that a backend can lay it out well.
    read = {a for n in body for a in inputs_of(n)} | set(afters)
    invariants = _ordered(
        found, {n for n in read - found.varying if n.op == "placeholder" or inputs_of(n)}
    )
    inputs, results = [*invariants, *sequences, *carries], [*afters, *emits, *totals]
    module = extract(inputs, results, found.loop.graph)
    linear = len(carries) == 1 and _is_linear(carries[0], core - found.fused)
    return ScanBlock(carries, afters, invariants, sequences, emits, [], linear, module, totals)


def _sink(found: _Analysis, core: set[Node], carries: set[Node]) -> set[Node]:
    """Cheap work of maps that only feeds the loop is done in it: what it reads never grows."""
    body = set(core)

    def reads() -> set[Node]:
        return {a for n in body for a in inputs_of(n) if a in found.varying} - body - carries

    def new(node: Node) -> frozenset[Node]:
        return frozenset(a for a in inputs_of(node) if a in found.varying) - before

    before = reads()
    changed = True
    while changed:
        changed = False
        mapped = (n for n in before if found.stage.get(n, 1) % 2 == 0)
        able = [n for n in mapped if n.target in CHEAP | VIEWS]
        by_new: dict[frozenset[Node], list[Node]] = {}  # such as all chunks of one value
        for node in sorted(able, key=lambda n: n.name):
            by_new.setdefault(new(node), []).append(node)
        for inputs, same in by_new.items():
            if sum(map(nbytes, inputs)) <= sum(map(nbytes, same)):
                body.update(same)
                before = reads()
                changed = True
                break
    return body


def _map_block(found: _Analysis, outputs: list[Node], own: set[Node]) -> MapBlock:
    inside, stack = set(), list(outputs)
    while stack:
        node = stack.pop()
        if node in own and node not in inside:
            inside.add(node)
            stack.extend(inputs_of(node))
    outside = {arg for n in inside for arg in inputs_of(n)} - inside
    sequences = [n for n in _ordered(found, outside) if n in found.varying]
    invariants = _invariants(found, inside)
    module = extract([*invariants, *sequences], outputs, found.loop.graph)
    return MapBlock(invariants, sequences, outputs, module, for_any_length(module))


def _ordered(found: _Analysis, nodes: set[Node]) -> list[Node]:
    return [n for n in found.loop.graph.nodes if n in nodes]


def _invariants(found: _Analysis, nodes: Iterable[Node]) -> list[Node]:
    """The invariants a block reads: parameters and hoisted work; views of them are its own."""
    stop = {*found.loop.invariants, *found.hoisted}
    read = needed_for(
        [a for n in nodes for a in [n, *inputs_of(n)] if a not in found.varying], stop
    )
    return _ordered(found, read & stop)


_LINEAR = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default,
           aten.where.self}  # fmt: skip


def _is_linear(carry: Node, core: set[Node]) -> bool:
    """Whether each node of the core is elementwise affine in the one carry."""
    inside = core | {carry}
    shape = value_of(carry).shape
    for node in core:
        if node.target not in _LINEAR or value_of(node).shape != shape:
            return False
        if sum(arg in inside for arg in node.args) != 1:
            return False
        if node.target is aten.div.Tensor and node.args[0] not in inside:
            return False
        if node.target is aten.where.self and node.args[0] in inside:
            return False
    return bool(core)
