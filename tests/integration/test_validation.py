"""What cannot be decoded is refused before a model runs: the message names the argument, its value and the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_calls import config_of
from tiny_models import VOCABULARY, WINDOW, noisy_copy, ragged_batch, tiny_model
from tiny_text import tiny_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import SynthIDTextWatermarkingConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

import hf_dsde
from hf_dsde import SpeculationConfig, compat
from hf_dsde.integration import validation

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

BATCH = ragged_batch((3, 6, 1))
WAYS_OUT = ("Use ", "use ", "Leave ", "leave ", "Pass ", "pass ", "Set ", "Remove ", "Keep ", "Call ", "Did you mean")


@cache
def target() -> PreTrainedModel:
    return hf_dsde.enable(tiny_model("llama"))


@cache
def draft() -> PreTrainedModel:
    return noisy_copy(target(), 0.05)


def fails_when_called(*arguments: Any) -> None:
    raise AssertionError("a model ran before the call was refused")


def message_of(
    error: type[Exception] = ValueError,
    *,
    model: PreTrainedModel | None = None,
    assistant: PreTrainedModel | None = None,
    **arguments: Any,
) -> str:
    """Make a call that has to be refused; check that nothing ran and nothing changed; return the message."""
    model = target() if model is None else hf_dsde.enable(model)
    assistant = draft() if assistant is None else assistant
    arguments = {**BATCH, "max_new_tokens": 3, "assistant_model": assistant, "speculation_policy": "dsde", **arguments}
    both = (model, assistant)
    before = [copy.deepcopy((vars(m.config), vars(m.generation_config))) for m in both]
    hooks = [m.register_forward_pre_hook(fails_when_called) for m in both]
    try:
        with pytest.raises(error) as refusal:
            model.generate(**arguments)
    finally:
        for hook in hooks:
            hook.remove()
    assert str([(vars(m.config), vars(m.generation_config)) for m in both]) == str(before)
    message = str(refusal.value)
    assert any(way in message for way in WAYS_OUT), f"names no way out: {message}"
    return message


def filled_cache() -> DynamicCache:
    past = DynamicCache()
    target()(**BATCH, use_cache=True, **{compat.cache_argument(target()): past})
    return past


def cached(past: Callable[[], DynamicCache]) -> dict[str, Any]:
    return {compat.cache_argument(target()): past()}


CALLS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "beams": (lambda: {"num_beams": 3}, ("num_beams=3", "Use num_beams=1")),
    "beams in a config": (lambda: {"generation_config": GenerationConfig(num_beams=2)}, ("num_beams=2",)),
    "no assistant": (lambda: {"assistant_model": None}, ("assistant_model=None", "Pass assistant_model=")),
    "prompt lookup beside an assistant": (
        lambda: {"prompt_lookup_num_tokens": 3},
        ("prompt_lookup_num_tokens=3", "Use it or assistant_model"),
    ),
    "early exit beside an assistant": (
        lambda: {"assistant_early_exit": 1},
        ("assistant_early_exit=1", "EarlyExitDrafter(model, 1)"),
    ),
    "synchronised GPUs": (lambda: {"synced_gpus": True}, ("synced_gpus=True", "Keep a whole model on each GPU")),
    "no cache": (lambda: {"use_cache": False}, ("use_cache=False", "Use use_cache=True")),
    "static cache": (lambda: {"cache_implementation": "static"}, ("cache_implementation='static'", "Leave")),
    "quantised cache": (lambda: {"cache_implementation": "quantized"}, ("cache_implementation='quantized'", "Leave")),
    "offloaded cache": (lambda: {"cache_implementation": "offloaded"}, ("cache_implementation='offloaded'", "Leave")),
    "filled cache": (lambda: cached(filled_cache), ("(DynamicCache)", "Leave the argument out", "as input_ids")),
    "empty cache": (lambda: cached(DynamicCache), ("(DynamicCache)", "Leave the argument out")),
    "embeddings": (
        lambda: {"inputs_embeds": torch.zeros(3, 6, 32, dtype=torch.float64), "input_ids": None},
        ("inputs_embeds", "Pass input_ids"),
    ),
    "attentions": (lambda: {"output_attentions": True}, ("output_attentions=True", "Leave out")),
    "attentions in a config": (
        lambda: {"generation_config": GenerationConfig(output_attentions=True, return_dict_in_generate=True)},
        ("output_attentions=True",),
    ),
    "hidden states": (
        lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
        ("output_hidden_states=True", "Leave out"),
    ),
    "guidance": (lambda: {"guidance_scale": 1.5}, ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "Leave out")),
    "SynthID watermark": (
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3), "do_sample": True},
        ("SynthIDTextWatermarkLogitsProcessor",),
    ),
    "odd positions": (
        lambda: {"position_ids": torch.arange(6).expand(3, -1) + 1},
        ("position_ids", "Leave the argument out"),
    ),
    "padding after": (
        lambda: {"attention_mask": torch.tensor([[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2])},
        ("attention_mask: rows [1, 2]", "padding_side = 'left'"),
    ),
    "empty prompt": (
        lambda: {"attention_mask": torch.tensor([[1] * 6, [0] * 6, [1] * 6])},
        ("attention_mask: rows [1]", "empty"),
    ),
    "hidden tokens": (
        lambda: {"attention_mask": torch.tensor([[1] * 6, [0, 1, 0, 1, 1, 1], [1] * 6])},
        ("attention_mask: rows [1]", "Remove the hidden tokens"),
    ),
    "stock draft length": (
        lambda: {"num_assistant_tokens": 5},
        ("num_assistant_tokens=5", "StaticPolicy(num_draft_tokens=...)"),
    ),
    "stock schedule": (
        lambda: {"num_assistant_tokens_schedule": "heuristic"},
        ("num_assistant_tokens_schedule='heuristic'",),
    ),
    "stock threshold in a config": (
        lambda: {"generation_config": GenerationConfig(assistant_confidence_threshold=0.4)},
        ("assistant_confidence_threshold=0.4", "ConfidencePolicy"),
    ),
    "policy inside a config": (
        lambda: {"generation_config": GenerationConfig(speculation_policy="static"), "speculation_policy": None},
        ("generation_config.speculation_policy='static'", "to `generate` itself"),
    ),
    "unknown policy": (lambda: {"speculation_policy": "dsdee"}, ("'dsdee'", "Did you mean 'dsde'?")),
    "two configs": (
        lambda: {"speculation_policy": SpeculationConfig(), "speculation_config": SpeculationConfig()},
        ("speculation_config", "pass one of them"),
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_cannot_be_served_is_refused_by_name(case: str) -> None:
    arguments, parts = CALLS[case]
    message = message_of(**arguments())
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"speculation_policy": 5}, ("speculation_policy", "int", "name, a StoppingPolicy or a SpeculationConfig")),
        ({"speculation_policy": hf_dsde.StaticPolicy}, ("speculation_policy", "ABCMeta")),
        ({"speculation_policy": ["dsde"]}, ("speculation_policy", "list")),
        ({"speculation_config": {"policy": "dsde"}}, ("speculation_config", "dict", "SpeculationConfig")),
        ({"speculation_policy": None, "speculation_config": "dsde"}, ("speculation_config", "str")),
        ({"speculation_listeners": [print]}, ("speculation_listeners", "hf_dsde.RoundListener", "builtin_function")),
    ],
    ids=["number", "class", "list", "dict as config", "name as config", "function that listens"],
)
def test_wrong_types_are_refused_by_name(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(TypeError) as refusal:
        target().generate(**BATCH, **{"assistant_model": draft(), "speculation_policy": "dsde", **arguments})
    for part in parts:
        assert part in str(refusal.value)


def test_a_way_of_mixing_the_draft_into_the_target_is_refused() -> None:
    config = GenerationConfig()
    config.assistant_ensemble_weight = 0.3
    with pytest.raises(ValueError, match=r"assistant_ensemble_weight=0\.3.*Leave it out"):
        validation.check_call(target(), BATCH["input_ids"], LogitsProcessorList(), config, False, {})


def test_a_mode_that_is_neither_greedy_nor_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"contrastive_search.*Leave out"):
        validation.check_mode(GenerationMode.CONTRASTIVE_SEARCH, GenerationConfig(num_beams=1), {"assistant_model": 1})


def test_heads_of_the_target_that_draft_are_a_second_way_of_drafting() -> None:
    config = GenerationConfig(num_beams=1)
    config.use_mtp = True
    with pytest.raises(ValueError, match=r"use_mtp=True.*Use it or assistant_model"):
        validation.check_mode(GenerationMode.ASSISTED_GENERATION, config, {"assistant_model": draft()})


# Models


def made(kind: str, form: str = "ForCausalLM", **fields: Any) -> PreTrainedModel:
    """A tiny model of a family that `tiny_models` does not have."""
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, **fields)
    return getattr(transformers, kind + form)(config)


mamba = partial(made, "Mamba", hidden_size=16, num_hidden_layers=1, state_size=4)
t5 = partial(
    made, "T5", "ForConditionalGeneration", d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
    decoder_start_token_id=0,
)  # fmt: skip
bloom = partial(made, "Bloom", hidden_size=16, n_layer=1, n_head=2)
mpt = partial(made, "Mpt", d_model=16, n_layers=1, n_heads=2, max_seq_len=64)
falcon = partial(made, "Falcon", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True)
xlm = partial(made, "XLM", "WithLMHeadModel", emb_dim=16, n_layers=1, n_heads=2, is_decoder=True)
bart = partial(
    made, "Bart", d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True,
    is_encoder_decoder=False,
)  # fmt: skip
gpt_neo = partial(
    made, "GPTNeo", hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
    window_size=WINDOW,
)  # fmt: skip


def llama_with(**fields: Any) -> PreTrainedModel:
    model = tiny_model("llama")
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def unmaskable() -> PreTrainedModel:
    """A model that packed attention does not reproduce, set to attention that takes no mask of ours."""
    model = tiny_model("gemma2")
    compat.set_attention_setting(model.config, "flash_attention_2")
    return model


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, ...]]] = {
    "recurrent": (mamba, ("(MambaForCausalLM)", "recurrent state", "Leave out")),
    "encoder-decoder": (t5, ("(T5ForConditionalGeneration)", "encoder-decoder", "Leave out")),
    "Bloom": (bloom, ("(BloomForCausalLM) with ALiBi", "Leave out")),
    "MPT": (mpt, ("(MptForCausalLM) with ALiBi",)),
    "Falcon with ALiBi": (falcon, ("(FalconForCausalLM) with ALiBi",)),
    "linear layers": (
        partial(llama_with, layer_types=["linear_attention", "full_attention"]),
        ("['linear_attention']", "known are ['full_attention', 'sliding_attention']"),
    ),
    "chunked layers": (partial(llama_with, attention_chunk_size=WINDOW), ("['chunked_attention']",)),
    "shared caches": (partial(llama_with, num_kv_shared_layers=1), ("num_kv_shared_layers=1",)),
    "local layers": (gpt_neo, ("(GPTNeoForCausalLM) with layer types ['local_attention']", "Leave out")),
    "positions counted by the cache": (bart, ("(BartForCausalLM)", "takes no position_ids", "Leave out")),
    "mask tokens": (xlm, ("(XLMWithLMHeadModel)", "mask token", "Leave out")),
    "attention without masks": (
        unmaskable,
        ("attn_implementation='flash_attention_2'", "model.set_attn_implementation", "'sdpa'"),
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_target_that_cannot_be_ragged_is_refused_by_name(case: str) -> None:
    make, parts = MODELS[case]
    message = message_of(model=make())
    for part in ("used with model (", *parts):
        assert part in message


@pytest.mark.parametrize("case", MODELS)
def test_a_draft_that_cannot_be_ragged_is_refused_by_name(case: str) -> None:
    make, parts = MODELS[case]
    message = message_of(assistant=make())
    for part in ("assistant_model (", *parts):
        assert part in message


def test_attention_without_masks_is_refused_also_when_packing_is_switched_off() -> None:
    """Packed attention stands in for whatever a model is set to, but not when the call forbids it."""
    model = tiny_model("llama")
    compat.set_attention_setting(model.config, "flash_attention_2")
    message = message_of(model=model, speculation_policy=None, speculation_config=config_of(packed_attention=False))
    assert "attn_implementation='flash_attention_2'" in message


def test_packing_serves_a_model_set_to_attention_that_takes_no_mask() -> None:
    model = hf_dsde.enable(tiny_model("llama"))
    plain = model.generate(**BATCH, max_new_tokens=6)
    compat.set_attention_setting(model.config, "flash_attention_2")
    ours = model.generate(**BATCH, max_new_tokens=6, assistant_model=draft(), speculation_policy="dsde")
    assert ours.tolist() == plain.tolist()
    assert model.config._attn_implementation == "flash_attention_2"


# Tokenizers


def test_a_draft_of_another_tokenizer_is_translated_and_the_first_differing_tokens_named() -> None:
    """Accepted in silence elsewhere (SGLang #23838): sizes are equal, so only the entries tell."""
    ours, theirs = (tiny_tokenizer().convert_ids_to_tokens([20, 41])[i] for i in (0, 1))
    named = f"assistant_tokenizer.*2 token ids differ.*20: '{ours}' against '{theirs}'.*41: "
    arguments = {"max_new_tokens": 4, "assistant_model": draft(), "speculation_policy": "static"}
    tokenizers = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": tiny_tokenizer(swapped=(20, 41))}
    with pytest.warns(hf_dsde.SpeculationWarning, match=named):
        output = target().generate(**BATCH, **arguments, **tokenizers)
    assert output.tolist() == target().generate(**BATCH, max_new_tokens=4).tolist()


def test_tokenizers_of_different_sizes_are_compared_on_what_both_models_know() -> None:
    small = tiny_model("llama", vocab_size=60)
    arguments = {**BATCH, "max_new_tokens": 4, "assistant_model": small, "speculation_policy": "static"}
    output = target().generate(**arguments, tokenizer=tiny_tokenizer(), assistant_tokenizer=tiny_tokenizer(60))
    assert output.tolist() == target().generate(**BATCH, max_new_tokens=4).tolist()
    others = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": tiny_tokenizer(60, swapped=(30, 59))}
    with pytest.warns(hf_dsde.SpeculationWarning, match="2 token ids differ"):
        target().generate(**arguments, **others)


def test_tokenizers_that_lie_beside_the_models_are_compared_unasked(tmp_path: Path) -> None:
    models = {}
    for name, swapped in (("target", None), ("same", None), ("other", (20, 41))):
        tiny_model("llama").save_pretrained(tmp_path / name)
        tiny_tokenizer(swapped=swapped).save_pretrained(tmp_path / name)
        models[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    hf_dsde.enable(models["target"])
    arguments = {**BATCH, "max_new_tokens": 2, "speculation_policy": "static"}
    models["target"].generate(**arguments, assistant_model=models["same"])
    with pytest.raises(ValueError, match="2 token ids differ from the target's tokenizer"):
        models["target"].generate(**arguments, assistant_model=models["other"])


def test_one_tokenizer_alone_is_no_reason_to_refuse() -> None:
    for name in ("tokenizer", "assistant_tokenizer"):
        target().generate(
            **BATCH, max_new_tokens=2, assistant_model=draft(), speculation_policy="dsde", **{name: tiny_tokenizer()}
        )


# What looks odd and is fine


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_ids": (BATCH["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)},
        {"attention_mask": BATCH["attention_mask"].bool()},
        {"cache_implementation": "dynamic"},
        {"use_cache": True},
        {"synced_gpus": False},
        {"num_beams": 1},
        {"output_attentions": False},
        {"guidance_scale": 1.0},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_settings_that_say_what_is_the_case_anyway_are_accepted(arguments: dict[str, Any]) -> None:
    output = target().generate(
        **{**BATCH, **arguments}, max_new_tokens=3, assistant_model=draft(), speculation_policy="dsde"
    )
    assert output.tolist() == target().generate(**BATCH, max_new_tokens=3).tolist()


# The other route


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ],
)
def test_a_custom_decoding_method_refuses_the_same(arguments: dict[str, Any], part: str) -> None:
    never_enabled = tiny_model("llama")
    never_enabled.register_forward_pre_hook(fails_when_called)
    with pytest.raises(ValueError, match=part):
        never_enabled.generate(
            **BATCH, **arguments, max_new_tokens=3, custom_generate=partial(hf_dsde.generate, assistant_model=draft())
        )


def test_a_streamer_for_one_sequence_is_refused_before_anything_runs() -> None:
    class Single(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            pass

    assert "streamer: Single" in message_of(streamer=Single())


def test_a_custom_decoding_method_refuses_models_too() -> None:
    with pytest.raises(ValueError, match=r"assistant_model \(MambaForCausalLM\)"):
        target().generate(**BATCH, max_new_tokens=3, custom_generate=partial(hf_dsde.generate, assistant_model=mamba()))
