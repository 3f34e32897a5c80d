"""Heads that are saved load again, here and in speculators."""

import json
from functools import partial

import pytest
import torch
from head_files import FEATURE, VOCABULARY, first_eagle_weights
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import LlamaConfig, Qwen3Config

from hf_dsde import load_head, save_head
from hf_dsde.heads.eagle import EagleHead
from hf_dsde.heads.eagle3 import Eagle3Head, Eagle3Settings

DRAFT = [3, 4, 9, 20, 33, 34, 35, 60, 77, 95]
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
CONFIGS = {
    "llama": lambda **changes: LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **{**SIZES, **changes}),
    "qwen3": lambda **changes: Qwen3Config(vocab_size=VOCABULARY, num_hidden_layers=2, **{**SIZES, **changes}),
}


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_hidden_layers=8)


def new_head(config, *, draft=DRAFT, dtype=torch.float64, layers=(1, 3, 6), **settings):
    size = VOCABULARY if draft is None else len(draft)
    torch.manual_seed(0)
    head = Eagle3Head(config, Eagle3Settings(layers, FEATURE, size, **settings)).to(dtype).eval()
    if draft is not None:
        head.draft_ids.copy_(torch.tensor(draft))
    return head


def same(one, other):
    """Whether two heads have the same weights, and say the same: the last bits depend on where in memory they lie."""
    weights, others = one.state_dict(), other.state_dict()
    if weights.keys() != others.keys() or not all(torch.equal(weights[name], others[name]) for name in weights):
        return False
    generator = torch.Generator().manual_seed(5)
    features = [torch.randn(2, 7, FEATURE, generator=generator, dtype=torch.float64) for _ in one.feature_layers]
    ids = torch.randint(0, VOCABULARY, (2, 7), generator=generator)
    with torch.no_grad():
        first, second = (head(ids, head.project(features)) for head in (one, other))
    close = partial(torch.allclose, rtol=0, atol=1e-12)
    return close(first.logits, second.logits) and close(first.hidden_states, second.hidden_states)


CASES = {
    "plain": ("llama", {}, {}),
    "whole": ("llama", {}, {"draft": None, "norm_before_residual": True}),
    "rotated": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}, {}),
    "biased": ("llama", {"attention_bias": True, "max_position_embeddings": 77}, {"norm_before_fc": True}),
    "sliding": (
        "qwen3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 3,
            "use_sliding_window": True,
            "rms_norm_eps": 1e-3,
        },
        {"fc_norm": True, "norm_output": True, "layers": (2, 5)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_head_comes_back_as_it_was(tmp_path, target, name):
    kind, changes, settings = CASES[name]
    head = new_head(CONFIGS[kind](**changes), **settings)
    assert save_head(head, tmp_path / "new" / "head", target_name="a/target", dtype=torch.float64).is_dir()
    loaded = load_head(tmp_path / "new" / "head", target)
    assert loaded.settings == head.settings
    assert (loaded.draft_ids is None) == (head.draft_ids is None)
    assert head.draft_ids is None or torch.equal(loaded.draft_ids, head.draft_ids)
    assert loaded.config.max_position_embeddings == head.config.max_position_embeddings
    assert same(head, loaded)


def test_a_head_of_the_other_format_comes_back_as_it_was(tmp_path, target):
    from head_files import eagle3_weights, eagle_config, eagle_names, write

    folder = write(tmp_path / "a", eagle_config(draft_vocab_size=10), eagle_names(eagle3_weights(draft=DRAFT)))
    head = load_head(folder, target)
    assert same(head, load_head(save_head(head, tmp_path / "b", target_name="t", dtype=torch.float64), target))


TARGETS = {"lm_head.weight", "embed_tokens.weight"}


def names(folder):
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_what_the_head_has_of_its_target_can_be_left_out(tmp_path, target, draft):
    head = new_head(CONFIGS["llama"](hidden_size=FEATURE), draft=draft)
    head.share_with(target, lm_head=True)
    smaller = {"target_name": "a/target", "shared_weights": False, "dtype": torch.float64}
    whole = names(save_head(head, tmp_path, target_name="a/target"))
    assert whole - names(save_head(head, tmp_path, **smaller)) == TARGETS
    loaded = load_head(tmp_path, target)
    assert same(head, loaded)
    assert loaded.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    # Also of a head that was loaded, and cast.
    assert whole - names(save_head(loaded.float(), tmp_path, **smaller)) == TARGETS


def test_weights_that_the_target_ties_are_written_each(tmp_path):
    tied = tiny_model(num_hidden_layers=8, tie_word_embeddings=True)
    head = new_head(CONFIGS["llama"](hidden_size=FEATURE), draft=None)
    head.share_with(tied, lm_head=True)
    assert head.lm_head.weight.data_ptr() == head.embed_tokens.weight.data_ptr()
    assert names(save_head(head, tmp_path, target_name="a/target", dtype=torch.float64)) >= TARGETS
    assert same(head, load_head(tmp_path, tied))


def replaced(embedding):
    embedding.weight = torch.nn.Parameter(embedding.weight + 1, requires_grad=False)


@pytest.mark.parametrize("change", [replaced, lambda embedding: embedding.weight.requires_grad_(True)])
def test_an_embedding_that_is_the_heads_own_is_always_written(tmp_path, target, change):
    head = new_head(CONFIGS["llama"](hidden_size=FEATURE), draft=None)
    head.share_with(target, lm_head=True)
    change(head.embed_tokens)
    written = names(save_head(head, tmp_path, target_name="a/target", shared_weights=False))
    assert TARGETS & written == {"embed_tokens.weight"}


def test_weights_are_stored_in_half_precision_and_tables_as_they_are(tmp_path):
    save_head(new_head(CONFIGS["llama"]()), tmp_path, target_name="a/target")
    weights = load_file(tmp_path / "model.safetensors")
    tables = {"d2t": torch.int64, "t2d": torch.bool}
    assert {name: tensor.dtype for name, tensor in weights.items()} == dict.fromkeys(weights, torch.float16) | tables
    assert (weights["d2t"] + torch.arange(len(DRAFT))).tolist() == DRAFT
    assert weights["t2d"].nonzero().flatten().tolist() == DRAFT
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "a/target"
    assert written["dtype"] == "float16"


def test_a_weight_that_does_not_fit_is_refused(tmp_path):
    head = new_head(CONFIGS["llama"]())
    head.norm.weight.data[3] = 1e6
    with pytest.raises(ValueError, match=r"weight norm\.weight has values that torch\.float16 cannot hold"):
        save_head(head, tmp_path / "head", target_name="a/target")
    assert not (tmp_path / "head").exists()


def test_only_heads_of_eagle3_are_written(tmp_path):
    head = EagleHead(LlamaConfig(vocab_size=96, num_hidden_layers=1, **{**SIZES, "hidden_size": 32}), 8)
    assert set(head.state_dict()) - {"lm_head.weight"} == set(
        first_eagle_weights({"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 10, "inner": 40, "layers": 1})
    )
    with pytest.raises(TypeError, match="head of class EagleHead"):
        save_head(head, tmp_path, target_name="a/target")


def test_a_draft_vocabulary_has_to_be_one(tmp_path):
    head = new_head(CONFIGS["llama"](), draft=[3, 3, *DRAFT[2:]])
    with pytest.raises(ValueError, match="draft_ids: 10 tokens of which 9 are different"):
        save_head(head, tmp_path, target_name="a/target")
