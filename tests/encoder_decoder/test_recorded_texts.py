"""Recorded passes of encoder-decoders that read tokens, noted on the CPU: inputs differ in length from call to call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_decoders import VOCABULARY, decoder_prompts, pair, texts
from tiny_calls import config_of
from transformers.modeling_outputs import BaseModelOutput

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.cross_runner import RecordedCrossRunner, held_inputs
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]

CONFIG = config_of(cost_probe=False, view_bucket=8, max_draft_length=3)
CALL: dict[str, Any] = {"max_new_tokens": 8, "no_repeat_ngram_size": 2}


@pytest.mark.parametrize(("family", "policy"), [("t5", "dsde"), ("bart", "static")])
def test_other_inputs_and_other_padding_in_later_calls(family: str, policy: str, recording: list[Any]) -> None:
    target, draft = pair(family)
    counts: list[int] = []
    for seed, (inputs, prompts) in enumerate((([6, 3, 8], [1, 4, 2]), ([2, 9, 5], [4, 2, 2]), ([4, 4, 4], [3, 3, 4]))):
        given = {**texts(inputs, seed=seed), **decoder_prompts(target, prompts, seed=seed)}
        expected = target.generate(**given, **CALL)
        output = target.generate(
            **given, assistant_model=draft, speculation_policy=policy, speculation_config=CONFIG, **CALL
        )
        assert output.tolist() == expected.tolist()
        counts = counts or [capture.recorded for capture in recording]
    assert len(recording) == 2  # what the first call has recorded was used again
    assert min(counts) > 0


@torch.no_grad()
def test_more_inputs_than_there_is_room_for(recording: list[Any]) -> None:
    model = pair("bart")[0]
    tokens = torch.randint(4, VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(0))
    for seed, inputs in enumerate((5, 64, 65, 9)):
        hidden = torch.randn(2, inputs, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        mask = torch.ones(2, inputs, dtype=torch.long)
        mask[1, inputs // 2 :] = 0
        runner = create_runner(model, 2, 16, RuntimeOptions(), encoded=EncoderStates(hidden, mask))
        assert isinstance(runner, RecordedCrossRunner)
        states = BaseModelOutput(last_hidden_state=hidden)
        expected = model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=tokens).logits.float()
        for _ in range(2):
            logits = runner.forward(RowBlock(tokens, torch.arange(3).expand(2, -1)), 3).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        runner.finish()
    assert [capture.recorded for capture in recording] == [2]


def test_how_many_inputs_passes_are_recorded_for() -> None:
    assert [held_inputs(inputs, 0) for inputs in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
    assert held_inputs(70, 128) == 128
    assert held_inputs(70, 64) == 128
    assert held_inputs(10, 256) == 256
    assert held_inputs(10, 512) == 64
