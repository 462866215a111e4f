"""Every bad input has a defined answer: an error names the argument, its leaf and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment
from ftbptt.segment.consecutive_calls import ConsecutiveCalls

from ..cells import problem
from ..cells.problems import B, D, H, Problem, cross_entropy, mse, per_row
from ..oracle import assert_close, reference

K = 5
Tree = Any
Change = Callable[[dict[str, Any]], Any]


def dict_step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
    h = torch.tanh(x_t @ params["w"] + state["h"] @ params["u"])
    return h, {"h": h}


def arguments() -> dict[str, Any]:
    """A call that is right; each test spoils one thing of it."""
    torch.manual_seed(1)
    params = {"w": torch.randn(D, H), "u": torch.randn(H, H) / H}
    return {
        "params": params, "state": {"h": torch.zeros(B, H)},
        "x": torch.randn(K, B, D), "y": torch.randn(K, B, H),
    }  # fmt: skip


def call(step: Any = dict_step, loss: Any = per_row, /, **changes: Any) -> Any:
    given = arguments() | changes
    segment = make_train_segment(step, loss, backend="eager")
    return segment(**given)


def refused(kind: type[Exception], words: str, *args: Any, **changes: Any) -> str:
    """The call raises exactly this kind, its text matching the fragments in order."""
    with pytest.raises(kind, match="(?s)" + words) as caught:
        call(*args, **changes)
    assert caught.type is kind
    return str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))


def test_the_call_that_the_others_spoil_is_right() -> None:
    assert call().loss.isfinite()


# -- params -------------------------------------------------------------------------------------


def of_cell(**params: Any) -> dict[str, Any]:
    cell = nn.GRUCell(D, H)
    own = dict(cell.named_parameters()) | params
    own = {name: value for name, value in own.items() if value is not None}
    return {"step": cell, "params": own, "state": torch.zeros(B, H)}


def test_params_without_a_key() -> None:
    changes = of_cell(bias_hh=None)
    words = r"params: 'bias_hh' is missing, a parameter of GRUCell.*named_parameters\(\)"
    refused(TypeError, words, changes.pop("step"), **changes)


def test_params_with_a_key_too_many() -> None:
    changes = of_cell(bias_hx=torch.zeros(1))
    words = r"params: 'bias_hx' is not a parameter of GRUCell.*'weight_ih', 'weight_hh'"
    refused(TypeError, words, changes.pop("step"), **changes)


def test_params_with_the_second_name_of_one() -> None:
    module = nn.Module()
    module.a, module.b = nn.Linear(H, H), nn.Linear(H, H)
    module.b.weight = module.a.weight
    module.forward = lambda x_t, h: (h, torch.tanh(module.a(h) + module.b(h)))
    words = r"params: 'b.weight' is the parameter that stands there as 'a.weight' already, tied"
    params = dict(module.named_parameters(remove_duplicate=False))
    refused(TypeError, words, module, params=params, state=torch.zeros(B, H))


def test_params_of_a_module_as_a_list() -> None:
    changes = of_cell()
    changes["params"] = list(changes["params"].values())
    words = r"params: expected a dict of GRUCell's parameters.*found list.*named_parameters\(\)"
    refused(TypeError, words, changes.pop("step"), **changes)


def test_params_with_a_number() -> None:
    params = arguments()["params"] | {"u": 0.5}
    refused(TypeError, r"params\['u'\]: expected a tensor, found float", params=params)


@pytest.mark.parametrize("wrong", [lambda cell: cell, lambda cell: cell.named_parameters()])
def test_params_of_a_module_as_something_else(wrong: Any) -> None:
    cell = nn.GRUCell(D, H)
    refused(TypeError, r"params: expected a dict of GRUCell's parameters by name", cell,
            params=wrong(cell), state=torch.zeros(B, H))  # fmt: skip


def test_params_in_a_parameter_dict() -> None:
    params = nn.ParameterDict(arguments()["params"])
    refused(
        TypeError, r"params: expected a tensor, found ParameterDict.*dict\(value\)", params=params
    )


def test_params_of_a_wrong_shape() -> None:
    """The step itself fails on it; the error says where."""
    params = arguments()["params"] | {"u": torch.zeros(H + 1, H)}
    with pytest.raises(RuntimeError) as caught:
        call(params=params)
    told = "".join(getattr(caught.value, "__notes__", []))
    assert "while step dict_step was traced" in told
    assert "test_bad_input.py" in told
    assert f"It was given x_t [{B}, {D}], state['h'] [{B}, {H}], params['w']" in told


# -- state --------------------------------------------------------------------------------------


def test_state_as_a_number() -> None:
    refused(TypeError, r"state: expected a tensor, found float", state=0.0)
    refused(TypeError, r"state\['h'\]: expected a tensor, found int", state={"h": 0})


def test_state_none_of_a_step_that_has_no_known_zero() -> None:
    refused(TypeError, r"state: None.*dict_step.*initial_state=", state=None)


def test_state_of_another_structure() -> None:
    """The step reads state['h'] and finds a tuple, or returns what did not go in."""
    with pytest.raises((TypeError, IndexError)) as caught:
        call(state=(torch.zeros(B, H),))
    assert "dict_step" in "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    state = {"h": torch.zeros(B, H), "c": torch.zeros(B, H)}
    words = r"step: the state must keep its structure.*went in:.*'c'.*came out: \{'h': \[3, 7\]\}"
    refused(TypeError, words, state=state)


def test_initial_state_of_another_structure() -> None:
    given = arguments()
    segment = make_train_segment(
        dict_step, per_row, backend="eager", initial_state=torch.zeros(B, H)
    )
    with pytest.raises(TypeError, match="initial_state: expected the structure of the state"):
        segment(**given, reset=torch.zeros(K, dtype=torch.bool))


def test_classes_on_the_last_axis() -> None:
    """torch looks for them on axis 1, where a segment has its rows."""
    words = r"loss CrossEntropyLoss has the classes on axis 1.*out.flatten\(0, 1\), y.flatten\(\)"
    y = torch.zeros(K, B, dtype=torch.int64)
    refused(RuntimeError, words, dict_step, nn.CrossEntropyLoss(), y=y)


def test_initial_state_of_another_shape_or_dtype() -> None:
    given = arguments()
    reset = torch.zeros(K, dtype=torch.bool)
    for wrong, kind in (
        (torch.zeros(B, H + 1), ValueError),
        (torch.zeros(B, H, dtype=torch.float64), TypeError),
    ):
        segment = make_train_segment(
            dict_step, per_row, backend="eager", initial_state={"h": wrong}
        )
        with pytest.raises(kind, match=r"initial_state\['h'\]"):
            segment(**given, reset=reset)


def test_initial_state_that_returns_another_shape() -> None:
    segment = make_train_segment(
        dict_step,
        per_row,
        backend="eager",
        initial_state=lambda params: {"h": torch.zeros(B + 1, H)},
    )
    words = r"initial_state: returned a leaf of shape \[4, 7\] where the state has \[3, 7\]"
    with pytest.raises(ValueError, match=words):
        segment(**arguments(), reset=torch.zeros(K, dtype=torch.bool))


@pytest.mark.parametrize("of", [make_train_segment, reference_segment])
def test_initial_state_that_is_no_tensor(of: Any) -> None:
    given = () if of is make_train_segment else arguments().values()
    words = r"initial_state\['h'\]: expected a tensor, found float. Leave initial_state= out to st"
    with pytest.raises(TypeError, match=words):
        of(dict_step, per_row, *given, initial_state={"h": 0.0})


@pytest.mark.parametrize("of", [make_train_segment, reference_segment])
def test_initial_state_that_asks_for_a_gradient(of: Any) -> None:
    words = r"initial_state\['h'\]: requires a gradient, but .* give a function of the parameters"
    given = () if of is make_train_segment else arguments().values()
    with pytest.raises(ValueError, match=words):
        of(dict_step, per_row, *given, initial_state={"h": nn.Parameter(torch.zeros(H))})


def test_initial_state_that_closes_over_a_parameter() -> None:
    own = torch.zeros(B, H, requires_grad=True)
    segment = make_train_segment(
        dict_step, per_row, backend="eager", initial_state=lambda params: {"h": own + 1}
    )
    words = r"initial_state: uses a tensor of shape .* not taken from params.*Take it from params"
    with pytest.raises(ValueError, match=words):
        segment(**arguments(), reset=torch.zeros(K, dtype=torch.bool))


def test_state_that_changes_its_shape_in_the_step() -> None:
    words = r"step: state\['h'\] went in with shape \[1, 7\] and came out with \[3, 7\]"
    refused(ValueError, words, state={"h": torch.zeros(1, H)})


def test_state_that_changes_its_dtype_in_the_step() -> None:
    words = (
        r"step: state\['h'\] went in as torch.float64 and came out as torch.float32.*"
        r"give it in as torch.float32"
    )

    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        return dict_step(params, x_t, {"h": state["h"].float()})

    refused(TypeError, words, step, state={"h": torch.zeros(B, H, dtype=torch.float64)})


def test_data_of_another_dtype_than_the_model() -> None:
    """As NumPy's numbers are, where nobody says otherwise."""
    words = (
        r"step: state\['h'\] went in as torch.float32 and came out as torch.float64. That is the "
        "dtype of x, but of no parameter: give x as torch.float32."
    )
    refused(TypeError, words, x=arguments()["x"].double())


