"""float16 end to end: text as plain `generate` writes it, but for near-ties, and tokens that overflow."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_calls import config_of
from tiny_heads import tiny_head
from tiny_models import PAD, noisy_copy, ragged_batch, tiny_model
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.divergence import Verdict, compare_outputs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
RUNS = {
    "eager": {"runner": "eager"},
    "eager, the model's attention": {"runner": "eager", "packed_attention": False},
    "recorded": {"fused_layers": False},
    "fused": {},
}


@functools.cache
def target_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    target = tiny_model(family, hidden_size=64, intermediate_size=128).to(dtype)
    target.generation_config.eos_token_id = None
    return hf_dsde.enable(target)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("run", ["eager", "fused"])
@pytest.mark.parametrize(
    ("family", "drafter", "dtype"),
    [
        ("llama", "draft", torch.bfloat16),
        ("llama", "draft", torch.float16),
        ("qwen2", "draft", torch.float16),
        ("qwen3", "head", torch.float16),
        ("mistral", "suffix", torch.float16),
    ],
    ids=str,
)
def test_text_differs_from_plain_generate_at_near_ties_only(
    family: str, drafter: str, dtype: torch.dtype, run: str
) -> None:
    target = target_of(family, dtype)
    drafters: dict[str, Any] = {
        "draft": lambda: noisy_copy(target, 0.05),
        "head": lambda: tiny_head(target),
        "suffix": hf_dsde.SuffixDrafter,
    }
    inputs = ragged_batch((3, 9, 1, 6))
    call: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": 16}
    expected = target.generate(**call)
    text = target.generate(
        **call,
        assistant_model=drafters[drafter](),
        speculation_policy="static",
        speculation_config=config_of(**RUNS[run]),
    )
    # Logits as wide as a tiny model's are noisy: passes of another shape move them by several ulps.
    comparison = compare_outputs(target, *inputs.values(), expected, text, pad_token_id=PAD, tolerance_ulps=8)
    assert all(row.verdict is not Verdict.DIFFERENT for row in comparison.rows), str(comparison)


class Only(torch.nn.Linear):
    """A vocabulary product that wants one token, whatever came before."""

    token = 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros_like(super().forward(x))
        logits.narrow(-1, self.token, 1).fill_(1.0)
        return logits


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("run", RUNS)
def test_a_rejected_token_that_overflows_does_not_reach_those_before_it(run: str) -> None:
    target, draft = (tiny_model().half() for _ in range(2))
    draft.lm_head.__class__ = Only
    target.model.embed_tokens.weight.data[Only.token] = float("inf")
    target.lm_head.weight.data[Only.token] = 0
    inputs = ragged_batch((3, 6, 1))
    inputs["input_ids"][inputs["input_ids"] == Only.token] = 7
    call: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": 10}
    expected = target.generate(**call)
    assert (expected != Only.token).all()
    output = hf_dsde.enable(target).generate(
        **call,
        assistant_model=draft,
        speculation_policy="static",
        speculation_config=config_of(**RUNS[run]),
        return_dict_in_generate=True,
    )
    assert output.speculation_statistics.drafted > 10
    assert output.speculation_statistics.accepted == 0
    assert torch.equal(output.sequences, expected)
