"""Steps that cannot become a graph: the error names the line of the step and a remedy."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ftbptt
from ftbptt import as_step, make_train_segment, reference_segment

from ..cells.problems import B, H, mse, named
from ..oracle import assert_close

K = 4
Tree = Any


def call(step: Any, params: Tree = None, state: Tree = None) -> Any:
    segment = make_train_segment(step, mse, backend="eager")
    params = named(step) if isinstance(step, nn.Module) else params
    params = {"w": torch.ones(H)} if params is None else params
    state = torch.zeros(B, H) if state is None else state
    return segment(params, state, torch.randn(K, B, H), torch.randn(K, B, H))


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
    assert "torch.where" in message


def test_auto_and_compile_refuse_it_too() -> None:
    """It never falls back to a silently chosen branch."""
    for backend in ("auto", "compile"):
        segment = make_train_segment(branch, mse, backend=backend)
        with pytest.raises(RuntimeError, match="step branch cannot be compiled"):
            segment(
                {"w": torch.ones(H)}, torch.zeros(B, H), torch.ones(K, B, H), torch.ones(K, B, H)
            )


def test_a_branch_in_the_loss() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return out.mean() if out.sum() > 0 else y.mean()

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h + x_t * params["w"]

    segment = make_train_segment(step, loss, backend="eager")
    with pytest.raises(RuntimeError, match="loss loss cannot be compiled"):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), torch.ones(K, B, H), torch.ones(K, B, H))


def test_an_operation_whose_result_depends_on_values() -> None:
    """It is named: the caller has written no branch."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        labels = y[0].long()
        return torch.nn.functional.ctc_loss(out.log_softmax(-1), labels, (K,) * B, (1,) * B)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h + x_t * params["w"]

    segment = make_train_segment(step, loss, backend="eager")
    message = r"loss loss cannot be compiled: what aten._ctc_loss\S* does.*depends on the values"
    with pytest.raises(RuntimeError, match=message) as caught:
        segment({"w": torch.ones(H)}, torch.zeros(B, H), torch.ones(K, B, H), torch.ones(K, B, H))
    assert 'test_untraceable.py", line' in str(caught.value)


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


