"""Recorded passes of Whisper, noted on the CPU: they read this call's sounds, whatever an earlier call has left."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from encoder_decoders import FRAMES, decoder_alone, distilled, sounds, tiny_encoder_decoder
from tiny_calls import config_of
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import hf_dsde
from hf_dsde.execution.create_runner import RunnerWarning, create_runner
from hf_dsde.execution.cross_runner import RecordedCrossRunner
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]

CONFIG = config_of(cost_probe=False, view_bucket=8, max_draft_length=3)
CALL: dict[str, Any] = {"language": "en", "max_new_tokens": 8}


@functools.cache
def models() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Return a target, a distilled draft, and its decoder alone."""
    target = hf_dsde.enable(tiny_encoder_decoder("whisper"))
    draft = distilled(target)
    return target, draft, decoder_alone(draft)


def transcribe(draft: Any, features: torch.Tensor, policy: str = "static", **call: Any) -> list[list[int]]:
    target = models()[0]
    call = {**CALL, **call}
    output = target.generate(
        features, assistant_model=draft, speculation_policy=policy, speculation_config=CONFIG, **call
    )
    assert output.tolist() == target.generate(features, **call).tolist()
    return output.tolist()


@pytest.mark.parametrize(("kind", "policy"), [(1, "static"), (2, "dsde")])
def test_later_calls_replay_what_earlier_ones_recorded(kind: int, policy: str, recording: list[Any]) -> None:
    draft = models()[kind]
    first = transcribe(draft, sounds(2), policy)
    counts = [capture.recorded for capture in recording]
    assert len(counts) == 2
    assert min(counts) > 0
    assert transcribe(draft, sounds(2, seed=5), policy) != first
    assert [capture.recorded for capture in recording[:2]] == counts  # later segments have fewer rows


def test_rows_end_at_different_times(recording: list[Any]) -> None:
    target, draft, _ = models()
    text = target.generate(sounds(4), **CALL)
    ends = [int(text[row, step]) for row, step in ((0, 1), (2, 4))]
    transcribe(draft, sounds(4), eos_token_id=ends)
    assert recording


def test_long_sounds(recording: list[Any]) -> None:
    """Segments of one call have different numbers of rows, and each is another call with other sounds."""
    mask = (torch.arange(110) < torch.tensor([[110], [60]])).long()
    transcribe(models()[1], sounds(2, frames=110), return_timestamps=True, attention_mask=mask, max_new_tokens=6)
    assert recording


@torch.no_grad()
def test_states_of_another_length_are_recorded_over_again(recording: list[Any]) -> None:
    model = models()[0]
    tokens = torch.tensor([[9, 8, 7], [4, 5, 6]])
    for seed, inputs in enumerate((FRAMES // 2, FRAMES // 2, 12, FRAMES // 2)):
        hidden = torch.randn(2, inputs, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        runner = create_runner(model, 2, 16, RuntimeOptions(), encoded=EncoderStates(hidden))
        assert isinstance(runner, RecordedCrossRunner)
        states = BaseModelOutput(last_hidden_state=hidden)
        expected = model(encoder_outputs=states, decoder_input_ids=tokens).logits.float()
        for _ in range(2):
            logits = runner.forward(RowBlock(tokens, torch.arange(3).expand(2, -1)), 3).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        runner.finish()
    assert [capture.recorded for capture in recording] == [3]


@pytest.fixture
def unrecordable(monkeypatch: pytest.MonkeyPatch, recording: list[Any]) -> PreTrainedModel:
    """A target whose passes wait for the device."""
    target = copy.deepcopy(models()[0])
    decoder = target.model.decoder
    forward = type(decoder).forward

    def waiting(self: Any, *arguments: Any, **options: Any) -> Any:
        output = forward(self, *arguments, **options)
        float(output.last_hidden_state.sum())
        return output

    monkeypatch.setattr(type(decoder), "forward", waiting)
    return target


def test_what_cannot_be_recorded_runs_eagerly(unrecordable: PreTrainedModel) -> None:
    draft = models()[1]
    expected = unrecordable.generate(sounds(3), **CALL)
    with pytest.warns(RunnerWarning, match="recording failed"):
        output = unrecordable.generate(
            sounds(3), assistant_model=draft, speculation_policy="static", speculation_config=CONFIG, **CALL
        )
    assert output.tolist() == expected.tolist()
