"""Whisper with a distilled draft, its decoder alone, or texts as drafters: it transcribes what it would alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from encoder_decoders import (
    FIRST_TIMESTAMP,
    PREVIOUS,
    SUPPRESSED_AT_BEGIN,
    decoder_alone,
    decoder_prompts,
    distilled,
    pair,
    sounds,
    tiny_encoder_decoder,
)
from tiny_calls import config_of
from tiny_policies import RandomLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.measurement.rounds import RoundRecord

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

CONFIG = config_of(cost_probe=False, view_bucket=8, max_draft_length=4)
SHORT: dict[str, Any] = {"language": "en", "max_new_tokens": 10}
LONG: dict[str, Any] = {
    **SHORT,
    "return_timestamps": True,
    "attention_mask": (torch.arange(110) < torch.tensor([[110], [60], [35]])).long(),
}


class Rounds(hf_dsde.RoundListener):
    def __init__(self) -> None:
        self.heard: list[RoundRecord] = []

    def on_round(self, record: RoundRecord) -> None:
        self.heard.append(record)

    def __deepcopy__(self, _: Any) -> Rounds:
        raise AssertionError("a listener was copied, and would hear nothing")

    @property
    def accepted(self) -> int:
        return sum(sum(record.accepted) for record in self.heard)


def compare(
    model: PreTrainedModel, draft: Any, features: torch.Tensor, policy: str | None = None, **call: Any
) -> Rounds:
    """Transcribe with and without a draft; return what was heard of the rounds."""
    rounds = Rounds()
    expected = model.generate(features, **call)
    output = model.generate(
        features,
        assistant_model=draft,
        speculation_policy=policy or RandomLengths(4, seed=1),
        speculation_config=CONFIG,
        speculation_listeners=[rounds],
        **call,
    )
    assert output.tolist() == expected.tolist()
    assert rounds.accepted > 0
    return rounds


@functools.cache
def drafts() -> dict[str, Any]:
    target, noisy = pair("whisper")
    smaller = distilled(target)
    alone = {"decoder alone": decoder_alone(smaller), "suffix": "suffix", "both": ["prompt_lookup", smaller]}
    return {"another encoder": noisy, "distilled": smaller, **alone}


@pytest.mark.parametrize("kind", ["another encoder", "distilled", "decoder alone", "suffix", "both"])
def test_every_kind_of_draft(kind: str) -> None:
    policy = "goodput" if kind == "suffix" else None
    compare(pair("whisper")[0], drafts()[kind], sounds(2), policy, **{**SHORT, "max_new_tokens": 16})


CALLS: dict[str, dict[str, Any]] = {
    "language and task": {"language": ["en", "de", "en", "de"], "task": "translate"},
    "detected language": {"task": "transcribe"},
    "timestamps": {"language": "de", "return_timestamps": True},
    "a prompt": {"language": "en", "prompt_ids": torch.tensor([PREVIOUS, 30, 31, 32])},
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_whispers_own(name: str) -> None:
    compare(pair("whisper")[0], drafts()["distilled"], sounds(4, seed=2), max_new_tokens=10, **CALLS[name])


LONG_CALLS: dict[str, dict[str, Any]] = {
    "segments": {},
    "earlier segments as prompts": {"condition_on_prev_tokens": True},
    "fallbacks and silence": {
        "temperature": (0.0,), "logprob_threshold": -1.0, "no_speech_threshold": 1e-4,
        "compression_ratio_threshold": 1.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LONG_CALLS)
def test_long_sounds_segment_by_segment(name: str) -> None:
    """Rows of one call have different numbers of segments, and prompts of different lengths."""
    kind = "decoder alone" if "prompts" in name else "distilled"
    rounds = compare(pair("whisper")[0], drafts()[kind], sounds(3, frames=110), **LONG, **LONG_CALLS[name])
    assert len({len(record.accepted) for record in rounds.heard}) > 1


def test_padded_decoder_prompts() -> None:
    target, draft = pair("whisper")
    prompts = decoder_prompts(target, [4, 1, 6])
    compare(target, draft, sounds(3), **prompts, max_new_tokens=12)


def test_the_first_token_is_suppressed_with_a_draft_as_without() -> None:
    """Whisper's own `generate` lets suppressed tokens begin a text as soon as it is given an assistant."""
    model = tiny_encoder_decoder("whisper")
    free = copy.deepcopy(model)
    free.generation_config.begin_suppress_tokens = None
    began = free.generate(sounds(4), **SHORT)[:, 0].tolist()
    model.generation_config.begin_suppress_tokens = [*began, *SUPPRESSED_AT_BEGIN]
    compare(hf_dsde.enable(model), distilled(model), sounds(4), **SHORT)


