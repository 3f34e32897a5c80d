"""Greedy text of encoder-decoders is that of plain `generate`, token for token, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoder_decoders import (
    FAMILIES,
    READING,
    decoder_prompts,
    inputs_of,
    pair,
    texts,
    tiny_encoder_decoder,
)
from tiny_calls import config_of
from tiny_models import noisy_copy
from tiny_policies import RandomLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.policies import StaticPolicy

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

CONFIG = config_of(cost_probe=False, view_bucket=8, max_draft_length=4)
LIVELY = {"no_repeat_ngram_size": 2, "max_new_tokens": 12}
"""Tiny models fall into a loop at once where nothing forbids it."""
LENGTHS = [9, 2, 6, 1]


def compare(
    target: PreTrainedModel, draft: Any, policy: Any = None, config: hf_dsde.SpeculationConfig = CONFIG, **call: Any
) -> hf_dsde.SpeculativeEncoderDecoderOutput:
    """Return the output of a speculative call, once its text is that of plain decoding."""
    expected = target.generate(do_sample=False, **call)
    output = target.generate(
        do_sample=False,
        assistant_model=draft,
        speculation_policy=policy or RandomLengths(4, seed=1),
        speculation_config=config,
        return_dict_in_generate=True,
        **call,
    )
    assert output.sequences.tolist() == expected.tolist()
    return output


@pytest.mark.parametrize("family", READING)
def test_every_family_writes_what_plain_generate_writes(family: str) -> None:
    output = compare(*pair(family, 0.1), **inputs_of(family, LENGTHS), **LIVELY)
    assert len(set(output.sequences.flatten().tolist())) > 6
    assert 0 < output.speculation_statistics.acceptance_rate < 1


@pytest.mark.parametrize("family", ["t5", "umt5", "bart", "pegasus"])
def test_decoder_prompts_of_different_lengths(family: str) -> None:
    """T5 asks for distances, BART counts padding among its positions: each as in plain decoding."""
    target, draft = pair(family)
    compare(target, draft, **inputs_of(family, LENGTHS), **decoder_prompts(target, [1, 5, 3, 7]), **LIVELY)


def test_a_draft_with_fewer_positions_than_the_text_has() -> None:
    target = pair("bart")[0]
    draft = tiny_encoder_decoder("bart", max_position_embeddings=10)
    compare(target, draft, **texts([4, 6]), **decoder_prompts(target, [1, 5]), **LIVELY)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_both_implementations_of_attention(family: str, attention: str) -> None:
    target = hf_dsde.enable(tiny_encoder_decoder(family))
    target.set_attn_implementation(attention)
    compare(target, noisy_copy(target, 0.05), **inputs_of(family, LENGTHS), **LIVELY)


@pytest.mark.parametrize(("family", "rows"), [("t5", 1), ("bart", 2), ("t5", 3), ("bart", 5), ("t5", 6)])
def test_batches_of_any_size(family: str, rows: int) -> None:
    target, draft = pair(family)
    compare(target, draft, "dsde", **texts([5, 1, 8, 3, 3, 7][:rows]), **LIVELY)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_inputs_padded_in_front_or_not_said_to_be_padded(family: str) -> None:
    target, draft = pair(family)
    compare(target, draft, **texts(LENGTHS[:3], padded_in_front=True), **LIVELY)
    compare(target, draft, input_ids=texts(LENGTHS[:2])["input_ids"], **LIVELY)


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_rows_end_at_different_times_and_take_their_inputs_along(family: str, drops: bool) -> None:
    target, draft = pair(family)
    inputs = {**texts([7, 2, 9, 4, 5]), **decoder_prompts(target, [2, 4, 1, 3, 3])}
    text = target.generate(**inputs, **LIVELY)[:, -12:]
    ends = [int(text[row, step]) for row, step in ((1, 2), (3, 4), (0, 6), (2, 8))]
    config = config_of(CONFIG, drop_finished_rows=drops)
    output = compare(target, draft, config=config, eos_token_id=ends, **inputs, **LIVELY)
    lengths = {int((row != 0).sum()) for row in output.sequences}
    assert len(lengths) > 2


PROCESSORS: list[dict[str, Any]] = [
    {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
    {"suppress_tokens": [7, 8, 9, 10], "begin_suppress_tokens": [11, 12]},
    {"encoder_no_repeat_ngram_size": 1, "repetition_penalty": 1.3},
    {"encoder_repetition_penalty": 1.5, "bad_words_ids": [[13], [14, 15]], "min_new_tokens": 4},
    {"eos_token_id": [21, 22, 23, 24, 25, 26], "min_length": 5, "exponential_decay_length_penalty": (4, 1.2)},
]


@pytest.mark.parametrize("options", PROCESSORS, ids=lambda options: next(iter(options)))
def test_processors_see_the_decoder_text_and_the_encoder_input(options: dict[str, Any]) -> None:
    compare(*pair("bart"), **texts([6, 3, 8]), **{**LIVELY, **options})


def test_scores_and_logits_are_those_of_plain_decoding() -> None:
    target, draft = pair("t5")
    wanted = {"output_scores": True, "output_logits": True}
    output = compare(target, draft, **texts([4, 6]), **LIVELY, **wanted)
    expected = target.generate(**texts([4, 6]), **LIVELY, **wanted, return_dict_in_generate=True)
    for ours, theirs in zip((*output.scores, *output.logits), (*expected.scores, *expected.logits), strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
    assert isinstance(output, type(expected))
    assert isinstance(output, hf_dsde.SpeculativeEncoderDecoderOutput)
    assert output.speculation_statistics.acceptance_rate > 0
    assert "speculation_statistics" not in output


def test_several_continuations_of_one_input() -> None:
    """A draft with an encoder of its own reads each input once, and what it makes of it goes to all its rows."""
    target, draft = pair("t5")
    torch.manual_seed(0)
    output = target.generate(
        **texts([4, 6]),
        assistant_model=draft,
        speculation_policy=StaticPolicy(num_draft_tokens=2),
        do_sample=True,
        top_k=1,
        num_return_sequences=3,
        **LIVELY,
    )
    expected = target.generate(**texts([4, 6]), **LIVELY)
    assert output.tolist() == expected.repeat_interleave(3, dim=0).tolist()


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_models_are_as_they_were_before(family: str) -> None:
    target, draft = (copy.deepcopy(model) for model in pair(family))
    kept = [(dict(vars(module)), dict(module._modules)) for model in (target, draft) for module in model.modules()]
    settings = [model.generation_config.to_dict() for model in (target, draft)]
    call = {"max_new_tokens": 8, "assistant_model": draft, "speculation_policy": "dsde"}
    target.generate(**inputs_of(family, [3, 5]), **call, **({"language": "en"} if family == "whisper" else {}))
    assert settings == [model.generation_config.to_dict() for model in (target, draft)]
    after = [module for model in (target, draft) for module in model.modules()]
    for (held, inside), module in zip(kept, after, strict=True):
        assert held.keys() == vars(module).keys()
        assert all(module._modules[name] is child for name, child in inside.items())


def test_the_families_that_are_known_are_all_tested() -> None:
    from hf_dsde.execution.ragged_positions import FAMILIES as KNOWN

    assert {pair(family)[0].config.model_type for family in FAMILIES} == set(KNOWN)
