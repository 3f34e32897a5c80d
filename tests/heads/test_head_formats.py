"""What a head's files say, and what is refused."""

import pickle
from fnmatch import fnmatch

import pytest
import torch
from head_files import (
    FEATURE,
    SHAPE,
    VOCABULARY,
    eagle3_weights,
    eagle_config,
    eagle_names,
    first_eagle_weights,
    speculators_config,
    write,
)
from tiny_models import tiny_model

from hf_dsde import load_head
from hf_dsde.heads.checkpoint import Checkpoint

DRAFT = [3, 4, 9, 20, 33, 34, 35, 60, 77, 95]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FIRST_EAGLE = {**SHAPE, "width": FEATURE, "head_dim": 8}


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_hidden_layers=8)


@pytest.fixture
def unread(monkeypatch):
    """No weights may be read."""
    monkeypatch.setattr(Checkpoint, "tensors", lambda *_: pytest.fail("weights were read"))


def eagle(folder, weights=None, **changes):
    weights = eagle3_weights() if weights is None else weights
    return write(folder, eagle_config(**changes), eagle_names(weights))


def speculators(folder, weights=None, **changes):
    return write(folder, speculators_config(**changes), eagle3_weights() if weights is None else weights)


# Layers of the target


def test_layers_are_the_low_the_middle_and_the_high_one_by_default(tmp_path, target):
    assert load_head(eagle(tmp_path / "e"), target).feature_layers == (2, 4, 5)
    assert load_head(speculators(tmp_path / "s"), target).feature_layers == (2, 4, 5)


def test_speculators_counts_layers_by_what_goes_into_them(tmp_path, target):
    assert load_head(speculators(tmp_path, **{LAYER_IDS: [0, 3, 7]}), target).feature_layers == (0, 3, 7)


def test_sglang_counts_layers_by_what_comes_out_of_them(tmp_path, target):
    folder = eagle(tmp_path, eagle_config={LAYER_IDS: [0, 3, 6], "use_aux_hidden_state": True})
    assert load_head(folder, target).feature_layers == (1, 4, 7)


def test_vllm_counts_as_speculators_does_at_the_top_level_of_the_other_format(tmp_path, target):
    assert load_head(eagle(tmp_path, **{LAYER_IDS: [1, 4, 7]}), target).feature_layers == (1, 4, 7)


def test_layers_can_be_given_where_the_configuration_counts_otherwise(tmp_path, target):
    folder = eagle(tmp_path, eagle_config={LAYER_IDS: [5, 6, 7]})
    with pytest.raises(ValueError, match=r"feature_layers: .*\[6, 7, 8\].*\[8\] cannot be had of a target of 8 layers"):
        load_head(folder, target)
    assert load_head(folder, target, feature_layers=[5, 6, 7]).feature_layers == (5, 6, 7)


@pytest.mark.parametrize("layers", [[8, 2, 3], [-1, 2, 3], [2, 3, 11]])
def test_layers_that_the_target_has_not_are_refused(tmp_path, target, unread, layers):
    with pytest.raises(ValueError, match=r"feature_layers: .* cannot be had"):
        load_head(speculators(tmp_path, **{LAYER_IDS: layers}), target)


def test_a_target_too_small_for_the_default_is_refused(tmp_path, unread):
    with pytest.raises(ValueError, match=r"feature_layers: .*\[2, 1, -1\]"):
        load_head(eagle(tmp_path), tiny_model(num_hidden_layers=2))


@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_layers_is_read(tmp_path, target, count):
    folder = speculators(tmp_path, eagle3_weights(features=count), **{LAYER_IDS: [1, 2, 3, 4][:count]})
    assert load_head(folder, target).fc.in_features == count * FEATURE


def test_another_number_of_layers_than_the_weights_are_for_is_refused(tmp_path, target, unread):
    with pytest.raises(ValueError, match=r"fc.weight: .* 96 in all, but 2 layers \[1, 2\] of this target have 64"):
        load_head(speculators(tmp_path, **{LAYER_IDS: [1, 2]}), target)


# Norms