def test_state_that_changes_its_structure_in_the_step() -> None:
    def step(params: Tree, x_t: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        out, after = dict_step(params, x_t, state)
        return out, (after["h"],)

    refused(TypeError, "step: the state must keep its structure.*Return the next state", step)


# -- x, y ---------------------------------------------------------------------------------------


def test_x_without_a_tensor() -> None:
    refused(TypeError, r"x: expected at least one tensor.*found none", x=())
    refused(TypeError, r"x\[1\]: expected a tensor, found str", x=[torch.zeros(K, B, D), "a"])
    advice = r"For a step without an input give torch.zeros\(K\)"
    refused(TypeError, rf"x: expected tensors, found None\. {advice}", x=None)
    refused(TypeError, rf"found none\. {advice}", x={})


def test_packed_sequences() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, D), torch.zeros(2, D)])
    advice = r"Pad it \(torch.nn.utils.rnn.pad_packed_sequence\) and give mask="
    refused(TypeError, rf"x: a PackedSequence has another number of rows.*{advice}", x=packed)


def test_no_steps() -> None:
    x, y = torch.zeros(0, B, D), torch.zeros(0, B, H)
    refused(ValueError, r"x: has 0 steps; a segment needs at least one", x=x, y=y)


def test_lengths_that_differ() -> None:
    refused(ValueError, r"y: has 4 steps on axis 0, but x has 5", y=torch.zeros(K - 1, B, H))
    x = {"a": torch.zeros(K, B, D), "b": torch.zeros(K + 1, B)}
    refused(ValueError, r"x\['b'\]: has 6 steps on axis 0, but x\['a'\] has 5", x=x)


