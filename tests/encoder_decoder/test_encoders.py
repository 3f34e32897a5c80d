"""Which encoder runs when, and whose states a draft reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from encoder_decoders import decoder_alone, distilled, pair, sounds, texts, tiny_encoder_decoder
from tiny_models import noisy_copy
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import hf_dsde
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.integration.encoders import draft_states, shares_encoder

CALL: dict[str, Any] = {"max_new_tokens": 6, "speculation_policy": "static"}


@contextmanager
def encoder_passes(*models: PreTrainedModel) -> Iterator[list[int]]:
    """Count the passes of encoders."""
    counts = [0] * len(models)

    def count(index: int) -> None:
        counts[index] += 1

    hooks = [
        model.get_encoder().register_forward_hook(lambda *_, index=index: count(index))
        for index, model in enumerate(models)
    ]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_of_its_own_runs_once(family: str) -> None:
    target, draft = pair(family)
    with encoder_passes(target, draft) as counts:
        target.generate(**texts([5, 3]), assistant_model=draft, **CALL)
    assert counts == [1, 1]


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_an_encoder_that_equals_the_targets_does_not_run(family: str) -> None:
    target = pair(family)[0]
    draft = distilled(target)
    call = {"language": "en", **CALL} if family == "whisper" else CALL
    inputs = {"input_features": sounds(2)} if family == "whisper" else texts([5, 3])
    with encoder_passes(target, draft) as counts:
        target.generate(**inputs, assistant_model=draft, **call)
    assert counts[0] >= 1
    assert counts[1] == 0


def changed(model: PreTrainedModel, name: str, by: float = 1e-9) -> PreTrainedModel:
    other = copy.deepcopy(model)
    other.get_parameter(name).data[0] += by
    return other


def test_encoders_are_equal_when_all_their_weights_are() -> None:
    target = tiny_encoder_decoder("bart")
    assert shares_encoder(target, target)
    assert shares_encoder(target, copy.deepcopy(target))
    assert shares_encoder(target, changed(target, "model.decoder.layers.0.fc1.weight"))
    assert not shares_encoder(target, changed(target, "model.encoder.layers.1.fc1.weight"))
    assert not shares_encoder(target, changed(target, "model.encoder.layers.0.fc2.bias"))
    assert not shares_encoder(target, copy.deepcopy(target).float())
    assert not shares_encoder(target, tiny_encoder_decoder("bart", encoder_attention_heads=4))
    assert not shares_encoder(target, tiny_encoder_decoder("bart", activation_function="relu"))
    assert not shares_encoder(target, tiny_encoder_decoder("bart", encoder_layers=1))


@torch.no_grad()
def test_states_of_a_drafts_own_encoder() -> None:
    """As its own `generate` would have them made: of padded inputs, and in its own dtype."""
    target, draft = tiny_encoder_decoder("t5"), tiny_encoder_decoder("t5", seed=1).float()
    inputs = texts([5, 2, 4])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    given = EncoderStates(torch.zeros(3, 5, 32, dtype=torch.float64), mask)
    states = draft_states(target, draft, given, ids)
    expected = draft.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(states.hidden, expected)
    assert states.mask is mask
    twice = EncoderStates(torch.zeros(6, 5, 32, dtype=torch.float64), mask.repeat_interleave(2, dim=0))
    again = draft_states(target, draft, twice, ids)
    torch.testing.assert_close(again.hidden, expected.repeat_interleave(2, dim=0))
    assert draft_states(target, None, given, ids) is None
    assert draft_states(target, draft, None, ids) is None
    alone = decoder_alone(tiny_encoder_decoder("whisper"))
    assert draft_states(tiny_encoder_decoder("whisper"), alone, given, None) is given


def test_states_that_the_caller_has_made() -> None:
    target = pair("bart")[0]
    draft = distilled(target)
    inputs = texts([4, 6])
    states = target.get_encoder()(**inputs).last_hidden_state
    call = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "attention_mask": inputs["attention_mask"]}
    expected = target.generate(**inputs, max_new_tokens=6)
    assert target.generate(**call, assistant_model=draft, **CALL).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=r"encoder_outputs and assistant_model \(Bart.*has to read the inputs"):
        target.generate(**call, assistant_model=noisy_copy(target, 0.1), **CALL)


def test_a_draft_that_knows_nothing_of_the_inputs() -> None:
    """A decoder-only model, a user's generator or a drafter of texts sees the decoder's text."""
    from tiny_models import tiny_model
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    target = pair("bart")[0]
    llama = tiny_model("llama", vocab_size=80)
    lookup = PromptLookupCandidateGenerator(max_length=30, vocab_size=80)
    expected = target.generate(**texts([5, 3]), max_new_tokens=10)
    for draft in (llama, lookup, "suffix", "sssd", ["suffix", llama]):
        output = target.generate(**texts([5, 3]), max_new_tokens=10, assistant_model=draft, speculation_policy="static")
        assert output.tolist() == expected.tolist()


def test_without_enabling_the_model() -> None:
    import functools

    target, draft = tiny_encoder_decoder("t5"), tiny_encoder_decoder("t5", seed=1)
    bound = functools.partial(hf_dsde.generate, assistant_model=draft)
    expected = target.generate(**texts([5, 3]), max_new_tokens=8)
    assert target.generate(**texts([5, 3]), max_new_tokens=8, custom_generate=bound).tolist() == expected.tolist()