@pytest.mark.parametrize("write_head", [eagle, speculators])
def test_norms_that_are_not_spoken_of_are_not_there(tmp_path, target, write_head):
    settings = load_head(write_head(tmp_path), target).settings
    assert not settings.norm_before_residual
    assert not settings.norm_output
    assert not settings.fc_norm
    assert not settings.norm_before_fc


@pytest.mark.parametrize("write_head", [eagle, speculators])
def test_what_is_fed_back_can_be_given_where_the_word_meant_something_else(tmp_path, target, write_head):
    folder = write_head(tmp_path, norm_output=True, norm_before_residual=False)
    assert load_head(folder, target).settings.norm_output
    changed = load_head(folder, target, norm_output=False, norm_before_residual=True).settings
    assert not changed.norm_output
    assert changed.norm_before_residual


def test_two_ways_of_normalising_features_exclude_each_other(tmp_path, target, unread):
    weights = eagle3_weights(fc_norm=True, norm_before_fc=True)
    with pytest.raises(ValueError, match="fc_norm: True with norm_before_fc=True"):
        load_head(speculators(tmp_path, weights, fc_norm=True, norm_before_fc=True), target)


# Sizes and positions


def test_positions_of_a_head_that_does_not_say_are_few(tmp_path, target):
    head = load_head(eagle(tmp_path), target)
    assert head.config.max_position_embeddings == 2048
    assert head.config.rope_parameters["rope_theta"] == 10000.0
    assert load_head(eagle(tmp_path, max_position_embeddings=77), target).config.max_position_embeddings == 77


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "mrope_section": [1, 1, 3]}},
    ],
)
def test_of_several_positions_per_token_one_is_used(tmp_path, target, rope):
    """Drafts of models of images and text keep the target's setting; in text the positions are one."""
    config = load_head(eagle(tmp_path, **rope), target).config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_the_size_of_heads_is_the_drafts_own(tmp_path, target):
    head = load_head(eagle(tmp_path), target)
    assert head.layers[0].self_attn.head_dim == SHAPE["head_dim"] != target.model.layers[0].self_attn.head_dim


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "new", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}}},
    ],
)
def test_rotations_that_layers_do_not_know_are_refused(tmp_path, target, unread, rope):
    with pytest.raises(
        ValueError, match=r"partial_rotary_factor 0\.5|rope_parameters differs|rope_scaling: the type 'new'"
    ):
        load_head(eagle(tmp_path, **rope), target)


# Vocabulary


@pytest.mark.parametrize("write_head", [eagle, speculators])
def test_the_draft_vocabulary_is_told_by_distances(tmp_path, target, write_head):
    head = load_head(write_head(tmp_path, eagle3_weights(draft=DRAFT), draft_vocab_size=len(DRAFT)), target)
    assert head.draft_ids.tolist() == DRAFT
    assert head.draft_ids.dtype == torch.int64


def test_a_whole_vocabulary_has_no_ids(tmp_path, target):
    zeros = {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64), "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}
    assert load_head(eagle(tmp_path / "a", eagle3_weights()), target).draft_ids is None
    assert load_head(eagle(tmp_path / "b", eagle3_weights() | zeros), target).draft_ids is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"d2t": torch.tensor(DRAFT)}, r"d2t .* from 3 to 104"),  # ids where distances belong
        ({"d2t": torch.tensor([-1] + [0] * 9)}, r"d2t .* from -1 to 9"),
        ({"d2t": torch.tensor([1] + [0] * 9), "t2d": None}, r"d2t .* 1 of them more than once"),
        ({"d2t": torch.zeros(9, dtype=torch.int64)}, r"d2t \(9,\), not \(10,\)"),
        ({"t2d": torch.ones(VOCABULARY, dtype=torch.bool)}, r"t2d .* names 96 tokens"),
        ({"t2d": torch.arange(VOCABULARY) < 10}, r"t2d .* names 10 tokens, which are not those"),
        ({"d2t": None}, r"missing \['d2t'\]"),
    ],
)
def test_tables_that_contradict_each_other_or_the_target_are_refused(tmp_path, target, tables, message):
    weights = eagle3_weights(draft=DRAFT) | tables
    folder = eagle(tmp_path, {name: held for name, held in weights.items() if held is not None}, draft_vocab_size=10)
    with pytest.raises(ValueError, match=message):
        load_head(folder, target)


