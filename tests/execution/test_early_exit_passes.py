"""A pass that ends after a layer gives what transformers' model of so many layers gives, and stores no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_exits import LAYERS, continued, cut_off, deep_model, logits_of
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.early_exit import ExitHead, ending_after, why_no_exits
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.recorded_chain import Chain
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span
from hf_dsde.execution.token_choice import BestTokens

LENGTHS = [9, 1, 14, 5]
RUNNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "recorded": ("graph", {"fused_layers": False}),
    "fused": ("graph", {}),
}
CASES = [
    *(("llama", name) for name in RUNNERS),
    *((family, "eager") for family in ("gemma2", "mixtral", "gpt_oss")),
    ("gemma3", "recorded"),
    ("qwen2", "fused"),
]
TEXTS = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))


def runner_of(model: PreTrainedModel, name: str, hidden_layers: tuple[int, ...] = ()) -> ModelRunner:
    """A runner with all texts stored but for their last tokens."""
    runner, settings = RUNNERS[name]
    made = create_runner(model, len(LENGTHS), 32, RuntimeOptions(**settings), runner, hidden_layers=hidden_layers)
    spans = [Span(row, 0, length - 1) for row, length in enumerate(LENGTHS)]
    with made.active():
        made.store(spans, torch.cat([TEXTS[span.row, : span.end] for span in spans]))
    return made


def last_tokens(exit_layer: int | None, width: int = 1) -> RowBlock:
    positions = torch.tensor(LENGTHS)[:, None] + torch.arange(-width, 0)
    tokens = TEXTS.gather(1, positions.clamp_min(0))
    return RowBlock(tokens, positions, exit_layer=exit_layer)


@pytest.mark.parametrize(("family", "name"), CASES)
@pytest.mark.usefixtures("recording")
def test_logits_are_those_of_a_model_of_so_many_layers(family: str, name: str) -> None:
    model = deep_model(family)
    runner = runner_of(model, name, hidden_layers=(2,))
    tolerance = 1e-9 if model.dtype == torch.float64 else 1e-4
    for exit_layer in (3, 1, None, 3):  # in any order: later layers are still there
        with runner.active():
            output = runner.forward(last_tokens(exit_layer), max(LENGTHS), keep=1)
        reference = model if exit_layer is None else cut_off(model, exit_layer)
        assert len(output.hidden) == (exit_layer is None)
        for row, length in enumerate(LENGTHS):
            expected = logits_of(reference, TEXTS[row, :length].tolist())[-1].float()
            torch.testing.assert_close(output.logits[row, 0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.usefixtures("recording")
def test_later_layers_are_left_as_they_are(name: str) -> None:
    runner = runner_of(deep_model(), name)
    before = [layer.keys.clone() for layer in runner.cache.ragged_layers]
    with runner.active():
        runner.forward(last_tokens(2), max(LENGTHS), keep=1)
    changed = [
        not torch.equal(layer.keys[..., :-1, :], old[..., :-1, :])  # the last slot is for what is no token
        for layer, old in zip(runner.cache.ragged_layers, before, strict=True)
    ]
    assert changed == [True, True, *[False] * (LAYERS - 2)]


@pytest.mark.parametrize("name", ["recorded", "fused"])
def test_a_chain_ends_early_too_and_each_exit_is_recorded_once(name: str, recording: list[NotingCapture]) -> None:
    model = deep_model()
    runner = runner_of(model, name)
    recorded = []
    for exit_layer in (1, 3, 1):
        chain = Chain(
            partial(last_tokens, exit_layer),
            torch.tensor([4] * 4),
            3,
            max(LENGTHS) + 3,
            BestTokens(VOCABULARY),
            exit_layer,
        )
        with runner.active():
            drafted = runner.chain(chain)
        assert drafted is not None
        recorded.append(recording[-1].recorded)
        for row, length in enumerate(LENGTHS):
            text = TEXTS[row, :length].tolist()
            assert drafted.tokens[row, 1:].tolist() == continued(cut_off(model, exit_layer), text, 3)
    assert recorded[0] < recorded[1] == recorded[2]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_states_of_a_layer_go_through_norm_and_head(family: str) -> None:
    model = deep_model(family)
    text = TEXTS[:1, :9]
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states
        found = ExitHead(model)(states[3][0])
    tolerance = 1e-9 if model.dtype == torch.float64 else 1e-4
    expected = logits_of(cut_off(model, 3), text[0].tolist()).float()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_view_has_the_models_own_weights() -> None:
    model = deep_model()
    view = ending_after(model, 2)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in view.parameters()} < own
    assert len(model.model.layers) == LAYERS == model.config.num_hidden_layers


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.usefixtures("recording")
def test_stored_states_are_kept_only_where_they_are_wanted(name: str) -> None:
    spans = [Span(row, 0, length - 1) for row, length in enumerate(LENGTHS)]
    runner = runner_of(deep_model(), name, hidden_layers=(1, 3))
    for wanted in (False, True):
        runner.keeps_stored_states = wanted
        with runner.active():
            hidden = runner.store(spans, torch.cat([TEXTS[span.row, : span.end] for span in spans]))
            assert len(hidden) == len(runner.store([], TEXTS[0, :0])) == 2 * wanted


def test_models_that_cannot_end_early_are_named() -> None:
    assert why_no_exits(deep_model()) is None
    assert "another layout" in str(why_no_exits(tiny_model("gpt2")))
    assert "1 layer" in str(why_no_exits(tiny_model(num_hidden_layers=1)))
    replaced = tiny_model()
    replaced.model.forward = lambda *arguments, **options: None
    assert "replaced" in str(why_no_exits(replaced))
