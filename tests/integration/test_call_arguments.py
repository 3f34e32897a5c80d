"""Every argument of `generate` and every field of a generation config: as in plain decoding, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from small_batch import BATCH, draft, model, plain_text
from tiny_calls import QUIET
from tiny_text import StopsRowOn, tiny_tokenizer
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import NoRepeatNGramLogitsProcessor, WatermarkingConfig

import hf_dsde

WIDTH = BATCH["input_ids"].shape[1]
GREEDY: dict[str, Any] = {**BATCH, "do_sample": False, "max_new_tokens": 12}
ONE_LEFT: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
"""Sampling in which the option that is added leaves one token."""


@cache
def target() -> PreTrainedModel:
    return hf_dsde.enable(model())


def text_token(step: int, row: int = 2) -> int:
    return plain_text()[row][WIDTH + step]


def allowed(row: int, text: torch.Tensor) -> list[int]:
    """Tokens that depend on the row and on how long its text is."""
    return [token for token in range(3, 96) if (token + row + len(text)) % 3]


Arguments = Callable[[], dict[str, Any]]

SERVED: dict[str, Arguments] = {
    "bad_words_ids": lambda: {"bad_words_ids": [[text_token(1)], [text_token(3), text_token(4)]]},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": [text_token(0)]},
    "do_sample": lambda: {**ONE_LEFT, "top_k": 1},
    "encoder_no_repeat_ngram_size": lambda: {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 0.2},
    "eos_token_id": lambda: {"eos_token_id": [text_token(3), text_token(5, 0)]},
    "epsilon_cutoff": lambda: {**ONE_LEFT, "epsilon_cutoff": 0.999},
    "eta_cutoff": lambda: {**ONE_LEFT, "temperature": 1e-4, "eta_cutoff": 0.999},
    "exponential_decay_length_penalty": lambda: {"exponential_decay_length_penalty": (2, 3.0)},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": 2},
    "generation_config": lambda: {"generation_config": GenerationConfig(max_new_tokens=7, repetition_penalty=1.7)},
    "logits_processor": lambda: {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])},
    "max_length": lambda: {"max_length": WIDTH + 4, "max_new_tokens": None},
    "max_new_tokens": lambda: {"max_new_tokens": 5},
    "min_length": lambda: {"min_length": WIDTH + 9, "eos_token_id": text_token(3)},
    "min_new_tokens": lambda: {"min_new_tokens": 9, "eos_token_id": text_token(3)},
    "min_p": lambda: {**ONE_LEFT, "min_p": 1.0},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "num_return_sequences": lambda: {**ONE_LEFT, "top_k": 1, "num_return_sequences": 2},
    "pad_token_id": lambda: {"pad_token_id": 7, "eos_token_id": text_token(3)},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": allowed},
    "renormalize_logits": lambda: {"renormalize_logits": True, "repetition_penalty": 1.7},
    "repetition_penalty": lambda: {"repetition_penalty": 1.7},
    "sequence_bias": lambda: {"sequence_bias": [[[text_token(0), 9], 50.0], [[8], 1.0]]},
    "stop_strings": lambda: {
        "stop_strings": [tiny_tokenizer().convert_ids_to_tokens(text_token(4))],
        "tokenizer": tiny_tokenizer(),
    },
    "stopping_criteria": lambda: {"stopping_criteria": StoppingCriteriaList([StopsRowOn(text_token(4))])},
    "suppress_tokens": lambda: {"suppress_tokens": [text_token(1), text_token(2, 0)]},
    "temperature": lambda: {**ONE_LEFT, "temperature": 1e-5},
    "top_h": lambda: {**ONE_LEFT, "top_h": 1e-6},
    "top_k": lambda: {**ONE_LEFT, "top_k": 1},
    "top_p": lambda: {**ONE_LEFT, "top_p": 1e-9},
    "typical_p": lambda: {**ONE_LEFT, "typical_p": 1e-9},
    "watermarking_config": lambda: {"watermarking_config": WatermarkingConfig(bias=20.0)},
}
"""What changes the text, and does so as in plain decoding."""

AS_IT_IS: dict[str, Arguments] = {
    "cache_config": lambda: {"cache_config": {"nbits": 4}},
    "compile_config": lambda: {"compile_config": CompileConfig(mode="default")},
    "decoder_start_token_id": lambda: {"decoder_start_token_id": 5},
    "bos_token_id": lambda: {"bos_token_id": 5},
    "forced_bos_token_id": lambda: {"forced_bos_token_id": 9},
    "disable_compile": lambda: {"disable_compile": True},
    "length_penalty": lambda: {"length_penalty": 1.0},
    "max_cache_len": lambda: {"max_cache_len": 64},
    "max_matching_ngram_size": lambda: {"max_matching_ngram_size": 3},
    "negative_prompt_ids": lambda: {"negative_prompt_ids": BATCH["input_ids"]},
    "negative_prompt_attention_mask": lambda: {"negative_prompt_attention_mask": BATCH["attention_mask"]},
    "output_logits": lambda: {"output_logits": True},
    "output_scores": lambda: {"output_scores": True},
    "prefill_chunk_size": lambda: {"prefill_chunk_size": 2},
    "remove_invalid_values": lambda: {"remove_invalid_values": True},
    "synced_gpus": lambda: {"synced_gpus": False},
    "use_cache": lambda: {"use_cache": True},
    "continuous_batching_config": lambda: {"continuous_batching_config": None},
    "early_stopping": lambda: {"early_stopping": False},
    "transformers_version": lambda: {"transformers_version": "5.0.0"},
    "assistant_lookbehind": lambda: {"assistant_lookbehind": 4},
    "target_lookbehind": lambda: {"target_lookbehind": 4},
}
"""What has no say in a text that is decoded greedily from a cache of the loop's own, in plain decoding either."""