def test_a_gradient_by_torch_autograd() -> None:
    def by_grad(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        (slope,) = torch.autograd.grad((h**3).sum(), h, create_graph=True)
        return h, h - 0.1 * slope

    def by_backward(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        ((h + x_t * params["w"]) ** 3).sum().backward()
        return h, h

    for step in (by_grad, by_backward):
        message = (
            rf"step {step.__name__} takes a gradient by torch\.autograd.*\n.*test_untraceable.py"
        )
        with pytest.raises(RuntimeError, match=message) as caught:
            call(step)
        assert "torch.func.grad(f)(x)" in str(caught.value)


def test_a_gradient_by_torch_func_and_marks_that_do_not_matter() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = (h + x_t * params["w"]).requires_grad_()
        h = h - 0.1 * torch.func.grad(lambda h: (h**3).sum())(h)
        return h + torch.zeros(H).requires_grad_(False), h

    arguments = {"w": torch.ones(H)}, torch.zeros(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    result = make_train_segment(step, mse, backend="eager")(*arguments)
    torch.testing.assert_close(result.grads, reference_segment(step, mse, *arguments).grads)


def tangent_in_no_grad(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda h: h**3 * x_t, (h,), (x_t,))
    return h, h - params["w"] * tangent


def no_grad_in_a_tangent(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    def function(h: Tensor) -> Tensor:
        with torch.no_grad():
            square = h**2
        return square * h * x_t

    _, tangent = torch.func.jvp(function, (h,), (x_t,))
    return h, h - params["w"] * tangent


def jacobian_in_no_grad(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        jacobian = torch.func.jacfwd(lambda row: (row * row.sum()).sin())(h[0])
    return h, h @ jacobian * params["w"]


@pytest.mark.parametrize("step", [tangent_in_no_grad, no_grad_in_a_tangent, jacobian_in_no_grad])
def test_a_tangent_and_no_grad(step: Any) -> None:
    message = r"step: torch\.func\.jvp \(jacfwd, hessian\) around or inside of no_grad cannot be.*"
    with pytest.raises(RuntimeError, match=message + r"detach\(\) its results"):
        call(step)


def test_a_tangent_and_detach() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.jvp(lambda h: h.detach() ** 2 * h * x_t, (h,), (x_t,))[1]
        constant = torch.func.jvp(lambda h: h**3 * x_t, (h,), (x_t,))[1].detach()
        return h + slope, h - params["w"] * (slope + constant).tanh()

    arguments = {"w": torch.ones(H)}, torch.rand(B, H), torch.randn(K, B, H), torch.randn(K, B, H)
    result = make_train_segment(step, mse, backend="eager")(*arguments)
    torch.testing.assert_close(result.grads, reference_segment(step, mse, *arguments).grads)


def test_a_branch_of_torch() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        return h, torch.cond(h.sum() > 0, lambda h: -h, lambda h: h + 1, (h,))

    message = "step: uses an operation that contains graphs, such as torch.cond.*torch.where"
    with pytest.raises(TypeError, match=message):
        call(step)


def test_a_python_branch_on_shapes_and_options_is_fine() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if h.shape[-1] == H and params["w"].dtype == torch.float32:
            return h, h + x_t * params["w"]
        raise AssertionError

    assert call(step).loss.isfinite()


# -- state outside the state --------------------------------------------------------------------


class Remembers(nn.Module):
    """The classic: the hidden state is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(H))
        self.h: Tensor | None = None

    def forward(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.h = x_t * self.w if self.h is None else self.h + x_t * self.w
        return self.h, state


def test_a_module_with_its_state_in_an_attribute() -> None:
    module = Remembers()
    message = r"step Remembers changes the attribute 'h'.*from the state and return it"
    with pytest.raises(RuntimeError, match=message):
        call(module)
    assert module.h is None, "the module is as it was"


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.calls = nn.GRUCell(H, H), 0

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        h = self.cell(x_t, h)
        return h, h


def test_a_module_that_counts_its_calls() -> None:
    with pytest.raises(RuntimeError, match="changes the attribute 'calls'"):
        call(CountsCalls())


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(H, H), nn.BatchNorm1d(H)

    def forward(self, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.norm(x_t), h)
        return h, h


def test_batch_norm_in_train_mode_names_its_buffer() -> None:
    module = Normalised()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    message = (
        r"step Normalised changes its buffer '?norm\.(running_mean|running_var|num_batches).*eval"
    )
    with pytest.raises(RuntimeError, match=message):
        call(module)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_batch_norm_in_eval_mode_is_fine() -> None:
    assert call(Normalised().eval()).loss.isfinite()


@pytest.mark.parametrize("argument", ["params", "x", "state"])
def test_a_step_that_writes_into_its_arguments(argument: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        {"params": params["w"], "x": x_t, "state": h}[argument].mul_(0.5)
        return h + params["w"], h + x_t

    where = {"params": r"params\['w'\]", "x": "x", "state": "state"}[argument]
    with pytest.raises(RuntimeError, match=rf"step step changes {where} in place.*clone"):
        call(step)


@pytest.mark.parametrize("kind", ["replaced", "added", "removed"])
def test_a_step_that_changes_what_params_holds(kind: str) -> None:
    def step(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "replaced":
            params["w"] = params["w"] * 0.9
        elif kind == "added":
            params["n"] = params["w"] * 2
        else:
            del params["w"]
        return x_t, state

    leaf = r"params\['w'\]" if kind == "replaced" else "params"
    with pytest.raises(RuntimeError, match=f"step step puts other values into {leaf}, which the"):
        call(step)


@pytest.mark.parametrize("kind", ["write", "strides"])
def test_places_in_memory(kind: str) -> None:
    """What is written within torch.func.grad is a place in memory, as the trace has it."""

    def inner(a: Tensor) -> Tensor:
        z = a.clone()
        z[0] *= 2
        z[1] *= 3
        return (z**3).sum()

    def step(params: Tree, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = state + x_t * params["w"]
        if kind == "write":
            return torch.func.grad(inner)(h), state
        return h.as_strided((2,), (1,)), state

    with pytest.raises(RuntimeError, match="step step writes into a part of a tensor inside torch"):
        call(step)


def test_a_step_that_writes_into_what_it_closes_over() -> None:
    total = torch.zeros(B, H)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        total.add_(x_t)
        return h + total * params["w"], h

    with pytest.raises(RuntimeError, match=r"not among its arguments.*Carry it in the state"):
        call(step)
    assert not total.any()


@pytest.mark.parametrize("argument", ["step", "loss"])
def test_a_counter_that_is_a_tensor(argument: str) -> None:
    """Which nothing in the graph reads."""
    calls = torch.zeros((), dtype=torch.long)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if argument == "step":
            calls.add_(1)
        return h + x_t * params["w"], h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if argument == "loss":
            calls.add_(1)
        return mse(out, y)

    x = torch.randn(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    expected = f"{argument}: changes in place a tensor that is not among its arguments"
    with pytest.raises(RuntimeError, match=expected):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, x)


@pytest.mark.parametrize("changed", ["out", "y"])
def test_a_loss_that_writes_into_its_arguments(changed: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h + x_t * params["w"]
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        {"out": out, "y": y}[changed].sub_(1)
        return mse(out, y)

    x, y = torch.randn(K, B, H), torch.zeros(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    with pytest.raises(RuntimeError, match=r"loss: changes out or y in place.*Write out = out - a"):
        segment({"w": torch.ones(H)}, torch.zeros(B, H), x, y)
    assert not y.any()


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


@pytest.mark.parametrize("kind", ["tensor", "parameter", "module"])
def test_a_step_that_closes_over_what_it_should_be_given(kind: str) -> None:
    """A weight that is not in params would silently never be trained."""
    layer = nn.Linear(H, H)
    weight: Any = layer.weight if kind == "parameter" else torch.zeros(H, H, requires_grad=True)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(layer(h) if kind == "module" else h @ weight) + x_t * params["w"]
        return h, h

    expected = (
        r"step: uses an? .* of shape \[7, 7\] that requires grad but was not taken from params"
    )
    with pytest.raises(ValueError, match=expected):
        call(step)


def test_a_loss_with_a_parameter() -> None:
    """A readout in the loss, which only the step's parameters would be trained beside."""
    readout = nn.Linear(H, H, bias=False)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x_t * params["w"])
        return h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(readout(out), y)

    params, x = {"w": torch.ones(H), **named(readout)}, torch.randn(K, B, H)
    segment = make_train_segment(step, loss, backend="eager")
    expected = (
        r"loss: uses an nn.Parameter of shape \[7, 7\] that requires grad but was not taken from "
        r"params, so it would get no gradient\. .*compute with it in the step"
    )
    with pytest.raises(ValueError, match=expected):
        segment(params, torch.zeros(B, H), x, x)
    readout.requires_grad_(False)
    assert segment(params, torch.zeros(B, H), x, x).loss.isfinite()


# -- operands of different dtypes ---------------------------------------------------------------

DOUBLE = torch.float64


def cell_call(cell: nn.Module, x: Tensor, state: Tree, backend: str) -> Any:
    segment = make_train_segment(cell, mse, backend=backend)
    return segment(named(cell), state, x, torch.zeros(K, B, H, dtype=x.dtype))


@pytest.mark.parametrize("backend", ["auto", "eager", "compile", "fused"])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_data_of_another_dtype_than_the_parameters(kind: Any, backend: str) -> None:
    """Fake tensors do not check it, and each backend would fail in another way."""
    message = (
        r"step: x is torch.float64, but the parameters are torch.float32, and .* multiplies the "
        r"two. Give x as torch.float32 \(x.float\(\)\), or the parameters as torch.float64 "
        r"\(module.double\(\)\)."
    )
    with pytest.raises(TypeError, match=message):
        cell_call(kind(H, H), torch.randn(K, B, H, dtype=DOUBLE), None, backend)
    message = r"state.* came out as torch.float64. x is torch.float32 too.*give x and the state as "
    with pytest.raises(TypeError, match=message + "torch.float64"):
        cell_call(kind(H, H).double(), torch.randn(K, B, H), None, backend)


def test_the_leaf_of_another_dtype_is_named() -> None:
    def product(params: Tree, x_t: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t["a"] + (x_t["b"] @ params["w"]).float() + h)
        return h, h

    def convolution(params: Tree, x_t: Tree, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t["a"] + F.conv1d(x_t["b"][None], params["c"])[0].float() + h)
        return h, h

    params = {"w": torch.randn(H, H), "c": torch.randn(B, B, 1)}
    x = {"a": torch.randn(K, B, H), "b": torch.randn(K, B, H, dtype=torch.float16)}
    for step in (product, convolution):
        message = (
            r"step: x\['b'\] is torch.float16, but the parameters are torch.float32, and "
            rf"{step.__name__} .*Give x\['b'\] as torch.float32 \(x\['b'\].float\(\)\), or the "
            r"parameters as torch.float16\."
        )
        segment = make_train_segment(step, mse, backend="eager")
        with pytest.raises(TypeError, match=message):
            segment(params, torch.zeros(B, H), x, torch.zeros(K, B, H))


def test_a_state_of_another_dtype_than_the_parameters() -> None:
    message = r"step: state is torch.float64, but the parameters are torch.float32.*state.float\(\)"
    with pytest.raises(TypeError, match=message):
        cell_call(nn.GRUCell(H, H), torch.randn(K, B, H), torch.zeros(B, H, dtype=DOUBLE), "eager")


def test_operands_of_different_dtypes_that_are_no_arguments() -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.eye(H, dtype=DOUBLE)
        h = torch.tanh(x_t + ((h * params["w"]) @ eye).float())
        return h, h

    message = r"calls aten.mm.default on operands of different dtypes, .*float32 and .*float64"
    with pytest.raises(TypeError, match=message):
        call(step)


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_operands_that_the_step_converts(backend: str) -> None:
    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh((x_t @ params["u"].double()).float() + h @ params["u"])
        return h, h

    x = torch.randn(K, B, H, dtype=DOUBLE)
    arguments = {"u": torch.randn(H, H)}, torch.zeros(B, H), x, torch.randn(K, B, H)
    result = make_train_segment(step, mse, backend=backend)(*arguments)
    torch.testing.assert_close(result.grads, reference_segment(step, mse, *arguments).grads)


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


def detached(teacher: nn.Linear, x: Tensor) -> Tensor:
    return teacher(x).detach()


def without_grad(teacher: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        return teacher(x)


def with_detached_weights(teacher: nn.Linear, x: Tensor) -> Tensor:
    weights = {name: p.detach() for name, p in teacher.named_parameters()}
    return torch.func.functional_call(teacher, weights, x)


@pytest.mark.parametrize("use", [detached, without_grad, with_detached_weights])
@pytest.mark.parametrize("place", ["step", "loss"])
def test_a_trained_tensor_that_no_gradient_reaches(place: str, use: Callable[..., Any]) -> None:
    """A teacher, as the loop takes it; with a gradient it is refused."""
    teacher = nn.Linear(H, H)

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * params["w"] + x_t)
        return h + use(teacher, x_t) if place == "step" else h, h

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return mse(out, use(teacher, y) if place == "loss" else y)

    params, h, x = {"w": torch.ones(H)}, torch.zeros(B, H), torch.randn(K, B, H)
    found = make_train_segment(step, loss, backend="eager")(params, h, x, x)
    assert_close(found, reference_segment(step, loss, params, h, x, x), 1e-6)
    use = lambda teacher, x: teacher(x)  # noqa: E731
    with pytest.raises(ValueError, match=rf"{place}: uses an nn.Parameter of shape \[\d+, \d+\]"):
        make_train_segment(step, loss, backend="eager")(params, h, x, x)
