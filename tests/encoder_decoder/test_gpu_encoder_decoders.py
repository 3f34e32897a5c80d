"""Encoder-decoders on a GPU: passes are recorded, and texts are exact.

Run with `tests/gpu.sh` on a machine with a CUDA device; elsewhere the file is skipped.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from encoder_decoders import decoder_alone, decoder_prompts, distilled, sounds, texts, tiny_encoder_decoder
from tiny_calls import config_of
from tiny_models import noisy_copy
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.cross_runner import RecordedCrossRunner
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
CUDA = torch.device("cuda", 0)
CALL: dict[str, Any] = {"max_new_tokens": 14, "no_repeat_ngram_size": 2}
SPOKEN: dict[str, Any] = {"language": "en", "max_new_tokens": 14}
CONFIG = config_of(cost_probe=False, max_draft_length=4)


@functools.cache
def whisper() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    target = tiny_encoder_decoder("whisper").to(CUDA)
    draft = distilled(target).to(CUDA)
    return hf_dsde.enable(target), draft, decoder_alone(draft).to(CUDA)


@pytest.mark.filterwarnings("error::hf_dsde.execution.create_runner.RunnerWarning")
@pytest.mark.parametrize("policy", ["static", "dsde"])
@pytest.mark.parametrize("kind", [1, 2])
def test_whisper_is_recorded_and_exact(kind: int, policy: str) -> None:
    target, draft = whisper()[0], whisper()[kind]
    for seed in range(3):
        features = sounds(4, seed=seed).to(CUDA)
        expected = target.generate(features, **SPOKEN)
        output = target.generate(
            features, assistant_model=draft, speculation_policy=policy, speculation_config=CONFIG, **SPOKEN
        )
        assert output.tolist() == expected.tolist()


@torch.no_grad()
def test_replayed_passes_read_the_states_of_their_own_call() -> None:
    model = whisper()[0]
    tokens = torch.tensor([[9, 8, 7], [4, 5, 6]], device=CUDA)
    positions = torch.arange(3, device=CUDA).expand(2, -1)
    for seed in range(3):
        hidden = model.get_encoder()(sounds(2, seed=seed).to(CUDA)).last_hidden_state
        runner = create_runner(model, 2, 16, RuntimeOptions(), encoded=EncoderStates(hidden))
        assert isinstance(runner, RecordedCrossRunner)
        expected = model(encoder_outputs=(hidden,), decoder_input_ids=tokens).logits.float()
        for _ in range(2):
            logits = runner.forward(RowBlock(tokens, positions), 3).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        runner.finish()


@pytest.mark.filterwarnings("error::hf_dsde.execution.create_runner.RunnerWarning")
@pytest.mark.parametrize("runner", [None, "eager"])
@pytest.mark.parametrize("family", ["t5-gated", "umt5", "bart", "pegasus"])
def test_models_that_read_texts_are_recorded_and_exact(family: str, runner: str | None) -> None:
    target = hf_dsde.enable(tiny_encoder_decoder(family).to(CUDA))
    longest = min(70, getattr(target.config, "max_position_embeddings", 70))
    draft = noisy_copy(target, 0.05)
    for seed, (lengths, prompts) in enumerate((([6, 2, 9, 4], [1, 4, 2, 2]), ([longest, 3, 5, 8], [3, 1, 1, 2]))):
        inputs = {**texts(lengths, seed=seed), **decoder_prompts(target, prompts, seed=seed)}
        inputs = {name: values.to(CUDA) for name, values in inputs.items()}
        expected = target.generate(**inputs, **CALL)
        output = target.generate(
            **inputs,
            assistant_model=draft,
            speculation_policy="dsde",
            speculation_config=CONFIG.replace(runner=runner),
            **CALL,
        )
        assert output.tolist() == expected.tolist()