HUB = {"trust_remote_code": True}
"""Lets transformers ask the Hub for what it has given up, had the call not been refused before."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "assistant_confidence_threshold": ({"assistant_confidence_threshold": 0.3}, "assistant_confidence_threshold=0.3"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    "assistant_ensemble_weight": ({"assistant_ensemble_weight": 0.3}, "assistant_ensemble_weight"),
    "assistant_model": ({"assistant_model": None}, "assistant_model=None"),
    "cache_implementation": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "constraints": ({"constraints": ["x"], **HUB}, "constrained_beam_search"),
    "diversity_penalty": ({"diversity_penalty": 0.5, "num_beams": 4, "num_beam_groups": 2, **HUB}, "num_beams=4"),
    "dola_layers": ({"dola_layers": "low"}, "dola_layers='low'"),
    "force_words_ids": ({"force_words_ids": [[5]], "num_beams": 2, **HUB}, "num_beams=2"),
    "guidance_scale": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "is_assistant": ({"is_assistant": True}, "is_assistant=True"),
    "low_memory": ({"low_memory": True, "penalty_alpha": 0.5, "top_k": 4, **HUB}, "contrastive_search"),
    "num_assistant_tokens": ({"num_assistant_tokens": 5}, "num_assistant_tokens=5"),
    "num_assistant_tokens_schedule": ({"num_assistant_tokens_schedule": "constant"}, "schedule='constant'"),
    "num_beam_groups": ({"num_beam_groups": 2, "num_beams": 4, **HUB}, "num_beams=4"),
    "num_beams": ({"num_beams": 2}, "num_beams=2"),
    "output_attentions": ({"output_attentions": True}, "output_attentions=True"),
    "output_hidden_states": ({"output_hidden_states": True}, "output_hidden_states=True"),
    "penalty_alpha": ({"penalty_alpha": 0.5, "top_k": 4, **HUB}, "contrastive_search"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    "speculation_type": ({"speculation_type": "dflash"}, "speculation_type=dflash"),
    "use_mtp": ({"use_mtp": True}, "use_mtp=True"),
}
"""What is refused before a model runs, and what the message names."""

ELSEWHERE = {
    "self",
    "inputs",
    "kwargs",
    "streamer",  # tests/decoding/test_streamers.py
    "custom_generate",  # tests/integration/test_hooks.py
    "token_healing",  # `generate` calls itself for the prompts, before it decodes
    "max_time",  # tests/decoding/test_stopping.py: looked at once a round
    "return_dict_in_generate",  # in every call here
}


def speculative(arguments: dict[str, Any]) -> Any:
    settings = {"assistant_model": draft(), "speculation_policy": "static", "speculation_config": QUIET}
    return target().generate(**{**GREEDY, **settings, **arguments}, return_dict_in_generate=True)


def test_the_tables_know_every_argument() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    known = SERVED.keys() | AS_IT_IS.keys() | REFUSED.keys() | ELSEWHERE
    assert fields | inspect.signature(GenerationMixin.generate).parameters.keys() <= known


@pytest.mark.parametrize("argument", SERVED)
def test_what_changes_the_text_changes_it_as_in_plain_decoding(argument: str) -> None:
    arguments = {**GREEDY, **SERVED[argument]()}
    plain = target().generate(**arguments).tolist()
    if arguments["do_sample"]:
        assert target().generate(**arguments).tolist() == plain, "more than one token is left"
    else:
        assert plain != plain_text(), "the argument does nothing here"
    assert speculative(arguments).sequences.tolist() == plain


@pytest.mark.parametrize("argument", AS_IT_IS)
def test_what_has_no_say_in_the_text_is_taken(argument: str) -> None:
    arguments = AS_IT_IS[argument]()
    assert target().generate(**{**GREEDY, **arguments}).tolist() == plain_text()
    assert speculative(arguments).sequences.tolist() == plain_text()


@pytest.mark.parametrize("argument", REFUSED)
def test_what_cannot_be_served_is_refused_before_a_model_runs(argument: str) -> None:
    arguments, part = REFUSED[argument]
    with pytest.raises(ValueError, match=f"speculation_policy.*{part}"):
        speculative(arguments)
