"""A state that a caller means to train: a segment detaches it, and says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftbptt import make_train_segment, reference_segment, tap
from ftbptt.segment.consecutive_calls import ConsecutiveCalls
from ftbptt.training import train_stream

from ..cells.problems import B, H, per_row
from ..oracle import assert_close
from .spoiled_calls import K, arguments, dict_step

WORDS = (
    r"ftbptt: state\['h'\] requires a gradient, but a segment detaches the state that it is given, "
    r"so that it would not be trained\. .*, initial_state=lambda params: params\['h0'\]\), with st"
)


def segment(**options: Any) -> Any:
    return make_train_segment(dict_step, per_row, backend="eager", **options)


@pytest.mark.parametrize("learned", [nn.Parameter, Tensor.requires_grad_])
@pytest.mark.parametrize("consecutive", [False, True])
def test_a_state_to_be_trained(learned: Any, consecutive: bool) -> None:
    """Also where such a call was checked before, as with the state that came back."""
    own = segment()
    call = ConsecutiveCalls(own) if consecutive else own
    given = arguments()
    for _ in range(3):
        given["state"] = call(*given.values()).state
    given["state"] = {"h": learned(torch.zeros(B, H))}
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=WORDS) as caught:
            call(*given.values())
        assert caught[0].filename == __file__
    data, params = (given["x"], given["y"]), given["params"]
    optimizer = torch.optim.SGD([*params.values()])
    with pytest.warns(RuntimeWarning, match=WORDS):
        train_stream(own, params, given["state"], data, optimizer, k1=5)


@pytest.fixture
def _silent() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("_silent")
def test_what_is_no_state_to_be_trained() -> None:
    given, h = arguments(), nn.Parameter(torch.zeros(B, H))
    own = segment()
    for state in (h + 0, h.detach()):  # of code before, which is cut; not to be trained
        for _ in range(2):
            own(*(given | {"state": {"h": state}}).values())
    own.evaluate(*(given | {"state": {"h": h}}).values())
    states = torch.stack([h, h])
    torch.func.vmap(own, in_dims=(None, 0, None, None))(
        given["params"], {"h": states}, given["x"], given["y"]
    )


@pytest.mark.usefixtures("_silent")
def test_the_remedy() -> None:
    given = arguments()
    h = nn.Parameter(torch.zeros(B, H))
    given["params"] |= {"h0": h}
    own = segment(initial_state=lambda params: {"h": params["h0"]})
    assert own(*(given | {"state": None}).values()).grads["h0"].any()
    reset = torch.arange(5) == 0
    assert own(*given.values(), reset=reset).grads["h0"].any()


def attend(params: Any, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Attention over a memory ``[B, slots, H]`` that the state keeps."""
    memory, h = (tap(name, leaf) for name, leaf in zip(("memory", "h"), state, strict=True))
    weights = (memory @ h.unsqueeze(2)).softmax(1)
    h = torch.tanh(x_t * params["w"] + (weights * memory).sum(1))
    return h, (memory, h)


def test_a_memory_that_an_encoder_made() -> None:
    """And the state to start from: what was computed is told of the first, and trained by taps."""
    torch.manual_seed(0)
    encoder = nn.Linear(3, H).double()
    features, x = torch.randn(B, 6, 3).double(), torch.randn(5, B, H).double()
    params, y = {"w": torch.ones(H).double()}, torch.zeros(5, B, H).double()

    def start() -> tuple[Tensor, Tensor]:
        memory = encoder(features)
        return memory, memory.mean(1)

    plain = make_train_segment(attend, per_row, backend="eager")
    with torch.no_grad():  # a first call to which nothing is lost
        plain(params, start(), x, y)
    with pytest.warns(RuntimeWarning, match=r"state\[0\] requires a gradient, and the step ret"):
        plain(params, start(), x, y)
    tapped = make_train_segment(attend, per_row, taps=["memory", "h"], backend="eager")
    state = start()
    taps = tapped(params, state, x, y).taps
    torch.autograd.backward(state, [taps["memory"].grad[0], taps["h"].grad[0]])
    found = encoder.weight.grad.clone()

    encoder.zero_grad()
    state, outs = start(), []
    for x_t in x:
        out, state = attend(params, x_t, state)
        outs.append(out)
    per_row(torch.stack(outs), y).mean().backward()
    torch.testing.assert_close(found, encoder.weight.grad)


@pytest.mark.parametrize(
    ("h", "words"),
    [
        (0.0, r"initial_state\['h'\]: expected a tensor, found float. Return tensors"),
        (torch.zeros(H).double(), "of torch.float64 where the state has torch.float32. Give both"),
    ],
)
def test_a_start_of_another_dtype(h: Any, words: str) -> None:
    own = segment(initial_state=lambda params: {"h": h})
    with pytest.raises(TypeError, match=words):
        own(**arguments(), reset=torch.zeros(K, dtype=torch.bool))


@pytest.mark.parametrize("h", [torch.ones(H).half(), torch.ones(()).double(), torch.tensor(1)])
def test_a_start_that_the_state_can_hold(h: Tensor) -> None:
    given, reset = arguments(), torch.arange(K) % 2 == 1
    options: Any = {"initial_state": lambda params: {"h": h}}
    expected = reference_segment(dict_step, per_row, **given, reset=reset, **options)
    assert_close(segment(**options)(**given, reset=reset), expected, 1e-5)
