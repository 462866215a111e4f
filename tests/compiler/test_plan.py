"""What the compiler makes of a step: blocks, GEMMs and saved values are counted in the plan."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ftbptt
from ftbptt import Explanation, make_train_segment

from ..cells.problems import named

B, D, H, K = 3, 5, 7, 4


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def plan(step: Any, params: Any, state: Any, out: int = H, **options: Any) -> Explanation:
    segment = make_train_segment(step, mse, backend="eager", **options)
    return segment.explain(params, state, torch.randn(K, B, D), torch.randn(K, B, out))


def kinds(explanation: Explanation, phase: str) -> list[str]:
    return [block.kind for block in explanation.blocks if block.phase == phase]


def scans(explanation: Explanation, phase: str) -> list[str]:
    return [b.title for b in explanation.blocks if b.phase == phase and "scan" in b.kind]


def test_its_graphs_are_of_one_class() -> None:
    """torch makes a subclass of Module for each; whenever Module is patched, all are gone through.

    What a trace leaves of them is collected.
    """

    def count(of: type) -> int:
        return 1 + sum(map(count, of.__subclasses__()))

    cell, segments, counts = nn.LSTMCell(D, H), [], []
    for _ in range(2):
        segments.append(make_train_segment(cell, mse, backend="eager"))
        data = torch.randn(K, B, D), torch.randn(K, B, H)
        segments[-1](dict(cell.named_parameters()), None, *data)
        gc.collect()
        counts.append(count(nn.Module))
    assert counts[0] == counts[1]


def test_a_stack_falls_apart_into_one_scan_per_layer() -> None:
    layers = nn.LSTM(D, H, num_layers=3)
    explanation = plan(layers, dict(layers.named_parameters()), None)
    assert kinds(explanation, "forward") == ["map", "scan", "map", "scan", "map", "scan", "map"]
    assert scans(explanation, "forward") == [
        f"over state[0][part {i}], state[1][part {i}]" for i in range(3)
    ]
    assert scans(explanation, "reverse") == [
        f"over d state[0][part {i}], d state[1][part {i}]" for i in (2, 1, 0)
    ]
    for block in explanation.blocks:
        if block.kind == "scan":  # only the recurrent product is left inside
            assert len(block.gemms) == 1
        if block.kind == "map" and block.phase == "forward":
            assert len(block.gemms) <= 1


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_unbatched_stack_falls_apart_too(kind: Any, batch_first: bool) -> None:
    layers = kind(D, H, num_layers=3, batch_first=batch_first)
    segment = make_train_segment(layers, mse, backend="eager")
    params = dict(layers.named_parameters())
    explanation = segment.explain(params, None, torch.randn(K, D), torch.randn(K, H))
    assert len(scans(explanation, "forward")) == len(scans(explanation, "reverse")) == 3


def test_one_gemm_per_weight_and_none_of_them_in_the_loop() -> None:
    cell = nn.LSTMCell(D, H)
    explanation = plan(cell, dict(cell.named_parameters()), None)
    (sums,) = [block for block in explanation.blocks if block.kind == "sum"]
    assert sorted(sums.gemms) == [
        f"[28, 3] @ [3, 5] contracted over {K} steps and rows at once",
        f"[28, 3] @ [3, 7] contracted over {K} steps and rows at once",
    ]
    (scan,) = [b for b in explanation.blocks if b.phase == "reverse" and b.kind == "scan"]
    assert scan.gemms == [f"[3, 28] @ [28, 7] {K} times"]


JOINED = {
    "matmul": lambda w, x, h: torch.cat([x, h], -1) @ w,
    "linear": lambda w, x, h: nn.functional.linear(torch.cat([x, h], 1), w.T.contiguous(), w[0]),
    "three parts": lambda w, x, h: torch.cat([x[:, :2], h, x[:, 2:]], -1) @ w,
    "parts of the state": lambda w, x, h: torch.cat([x, h[:, :3], h[:, 3:]], -1) @ w,
    "reshaped": lambda w, x, h: torch.cat([x[:, None], h[:, None]], -1).matmul(w)[:, 0],
}


@pytest.mark.parametrize("name", JOINED)
def test_the_input_beside_the_state_in_one_product_leaves_the_loop(name: str) -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(JOINED[name](params["w"], x_t, h))
        return h, h

    params = {"w": torch.randn(D + H, H)}
    explanation = plan(step, params, torch.zeros(B, H))
    for phase in ("forward", "reverse"):
        (scan,) = [b for b in explanation.blocks if b.phase == phase and b.kind == "scan"]
        assert scan.gemms == [f"[3, 7] @ [7, 7] {K} times"]
    (sums,) = [block for block in explanation.blocks if block.kind == "sum"]
    assert all("contracted" in gemm for gemm in sums.gemms)
    assert len(sums.gemms) == (3 if name == "three parts" else 2)


def test_each_layer_of_joined_products_keeps_only_its_state() -> None:
    def step(params: Any, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        low = torch.tanh(torch.cat([x_t, state[0]], -1) @ params["w"])
        high = torch.tanh(torch.cat([low, state[1]], -1) @ params["u"])
        return high, (low, high)

    params = {"w": torch.randn(D + H, H), "u": torch.randn(2 * H, H)}
    explanation = plan(step, params, (torch.zeros(B, H), torch.zeros(B, H)))
    loops = [b for b in explanation.blocks if b.kind == "scan"]
    assert [b.gemms for b in loops] == [[f"[3, 7] @ [7, 7] {K} times"]] * 4


@pytest.mark.parametrize("in_dims", [None, (None, 0, 1, 1)], ids=["unbatched", "in_dims"])
def test_joined_vectors(in_dims: Any) -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(params["w"] @ torch.cat([x_t, h]) + params["b"])
        return h, h

    params = {"w": torch.randn(H, D + H), "b": torch.randn(H)}
    segment = make_train_segment(step, mse, backend="eager", in_dims=in_dims)
    rows = (B,) if in_dims else ()
    data = torch.zeros(*rows, H), torch.randn(K, *rows, D), torch.randn(K, *rows, H)
    explanation = segment.explain(params, *data)
    loops = [b for b in explanation.blocks if b.kind == "scan"]
    assert [b.gemms for b in loops] == [[f"[{B if rows else 1}, 7] @ [7, 7] {K} times"]] * 2


def test_a_product_outside_the_loop_stays_one() -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["w"] + h @ params["u"])
        return torch.cat([x_t, h], -1) @ params["v"], h

    params = {"w": torch.randn(D, H), "u": torch.randn(H, H), "v": torch.randn(D + H, H)}
    explanation = plan(step, params, torch.zeros(B, H))
    gemms = [g for b in explanation.blocks if b.phase == "forward" for g in b.gemms]
    assert sorted(gemms) == [
        f"[3, 12] @ [12, 7] over {K} steps at once",
        f"[3, 5] @ [5, 7] over {K} steps at once",
        f"[3, 7] @ [7, 7] {K} times",
    ]


def test_work_on_parameters_alone_leaves_the_loop() -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["w"] + h @ (params["u"] @ params["u"].T))
        return h, h

    params = {"w": torch.randn(D, H), "u": torch.randn(H, H)}
    explanation = plan(step, params, torch.zeros(B, H))
    (prepared,) = [b for b in explanation.blocks if b.kind == "invariant"]
    assert prepared.gemms == ["[7, 7] @ [7, 7] once"]
    assert all("[7, 7] @ [7, 7]" not in g for b in explanation.blocks[1:] for g in b.gemms)


def test_a_delay_line_is_no_loop() -> None:
    def step(params: Any, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        older, old = state
        return (x_t + old + older) @ params["w"], (old, x_t)

    explanation = plan(step, {"w": torch.randn(D, H)}, (torch.zeros(B, D), torch.zeros(B, D)))
    assert kinds(explanation, "forward").count("shift") == 2
    assert scans(explanation, "forward") == scans(explanation, "reverse") == []


@pytest.mark.parametrize(
    "average", [lambda a, h, n: a * h + (1 - a) * n, lambda a, h, n: n + a * (h - n) - h + h]
)
def test_an_average_is_a_linear_scan_both_ways(average: Any) -> None:
    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = average(torch.sigmoid(x_t @ params["g"]), h, x_t @ params["w"])
        return h, h

    params = {"g": torch.randn(D, H), "w": torch.randn(D, H)}
    explanation = plan(step, params, torch.zeros(B, H))
    loops = [b for b in explanation.blocks if "scan" in b.kind]
    assert [(b.phase, b.kind, b.gemms) for b in loops] == [
        ("forward", "linear scan", []),
        ("reverse", "linear scan", []),
    ]


def test_top_down_feedback_ties_the_layers_into_one_scan() -> None:
    def step(params: Any, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        low = torch.tanh(x_t @ params["w"] + state["high"] @ params["u"])
        high = torch.tanh(low @ params["v"] + state["high"])
        return high, {"low": low, "high": high}

    params = {"w": torch.randn(D, H), "u": torch.randn(H, H), "v": torch.randn(H, H)}
    state = {"low": torch.zeros(B, H), "high": torch.zeros(B, H)}
    explanation = plan(step, params, state)
    assert scans(explanation, "forward") == ["over state['high']"]  # low does not feed itself
    assert "shift" in kinds(explanation, "forward")


def test_recompute_saves_the_state_alone() -> None:
    cell = nn.LSTMCell(D, H)
    params = dict(cell.named_parameters())
    saved, recomputed = plan(cell, params, None), plan(cell, params, None, recompute=True)
    assert saved.saved_bytes == K * B * H * 4 * 7  # i, f, g, o, tanh(c), c, h
    assert recomputed.saved == ["state[0]", "state[1]"]
    assert recomputed.saved_bytes == K * B * H * 4 * 2


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_and_their_gradients_are_counted(groups: int) -> None:
    """As torch counts the forward; each product has two gradients that take as much."""

    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options: Any = {"stride": 2, "padding": 1, "groups": groups}
            self.into = nn.Conv2d(4, 6, 3, **options)
            self.back = nn.ConvTranspose2d(6, 4, 3, **options)
            self.readout = nn.Linear(D, H)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x + self.back(torch.tanh(self.into(h))))
            return self.readout(h), h

    module, h, x = Convolutional(), torch.zeros(B, 4, D, D), torch.randn(K, B, 4, D, D)
    segment = make_train_segment(module, mse, backend="eager")
    explanation = segment.explain(named(module), h, x, torch.randn(K, B, 4, D, H))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        for x_t in x:
            _, h = module(x_t, h)
    assert explanation.flops == 3 * counted.get_total_flops()
    (sums,) = [block for block in explanation.blocks if block.kind == "sum"]
    assert len(sums.gemms) == 3  # one for each weight, over all steps


def test_explain_prints_every_block_and_runs_nothing() -> None:
    cell = nn.GRUCell(D, H)
    segment = make_train_segment(cell, mse)
    arguments = dict(cell.named_parameters()), None, torch.randn(K, B, D), torch.randn(K, B, H)
    text = str(segment.explain(*arguments))
    assert segment.compile_count == 0
    for word in (
        "GRUCell: K=4 steps, backend fused",
        "generated C++ kernel",
        "forward",
        "reverse",
        "scan",
        "GEMM",
        "saved",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("function", "backend"),
    [("compile.inductor_compile", "compile"), ("fused.make_row_loop", "fused")],
)
def test_auto_falls_back_to_eager_with_one_warning(
    function: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where code cannot be compiled, and where a kernel cannot be planned."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no compiler here")

    monkeypatch.setattr(f"ftbptt.backends.{function}", broken)
    cell = nn.GRUCell(D, H)
    arguments = dict(cell.named_parameters()), None, torch.randn(K, B, D), torch.randn(K, B, H)
    segment = make_train_segment(cell, mse)
    with pytest.warns(RuntimeWarning, match="fused backend failed for GRUCell.*no compiler"):
        result = segment(*arguments)
    torch.testing.assert_close(segment(*arguments), result)  # and no second warning
    expected = ftbptt.reference_segment(cell, mse, arguments[0], torch.zeros(B, H), *arguments[2:])
    torch.testing.assert_close(result.grads, expected.grads)
    with pytest.raises(OSError, match="no compiler"):
        make_train_segment(cell, mse, backend=backend)(*arguments)


def test_auto_does_not_fall_back_for_good_where_the_data_are_at_fault() -> None:
    """A token outside the vocabulary is an error on every backend; later calls run as before."""

    def step(params: Any, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(nn.functional.embedding(token, params["w"]) + h)
        return h, h

    params, h, y = {"w": torch.randn(5, H)}, torch.zeros(B, H), torch.randn(K, B, H)
    segment = make_train_segment(step, mse)
    tokens = torch.zeros(K, B, dtype=torch.int64)
    with pytest.raises(IndexError, match="index out of range"):
        segment(params, h, tokens + 5, y)
    segment(params, h, tokens, y)
    assert segment.explain(params, h, tokens, y).backend == "fused"


# In the order of the data flow; a package imports only from those before it.
PACKAGES = [
    "contract", "compiler", "kernels", "backends", "segment", "distributed", "training", "debug",
    "integrations",
]  # fmt: skip


def _imports() -> Iterator[tuple[str, str]]:
    """Which module of this package imports which."""
    package = Path(ftbptt.__file__).parent
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*parts[: -node.level], *(node.module or "").split(".")]
                yield ".".join(parts[1:]), ".".join(part for part in base[1:] if part)


def test_imports_follow_the_data_flow() -> None:
    modules = nx.DiGraph(_imports())
    assert len(modules) > 100
    assert not list(nx.simple_cycles(modules))
    packages = nx.DiGraph()  # those that lie in one folder: a.b and a.c
    for importer, imported in modules.edges:
        package, other = importer.split(".")[0], imported.split(".")[0]
        if package in PACKAGES and other in PACKAGES:
            assert PACKAGES.index(other) <= PACKAGES.index(package), (
                f"{importer} imports {imported}"
            )
        (parent, *inside), (other_parent, *inside_other) = importer.split("."), imported.split(".")
        if parent == other_parent and len(inside) == len(inside_other) == 2:
            packages.add_edge((parent, inside[0]), (parent, inside_other[0]))
    packages.remove_edges_from(nx.selfloop_edges(packages))
    assert packages.edges
    assert not list(nx.simple_cycles(packages))


# The standard library's, Lightning's count of batches, and what torch documents for torch.export.
PRIVATE_OF_OTHERS = {"_getframe", "_replace", "_fields", "_batches_that_stepped", "_check"}


def test_private_torch_names_stay_in_compat() -> None:
    package = Path(ftbptt.__file__).parent
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    defined = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for _, node in nodes:  # what is assigned: a slot, an attribute of an object of the package
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    for path, node in nodes:
        if path.parent.name == "_compat":
            continue
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert "torch.fx.experimental" not in (node.module or ""), path
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "aten":
            names = [node.attr]
        for name in names:
            private = name.startswith("_") and not name.startswith("__")
            assert not private or name in defined | PRIVATE_OF_OTHERS, (
                f"{path}: {ast.unparse(node)}"
            )