def test_x_without_an_axis_for_time() -> None:
    refused(
        ValueError, r"x: expected time on axis 0, found shape \[\]\. Expand what holds for all",
        x=torch.tensor(1.0),
    )  # fmt: skip
    refused(TypeError, r"y: expected a tensor, found float.*torch.full\(\(K,\), value\)", y=1.0)
    segment = make_train_segment(dict_step, per_row, backend="eager", time_dim=1)
    with pytest.raises(ValueError, match=r"y: expected time on axis 1, found shape \[5\]"):
        segment(**arguments() | {"x": torch.zeros(B, K, D), "y": torch.zeros(K)})


# -- reset and mask -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reset", "mask"])
def test_rows(name: str) -> None:
    def wrong(kind: type[Exception], words: str, rows: Any) -> None:
        refused(kind, f"{name}: {words}", **{name: rows})

    wrong(
        TypeError, r"expected a bool tensor \[K\] or \[K, B\], found torch.float32", torch.ones(K)
    )
    wrong(TypeError, r"expected a bool tensor.*found list", [True] * K)
    wrong(ValueError, r"has 4 steps, but x has 5", torch.ones(K - 1).bool())
    wrong(ValueError, r"has 3 steps, but x has 5", torch.ones(B, K).bool())
    wrong(
        ValueError,
        r"expected \[K\] or \[K, B\], found shape \[5, 3, 1\]",
        torch.ones(K, B, 1).bool(),
    )
    wrong(ValueError, r"expected \[K\] or \[K, B\], found shape \[\]", torch.tensor(True))
    words = r"has 2 rows, but state\['h'\] of shape \[3, 7\] has 3 on axis 0"
    wrong(ValueError, words, torch.ones(K, 2).bool())