def test_a_whole_vocabulary_in_another_order_is_refused(tmp_path, target):
    turned = {"d2t": torch.arange(VOCABULARY).flip(0) - torch.arange(VOCABULARY)}
    with pytest.raises(ValueError, match=r"d2t .* another order"):
        load_head(eagle(tmp_path, eagle3_weights() | turned), target)


def test_a_head_without_product_and_draft_vocabulary_uses_the_targets(tmp_path):
    target = tiny_model(num_hidden_layers=8)
    shape = {**SHAPE, "width": FEATURE}
    weights = eagle3_weights(shape)
    del weights["lm_head.weight"], weights["embed_tokens.weight"]
    head = load_head(write(tmp_path, eagle_config(shape), eagle_names(weights)), target)
    for held, theirs in ((head.lm_head, target.lm_head), (head.embed_tokens, target.get_input_embeddings())):
        assert held.weight.data_ptr() == theirs.weight.data_ptr()
        assert not held.weight.requires_grad
        assert theirs.weight.requires_grad
    assert head.shares("lm_head")
    assert head.shares("embed_tokens")
    other = load_head(tmp_path, target, dtype=torch.float32)
    assert other.dtype == torch.float32
    assert target.dtype == torch.float64
    torch.testing.assert_close(other.lm_head.weight, target.lm_head.weight.float(), rtol=0, atol=0)
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert other.rotary_emb.inv_freq.dtype == torch.float32


def test_speculators_takes_the_rows_of_the_targets_product(tmp_path, target):
    shape = {**SHAPE, "width": FEATURE}
    weights = eagle3_weights(shape, draft=DRAFT)
    del weights["lm_head.weight"]
    head = load_head(write(tmp_path, speculators_config(shape, draft_vocab_size=10), weights), target)
    torch.testing.assert_close(head.lm_head.weight, target.lm_head.weight[DRAFT], rtol=0, atol=0)


def test_weights_of_the_target_that_have_another_width_are_not_taken(tmp_path, target):
    weights = eagle3_weights()
    del weights["embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"embed_tokens: the target's has the shape \(96, 32\), the head needs"):
        load_head(eagle(tmp_path, weights), target)


def test_a_target_without_a_product_is_no_help(tmp_path, target):
    folder = write(tmp_path, eagle_config(FIRST_EAGLE), first_eagle_weights(FIRST_EAGLE))
    with pytest.raises(ValueError, match="target: LlamaModel has no vocabulary product"):
        load_head(folder, target.model)


def test_a_product_with_a_bias_is_not_taken(tmp_path):
    target = tiny_model(num_hidden_layers=8)
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    with pytest.raises(ValueError, match="lm_head: that of LlamaForCausalLM has a bias"):
        load_head(write(tmp_path, eagle_config(FIRST_EAGLE), first_eagle_weights(FIRST_EAGLE)), target)


# Names


@pytest.mark.parametrize("write_head", [eagle, speculators])
def test_missing_and_unknown_weights_are_named(tmp_path, target, unread, write_head):
    weights = eagle3_weights()
    del weights["norm.weight"], weights["layers.0.self_attn.k_proj.weight"]
    weights["layers.0.self_attn.sinks"] = torch.zeros(3)
    found = r"missing \['layers.0.self_attn.k_proj.weight', 'norm.weight'\], unknown \['layers.0.self_attn.sinks'\]"
    with pytest.raises(ValueError, match=found):
        load_head(write_head(tmp_path, weights), target)


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ({"bias": True}, {}, r"unknown \['layers.0.self_attn.k_proj.bias'"),
        ({}, {"attention_bias": True}, r"missing \['layers.0.self_attn.k_proj.bias'"),
        ({"norm_before_fc": True}, {}, r"unknown \['input_norm.weight'\]"),
        ({}, {"norm_before_fc": True}, r"missing \['input_norm.weight'\]"),
        ({"fc_norm": True}, {"fc_norm": False}, r"unknown \['fc_norm.0.weight'"),
        ({}, {"fc_norm": True}, r"missing \['fc_norm.0.weight'"),
        ({}, {"num_hidden_layers": 2}, r"missing \['layers.1"),
        ({}, {"draft_vocab_size": 10}, r"missing \['d2t'\]"),
    ],
)
def test_settings_and_weights_have_to_agree(tmp_path, target, unread, weights, changes, message):
    with pytest.raises(ValueError, match=message):
        load_head(eagle(tmp_path, eagle3_weights(**weights), **changes), target)


