"""Heads in the width of an inflated target: the same guesses and states, every weight in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_inflate import EVERYTHING, SHAPES_BY_CHANGE, exact_norms, small_model  # noqa: F401 - a fixture
from transformers import LlamaConfig

from hf_dsde.bench.inflate import inflate
from hf_dsde.bench.inflate_head import inflate_head
from hf_dsde.heads.eagle3 import Eagle3Head, Eagle3Settings

SETTINGS = Eagle3Settings((0, 1, 2), 32, 20)
VARIANTS = {
    "plain": SETTINGS,
    "normed features": replace(SETTINGS, fc_norm=True),
    "normed together": replace(SETTINGS, norm_before_fc=True),
    "normed residual": replace(SETTINGS, norm_before_residual=True),
    "normed output": replace(SETTINGS, norm_output=True),
}


def small_head(settings: Eagle3Settings, **changes: object) -> tuple[Eagle3Head, torch.nn.Module]:
    """A head with no zero among its weights, and its target, which has a layer after those that it reads."""
    target = small_model(num_hidden_layers=3)
    sizes = {
        name: getattr(target.config, name) for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
    }
    counts = {name: getattr(target.config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    config = LlamaConfig(**{**sizes, **counts, "num_hidden_layers": 2, "rms_norm_eps": 0.05, **changes})
    torch.manual_seed(0)
    head = Eagle3Head(config, settings).double().eval()
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    head.share_with(target)
    head.draft_ids = torch.arange(1, 41, 2)
    return head, target


@torch.no_grad()
def guesses(head: Eagle3Head, target: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the first 32 channels of the states, of a pass over features and of one over its own states."""
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    hidden = target(tokens, output_hidden_states=True).hidden_states
    states = head.project([hidden[layer][:, :-1] for layer in head.feature_layers])
    first = head(tokens[:, 1:], states)
    second = head(tokens[:, 1:], first.hidden_states)
    return torch.stack([first.logits, second.logits]), second.hidden_states[..., :32]


@pytest.mark.parametrize("shape", SHAPES_BY_CHANGE.values(), ids=SHAPES_BY_CHANGE)
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_guesses_and_states_are_the_small_heads(shape, settings, exact_norms):  # noqa: F811
    head, target = small_head(settings)
    large_target = inflate(target, replace(shape, layers=max(shape.layers, 3)))
    large = inflate_head(head, large_target)
    logits, states = guesses(head, target)
    large_logits, large_states = guesses(large, large_target)
    torch.testing.assert_close(large_logits, logits, rtol=0, atol=1e-9 * float(logits.abs().max()))
    torch.testing.assert_close(large_states, states, rtol=0, atol=1e-9 * float(states.abs().max()))
    assert large.draft_ids.equal(head.draft_ids)
    assert large.shares("embed_tokens")


def test_weights_that_may_be_noise_are_noise():
    head, target = small_head(SETTINGS)
    large = inflate_head(head, inflate(target, replace(EVERYTHING, layers=4)))
    for name in ("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "layers.0.mlp.gate_proj", "lm_head"):
        assert large.get_submodule(name).weight.all(), name
    assert large.fc.weight[:32].all()


def test_what_cannot_be_carried_over_is_refused():
    head, target = small_head(SETTINGS, attention_bias=True)
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        inflate_head(head, inflate(target, replace(EVERYTHING, layers=4)))
    with pytest.raises(ValueError, match="intermediate"):
        inflate_head(small_head(SETTINGS, intermediate_size=128)[0], inflate(target, replace(EVERYTHING, layers=4)))
