"""A pair's name says its shapes and its draft, and what is made computes the small pair's functions."""

from __future__ import annotations

import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import ragged_batch
from tiny_pair import tiny_pair

from hf_dsde.bench import pairs
from hf_dsde.bench.inflate import SHAPES, Shape
from hf_dsde.bench.pairs import PAIRS, RECIPES, PairRecipe, make_pair
from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.pairs import SHIPPED_DRAFT, SHIPPED_HEAD, Pair

LARGE = Shape(hidden=48, layers=3, heads=6, kv_heads=2, head_dim=8, intermediate=80)
TOLERANCE = 1e-4
"""Norms compute in float32 whatever the model's dtype; the models differ from each other by far more."""


def logits(model):
    inputs = ragged_batch([12, 12])
    with torch.no_grad():
        return model(**inputs).logits.double()


def load_tiny_pairs(monkeypatch):
    """Let the tiny pair be loaded in place of packaged ones; the list gets their names."""
    asked = []

    def load(dtype, device, draft):
        asked.append(draft)
        return tiny_pair(dtype, device)

    monkeypatch.setattr(pairs, "load_packaged_pair", load)
    return asked


def test_names_say_shapes_and_quality():
    assert PAIRS == (
        "8B/deep-1B-strong", "8B/1B-weak", "8B/shallow-weak", "8B/deep-1B-bad",
        "32B/deep-1B-strong", "32B/1B-weak", "32B/shallow-weak", "32B/deep-1B-bad",
        "8B/eagle3", "32B/eagle3", "small", "small/eagle3",
    )  # fmt: skip
    for name, recipe in RECIPES.items():
        draft = "" if recipe.draft is None else f"{recipe.draft}-"
        assert name == f"{recipe.target}/{draft}{recipe.quality}"
        assert {recipe.target, recipe.draft} - {None} <= set(SHAPES)


@pytest.mark.parametrize("quality", ["strong", "weak", "bad"])
def test_a_pair_has_the_shapes_and_the_small_pairs_functions(quality):
    source = tiny_pair(torch.float64)
    before = {name: weight.clone() for name, weight in source.target.state_dict().items()}
    pair = make_pair(PairRecipe(LARGE, LARGE, quality), source, torch.float64, "cpu")
    assert Shape.of(pair.target) == Shape.of(pair.draft) == LARGE
    torch.testing.assert_close(logits(pair.target), logits(source.target), rtol=0, atol=TOLERANCE)
    if quality == "weak":
        torch.testing.assert_close(logits(pair.draft), logits(source.draft), rtol=0, atol=TOLERANCE)
    assert (logits(pair.draft) - logits(pair.target)).abs().max() > 100 * TOLERANCE
    assert all(torch.equal(weight, before[name]) for name, weight in source.target.state_dict().items())


def test_a_strong_draft_is_nearer_to_its_target_than_a_bad_one():
    source = tiny_pair(torch.float64)
    distance = {}
    for quality in ("strong", "bad"):
        pair = make_pair(PairRecipe(LARGE, LARGE, quality), source, torch.float64, "cpu")
        distance[quality] = float((logits(pair.draft) - logits(pair.target)).norm())
    assert 0 < distance["strong"] < distance["bad"] / 1.5


def test_the_two_models_have_noise_of_their_own():
    pair = make_pair(PairRecipe(LARGE, LARGE, "strong"), tiny_pair(torch.float64), torch.float64, "cpu")
    target, draft = (model.model.layers[2].mlp.gate_proj.weight for model in (pair.target, pair.draft))
    assert not torch.equal(target, draft)


def test_a_head_gets_the_width_of_its_target():
    source = tiny_pair(torch.float64)
    with_head = Pair(source.target, tiny_head(source.target), source.tokenizer)
    made = make_pair(PairRecipe(LARGE, None, "eagle3"), with_head, torch.float64, "cpu")
    assert isinstance(made.draft, Eagle3Head)
    assert made.draft.config.hidden_size == made.target.config.hidden_size == LARGE.hidden


def test_the_small_pairs_are_the_packaged_ones_in_the_dtype_asked_for(monkeypatch):
    asked = load_tiny_pairs(monkeypatch)
    pair = pairs.load_named_pair("small", torch.bfloat16, "cpu")
    assert pair.target.dtype == pair.draft.dtype == torch.bfloat16
    pairs.load_named_pair("small/eagle3", torch.bfloat16, "cpu")
    assert asked == [SHIPPED_DRAFT, SHIPPED_HEAD]


def test_others_are_made_from_the_packaged_one_in_float32(monkeypatch):
    load_tiny_pairs(monkeypatch)
    monkeypatch.setitem(pairs.RECIPES, "8B/1B-weak", PairRecipe(LARGE, LARGE, "weak"))
    pair = pairs.load_named_pair("8B/1B-weak", torch.bfloat16, "cpu")
    assert pair.target.dtype == torch.bfloat16
    expected = make_pair(PairRecipe(LARGE, LARGE, "weak"), tiny_pair(torch.float32), torch.bfloat16, "cpu")
    assert torch.equal(pair.target.model.norm.weight, expected.target.model.norm.weight)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"`pair` is '7B/strong'.*'8B/deep-1B-strong'.*--assistant-model"):
        pairs.load_named_pair("7B/strong", torch.float32, "cpu")
    with pytest.raises(ValueError, match="`quality` is 'good'"):
        PairRecipe("8B", "1B", "good")


def test_other_models_are_called_by_their_last_part(tmp_path):
    (tmp_path / "my-target").mkdir()
    assert pairs.name_of(str(tmp_path / "my-target"), "org/draft") == "my-target + org/draft"
