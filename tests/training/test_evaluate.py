"""``evaluate_stream``: the loss and the metrics of a whole stream, in chunks."""

from __future__ import annotations

import copy
import re
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.text import Perplexity

from ftbptt import SegmentOutput, make_train_segment
from ftbptt.training import Chunk, evaluate_stream

from .evaluations import Loss, accuracy, evaluate, flags, made, plain
from .stream_runs import assert_equal
from .streams import cross_entropy, mean_cross_entropy, stream, tagger, zeros

# -- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 7, 22, 256])
@pytest.mark.parametrize("loss", [cross_entropy, mean_cross_entropy])
def test_is_the_loss_of_the_whole(k: int, loss: Loss) -> None:
    """22 steps in chunks of 7 or 4: the last one counts by its steps, the state is carried."""
    data = Chunk(*stream(22, rows=3))
    _, losses, state = plain(data)
    found = evaluate(data, loss, k=k)
    assert found.loss == pytest.approx(losses.mean().item(), abs=1e-12)
    assert found.steps == 66
    assert found.metrics == {}
    for a, b in zip(found.state, state, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert not a.requires_grad


@pytest.mark.parametrize("k", [1, 5, 30])
@pytest.mark.parametrize("rows", [3, None])
def test_resets_and_masks(k: int, rows: int | None) -> None:
    """[T, B] or [T]; a chunk without a valid step changes nothing."""
    reset, mask = flags(23, rows, 0.2), flags(23, rows, 0.6, seed=1)
    mask[5:10] = False
    data = Chunk(*stream(23, rows=3), reset, mask)
    out, losses, state = plain(data)
    metric = accuracy()
    found = evaluate(data, k=k, metrics={"accuracy": metric},
                     metric_inputs=lambda out, y: (out.argmax(-1), y))  # fmt: skip
    valid = mask if rows else mask.unsqueeze(1).expand(23, 3)
    assert found.steps == int(valid.sum())
    assert found.loss == pytest.approx(losses[valid].mean().item(), abs=1e-12)
    for a, b in zip(found.state, state, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    right = (out.argmax(-1) == data.y)[valid]
    assert found.metrics["accuracy"].item() == pytest.approx(right.double().mean().item())


def test_nothing_valid_is_no_loss() -> None:
    found = evaluate(Chunk(*stream(9, rows=3), None, torch.zeros(9, dtype=torch.bool)), k=4)
    assert (found.loss, found.steps) == (0.0, 0)


def test_data_from_anywhere() -> None:
    x, y = stream(23, rows=3)
    expected = evaluate((x, y), k=5)
    chunks = [(x[:9], y[:9]), (x[9:10], y[9:10]), (x[10:], y[10:])]
    for data in (chunks, iter(chunks), (x.numpy(), y.numpy())):
        found = evaluate(data, k=5)
        assert (found.loss, found.steps) == (expected.loss, expected.steps)
    halved = evaluate((2 * x, y.float()), k=5, prepare=lambda x, y: (x / 2, y.long()))
    assert halved.loss == pytest.approx(expected.loss, abs=1e-12)


def test_goes_on_from_a_state() -> None:
    x, y = stream(22, rows=3)
    segment, params = made()
    first = evaluate((x[:9], y[:9]))
    rest = evaluate_stream(segment, params, first.state, (x[9:], y[9:]))
    whole = evaluate((x, y))
    assert (9 * first.loss + 13 * rest.loss) / 22 == pytest.approx(whole.loss, abs=1e-12)


def test_parameters_stay_as_they_are() -> None:
    _, params = made()
    before = copy.deepcopy(params)
    evaluate(stream(9, rows=3))
    for name, p in params.items():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_the_context_of_a_segment_counts_too() -> None:
    """All steps have a loss: nothing is left out at the start of each chunk."""
    module = tagger()
    segment = make_train_segment(module, cross_entropy, backend="eager", context=3)
    params = dict(module.named_parameters())
    found = evaluate_stream(segment, params, zeros(3), stream(10, rows=3), k=4)
    assert found.steps == 30
    assert found.loss == pytest.approx(evaluate(stream(10, rows=3)).loss, abs=1e-12)


def test_memory_does_not_grow_with_the_length() -> None:
    """Neither chunks nor outputs are kept: what is alive is the same at each read."""
    alive: list[int] = []

    class Long:
        total = 400

        def begin(self, epoch: int) -> None:
            pass

        def read(self, start: int, stop: int) -> Chunk | None:
            alive.append(sum(1 for chunk in chunks if chunk() is not None))
            if start >= self.total:
                return None
            x, y = stream(stop - start, rows=3, seed=start)
            chunks.append(weakref.ref(x))
            return Chunk(x, y)

    chunks: list[Any] = []
    assert evaluate(Long(), k=8, metrics={"accuracy": accuracy()},
                    metric_inputs=lambda out, y: (out.argmax(-1), y)).steps == 1200  # fmt: skip
    assert len(chunks) == 50
    assert max(alive) <= 1


# -- metrics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 6, 100])
def test_metrics_of_classes(k: int) -> None:
    """Scores [N, C] and classes [N], as they are given to metrics everywhere."""
    data = Chunk(*stream(22, rows=3))
    out, _, _ = plain(data)
    confusion = MulticlassConfusionMatrix(4)
    found = evaluate(data, k=k, metrics={"accuracy": accuracy(), "confusion": confusion})
    chosen = out.argmax(-1)
    assert found.metrics["accuracy"].item() == pytest.approx(
        (chosen == data.y).double().mean().item()
    )
    expected = torch.zeros(4, 4, dtype=torch.int64)
    for a, b in zip(data.y.flatten(), chosen.flatten(), strict=True):
        expected[a, b] += 1
    assert torch.equal(found.metrics["confusion"], expected)


def test_metrics_of_whole_chunks() -> None:
    """``metric_inputs`` sees [K, B, ...], such as for one that wants sequences."""
    data = Chunk(*stream(20, rows=3))
    shapes = []

    def inputs(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append((tuple(out.shape), tuple(y.shape)))
        return out.log_softmax(-1).unsqueeze(2), y.unsqueeze(2)

    found = evaluate(data, k=8, metrics={"perplexity": Perplexity()}, metric_inputs=inputs)
    assert shapes == [((8, 3, 4), (8, 3)), ((8, 3, 4), (8, 3)), ((4, 3, 4), (4, 3))]
    assert found.metrics["perplexity"].item() == pytest.approx(numpy.exp(found.loss))


def test_a_collection_of_metrics() -> None:
    found = evaluate(
        stream(20, rows=3),
        k=8,
        metrics=MetricCollection({"micro": accuracy(), "macro": MulticlassAccuracy(4)}),
    )
    alone = evaluate(
        stream(20, rows=3), metrics={"micro": accuracy(), "macro": MulticlassAccuracy(4)}
    )
    assert found.metrics.keys() == {"micro", "macro"}
    for name, value in found.metrics.items():
        assert value.item() == pytest.approx(alone.metrics[name].item())


def test_metrics_are_not_reset() -> None:
    metric = accuracy()
    parts = [stream(9, rows=3, seed=seed) for seed in (1, 2)]
    first, both = (evaluate(own, metrics={"accuracy": metric}) for own in parts)
    second = evaluate(parts[1], metrics={"accuracy": accuracy()})
    mean = (first.metrics["accuracy"] + second.metrics["accuracy"]) / 2
    assert both.metrics["accuracy"].item() == pytest.approx(mean.item())


def test_any_object_with_update_and_compute() -> None:
    class Steps:
        count = 0

        def update(self, preds: Tensor, target: Tensor) -> None:
            assert preds.shape == (len(target), 4)
            self.count += len(target)

        def compute(self) -> int:
            return self.count

    found = evaluate(stream(22, rows=3), k=5, metrics={"steps": Steps()})
    assert found.metrics == {"steps": found.steps} == {"steps": 66}


def test_trees_of_outputs() -> None:
    """A model with two heads: metrics are given the tree with steps and rows on one axis."""
    cell = nn.GRUCell(3, 5).double()

    def step(params: Any, x_t: Tensor, h: Tensor) -> Any:
        h = torch.func.functional_call(cell, params, (x_t, h))
        return {"h": h, "sum": h.sum(1)}, h

    def loss(out: Any, y: Any) -> Tensor:
        return (out["sum"] - y["sum"]).square()

    segment = make_train_segment(step, loss, backend="eager")
    x, _ = stream(13, rows=2)
    data = Chunk(x, {"sum": x.sum(2)}, None, flags(13, None, 0.5))
    found = evaluate_stream(
        segment, dict(cell.named_parameters()), torch.zeros(2, 5).double(), data, k=5,
        metrics={"error": MeanSquaredError()},
        metric_inputs=lambda out, y: (out["sum"], y["sum"]),
    )  # fmt: skip
    assert found.metrics["error"].item() == pytest.approx(found.loss)
    assert found.steps == 2 * int(data.mask.sum())
    # without metric_inputs: torchmetrics fails on a dict, and does not know whose it is
    with pytest.raises(AttributeError) as caught:
        evaluate_stream(
            segment, dict(cell.named_parameters()), torch.zeros(2, 5).double(), data,
            metrics={"error": MeanSquaredError()},
        )  # fmt: skip
    note = caught.value.__notes__[0]
    assert "metrics['error'] was given a dict as preds and a dict as target. metric_inputs" in note


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"k": 0}, ValueError, "k: expected at least 1, found 0."),
        ({"k": 2.5}, TypeError, "k: expected a whole number, found 2.5."),
        ({"k": True}, TypeError, "k: expected a whole number, found True."),
        ({"metrics": accuracy()}, TypeError, "metrics: expected a dict of them, found Multiclass"),
        ({"metrics": [accuracy()]}, TypeError, "metrics: expected a dict of them, found list."),
        (
            {"metrics": {"error": torch.dist}},
            TypeError,
            "metrics['error']: expected an object with update(preds, target) and compute(), such "
            "as one of torchmetrics, found builtin_function_or_method.",
        ),
        (
            {"metrics": {"error": MeanSquaredError}},
            TypeError,
            "metrics['error']: expected an object with update(preds, target) and compute(), such "
            "as one of torchmetrics, found the class MeanSquaredError itself.",
        ),
        (
            {"metrics": {"a": accuracy()}, "metric_inputs": lambda out, y: out},
            TypeError,
            "metric_inputs: expected it to return (preds, target), found Tensor.",
        ),
        (
            {"metric_inputs": lambda out, y: (out.flatten(0, 1), y.flatten())},
            ValueError,
            "metric_inputs: preds has shape [27, 4], but the chunk has 9 steps on axis 0 and 3 "
            "rows on axis 1. Keep these axes",
        ),
        (
            {"metric_inputs": lambda out, y: (out[:, :1], y)},
            ValueError,
            "metric_inputs: preds has shape [9, 1, 4], but the chunk has 9 steps on axis 0 and 3 ",
        ),
        (
            {"metric_inputs": lambda out, y: (out, {"y": y[y > 0]})},
            ValueError,
            "metric_inputs: target['y'] has shape [",
        ),
        (
            {"metric_inputs": lambda out, y: (out.numpy(), y.numpy())},
            TypeError,
            "metric_inputs: preds: expected a tensor, found ndarray. A metric may convert it",
        ),
        (
            {"metric_inputs": MeanSquaredError},
            TypeError,
            "metric_inputs: expected a function metric_inputs(out, y), found the class MeanSquared",
        ),
        ({"prepare": 3}, TypeError, "prepare: expected a function prepare(x, y), found int."),
        ({"data": []}, ValueError, "data: has no steps to evaluate on."),
        ({"data": (torch.zeros(0, 3, 3), None)}, ValueError, "data: has no steps to evaluate on."),
        ({"data": "corpus"}, TypeError, "data: expected a tuple (x, y), an iterable of such tuple"),
        (
            {"data": (stream(9)[0], stream(8)[1])},
            ValueError,
            "data: y: has 8 steps on axis 0, but x has 9.",
        ),
        (
            {"prepare": lambda x, y: (x[1:], y[1:])},
            ValueError,
            "prepare: it was given 9 steps and returned 8.",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    options = {"data": stream(9, rows=3), "metrics": {"accuracy": accuracy()}} | options
    with pytest.raises(kind, match=re.escape(words)):
        evaluate(options.pop("data"), **options)


def test_metrics_without_a_target() -> None:
    segment = make_train_segment(tagger(), lambda out, y: out.square().mean(), backend="eager")
    params = dict(tagger().named_parameters())
    x, _ = stream(9, rows=3)
    with pytest.raises(ValueError, match="metrics: there is no y to give to them"):
        evaluate_stream(segment, params, zeros(3), (x, None), metrics={"a": accuracy()})
    found = evaluate_stream(
        segment, params, zeros(3), (x, None), metrics={"error": MeanSquaredError()}, k=4,
        metric_inputs=lambda out, y: (out, torch.zeros_like(out)),
    )  # fmt: skip
    assert found.metrics["error"].item() == pytest.approx(found.loss)


def test_metrics_of_a_target_of_each_step() -> None:
    """The same for all rows."""
    segment = make_train_segment(
        tagger(), lambda out, y: (out.mean(-1) - y[:, None]).square().mean(), backend="eager"
    )
    data = stream(9, rows=3)[0], torch.arange(9.0).double()
    found = evaluate_stream(
        segment, dict(tagger().named_parameters()), zeros(3), data, k=4,
        metrics={"error": MeanSquaredError()}, metric_inputs=lambda out, y: (out.mean(-1), y),
    )  # fmt: skip
    assert found.metrics["error"].item() == pytest.approx(found.loss)


def test_an_ensemble() -> None:
    """The state and a loss of each model, with the same data."""
    modules = [tagger(seed).double() for seed in range(3)]
    params, _ = torch.func.stack_module_state(modules)
    segment = make_train_segment(modules[0], mean_cross_entropy, backend="eager")
    data, state = stream(9, rows=3), zeros(3)
    ensemble = vmap(segment.evaluate, in_dims=(0, None, None, None))
    with pytest.raises(ValueError, match="time_dim: train_segment is under vmap"):
        evaluate_stream(ensemble, params, state, data)
    models = tuple(torch.stack([leaf] * 3) for leaf in state)
    ensemble = vmap(segment.evaluate, in_dims=(0, 0, None, None))
    found = evaluate_stream(ensemble, params, models, data, k=4, time_dim=0)
    assert found.steps == 27
    for i, own in enumerate(modules):
        # The method of a segment is taken for the segment.
        alone = evaluate_stream(segment.evaluate, dict(own.named_parameters()), state, data)
        assert alone.steps == 27
        assert float(found.loss[i]) == pytest.approx(alone.loss)
        assert_equal([leaf[i] for leaf in found.state], list(alone.state))
    with pytest.raises(TypeError, match="metrics: of a function it is not known where time"):
        evaluate_stream(
            ensemble, params, models, data, time_dim=0, metrics={"error": MeanSquaredError()}
        )
    message = r"computes gradients. Pass vmap\(train_segment.evaluate, in_dims=...\)"
    with pytest.raises(TypeError, match=message):
        evaluate_stream(vmap(segment), params, models, data, time_dim=0)


def test_an_ensemble_on_chunks_of_which_one_has_a_mask() -> None:
    """The state has the models in front of the rows, of which there are as many in both chunks."""
    modules = [tagger(seed).double() for seed in range(2)]
    params, _ = torch.func.stack_module_state(modules)
    segment = make_train_segment(modules[0], cross_entropy, backend="eager")
    ensemble = vmap(segment.evaluate, in_dims=(0, 0, None, None))
    (x, y), mask = stream(9, rows=3), flags(9, 3, 0.5)
    mask[:4] = True
    state = tuple(torch.stack([leaf] * 2) for leaf in zeros(3))
    chunks = [Chunk(x[:4], y[:4]), Chunk(x[4:], y[4:], None, mask[4:])]
    found = evaluate_stream(ensemble, params, state, chunks, k=4, time_dim=0)
    assert found.steps == int(mask.sum())
    expected = ensemble(params, state, x, y, mask=mask).loss
    torch.testing.assert_close(found.loss, expected)


def test_a_function_whose_loss_of_no_step_is_nan() -> None:
    """The chunk of padding has no part in the mean."""

    def mean_of_valid(params: Any, state: Tensor, x: Tensor, y: Any, *, mask: Tensor) -> Any:
        return SegmentOutput(None, state, (x.mean(-1) * mask).sum() / mask.sum(), x)

    x, mask = torch.randn(8, 2, 3), torch.ones(8, 2, dtype=torch.bool)
    mask[:4], mask[6, 1] = False, False
    found = evaluate_stream(mean_of_valid, {}, torch.zeros(2, 3), Chunk(x, None, None, mask), k=4)
    assert found.steps == 7
    assert found.loss == pytest.approx(float(x.mean(-1)[mask].mean()))


def test_no_train_segment() -> None:
    with pytest.raises(TypeError, match="train_segment: expected what make_train_segment returns"):
        evaluate_stream(tagger(), {}, None, stream(9))


def test_progress_is_drawn_and_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(stream(9, rows=3), k=3, progress=True)
    drawn = capsys.readouterr().err
    assert "/9 [" in drawn
    evaluate(stream(9, rows=3), k=3)
    assert capsys.readouterr().err == ""