def test_neither_model_keeps_anything_of_a_call() -> None:
    target, draft = pair("whisper")[0], drafts()["distilled"]
    before = [copy.deepcopy(vars(model.generation_config)) for model in (target, draft)]
    compare(target, draft, sounds(2), **SHORT)
    assert [vars(model.generation_config) for model in (target, draft)] == before


def test_scores_and_segments_are_handed_out() -> None:
    target, draft = pair("whisper")
    call = {"return_timestamps": True, "return_dict_in_generate": True, "output_scores": True, **SHORT}
    expected = target.generate(sounds(2), **call)
    output = target.generate(sounds(2), assistant_model=draft, speculation_policy="static", **call)
    assert output["sequences"].tolist() == expected["sequences"].tolist()
    segments = [[segment for row in each["segments"] for segment in row] for each in (output, expected)]
    for ours, theirs in zip(*segments, strict=True):
        assert ours["tokens"].tolist() == theirs["tokens"].tolist()
        assert (ours["start"], ours["end"]) == (theirs["start"], theirs["end"])
        pairs = zip(ours["result"]["scores"], theirs["result"]["scores"], strict=True)
        assert all(torch.allclose(one, other.float(), rtol=1e-5, atol=1e-5) for one, other in pairs)


def test_fallbacks_sample() -> None:
    """A temperature above 0 samples: what comes of it has no timestamp where the first token may be none."""
    target, draft = pair("whisper")
    torch.manual_seed(0)
    output = target.generate(
        sounds(3),
        assistant_model=draft,
        speculation_policy="dsde",
        temperature=(0.0, 0.8),
        logprob_threshold=0.0,  # which no text reaches
        return_timestamps=True,
        **SHORT,
    )
    assert output.shape[0] == 3
    assert int(output.max()) >= FIRST_TIMESTAMP


def test_without_enabling_the_model() -> None:
    model, draft = tiny_encoder_decoder("whisper"), drafts()["distilled"]
    bound = functools.partial(hf_dsde.generate, assistant_model=draft)
    expected = model.generate(sounds(2), **SHORT)
    assert model.generate(sounds(2), custom_generate=bound, **SHORT).tolist() == expected.tolist()


def test_prompt_lookup_by_its_number() -> None:
    target = pair("whisper")[0]
    output = target.generate(sounds(2), prompt_lookup_num_tokens=3, speculation_policy="static", **SHORT)
    assert output.tolist() == target.generate(sounds(2), **SHORT).tolist()


def test_an_assistant_and_prompt_lookup_are_two_ways_of_drafting() -> None:
    target, draft = pair("whisper")
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=3: it is another way of drafting"):
        target.generate(
            sounds(1), assistant_model=draft, prompt_lookup_num_tokens=3, speculation_policy="static", **SHORT
        )


def test_calls_without_a_policy_go_the_stock_way() -> None:
    target, draft = pair("whisper")
    draft = copy.deepcopy(draft)
    output = target.generate(sounds(1), assistant_model=draft, **SHORT)
    assert output.shape[0] == 1
    assert draft.generation_config.force_unique_generate_call is True


def test_short_sounds_in_half_precision_run() -> None:
    """Inputs come in the target's dtype; a draft in another one reads them in its own."""
    target = hf_dsde.enable(tiny_encoder_decoder("whisper").bfloat16())
    draft = distilled(tiny_encoder_decoder("whisper")).float()
    features = sounds(2).bfloat16()
    call = {"assistant_model": draft, "speculation_policy": "static", **SHORT}
    assert target.generate(features, **call).shape[0] == 2