def test_rows_of_a_state_that_has_none() -> None:
    given = problem("schedule_scalar")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    with pytest.raises(ValueError, match=r"reset: has 3 rows, but state\[1\] of shape \[\]"):
        segment(*given.data(K), reset=torch.ones(K, B).bool())


def test_mask_of_a_scalar_loss() -> None:
    words = r"mask: a scalar loss cannot be masked.*\[K\] or \[K, B\]"
    refused(ValueError, words, dict_step, mse, mask=torch.ones(K).bool())


# -- devices, loss, backend ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["params", "x", "y"])
def test_devices_that_differ(name: str) -> None:
    given = arguments()
    moved = {"w": given["params"]["w"], "u": given["params"]["u"].to("meta")}
    moved = moved if name == "params" else given[name].to("meta")
    words = {
        "params": r"params\['u'\]: is on meta, but x is on cpu.*one device",
        "x": r"params\['w'\]: is on cpu, but x is on meta.*one device",
        "y": r"y: is on meta, but x is on cpu.*one device",
    }[name]
    refused(ValueError, words, **{name: moved})


def test_a_loss_that_is_a_class() -> None:
    words = r"loss: expected a function loss\(out, y\), found the class MSELoss\. .* as MSELoss\(\)"
    with pytest.raises(TypeError, match=words):
        make_train_segment(dict_step, nn.MSELoss)


def test_loss_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"loss: expected a function loss\(out, y\), found str"):
        make_train_segment(dict_step, "mse", backend="eager")
    refused(
        TypeError, "loss: expected .* to return a tensor, found float", dict_step, lambda o, y: 1.0
    )
    words = r"loss: expected a scalar, or .* found shape \[.*3, 7\]"
    refused(ValueError, words, dict_step, lambda out, y: (out - y).square())


@pytest.mark.parametrize("rows", [K, K + 1])
def test_a_loss_with_rows_before_steps(rows: int) -> None:
    """With as many rows as steps, its shape is that of the mask all the same."""

    def step(params: Tree, x_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x_t @ params["w"] + h)
        return h, h

    segment = make_train_segment(step, lambda out, y: (out - y).square().mean(-1).T)
    given = {"w": torch.ones(D, H)}, torch.zeros(rows, H), torch.ones(K, rows, D)
    mask = torch.ones(K, rows, dtype=torch.bool)
    words = r"loss: loss\(out, y\) has shape .* but mask has "
    words += (
        r".* with 5, as many as another axis of out has, the shapes fit by"
        if rows == K
        else r"\[5, 6\]"
    )
    with pytest.raises(ValueError, match=words):
        segment(*given, torch.ones(K, rows, H), mask=mask)


def test_loss_and_y_that_do_not_fit() -> None:
    with pytest.raises(Exception, match=r".") as caught:
        call(dict_step, cross_entropy)
    told = "".join(getattr(caught.value, "__notes__", []))
    assert "while loss cross_entropy was traced" in told
    assert "It was given out" in told


def test_recompute_that_is_no_bool() -> None:
    with pytest.raises(TypeError, match="recompute: expected True or False, found 'no'"):
        make_train_segment(dict_step, mse, recompute="no")  # type: ignore[arg-type]


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of auto, eager, .*found 'cuda'"):
        make_train_segment(dict_step, mse, backend="cuda")


