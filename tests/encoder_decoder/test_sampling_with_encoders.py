"""Sampled text of an encoder-decoder has the target's own law: chi-squared against enumeration by plain passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_decoders import PAD, distilled, tiny_encoder_decoder
from sampled_law import pearson
from scipy import stats
from tiny_calls import config_of
from tiny_models import noisy_copy
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]

TOKENS, DEPTH, ROWS = 6, 3, 2000
RIGHT, WRONG = 1e-4, 1e-6
"""A right decoder's p-value lies above the first, a wrong one's below the second. Seeds are fixed."""
INPUTS = {"input_ids": torch.tensor([[4, 5, 3], [5, PAD, PAD]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
"""Rows of one batch follow different laws."""


def toy(family: str) -> PreTrainedModel:
    """A target of a few tokens with a lively distribution that depends on the inputs."""
    shape = {"d_kv": 4, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2} if family == "t5-gated" else {}
    model = tiny_encoder_decoder(family, vocab_size=TOKENS, d_model=8, **shape).float()
    model.lm_head.weight.data *= 4
    return hf_dsde.enable(model)


@torch.no_grad()
def exact_law(target: PreTrainedModel, row: int) -> Tensor:
    """The law of the first `DEPTH` tokens, `[TOKENS ** DEPTH]`, float64; the first token is the most significant."""
    texts = torch.full((1, 1), target.config.decoder_start_token_id)
    law = torch.ones(1, dtype=torch.float64)
    for _ in range(DEPTH):
        inputs = {name: values[row : row + 1].expand(len(texts), -1) for name, values in INPUTS.items()}
        logits = target(**inputs, decoder_input_ids=texts).logits[:, -1]
        law = (law[:, None] * logits.double().softmax(dim=-1)).flatten()
        tokens = torch.arange(TOKENS).repeat(len(texts))
        texts = torch.cat([texts.repeat_interleave(TOKENS, dim=0), tokens[:, None]], dim=1)
    return law


def p_value(target: PreTrainedModel, draft: PreTrainedModel, laws: list[Tensor], **call: Any) -> float:
    torch.manual_seed(0)
    output = target.generate(
        **{name: values.repeat(ROWS // 2, 1) for name, values in INPUTS.items()},
        assistant_model=draft,
        speculation_policy="static",
        speculation_config=config_of(view_bucket=8, max_draft_length=2, cost_probe=False),
        do_sample=True,
        top_k=0,
        max_new_tokens=5,
        return_dict_in_generate=True,
        **call,
    )
    assert 0.1 < output.speculation_statistics.acceptance_rate < 0.97
    outcomes = (output.sequences[:, 1 : DEPTH + 1] * TOKENS ** torch.arange(DEPTH - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for row, law in enumerate(laws):
        observed = outcomes[row::2].bincount(minlength=len(law)).double()
        parts = pearson(observed, law * observed.sum())
        statistic, freedom = statistic + parts[0], freedom + parts[1]
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize("family", ["t5-gated", "bart"])
def test_sampled_text_has_the_targets_law(family: str) -> None:
    target = toy(family)
    laws = [exact_law(target, row) for row in (0, 1)]
    draft = noisy_copy(target, 0.4) if family == "t5-gated" else distilled(target, 0.4)
    assert p_value(target, draft, laws) > RIGHT
    assert p_value(target, draft, laws, temperature=1.4) < WRONG
    assert p_value(target, draft, laws[::-1]) < WRONG  # of the other row's input
