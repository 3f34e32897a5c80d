"""Rollouts between optimizer steps, and drafts of another tokenizer, on a GPU: recorded once, and exact.

Run with `tests/gpu.sh` on a machine with a CUDA device; elsewhere the file is skipped.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from other_tokenizer import NOT_LACKED, TOKENIZERS, draft_for, only_shared
from tiny_calls import config_of
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model

import hf_dsde

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
CUDA = torch.device("cuda", 0)


def batch() -> dict[str, torch.Tensor]:
    return {name: part.to(CUDA) for name, part in ragged_batch(random_lengths(6)).items()}


@pytest.mark.filterwarnings("error::hf_dsde.RunnerWarning")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_rollouts_are_right_after_every_step_and_recorded_once(fused: bool, optimizer: Any) -> None:
    target = tiny_model().float().to(CUDA).train()
    draft = noisy_copy(target, 0.05)
    config = config_of(keep_memory=True, fused_layers=fused, cost_probe=False)
    hf_dsde.enable(target, assistant_model=draft, speculation_policy=hf_dsde.StaticPolicy(3), speculation_config=config)
    inputs = batch()
    call: dict[str, Any] = {**inputs, "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    steps = optimizer(target.parameters(), lr=0.01)
    texts, recorded = [], []
    for _ in range(4):
        output = target.generate(**call, return_dict_in_generate=True)
        assert torch.equal(output.sequences, target.generate(**call, speculation_policy=None))
        texts.append(output.sequences.tolist())
        recorded.append(output.speculation_statistics.recorded_passes)
        steps.zero_grad()
        target(output.sequences, labels=output.sequences % 7).loss.backward()
        steps.step()
    assert texts[0] != texts[-1]
    assert recorded[0] > 0
    assert recorded[-1] < recorded[0]


@pytest.mark.parametrize("keep", [None, True])
def test_memory_is_there_for_training_unless_it_is_to_be_kept(keep: bool | None) -> None:
    target = tiny_model().float().to(CUDA)
    draft = noisy_copy(target, 0.05)
    hf_dsde.enable(target, assistant_model=draft, speculation_config=config_of(keep_memory=keep))
    gc.collect()  # what earlier tests have left would go in between, ...
    torch._C._cuda_clearCublasWorkspaces()  # ... and so would this, when passes are recorded
    before = torch.cuda.memory_allocated(CUDA)
    target.generate(**batch(), max_new_tokens=200)
    kept = torch.cuda.memory_allocated(CUDA) - before
    target.train()
    left = torch.cuda.memory_allocated(CUDA) - before
    assert kept > 0
    assert left == kept if keep else left < kept / 4


@pytest.mark.parametrize("policy", ["static", "dsde", "goodput"])
def test_drafts_of_another_tokenizer_are_recorded_and_exact(policy: str) -> None:
    target = tiny_model().float()
    draft = draft_for(target, 0.02).to(CUDA)
    hf_dsde.enable(target.to(CUDA))
    inputs = batch()
    expected = target.generate(**inputs, max_new_tokens=32, do_sample=False)
    for call in range(2):
        output = target.generate(
            **inputs,
            max_new_tokens=32,
            do_sample=False,
            assistant_model=draft,
            speculation_policy=policy,
            return_dict_in_generate=True,
            **TOKENIZERS,
        )
        assert torch.equal(output.sequences, expected)
        assert (output.speculation_statistics.recorded_passes > 0) == (call == 0) or policy != "static"
        assert output.speculation_statistics.acceptance_rate > 0.1


def test_a_sampled_draft_that_agrees_is_always_right_on_shared_tokens() -> None:
    target = tiny_model().float()
    draft = draft_for(target).to(CUDA)
    hf_dsde.enable(target.to(CUDA))
    target.generation_config.eos_token_id = None
    output = target.generate(
        **only_shared(batch()),
        max_new_tokens=24,
        do_sample=True,
        assistant_model=draft,
        speculation_policy=hf_dsde.StaticPolicy(3),
        return_dict_in_generate=True,
        **NOT_LACKED,
        **TOKENIZERS,
    )
    assert output.speculation_statistics.acceptance_rate > 0.98