@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        (0, TypeError, r"in_dims: expected \(None, state, x, y\).*found 0"),
        ((None, 0, 0), TypeError, r"in_dims: expected \(None, state, x, y\)"),
        ((0, 0, 0, 0), ValueError, r"in_dims: the parameters are shared.*torch.func.vmap"),
        ((None, 0, None, 0), ValueError, r"in_dims: x must have a batch axis"),
        ((None, 0, "a", 0), TypeError, r"in_dims: expected an axis for x, .*found 'a'"),
        ((None, 0, -2, 0), ValueError, r"in_dims: expected an axis of x counted from the front"),
        ((None, (0, 0), 0, 0), TypeError, r"in_dims: expected an axis for state, .*\(0, 0\)"),
    ],
)
def test_in_dims(wrong: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make_train_segment(dict_step, mse, backend="eager", in_dims=wrong)


@pytest.mark.parametrize(("name", "i"), [("state", 1), ("x", 2), ("y", 3)])
def test_in_dims_of_an_axis_that_is_not_there(name: str, i: int) -> None:
    given = problem("elman_one_sequence")
    dims = [None, 0, 0, 0]
    dims[i] = 5
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=tuple(dims))  # type: ignore[arg-type]
    x, y, h = (torch.zeros(shape).double() for shape in ((3, K, D), (3, K, 4), (3, H)))
    with pytest.raises(
        ValueError, match=rf"{name}: has shape .* but in_dims names axis 5 of {name}"
    ):
        segment(given.params, h, x, y)


@pytest.mark.parametrize("shape", [(1,), (1, B), (B, K)])
def test_flags_beside_a_learned_start(shape: tuple[int, ...]) -> None:
    """With ``state=None`` a start that is computed is put in by a reset, which must not expand."""
    segment = make_train_segment(
        dict_step, per_row, backend="eager", initial_state=lambda params: {"h": params["w"][:B, :H]}
    )
    given = arguments() | {"state": None}
    for name in ("reset", "mask"):
        with pytest.raises(ValueError, match=f"{name}: has {shape[0]} steps, but x has {K}"):
            segment(**given, **{name: torch.ones(shape, dtype=torch.bool)})


def test_in_dims_of_batches_that_differ() -> None:
    given = problem("elman_one_sequence")
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=(None, 0, 0, 0))
    x, y = torch.zeros(4, K, D).double(), torch.zeros(4, K, 4).double()
    with pytest.raises(ValueError, match=r"state: .*3.*x.*4"):
        segment(given.params, torch.zeros(3, H).double(), x, y)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((), r"reset: expected \[K\] or \[K, B\], found shape \[\]"),
        ((4, K, 1, 1), r"reset: expected \[K\] or \[K, B\], found shape \[4, 5, 1, 1\]"),
        ((1, K), r"reset: has 1 sequences on axis 0, but x has 3"),
        ((4, K), r"reset: has 4 sequences on axis 0, but x has 3"),
        ((3, K + 1), r"reset: has 6 steps, but x has 5"),
    ],
)
def test_in_dims_with_flags_of_other_shapes(shape: tuple[int, ...], words: str) -> None:
    given = problem("elman_one_sequence")
    segment = make_train_segment(given.step, given.loss, backend="eager", in_dims=(None, 0, 0, 0))
    x, y = torch.zeros(3, K, D).double(), torch.zeros(3, K, 4).double()
    with pytest.raises(ValueError, match=words):
        segment(given.params, torch.zeros(3, H).double(), x, y, reset=torch.zeros(shape).bool())


def test_in_dims_of_an_axis_that_out_does_not_have() -> None:
    def step(params: Any, x_t: Tensor, total: Tensor) -> Any:
        total = params["decay"] * total + x_t.sum()
        return total, total

    segment = make_train_segment(
        step, lambda out, y: out.square(), backend="eager", in_dims=(None, 0, 2, None)
    )
    with pytest.raises(ValueError, match=r"out: has shape \[\] at each of 5 steps of 3 sequences"):
        segment({"decay": torch.tensor(0.5)}, torch.zeros(3), torch.zeros(K, D, 3), None)


def test_x_that_waits_for_a_gradient() -> None:
    """What made it, such as an encoder in front, would not be trained; a tap gives it one."""
    x = arguments()["x"].requires_grad_()
    refused(ValueError, r"x: requires a gradient, but a segment returns none.*taps=\[\"x\"\]", x=x)


def test_y_that_waits_for_a_gradient() -> None:
    """As targets do that another network computed, if they were not detached."""
    y = arguments()["y"].requires_grad_()
    refused(ValueError, "y: requires a gradient, but a segment returns none for it.*Detach it", y=y)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("name", ["x", "y"])
