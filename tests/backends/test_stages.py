"""What a compiled step is made of: functions and products, and where they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ftbptt.backends.stages import Part, Stages

SIZE = 3


def stages_of(step: Any, *shapes: tuple[int, ...]) -> tuple[Stages, list[Tensor], list[Tensor]]:
    """The stages of a step, its inputs, and what it computes of them."""
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    graph = make_fx(step, tracing_mode="fake")(*inputs).graph
    return Stages(graph), inputs, step(*inputs)


def run(stages: Stages, inputs: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    """The targets, after the stages have run without a compiler."""
    targets = [torch.full_like(result, torch.nan) for result in expected]
    values = [node.meta["val"] for node in stages.scratch]
    scratch = [torch.full(v.shape, torch.nan, dtype=torch.float64).to(v.dtype) for v in values]
    memory = [*inputs, *targets, *scratch]
    for stage in stages.stages:
        stage.run(memory, stage.function)
    return targets


def check(stages: Stages, inputs: list[Tensor], expected: list[Tensor]) -> None:
    for target, result in zip(run(stages, inputs, expected), expected, strict=True):
        torch.testing.assert_close(target, result)


def test_a_product_writes_to_its_target_and_reads_what_a_function_wrote() -> None:
    """The reverse step of an LSTM: the gates' gradients side by side, and a product of these."""

    def step(h: Tensor, c: Tensor, w: Tensor) -> list[Tensor]:
        gates = torch.cat([torch.tanh(h * c), h - c], 1)
        return [gates @ w, c.sin(), gates]

    stages, inputs, expected = stages_of(step, (2, SIZE), (2, SIZE), (2 * SIZE, SIZE))
    (stage,) = stages.stages
    assert stage.targets == [Part(4), Part(5, ((1, 0, SIZE),)), Part(5, ((1, SIZE, SIZE),))]
    assert [(p.operands[0].part, p.target) for p in stage.products] == [(Part(5), Part(3))]
    assert stages.scratch == []
    check(stages, inputs, expected)


def test_what_is_cheap_is_computed_again_after_a_product() -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        gate, total = torch.sigmoid(x), x.sum(1, keepdim=True)
        return [(gate @ w) * gate + total]

    stages, inputs, expected = stages_of(step, (2, SIZE), (SIZE, SIZE))
    first, second = stages.stages
    assert [node.name for node in stages.scratch] == ["mm", "sigmoid"]
    assert (len(first.targets), len(first.products)) == (1, 1)
    assert sorted(second.inputs) == [Part(0), Part(3), Part(4)]  # the sum is of the inputs
    assert second.products == []
    check(stages, inputs, expected)


def test_what_is_no_map_is_kept_for_later_stages() -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        total = x.exp().sum(1, keepdim=True)
        return [((x / total) @ w) / total]

    stages, inputs, expected = stages_of(step, (2, SIZE), (SIZE, SIZE))
    _, second = stages.stages
    assert [node.name for node in stages.scratch] == ["mm", "div", "sum_1"]
    assert sorted(second.inputs) == [Part(3), Part(5)]
    check(stages, inputs, expected)


def test_what_is_compared_with_its_maximum_is_kept_for_later_stages() -> None:
    """Though it is cheap: in 16 bits, computed again, it would not be rounded as the maximum is."""

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        value = x * 0.7 + 1
        maximum = value.amax(1, keepdim=True)
        return [torch.where(value >= maximum, maximum @ w, x)]

    stages, inputs, expected = stages_of(step, (2, SIZE), (1, SIZE))
    assert "add" in [node.name for node in stages.scratch]
    check(stages, inputs, expected)


def test_results_of_one_operation_in_several_stages() -> None:
    """All of them are written where it is computed."""

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        largest, places = x.sin().topk(2)
        return [largest @ w + places]

    stages, inputs, expected = stages_of(step, (3, SIZE), (2, 2))
    assert [node.name for node in stages.scratch] == ["mm", "getitem", "getitem_1"]
    check(stages, inputs, expected)


def test_the_parts_of_a_cat_are_written_when_each_is_computed() -> None:
    """The reverse step of a GRU with two products, and a part that is a product itself."""

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        first = x.tanh()
        product = first @ w
        gates = torch.cat([first, product, x, product.sigmoid(), product], 1)
        return [gates[:, SIZE : 3 * SIZE] @ torch.cat([w, w]), gates]

    stages, inputs, expected = stages_of(step, (2, SIZE), (SIZE, SIZE))
    ranges = [Part(3, ((1, SIZE * i, SIZE),)) for i in range(5)]
    assert [node.name for node in stages.scratch] == ["cat_1"]  # of the weights
    first, second = stages.stages
    assert ranges[0] in first.targets
    assert first.products[0].target == ranges[1]
    assert set(second.targets) == {ranges[3], ranges[4]}
    check(stages, inputs, expected)


@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_cat_of_a_cat(axes: tuple[int, int]) -> None:
    """Each part of the inner one is written where that lies in the outer one."""

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        inner = torch.cat([x.sin(), x @ w], axes[0])
        return [torch.cat([inner.cos(), inner, x.new_ones(inner.shape)], axes[1])]

    stages, inputs, expected = stages_of(step, (SIZE, SIZE), (SIZE, SIZE))
    assert len(stages.stages[-1].targets) > 1
    assert stages.scratch == []
    check(stages, inputs, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_results_that_are_inputs_or_appear_twice(count: int) -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        product = x
        for _ in range(count):
            product = product @ w
        return [x, product, product, product.t(), x * 2, x * 2]

    stages, inputs, expected = stages_of(step, (SIZE, SIZE), (SIZE, SIZE))
    assert sum(len(stage.products) for stage in stages.stages) == count
    check(stages, inputs, expected)


def test_products_of_views() -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        y = torch.cat([x.tanh(), x], 1)
        return [torch.bmm(w.transpose(1, 2), y[:, :SIZE].expand(2, SIZE, SIZE)), y]

    stages, inputs, expected = stages_of(step, (SIZE, SIZE), (2, SIZE, SIZE))
    (stage,) = stages.stages
    assert stages.scratch == []
    (product,) = stage.products
    assert [len(operand.views) for operand in product.operands] == [1, 2]
    check(stages, inputs, expected)


def test_random_numbers_are_drawn_once() -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        noise = torch.rand_like(x)
        return [(x * noise) @ w + noise, noise]

    stages, inputs, expected = stages_of(step, (SIZE, SIZE), (SIZE, SIZE))
    result, noise = run(stages, inputs, expected)
    x, w = inputs
    torch.testing.assert_close(result, (x * noise) @ w + noise)


def test_a_converting_cat_is_one_result() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.cat([x.sin().float(), y], 1)]

    stages, inputs, expected = stages_of(step, (2, SIZE), (2, SIZE))
    (stage,) = stages.stages
    assert stage.targets == [Part(2)]
    check(stages, inputs, expected)
