"""The hidden states that passes return are those of transformers, layer by layer, for every token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_models import FAMILIES, PLAIN_NEEDS_FLOAT32, VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span
from hf_dsde.utils import tuning

pytestmark = pytest.mark.usefixtures("recording")
LENGTHS = [9, 1, 14, 5]
LAYERS = (2, 0, 1)
"""All that a model of two layers has, in an order that is not theirs."""
FUSED = [family for family in FAMILIES if why_not_fused(tiny_model(family)) is None]
RUNNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "eager-all-rows": ("eager", {"drop_finished_rows": False}),
    "recorded": ("graph", {"fused_layers": False}),
    "fused": ("graph", {}),
}
CASES = [
    (family, name)
    for family in FAMILIES
    for name in RUNNERS
    if (name != "fused" or family in FUSED) and (name != "recorded" or family != "mixtral")
]


def texts() -> Tensor:
    return torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))


def runner_of(model: PreTrainedModel, name: str = "eager", layers: tuple[int, ...] = LAYERS, **more: Any) -> Any:
    runner, settings = RUNNERS[name]
    options = RuntimeOptions(**{"prefill_chunk": 8, **settings, **more})
    return create_runner(model, len(LENGTHS), 32, options, runner, hidden_layers=layers)


@torch.no_grad()
def expected_states(model: PreTrainedModel) -> list[tuple[Tensor, ...]]:
    """For each row, the hidden states of its text, run alone by the model itself: `[length, H]` for each layer."""
    alone = []
    for row, length in zip(texts(), LENGTHS, strict=True):
        output = model(input_ids=row[None, :length], output_hidden_states=True)
        alone.append(tuple(states[0] for states in output.hidden_states))
    return alone


@torch.no_grad()
def store(runner: ModelRunner, spans: Sequence[Span]) -> tuple[Tensor, ...]:
    with runner.active():
        return runner.store(spans, torch.cat([texts()[span.row, span.start : span.end] for span in spans]))


@torch.no_grad()
def tail(runner: ModelRunner, width: int, keep: int | None = None) -> tuple[Tensor, ...]:
    """Run the last tokens of each text; `[rows, keep or width, H]` for each layer."""
    ends = torch.tensor(LENGTHS)[:, None]
    positions = ends - width + torch.arange(width)
    tokens = texts().gather(1, positions.clamp_min(0))
    with runner.active():
        return runner.forward(RowBlock(tokens, positions.clamp_min(-1)), max(LENGTHS), keep).hidden


def check_store(model: PreTrainedModel, found: Sequence[Tensor], spans: Sequence[Span], layers: Sequence[int]) -> None:
    expected = expected_states(model)
    for layer, states in zip(layers, found, strict=True):
        parts = [expected[span.row][layer][span.start : span.end] for span in spans]
        check(model, states, torch.cat(parts))


def check_tail(model: PreTrainedModel, found: Sequence[Tensor], layers: Sequence[int], rows: Sequence[int]) -> None:
    expected = expected_states(model)
    for layer, states in zip(layers, found, strict=True):
        assert states.isfinite().all()
        for row in rows:
            columns = min(LENGTHS[row], states.shape[1])
            check(model, states[row, -columns:], expected[row][layer][-columns:])


def check(model: PreTrainedModel, found: Tensor, expected: Tensor) -> None:
    assert found.dtype == model.dtype
    tolerance = 1e-9 if model.dtype == torch.float64 else 2e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


PROMPTS = [Span(2, 0, 11), Span(0, 0, 6), Span(1, 0, 0), Span(3, 0, 2)]
"""In an order of their own, and longer than a portion."""


@pytest.mark.parametrize(("family", "name"), CASES)
def test_hidden_states_are_those_of_transformers(family: str, name: str) -> None:
    model = tiny_model(family)
    runner = runner_of(model, name)
    check_store(model, store(runner, PROMPTS), PROMPTS, LAYERS)
    for width, keep in ((3, None), (1, 1), (3, 1), (5, 2)):
        found = tail(runner, width, keep)
        assert found[0].shape[:2] == (len(LENGTHS), keep or width)
        check_tail(model, found, LAYERS, range(len(LENGTHS)))
    rest = [Span(row, length - 2, 2) for row, length in enumerate(LENGTHS) if length > 1]
    check_store(model, store(runner, rest), rest, LAYERS)


@pytest.mark.parametrize("layers", [(1,), (0,), (2, 2), (1, 0)], ids=str)
@pytest.mark.parametrize("name", RUNNERS)
def test_only_the_layers_asked_for_are_returned(name: str, layers: tuple[int, ...]) -> None:
    model = tiny_model()
    runner = runner_of(model, name, layers)
    check_store(model, store(runner, PROMPTS), PROMPTS, layers)
    check_tail(model, tail(runner, 3), layers, range(len(LENGTHS)))


def test_neighbouring_layers_can_be_told_apart() -> None:
    """Or else a pass that is off by one would go unnoticed."""
    model = tiny_model()
    runner = runner_of(model, "fused", (0, 1))
    found = store(runner, PROMPTS)
    for wrong in ((1, 0), (1, 2), (1, 1)):
        with pytest.raises(AssertionError):
            check_store(model, found, PROMPTS, wrong)
    body = model.model(input_ids=texts(), output_hidden_states=True)
    assert torch.equal(body.hidden_states[2], body.last_hidden_state), "the last one is normed"


@pytest.mark.parametrize("name", RUNNERS)
def test_without_layers_nothing_is_returned(name: str) -> None:
    runner = runner_of(tiny_model(), name, ())
    assert store(runner, PROMPTS) == ()
    assert tail(runner, 2) == ()


@pytest.mark.parametrize("name", RUNNERS)
def test_nothing_stored_has_hidden_states_of_no_token(name: str) -> None:
    runner = runner_of(tiny_model(), name)
    found = store(runner, [Span(0, 0, 0)])
    assert [states.shape for states in found] == [(0, 32)] * len(LAYERS)


@pytest.mark.parametrize("name", RUNNERS)
def test_rows_that_left_have_finite_ones(name: str) -> None:
    model = tiny_model("mistral")
    runner = runner_of(model, name)
    store(runner, PROMPTS)
    tail(runner, 3)
    runner.keep_rows([0, 2])
    check_tail(model, tail(runner, 3), LAYERS, [0, 2])
    more = [Span(2, 11, 3)]
    check_store(model, store(runner, more), more, LAYERS)


@pytest.mark.parametrize("stored_sizes", [(64,), (4,)], ids=["recorded", "launched one by one"])
def test_prompts_read_by_flat_passes(stored_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, stored_sizes=stored_sizes))
    model = tiny_model("qwen3")
    for layers in (LAYERS, (1,), (2,)):
        runner = runner_of(model, "fused", layers, prefill_chunk=100)
        check_store(model, store(runner, PROMPTS), PROMPTS, layers)


def test_packed_passes_return_them_in_the_padded_form() -> None:
    model = tiny_model("qwen2")
    runner = runner_of(model, "fused")
    store(runner, PROMPTS)
    counts = torch.tensor([3, 1, 3, 3])
    column = torch.arange(3)
    positions = torch.tensor(LENGTHS)[:, None] - counts[:, None] + column
    positions = positions.masked_fill(column >= counts[:, None], -1)
    with runner.active(), torch.no_grad():
        tokens = texts().gather(1, positions.clamp_min(0))
        found = runner.forward(RowBlock(tokens, positions, counts=counts, size=16), max(LENGTHS)).hidden
    expected = expected_states(model)
    for layer, states in zip(LAYERS, found, strict=True):
        for row, count in enumerate(counts.tolist()):
            check(model, states[row, :count], expected[row][layer][-count:])


def test_replaying_again_does_not_change_what_was_returned() -> None:
    model = tiny_model()
    for name in ("fused", "recorded"):
        runner = runner_of(model, name)
        store(runner, PROMPTS)
        found = tail(runner, 3)
        copies = [states.clone() for states in found]
        with runner.active(), torch.no_grad():
            runner.forward(RowBlock(torch.full((4, 3), 5), torch.arange(20, 23).expand(4, -1)), 23)
        assert all(map(torch.equal, found, copies))


def test_recordings_for_other_layers_are_others(recording: list[NotingCapture]) -> None:
    """Calls with and without hidden states may follow each other over one cache."""
    model = tiny_model()
    for layers in ((), LAYERS, (1,), LAYERS, ()):
        runner = runner_of(model, "fused", layers)
        assert isinstance(runner, GraphRunner)
        check_store(model, store(runner, PROMPTS), PROMPTS, layers)
        check_tail(model, tail(runner, 3), layers, range(len(LENGTHS)))
        runner.finish()
    assert len(recording) == 1


@pytest.mark.parametrize("name", ["fused", "recorded"])
def test_a_second_call_records_nothing(name: str, recording: list[NotingCapture]) -> None:
    model, recorded = tiny_model(), []
    for _ in range(2):
        runner = runner_of(model, name)
        store(runner, PROMPTS)
        tail(runner, 3)
        runner.finish()
        recorded.append(recording[0].recorded)
    assert len(recording) == 1
    assert recorded[0] == recorded[1] > 0


def test_a_pass_that_cannot_be_recorded_gives_them_eagerly() -> None:
    model = tiny_model("mixtral")
    runner = create_runner(model, len(LENGTHS), 32, RuntimeOptions(), "graph", hidden_layers=LAYERS)
    check_store(model, store(runner, PROMPTS), PROMPTS, LAYERS)
    for width in (3, 2):
        with pytest.warns(UserWarning, match="run eagerly") if width == 3 else nullcontext():
            found = tail(runner, width)
        check_tail(model, found, LAYERS, range(len(LENGTHS)))


@pytest.mark.parametrize("layer", [-1, 3])
@pytest.mark.parametrize("name", RUNNERS)
def test_a_layer_that_is_not_there_is_refused(name: str, layer: int) -> None:
    with pytest.raises(ValueError, match=rf"hidden_layers: {layer} .*LlamaForCausalLM has 0 .* to 2"):
        runner_of(tiny_model(), name, (1, layer))


def test_every_family_is_compared_in_the_widest_dtype_it_can() -> None:
    assert {family for family in FAMILIES if tiny_model(family).dtype != torch.float64} == PLAIN_NEEDS_FLOAT32
