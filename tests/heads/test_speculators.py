"""Heads that the package speculators writes, with what its own forward pass gives, and heads written for it.

The folders in data were written by `python tests/heads/speculators_heads.py tests/heads/data`, with speculators 0.9.0
(eager attention), transformers 5.17.0 and torch 2.13.0 on a CPU in float32. Where speculators can be imported, it is
asked again.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators_heads import CASES, LAYERS, VOCABULARY, WIDTH, inputs, make_eager, their_head, their_pass
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_dsde import load_head, save_head

DATA = Path(__file__).parent / "data"
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def target():
    return tiny_model(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS).float()


@pytest.fixture
def speculators():
    return pytest.importorskip("speculators.models.eagle3", exc_type=ImportError)


@torch.no_grad()
def check(head, features, ids, logits, states):
    """Compare a head with both steps of speculators' forward pass.

    Its second step continues every pair by the next token of the text, where ours continues one: the fifth. Layers that
    slide see one pair more there than at the next position of a text.
    """
    given = head.project(list(features[:, None]))
    output = head(ids[None], given)
    torch.testing.assert_close(output.logits, logits[:1], **CLOSE)
    torch.testing.assert_close(output.hidden_states[0], states, **CLOSE)
    cache = DynamicCache()
    first = head(ids[None, :5], given[:, :5], past_key_values=cache)
    masks = {"full_attention": torch.ones(1, 1, 1, 6, dtype=torch.bool)}
    if head.config.sliding_window is not None:
        masks["sliding_attention"] = (torch.arange(6) >= 5 - head.config.sliding_window)[None, None, None]
    second = head(ids[None, 5:6], first.hidden_states[:, -1:], attention_mask=masks, past_key_values=cache)
    torch.testing.assert_close(second.logits[0, 0], logits[1, 4], **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_heads_in_files_of_speculators_give_what_speculators_gave(target, name):
    example = load_file(DATA / name / "example.safetensors")
    head = load_head(DATA / name, target)
    assert head.feature_layers == tuple(CASES[name].get("eagle_aux_hidden_state_layer_ids", (2, 4, 5)))
    check(head, example["features"], example["ids"], example["logits"], example["states"])


@pytest.mark.parametrize("name", CASES)
def test_heads_of_speculators_give_what_speculators_gives(target, name, tmp_path, speculators):
    theirs = their_head(**CASES[name])
    theirs.save_pretrained(tmp_path)
    features, ids = inputs(len(CASES[name].get("eagle_aux_hidden_state_layer_ids", range(3))))
    check(load_head(tmp_path, target), features, ids, *their_pass(theirs, features, ids))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", [False, True])
def test_speculators_gives_the_same_for_heads_that_are_written_here(target, name, shared, tmp_path, speculators):
    from speculators import SpeculatorModel

    target.save_pretrained(tmp_path / "target")
    head = load_head(DATA / name, target)
    if shared:
        head.share_with(target, lm_head=True)
    save_head(head, tmp_path / "head", target_name=str(tmp_path / "target"), dtype=torch.float32)
    theirs = SpeculatorModel.from_pretrained(str(tmp_path / "head")).eval()
    make_eager(theirs)
    assert theirs.config.eagle_aux_hidden_state_layer_ids == list(head.feature_layers)
    features, ids = inputs(len(head.feature_layers))
    check(head, features, ids, *their_pass(theirs, features, ids))