def test_data_that_waits_for_a_gradient_later(name: str, consecutive: bool) -> None:
    """As that of an encoder does that is no longer frozen; calls of its shape are known by then."""
    given = problem("gru_cell")
    segment: Any = make_train_segment(given.step, given.loss, backend="eager")
    call = ConsecutiveCalls(segment) if consecutive else segment
    params, state, x, y = given.data(3)
    for _ in range(3):
        state = call(params, state, x, y).state
    data = {"x": x, "y": y}
    data[name] = data[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: requires a gradient, but a segment returns"):
        call(params, state, **data)


def test_a_hook_on_a_parameters_gradient() -> None:
    given = problem("gru_cell")
    segment = make_train_segment(given.step, given.loss, backend="eager")
    params, *others = given.data(3)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    hook = params["weight_hh"].register_hook(lambda grad: 0 * grad)
    with pytest.warns(RuntimeWarning, match=r"params\['weight_hh'\] has a hook .* not called"):
        segment(params, *others)
    hook.remove()
    segment(params, *others)


def test_arrays_of_numpy() -> None:
    for name in ("x", "y"):
        array = arguments()[name].numpy()
        refused(TypeError, f"{name}: expected a tensor, found ndarray.*as_tensor", **{name: array})


# -- what is allowed ----------------------------------------------------------------------------


def test_context_without_a_target() -> None:
    def loss(out: Tensor, y: None) -> Tensor:
        return out.square().mean()

    given = arguments() | {"y": None}
    found = make_train_segment(dict_step, loss, backend="eager", context=2)(**given)
    assert_close(found, reference_segment(dict_step, loss, *given.values(), context=2), 1e-6)


def test_nan_is_returned_as_it_is() -> None:
    x = arguments()["x"]
    x[2, 0, 0] = float("nan")
    found = call(x=x)
    assert found.loss.isnan()
    assert found.grads["w"].isnan().any()
    assert found.out[:2].isfinite().all()
    assert found.out[:, 1:].isfinite().all()


def test_unused_and_integer_parameters_get_zeros() -> None:
    given = problem("unused_parameters")
    found = make_train_segment(given.step, given.loss, backend="eager")(*given.data(K))
    for name in ("unused", "unread", "order"):
        assert found.grads[name].shape == given.params[name].shape
        assert found.grads[name].dtype == given.params[name].dtype
        assert not found.grads[name].any()


def test_requires_grad_makes_no_difference() -> None:
    given = problem("gru_cell")
    params, state, x, y = given.data(K)
    segment = make_train_segment(given.step, given.loss, backend="eager")
    expected = reference(given, K)
    plain = {name: p.detach().clone() for name, p in params.items()}
    attached = {name: p.clone() * 1 for name, p in params.items()}  # not leaves
    for own in (params, plain, attached):
        assert_close(segment(own, state, x, y), expected)
    graded = state.clone().requires_grad_()
    assert_close(segment(params, graded, x, y), expected)
    with torch.no_grad():
        assert_close(segment(params, state, x, y), expected)
    with torch.inference_mode():
        assert_close(segment(params, state, x, y), expected)
    assert all(p.grad is None for p in params.values())


def test_non_contiguous_and_expanded_data() -> None:
    given = problem("gru_cell")
    params, state, x, y = given.data(K)
    segment = make_train_segment(given.step, given.loss, backend="eager")
    wide = torch.stack([x, x], -1)[..., 0]
    row = state[:1].expand(B, H)
    expected = reference(Problem(given.step, params, row, given.x, given.y, given.loss), K)
    turned = {name: p.detach().clone().mT.contiguous().mT if p.dim() == 2 else p
              for name, p in params.items()}  # fmt: skip
    assert_close(segment(turned, row, wide, y.flip(0).flip(0)), expected)


def test_a_start_without_rows_beside_resets_of_rows() -> None:
    given = arguments() | {"state": None}
    segment = make_train_segment(
        dict_step, per_row, backend="eager", initial_state={"h": torch.zeros(H)}
    )
    words = r"reset: has 3 rows, but initial_state\['h'\] of shape \[7\] has 7 on axis 0"
    with pytest.raises(ValueError, match=words):
        segment(**given, reset=torch.zeros(K, B, dtype=torch.bool))
