"""What the package asks of the installed transformers version, asked of real models."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import FAMILIES, WINDOW, ragged_batch, tiny_model
from transformers import PretrainedConfig

from hf_dsde import compat


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_cache_argument_is_one_that_forward_takes(family: str) -> None:
    model = tiny_model(family)
    name = compat.cache_argument(model)
    assert name in inspect.signature(model.forward).parameters
    assert compat.supports_logits_to_keep(model)


def test_the_cache_is_passed_under_the_name_this_version_prefers() -> None:
    """A newer version takes the old name too, but warns."""
    model = tiny_model("llama")
    output = model(**ragged_batch((3,)), use_cache=True)
    name = compat.cache_argument(model)
    assert output[name].get_seq_length() == 3
    if Version(transformers.__version__) >= Version("5.24"):
        assert name == "cache"


def test_a_model_without_a_cache_argument_is_refused() -> None:
    class Cacheless(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(ValueError, match=r"model: Cacheless.forward takes none of .*Generate without"):
        compat.cache_argument(Cacheless())
    assert not compat.supports_logits_to_keep(Cacheless())


def test_the_given_cache_is_found_under_either_name() -> None:
    cache = transformers.DynamicCache()
    assert compat.given_cache({"past_key_values": cache}) is cache
    assert compat.given_cache({"cache": cache, "past_key_values": None}) is cache
    assert compat.given_cache({"past_key_values": None, "use_cache": True}) is None
    assert compat.given_cache({}) is None


def test_a_mask_that_says_nothing_may_be_missing() -> None:
    """Newer versions drop it when no prompt is padded."""
    ids = ragged_batch((3, 2))["input_ids"]
    mask = ragged_batch((3, 2))["attention_mask"]
    assert compat.prompt_mask(ids, {"attention_mask": mask}) is mask
    for absent in ({}, {"attention_mask": None}):
        assert compat.prompt_mask(ids, absent).tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_context_length_is_the_number_of_positions(family: str) -> None:
    assert compat.context_length(tiny_model(family, max_position_embeddings=24)) == 24


def test_the_context_length_of_a_nested_configuration_is_that_of_the_text_decoder() -> None:
    nested = transformers.Gemma3Config(text_config={"max_position_embeddings": 24})
    assert compat.context_length(SimpleNamespace(config=nested)) == 24


def test_a_configuration_may_set_no_limit_to_the_context() -> None:
    assert compat.context_length(SimpleNamespace(config=transformers.BloomConfig())) is None


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["full_attention"] * 2),
        ("gpt2", ["full_attention"] * 2),
        ("mistral", ["sliding_attention"] * 2),
        ("gemma2", ["sliding_attention", "full_attention"]),
        ("gemma3", ["sliding_attention", "full_attention"]),
    ],
)
def test_layer_types_are_known_whether_declared_or_not(family: str, expected: list[str]) -> None:
    config = tiny_model(family).config.get_text_config(decoder=True)
    assert compat.layer_types(config) == expected
    if "sliding_attention" in expected:
        assert config.sliding_window == WINDOW


def test_layer_types_of_older_configurations_follow_from_their_windows() -> None:
    def config(**fields: object) -> PretrainedConfig:
        made = PretrainedConfig()
        for name, value in {"num_hidden_layers": 2, **fields}.items():
            setattr(made, name, value)
        return made

    assert compat.layer_types(config()) == ["full_attention"] * 2
    assert compat.layer_types(config(sliding_window=4)) == ["sliding_attention"] * 2
    assert compat.layer_types(config(sliding_window=None)) == ["full_attention"] * 2
    assert compat.layer_types(config(attention_chunk_size=4)) == ["chunked_attention"] * 2
    declared = config(sliding_window=4, layer_types=("linear_attention", "full_attention"))
    assert compat.layer_types(declared) == ["linear_attention", "full_attention"]


def test_attention_settings_are_read_and_restored() -> None:
    config = tiny_model("llama").config
    before = dict(vars(config))
    setting = compat.get_attention_setting(config)
    compat.set_attention_setting(config, "eager")
    assert config._attn_implementation == "eager"
    compat.set_attention_setting(config, setting)
    assert vars(config) == before


def test_attention_settings_of_nested_configurations_are_found() -> None:
    nested = transformers.Gemma3Config()
    found = compat.attention_configs(nested)
    assert found[0] is nested
    assert nested.text_config in found
    for index, config in enumerate(found):
        compat.set_attention_setting(config, "eager" if index else "sdpa")
    assert [config._attn_implementation for config in found] == ["sdpa"] + ["eager"] * (len(found) - 1)
