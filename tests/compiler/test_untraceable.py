"""Steps that cannot become a graph: the error names the line of the step and a remedy."""

from __future__ import annotations

import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

import ftbptt
from ftbptt import as_step, make_train_segment

from ..cells.problems import B, H, mse, named
from .calling import K, call

Tree = Any


def marked_line(step: Callable[..., Any]) -> int:
    """The line of the step that carries the comment ``# here``."""
    source = inspect.getsource(getattr(step, "forward", step))
    lines, first = inspect.getsourcelines(getattr(step, "forward", step))
    assert source.count("# here") == 1
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


def branch(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h + x_t * params["w"]
    if h.sum() > 0:  # here
        h = -h
    return h, h


def item(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    scale = x_t.max().item()  # here
    return h * scale, h + x_t * params["w"]


def to_int(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    steps = int(x_t.abs().sum())  # here
    return h * steps, h + x_t * params["w"]


def boolean_index(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    positive = x_t[x_t > 0]  # here
    return h + positive.sum(), h + x_t * params["w"]


def loop(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    while h.abs().max() > 1:  # here
        h = h / 2
    return h, h + x_t * params["w"]


def to_numpy(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    scale = float(x_t.detach().numpy().max())  # here
    return h * scale, h + x_t * params["w"]


def to_list(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    scale = sum(x_t[0].tolist())  # here
    return h * scale, h + x_t * params["w"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(H))

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * self.w
        if bool((h > 0).any()):  # here
            h = -h
        return h, h


@pytest.mark.parametrize(
    "step", [branch, item, to_int, boolean_index, loop, to_numpy, to_list, Branching()],
    ids=lambda step: getattr(step, "__name__", type(step).__name__),
)  # fmt: skip
def test_a_value_in_python(step: Any) -> None:
    name = getattr(step, "__name__", type(step).__name__)
    with pytest.raises(RuntimeError, match=f"step {name} cannot be compiled") as caught:
        call(step)
    message = str(caught.value)
    line = re.search(r'test_untraceable\.py", line (\d+)', message)
    assert line is not None, message
    assert int(line[1]) == marked_line(step)
    assert "torch.where, or multiply by the condition, and a loop until something has" in message


@pytest.mark.parametrize("kind", ["a list", "a hook", "a generator"])
def test_a_refusal_that_the_step_catches(kind: str) -> None:
    """What it does then is not what the loop does."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        try:
            if kind == "a list":
                h = h * max(h.flatten().tolist())
            elif kind == "a hook":
                h.register_hook(lambda grad: 2 * grad)
            else:
                h = h + torch.randn(H, generator=torch.Generator())
        except (RuntimeError, TypeError):
            h = -h
        return h, h

    with pytest.raises((RuntimeError, TypeError), match="step"):
        call(step)


def test_auto_and_compile_refuse_it_too() -> None:
    """It never falls back to a silently chosen branch."""
    for backend in ("auto", "compile"):
        segment = make_train_segment(branch, mse, backend=backend)
        with pytest.raises(RuntimeError, match="step branch cannot be compiled"):
            segment(
                {"w": torch.ones(H)}, torch.zeros(B, H), torch.ones(K, B, H), torch.ones(K, B, H)
            )


BRANCH = """
def step(params, x_t, h):
    h = h + x_t * params["w"]
    if h.sum() > 0:
        h = -h
    return h, h
"""


@pytest.mark.parametrize(
    "file",
    [
        "<stdin>",
        "<ipython-input-3-0123456789ab>",
        os.path.dirname(torch.__file__) + "vision/step.py",
        os.path.dirname(ftbptt.__file__) + "_experiments/step.py",
    ],
)
def test_the_line_of_a_step_at_a_prompt_or_in_a_folder_named_like_a_library(file: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(BRANCH, file, "exec"), names)
    with pytest.raises(RuntimeError, match="step step cannot be compiled") as caught:
        call(names["step"])
    assert f'File "{file}", line 4, in step' in str(caught.value)


def test_the_line_is_not_that_of_generated_code() -> None:
    names: dict[str, Any] = {}
    exec(compile("def is_positive(h):\n    return bool(h.sum() > 0)", "<string>", "exec"), names)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        return (h if names["is_positive"](h) else -h), h

    with pytest.raises(RuntimeError, match="step step cannot be compiled") as caught:
        call(step)
    assert 'names["is_positive"](h)' in str(caught.value)


class Packs(nn.Module):
    """Packs the chunk that it is called with."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(H, H)

    def forward(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        packed = nn.utils.rnn.pack_padded_sequence(x, [len(x)] * x.shape[1])
        out, state = self.layer(packed, state)
        return nn.utils.rnn.pad_packed_sequence(out)[0], state


class CallsOnPacked(Packs):
    def forward(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        packed = nn.utils.rnn.PackedSequence(x.flatten(0, 1), torch.tensor([x.shape[1]]))
        out, state = self.layer(packed, state)
        return out.data[None], state


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("packs", [Packs, CallsOnPacked])
def test_packed_sequences(packs: Any, kind: Any) -> None:
    state = torch.zeros(1, B, H)
    step = as_step(packs(kind), sequence=True)
    segment = make_train_segment(step, mse, backend="eager")
    message = r"(?s)PackedSequence has no single step.*reset= and mask="
    with pytest.raises((TypeError, RuntimeError), match=message):
        segment(
            named(step.module),
            (state, state) if kind is nn.LSTM else state,
            torch.randn(K, B, H),
            torch.randn(K, B, H),
        )


class OfChunks(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layer = layer(H, H)

    def forward(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        out, state = self.layer(x, state)
        return out, state


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_a_module_that_takes_chunks_is_given_steps(layer: type[nn.Module]) -> None:
    """It took the rows of a step for the steps of one sequence."""
    module, h = OfChunks(layer), torch.zeros(1, B, H)
    state: Tree = (h, h) if layer is nn.LSTM else h
    with pytest.raises(RuntimeError, match=r"as_step\(module, sequence=True\)"):
        call(module, dict(module.named_parameters()), state)


FIXED = torch.eye(H).to_sparse()


class WithSparseBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", FIXED)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.sparse.mm(self.get_buffer("mask"), h.T).T + x_t


@pytest.mark.parametrize(
    "product",
    [
        lambda w, h: torch.sparse.mm(FIXED, h.T).T,
        lambda w, h: h @ FIXED.to_dense(),
        lambda w, h: torch.sparse.mm(torch.diag(w).to_sparse(), h.T).T,
        lambda w, h: h @ torch.sparse_coo_tensor(FIXED.indices(), w, (H, H)).to_dense(),
    ],
)
def test_sparse_tensors_in_a_step(product: Any) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, product(params["w"], h) + x_t

    with pytest.raises(RuntimeError, match=r"step: .* layout torch\.sparse_coo.*weight \* mask"):
        call(step)


def test_sparse_tensors_that_are_given() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.sparse.mm(params["w"], h.T).T + x_t

    for module, path in ((step, r"params\['w'\]"), (WithSparseBuffer(), r"buffers\['mask'\]")):
        params = {"w": FIXED} if module is step else {}
        message = rf"{path}: expected a dense tensor, .* layout torch\.sparse_coo.*to_dense\(\)"
        with pytest.raises(TypeError, match=message):
            call(module, params)


def test_a_branch_of_torch() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        return h, torch.cond(h.sum() > 0, lambda h: -h, lambda h: h + 1, (h,))

    message = "step: uses an operation that contains graphs, such as torch.cond.*torch.where"
    with pytest.raises(TypeError, match=message):
        call(step)


def test_a_loop_of_torch() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        def nearer(z: Tensor) -> tuple[Tensor]:
            return (0.5 * z,)

        with torch.no_grad():
            (z,) = while_loop(lambda z: z.norm() > 1, nearer, (h + x_t,))
        return z * params["w"], z

    with (
        warnings.catch_warnings(action="ignore"),  # of torch.compile, which it calls
        pytest.raises(RuntimeError, match="uses an operator that contains graphs, such as while"),
    ):
        call(step)


def test_a_gradient_that_reads_values() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x_t * params["w"])
        index = torch.zeros_like(h, dtype=torch.int64)
        return torch.ones_like(h).scatter_reduce(1, index, h, "prod"), h

    with pytest.raises(RuntimeError, match="the gradient of one of its operations depends on the"):
        call(step)


def test_a_python_branch_on_shapes_and_options_is_fine() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if h.shape[-1] == H and params["w"].dtype == torch.float32:
            return h, h + x_t * params["w"]
        raise AssertionError

    assert call(step).loss.isfinite()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_attempts_that_fail_print_nothing(capfd: Any) -> None:
    """The deviation of a single step divides by 0, which a trace for any K comes upon."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return out.std(0, correction=0).mean() + out.std(0).nan_to_num().mean()

    x = torch.randn(1, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)
    assert "Traceback" not in capfd.readouterr().err


# -- what a step returns ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda h: h, "found a Tensor"),
        (lambda h: None, "found a NoneType"),
        (lambda h: (h,), "found a tuple of 1"),
        (lambda h: (h, h, h), "found a tuple of 3"),
    ],
)
def test_a_step_that_returns_no_pair(returned: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"step: expected \(out_t, state\), {message}"):
        call(lambda params, x_t, h: returned(h + x_t * params["w"]))


def test_out_that_is_no_tensor() -> None:
    with pytest.raises(
        TypeError, match=r"step: expected tensors in out_t, found int at out\['n'\]"
    ):
        call(lambda params, x_t, h: ({"h": h * params["w"], "n": 3}, h))


def test_the_error_of_a_step_is_raised() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake") as caught:
        call(step)
    assert "while step step was traced" in "".join(caught.value.__notes__)


def tapped_twice(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = ftbptt.tap("h", h + x_t)
    h = ftbptt.tap("h", h * params["w"])  # here
    return h, h


def called_by_the_standard_library(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = functools.partial(lambda h: h @ x_t)(h * params["w"])  # here
    return h, h


def wrong_width(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = nn.GRUCell(2 * H, H)(x_t, h * params["w"])  # here
    return h, h


@pytest.mark.parametrize("step", [tapped_twice, called_by_the_standard_library, wrong_width])
def test_the_line_of_the_step_is_not_one_of_a_library(step: Callable[..., Any]) -> None:
    segment = make_train_segment(step, mse, backend="eager", taps=True)
    x = torch.randn(K, B, H)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)
    note = "".join(caught.value.__notes__)
    assert f'File "{__file__}", line {marked_line(step)}' in note, note


def test_an_error_that_the_step_catches() -> None:
    """The loop never raises it, so that another branch was traced than the loop takes."""

    def step(params: Any, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * params["w"] + x_t)
        try:
            scale = 2.0 if h.sum() > 0 else 0.5
        except RuntimeError:
            scale = 1.0
        return h * scale, h

    with pytest.raises(RuntimeError, match=r"step step cannot be compiled: it needs the value"):
        call(step)
