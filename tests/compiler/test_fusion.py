"""Loop fusion: the work after a loop that its kernel computes, and the sums in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from ftbptt import Explanation, make_train_segment
from ftbptt.compiler.fusion import fused_nodes, keeps_rows

from ..cells.problems import Problem, mse
from ..oracle import assert_close, reference

B, D, H, K = 37, 5, 7, 9  # rows that no tile and no thread divides


class NormedLSTM(nn.Module):
    """Layer norm of the gates and of the cell: sums over rows for each gain and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(D, 4 * H), nn.Linear(H, 4 * H, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(4 * H), nn.LayerNorm(4 * H)
        self.norm_c = nn.LayerNorm(H)

    def forward(
        self, x_t: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (self.norm_x(self.x(x_t)) + self.norm_h(self.h(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.norm_c(c))
        return h, (h, c)


def normed(dtype: torch.dtype = torch.float64, steps: int = K) -> Problem:
    torch.manual_seed(0)
    module = NormedLSTM().to(dtype)
    x, y = torch.randn(steps, B, D, dtype=dtype), torch.randn(steps, B, H, dtype=dtype)
    state = (torch.randn(B, H, dtype=dtype), torch.randn(B, H, dtype=dtype))
    params = dict(module.named_parameters())
    return Problem(module, params, state, lambda k: x[:k], lambda k: y[:k], mse)


def explained(problem: Problem, backend: str) -> Explanation:
    segment = make_train_segment(problem.step, problem.loss, backend=backend)
    return segment.explain(*problem.data(K))


def test_what_follows_a_loop_is_done_in_its_kernel() -> None:
    apart, inside = (explained(normed(), backend) for backend in ("compile", "fused"))

    def after_loop(explanation: Explanation) -> list[int]:
        return [
            b.other_operations
            for b in explanation.blocks
            if b.kind == "map" and b.phase == "reverse"
        ][1:]

    assert after_loop(apart)
    assert all(after_loop(apart))
    assert not any(after_loop(inside))  # views, for the GEMMs
    assert inside.flops == apart.flops
    assert inside.saved == apart.saved


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels", "threads")
def test_sums_over_steps_and_rows() -> None:
    problem = normed()
    segment = make_train_segment(problem.step, problem.loss, backend="fused")
    for steps in (K, 1):
        assert_close(segment(*problem.data(steps)), reference(problem, steps))


@pytest.mark.usefixtures("kernels")
def test_long_sums_are_more_accurate_than_one_by_one() -> None:
    """11,840 numbers of about 2: the rows of a step are added up before the steps."""

    def step(params: dict[str, Tensor], x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.5 * h + params["b"] * x_t
        return h, h

    steps = 320
    segment = make_train_segment(step, lambda out, y: out.sum(), backend="fused")
    x = torch.full((steps, B, H), 1.1)
    grad = segment({"b": torch.ones(H)}, torch.zeros(B, H), x, x).grads["b"]
    d_h = 2 - 0.5 ** torch.arange(steps, dtype=torch.float64)
    exact = d_h.sum() * B * x[0, 0, 0].double()
    one_by_one = d_h.repeat_interleave(B).mul(1.1).float().numpy().cumsum()[-1]
    assert abs(one_by_one - exact) / exact > 1e-5
    assert ((grad - exact).abs() / exact).max() < 3e-6


def test_empty_batch() -> None:
    problem = normed()
    params, state, x, y = problem.data(3)
    empty = tuple(leaf[:0] for leaf in state)
    segment = make_train_segment(problem.step, lambda out, y: out.sum(), backend="fused")
    result = segment(params, empty, x[:, :0], y[:, :0])
    assert all(not grad.any() for grad in result.grads.values())


# -- the cut -----------------------------------------------------------------------------------


def graph_of(function: object, *shapes: tuple[int, ...]) -> dict[str, fx.Node]:
    graph = fx.symbolic_trace(function).graph  # type: ignore[arg-type]
    for node in graph.nodes:
        node.meta["val"] = torch.empty(shapes[0])
    return {node.name: node for node in graph.nodes if node.op != "output"}


def moved(
    nodes: dict[str, fx.Node], stay: set[str], elsewhere: set[str], stored: set[str]
) -> set[str]:
    inside = {nodes["a"]}
    fused, _ = fused_nodes(
        inside,
        [node for node in nodes.values() if node not in inside],
        lambda node: node.name not in stay,
        lambda node: node.name in elsewhere,
        {nodes[name] for name in stored},
    )
    return {node.name for node in fused}


def test_only_what_saves_bytes_moves() -> None:
    def chain(a: Tensor) -> Tensor:
        b = a.exp()
        return b.cos()

    nodes = graph_of(chain, (3, 5))
    assert moved(nodes, set(), set(), {"cos"}) == {"exp", "cos"}
    # Its bytes for those of ``a``: what is outside finds it ready.
    assert moved(nodes, {"cos"}, set(), {"cos"}) == {"exp"}
    # ``a`` goes out in any case, and is only read.
    assert moved(nodes, {"exp"}, set(), {"a"}) == set()


def test_a_smaller_value_goes_out_in_place_of_a_larger() -> None:
    def narrow(a: Tensor) -> Tensor:
        return a.exp().relu()

    nodes = graph_of(narrow, (3, 5))
    nodes["exp"].meta["val"] = torch.empty(3, 1)
    assert moved(nodes, {"relu"}, set(), {"relu"}) == {"exp"}


def test_rows_stay_in_front() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    a.meta["val"] = torch.empty(3, 5)
    swapped = graph.call_function(torch.ops.aten.permute.default, (a, [1, 0]))
    swapped.meta["val"] = torch.empty(5, 3)
    assert keeps_rows(a, (3,))
    assert not keeps_rows(swapped, (3,))
    swapped.meta["val"] = torch.empty(3, 3)
    assert not keeps_rows(swapped, (3,))


def test_a_range_of_integers_is_made_before_the_loop() -> None:
    """A kernel reads it as it reads a parameter; it has no operation that makes one."""

    def step(params: dict[str, Tensor], x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t + h @ params["w"] * torch.arange(4))
        return h, h

    segment = make_train_segment(step, mse, backend="fused")
    data = {"w": torch.ones(4, 4)}, torch.zeros(2, 4), torch.ones(5, 2, 4), torch.ones(5, 2, 4)
    scans = [block for block in segment.explain(*data).blocks if block.kind.endswith("scan")]
    assert len(scans) == 2
    assert all("no kernel" not in block.runs for block in scans)


@pytest.mark.usefixtures("kernels")
def test_a_sum_over_rows_that_the_step_reads_as_well() -> None:
    """The bias's gradient in batch norm: what a kernel returns summed up is not there at a step."""

    def step(params: dict[str, Tensor], x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        given = x_t @ params["w"]
        normed = nn.functional.batch_norm(given, None, None, params["gain"], params["bias"], True)
        h = torch.tanh(normed + h @ params["u"])
        h = h - h.mean(0, keepdim=True)
        return h, h

    torch.manual_seed(0)
    shapes = {"w": (D, H), "u": (H, H), "gain": (H,), "bias": (H,)}
    params = {name: torch.randn(shape).double() / 2 for name, shape in shapes.items()}
    x, y = torch.randn(K, B, D).double(), torch.randn(K, B, H).double()
    made = Problem(step, params, torch.zeros(B, H).double(), lambda k: x[:k], lambda k: y[:k], mse)
    segment = make_train_segment(step, mse, backend="fused")
    assert_close(segment(*made.data(K)), reference(made, K))
