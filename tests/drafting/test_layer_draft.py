"""A draft of its target's layers: what it shares, what it owns, and what it refuses."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

import hf_dsde
from hf_dsde.drafting.layer_draft import (
    DESCRIPTION_NAME,
    WEIGHTS_NAME,
    embedding_fingerprint,
    initialise_draft,
    load_draft,
    save_draft,
)

LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral", "gemma3")


def tokens(model, length=7):
    return torch.arange(3, 3 + length).repeat(2, 1) % model.config.vocab_size


def perturb(draft):
    """Stand in for training: change every weight that the draft owns."""
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    return draft


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_a_draft_of_all_layers_is_the_target(family):
    target = tiny_model(family)
    draft = initialise_draft(target, range(target.config.num_hidden_layers))
    torch.testing.assert_close(draft(tokens(target)).logits, target(tokens(target)).logits, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_share_the_targets_storage(tied):
    target = tiny_model(tie_word_embeddings=tied)
    draft = initialise_draft(target, [0])
    assert draft.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied


def test_layers_and_norm_are_copies_and_alone_trainable():
    target = tiny_model()
    before = copy.deepcopy(target.state_dict())
    draft = perturb(initialise_draft(target, [1]))
    trainable = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert "model.norm.weight" in trainable
    assert not any("embed_tokens" in name or "lm_head" in name for name in trainable)
    for name, value in target.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_casting_the_draft_leaves_the_target_alone():
    target = tiny_model()
    nn.Module.to(initialise_draft(target, [0]), torch.float32)
    assert target.lm_head.weight.dtype == torch.float64


def test_configuration_follows_the_chosen_layers():
    target = tiny_model("gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    draft = initialise_draft(target, [0, 2, 3])
    assert draft.config.num_hidden_layers == 3
    assert draft.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert [layer.self_attn.layer_idx for layer in draft.model.layers] == [0, 1, 2]
    assert all(layer.self_attn.config is draft.config for layer in draft.model.layers)
    assert target.config.num_hidden_layers == 4


def test_generation_config_is_a_copy():
    target = tiny_model()
    draft = initialise_draft(target, [0])
    assert draft.generation_config is not target.generation_config
    assert draft.generation_config.eos_token_id == target.generation_config.eos_token_id


def test_draft_assists_its_target_in_plain_generate():
    target = tiny_model()
    draft = initialise_draft(target, [0])
    prompt = tokens(target)[:1]
    alone = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assisted = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(alone, assisted)


def test_draft_of_an_enabled_target_has_the_plain_class():
    target = tiny_model()
    plain = type(target)
    hf_dsde.enable(target)
    assert type(initialise_draft(target, [0])) is plain


def test_save_and_load_round_trip(tmp_path):
    target = tiny_model()
    draft = perturb(initialise_draft(target, [1, 0]))
    save_draft(draft, tmp_path / "draft", dtype=torch.float64)
    loaded = load_draft(tmp_path / "draft", target)
    torch.testing.assert_close(loaded(tokens(target)).logits, draft(tokens(target)).logits, rtol=0, atol=0)
    assert loaded.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert not loaded.training


def test_file_holds_layers_and_norm_only(tmp_path):
    target = tiny_model()
    draft = initialise_draft(target, [0])
    save_draft(draft, tmp_path)
    owned = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    assert (tmp_path / WEIGHTS_NAME).stat().st_size < 2 * owned + 4096


def test_loading_in_another_dtype_copies_the_shared_parts(tmp_path):
    target = tiny_model()
    save_draft(initialise_draft(target, [0]), tmp_path)
    loaded = load_draft(tmp_path, target, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.model.rotary_emb.inv_freq.dtype == target.model.rotary_emb.inv_freq.dtype
    assert target.lm_head.weight.dtype == torch.float64


def test_saving_a_loaded_draft_keeps_its_description(tmp_path):
    target = tiny_model()
    save_draft(initialise_draft(target, [1]), tmp_path / "first", target_name="the target")
    save_draft(load_draft(tmp_path / "first", target), tmp_path / "second")
    first, second = (json.loads((tmp_path / name / DESCRIPTION_NAME).read_text()) for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_target_is_recognised_in_every_dtype(tmp_path, dtype):
    target = tiny_model().to(torch.float32)
    save_draft(initialise_draft(target, [0]), tmp_path)
    load_draft(tmp_path, copy.deepcopy(target).to(dtype))


def test_other_embedding_values_are_refused(tmp_path):
    save_draft(initialise_draft(tiny_model(), [0]), tmp_path, target_name="name/of-target")
    with pytest.raises(ValueError, match=r"name/of-target.*other embedding values"):
        load_draft(tmp_path, tiny_model(seed=1))


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"hidden_size": 64}, {"vocab_size": 128}])
def test_another_shape_is_refused_by_name(tmp_path, change):
    save_draft(initialise_draft(tiny_model(), [0]), tmp_path)
    with pytest.raises(ValueError, match=next(iter(change))):
        load_draft(tmp_path, tiny_model(**change))


def test_another_architecture_is_refused_by_name(tmp_path):
    save_draft(initialise_draft(tiny_model(), [0]), tmp_path)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*Qwen2ForCausalLM"):
        load_draft(tmp_path, tiny_model("qwen2"))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt"])
def test_a_layout_other_than_llamas_is_refused_by_name(family):
    model = tiny_model(family)
    with pytest.raises(TypeError, match=type(model).__name__):
        initialise_draft(model, [0])


@pytest.mark.parametrize("layers", [[], [2], [-1], [0, 5]])
def test_layers_that_the_target_lacks_are_refused(layers):
    with pytest.raises(ValueError, match="from 0 to 1"):
        initialise_draft(tiny_model(), layers)


def test_a_folder_without_description_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not written by save_draft"):
        load_draft(tmp_path, tiny_model())


def test_an_unknown_format_is_refused(tmp_path):
    target = tiny_model()
    save_draft(initialise_draft(target, [0]), tmp_path)
    file = tmp_path / DESCRIPTION_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        load_draft(tmp_path, target)


def test_what_is_neither_folder_nor_repository_is_refused():
    with pytest.raises(FileNotFoundError, match="no local folder"):
        load_draft("no-such-owner/no-such-draft", tiny_model())


def test_saving_an_ordinary_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save_pretrained"):
        save_draft(tiny_model(), tmp_path)


def test_a_weight_too_large_for_the_dtype_is_refused(tmp_path):
    draft = initialise_draft(tiny_model(), [0])
    with torch.no_grad():
        draft.model.norm.weight[0] = 1e6
    with pytest.raises(ValueError, match=r"norm\.weight.*float32"):
        save_draft(draft, tmp_path)


def test_fingerprint_depends_on_values_only():
    assert embedding_fingerprint(tiny_model()) == embedding_fingerprint(tiny_model())
    assert embedding_fingerprint(tiny_model()) != embedding_fingerprint(tiny_model(seed=1))
