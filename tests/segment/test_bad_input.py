"""Every bad input has a defined answer: an error names the argument, its leaf and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment
from ftbptt.segment.consecutive_calls import ConsecutiveCalls

from ..cells import problem
from ..cells.problems import B, D, H, Problem, per_row
from ..oracle import assert_close, reference
from .spoiled_calls import K, arguments, call, dict_step, refused

Tree = Any


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
    assert "spoiled_calls.py" in told
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


def test_a_start_without_rows() -> None:
    own = make_train_segment(
        dict_step, per_row, backend="eager", initial_state={"h": torch.zeros(H)}
    )
    given = arguments()
    own(*given.values(), reset=torch.tensor([True] * len(given["x"])))
    words = r"step: state\['h'\] went in .*so expand it over them, to \[3, 7\], also in initial_sta"
    with pytest.raises(ValueError, match=words):
        own(*(given | {"state": None}).values())


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    rows = torch.nested.nested_tensor([torch.zeros(3, D), torch.zeros(2, D)], layout=layout)
    advice = r"Pad it \(torch.nested.to_padded_tensor\(value, 0\)\) and give mask=, or let seq"
    refused(TypeError, rf"x: a nested tensor has rows of different lengths\. {advice}", x=rows)


def test_no_steps() -> None:
    x, y = torch.zeros(0, B, D), torch.zeros(0, B, H)
    refused(ValueError, r"x: has 0 steps; a segment needs at least one", x=x, y=y)


def test_a_list_of_steps() -> None:
    given = arguments()
    words = r"x: is a list of 5 tensors of 3 steps on axis 0, but y .* torch\.stack\(x, 0\)"
    refused(ValueError, words, x=list(given["x"]))


def test_lengths_that_differ() -> None:
    advice = "leave the others out in the loss; mask= is for padding, where the state stays"
    words = rf"y: has 4 steps on axis 0, but x has 5\..*{advice}"
    refused(ValueError, words, y=torch.zeros(K - 1, B, H))
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


def test_tables_and_mappings() -> None:
    """A table of pandas has keys() too."""
    table = SimpleNamespace(to_numpy=len, keys=len)
    words = r"x: expected a tensor, found SimpleNamespace.*from_numpy\(value\.to_numpy\(\)\), or"
    refused(TypeError, words, x=table)
    words = r"y\['a'\]: expected a tensor, found SimpleNamespace\..* tensor: dict\(value\), or keep"
    refused(TypeError, words, y={"a": SimpleNamespace(keys=len)})


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
    with pytest.warns(RuntimeWarning, match="ftbptt: state requires a gradient, but a segment det"):
        assert_close(segment(params, graded, x, y), expected)
    assert_close(segment(params, graded * 1, x, y), expected)
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