def test_buffers_that_every_model_computes_are_no_weights(tmp_path, target):
    weights = eagle3_weights() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}
    load_head(eagle(tmp_path, weights), target)


def test_weights_of_another_shape_are_named(tmp_path, target, unread):
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.weight \(24, 40\), not \(24, 41\)"):
        load_head(eagle(tmp_path, intermediate_size=41), target)


def test_a_name_that_two_weights_have_is_refused(tmp_path, target):
    weights = eagle_names(eagle3_weights()) | {"layers.0.mlp.up_proj.weight": torch.zeros(40, 24)}
    with pytest.raises(ValueError, match=r"'midlayer.mlp.up_proj.weight'.*both are 'layers.0.mlp.up_proj.weight'"):
        load_head(write(tmp_path, eagle_config(), weights), target)


# Targets and files


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: eagle(folder, vocab_size=95), "vocab_size: .* knows 95 tokens .* this target has 96"),
        (lambda folder: speculators(folder, target_hidden_size=64), "target_hidden_size: .* of 64, .* have 32"),
        (lambda folder: eagle(folder, target_hidden_size=64), "target_hidden_size: .* of 64, .* have 32"),
        (
            lambda folder: write(folder, eagle_config(), first_eagle_weights(SHAPE)),
            "hidden_size: .* has 24, .* this target has 32",
        ),
        (lambda folder: speculators(folder, draft_vocab_size=97), "draft_vocab_size: .* guesses 97 tokens of 96"),
        (lambda folder: speculators(folder, speculators_model_type="dflash"), "speculators_model_type 'dflash'"),
        (lambda folder: speculators(folder, layer_type="gpt_oss"), r"model_type is 'gpt_oss'.*\['llama', 'qwen3'\]"),
        (lambda folder: speculators(folder, transformer_layer_config=None), "model_type is None"),
        (lambda folder: eagle(folder, hidden_size=None), "does not say hidden_size"),
    ],
)
def test_heads_that_do_not_fit_are_refused_before_weights_are_read(tmp_path, target, unread, make, message):
    with pytest.raises(ValueError, match=message):
        load_head(make(tmp_path), target)


@pytest.mark.parametrize("change", [{"feature_layers": [1, 2, 3]}, {"norm_output": True}])
def test_the_first_eagle_has_no_settings(tmp_path, target, change):
    folder = write(tmp_path, eagle_config(FIRST_EAGLE), first_eagle_weights(FIRST_EAGLE))
    with pytest.raises(ValueError, match=f"{next(iter(change))}: .* EAGLE-1 or 2"):
        load_head(folder, target, **change)


def test_files_that_run_code_are_not_read(tmp_path, target):
    eagle(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("code was run",))

    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        load_head(tmp_path, target)


def test_folders_without_a_head_are_refused(tmp_path, target):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_head(tmp_path, target)
    eagle(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"none of .*model\.safetensors.*pytorch_model\.bin"):
        load_head(tmp_path, target)


def test_a_repository_is_fetched_without_what_a_head_does_not_need(tmp_path, target, monkeypatch):
    import huggingface_hub

    asked = {}

    def fetch(name, allow_patterns):
        asked[name] = allow_patterns
        return str(eagle(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    load_head("someone/a-head", target)
    assert set(asked) == {"someone/a-head"}
    files = ["config.json", "pytorch_model-00001-of-00002.bin", "model.safetensors.index.json", "optimizer.bin"]
    wanted = [file for file in files if any(fnmatch(file, pattern) for pattern in asked["someone/a-head"])]
    assert wanted == files[:3]


def test_a_name_that_is_neither_folder_nor_repository_is_refused(target):
    with pytest.raises(FileNotFoundError, match=r"folder 'no/such-head' is no local folder.*save_head"):
        load_head("no/such-head", target)
