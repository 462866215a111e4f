"""What the compile backend makes of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ftbptt import make_train_segment
from ftbptt._compat.tracing import make_fx
from ftbptt.backends import compile as compile_backend
from ftbptt.backends.compile import with_small_products


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float64])
def test_products_of_few_rows_have_the_numbers_of_products(dtype: torch.dtype) -> None:
    """Those of whole numbers wrap around; as a sum they were of 64 bits, and did not."""

    def step(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b) // 3

    a, b = torch.full((2, 4), 100).to(dtype), torch.arange(12).reshape(4, 3).to(dtype)
    small = with_small_products(make_fx(step, tracing_mode="fake")(a, b))
    assert torch.equal(small(a, b), step(a, b))
    assert small(a, b).dtype == dtype


def test_loops_are_counted_on_the_cpu_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They lay on that device, from which the host would have to read them at each step."""
    programs: list[fx.GraphModule] = []

    def compiled(program: fx.GraphModule, *_: Any) -> Any:
        programs.append(program)
        raise KeyboardInterrupt

    def step(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + h * params["w"])
        return h, h

    monkeypatch.setattr(compile_backend, "inductor_compile", compiled)
    segment = make_train_segment(step, lambda out, y: out.square().mean(), backend="compile")
    w, h, x = torch.randn(3), torch.zeros(2, 3), torch.randn(4, 2, 3)
    with pytest.raises(KeyboardInterrupt), torch.device("meta"):
        segment({"w": w}, h, x, None)
    loops = programs[0].graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.while_loop
    )
    assert loops
    assert all(loop.args[2][0].meta["val"].is_cpu for loop in loops)
