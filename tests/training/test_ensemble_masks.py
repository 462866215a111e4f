"""Models of an ensemble that have masks of their own: as the folds of a cross-validation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import stack_module_state, vmap

from ftbptt import make_train_segment
from ftbptt.training import Chunk, Stream, evaluate_stream, train_stream

from .streams import cross_entropy, stream, tagger, zeros

M, STEPS, K, ROWS = 3, 22, 4, 2


def masks(of_rows: bool) -> Tensor:
    """``bool[M, STEPS, ROWS]`` or ``bool[M, STEPS]``; model 1 has no valid step in two windows."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(M, *((STEPS, ROWS) if of_rows else (STEPS,)), generator=generator) < 0.5
    mask[1, 8:16] = False
    return mask


def mapped(call: Any) -> Any:
    """The call under vmap, which maps only what it is given by position."""

    def ensemble(*args: Any, reset: Tensor | None = None, mask: Tensor | None = None) -> Any:
        if mask is None:
            return vmap(call)(*args)
        return vmap(lambda p, s, x, y, m: call(p, s, x, y, mask=m))(*args, mask)

    return ensemble


def train(module: torch.nn.Module, params: Any, state: Any, chunk: Chunk, **options: Any) -> Stream:
    segment = make_train_segment(module, cross_entropy, backend="eager")
    if chunk.x.dim() > 3:
        segment, options["time_dim"] = mapped(segment), 1
    optimizer = torch.optim.SGD(params.values(), lr=0.5, momentum=0.9)
    return train_stream(segment, params, state, chunk, optimizer, k1=K, progress=False, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("of_rows", [True, False])
def test_each_model_is_trained_as_alone(of_rows: bool, accumulate: int) -> None:
    """Its windows weigh as much as its valid steps, in gradients, losses and reports."""
    x, y = stream(STEPS, ROWS)
    mask = masks(of_rows)
    params, _ = stack_module_state([tagger(seed) for seed in range(M)])
    state = tuple(torch.stack([leaf] * M) for leaf in zeros(ROWS))
    chunk = Chunk(x.expand(M, *x.shape), y.expand(M, *y.shape), None, mask)
    options = {"accumulate": accumulate, "interval": 1e9}
    together = train(tagger(), params, state, chunk, **options)
    updates = list(together)
    reported = []
    for i in range(M):
        module = tagger(i)
        own = dict(module.named_parameters())
        alone = train(module, own, zeros(ROWS), Chunk(x, y, None, mask[i]), **options)
        for update, other in zip(updates, alone, strict=True):
            torch.testing.assert_close(update.loss[i], other.loss)
            assert int(update.steps[i]) == int(other.steps)
        for name, p in own.items():
            torch.testing.assert_close(together.params[name][i], p)
        reported += [report.loss for report in alone.history]
    assert len(reported) == M
    assert [report.loss for report in together.history] == [pytest.approx(sum(reported) / M)]


def test_a_model_without_a_valid_step_has_no_part_in_reports() -> None:
    x, y = stream(K, ROWS)
    params, _ = stack_module_state([tagger(seed) for seed in range(M)])
    state = tuple(torch.stack([leaf] * M) for leaf in zeros(ROWS))
    mask = torch.ones(M, K, dtype=torch.bool)
    mask[1] = False
    run = train(
        tagger(), params, state, Chunk(x.expand(M, *x.shape), y.expand(M, *y.shape), None, mask)
    )
    (update,) = list(run)
    assert update.steps.tolist() == [8, 0, 8]
    (report,) = run.history
    assert report.loss == pytest.approx(float(update.loss[[0, 2]].mean()))


@pytest.mark.parametrize("of_rows", [True, False])
def test_each_model_is_evaluated_as_alone(of_rows: bool) -> None:
    modules = [tagger(seed) for seed in range(M)]
    params, _ = stack_module_state(modules)
    segment = make_train_segment(modules[0], cross_entropy, backend="eager")
    (x, y), mask = stream(STEPS, ROWS), masks(of_rows)
    mask[2] = False
    models = tuple(torch.stack([leaf] * M) for leaf in zeros(ROWS))
    data = Chunk(x.expand(M, *x.shape), y.expand(M, *y.shape), None, mask)
    ensemble = mapped(segment.evaluate)
    found = evaluate_stream(ensemble, params, models, data, k=4, time_dim=1)
    for i, own in enumerate(modules):
        alone = evaluate_stream(
            segment, dict(own.named_parameters()), zeros(ROWS), Chunk(x, y, None, mask[i]), k=4
        )
        assert float(found.loss[i]) == pytest.approx(alone.loss)
    assert found.loss[2] == 0
    assert found.steps == int(mask.sum()) * (1 if of_rows else ROWS)
    mask[:, :4] = True  # of which a chunk without a mask says nothing
    whole = evaluate_stream(ensemble, params, models, data, k=4, time_dim=1)
    chunks = [
        Chunk(data.x[:, :4], data.y[:, :4]), Chunk(data.x[:, 4:], data.y[:, 4:], None, mask[:, 4:])
    ]  # fmt: skip
    parts = evaluate_stream(ensemble, params, models, chunks, k=4, time_dim=1)
    torch.testing.assert_close(parts.loss, whole.loss)
    assert parts.steps == whole.steps == int(mask.sum()) * (1 if of_rows else ROWS)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_context_under_vmap(accumulate: int) -> None:
    """As of one model: a window with no more steps than have no loss is left out."""
    x, y = stream(2 * K + 1, ROWS)
    segment = make_train_segment(tagger(), cross_entropy, backend="eager", context=1)
    params, _ = stack_module_state([tagger(seed) for seed in range(M)])
    state = tuple(torch.stack([leaf] * M) for leaf in zeros(ROWS))
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    data = x.expand(M, *x.shape), y.expand(M, *y.shape)
    updates = list(
        train_stream(
            vmap(segment), params, state, data, optimizer, k1=K, time_dim=1, accumulate=accumulate,
            progress=False,
        )
    )  # fmt: skip
    assert [update.steps for update in updates] == ([6, 6] if accumulate == 1 else [12])


def test_context_under_vmap_is_refused_where_all_steps_are_to_have_a_loss() -> None:
    segment = make_train_segment(tagger(), cross_entropy, backend="eager", context=1)
    message = r"context: the segment was made with context=1, and under vmap .* context=0"
    with pytest.raises(ValueError, match=message):
        evaluate_stream(vmap(segment.evaluate), {}, None, stream(STEPS), time_dim=1)
