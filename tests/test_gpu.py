"""What only a GPU can show: equality on its kernels, models on different devices, bfloat16 near-ties.

Run with `pytest -m gpu` on a machine with a CUDA device; elsewhere the file is skipped.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import AGREEMENT, FAMILIES, PAD, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths

import hf_dsde
from hf_dsde.divergence import Verdict, compare_outputs

pytestmark = [
    pytest.mark.gpu,
    # Tiny models lose time by speculation; that is no finding here.
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda", 0)


def batch_on(device: torch.device, rows: int = 6) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in ragged_batch(random_lengths(rows)).items()}


@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_plain_generate_in_float32(family: str, agreement: str) -> None:
    target = tiny_model(family).float().to(CUDA)
    draft = noisy_copy(target.cpu(), AGREEMENT[agreement]).to(CUDA)
    target.to(CUDA)
    inputs = batch_on(CUDA)
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    hf_dsde.enable(target)
    text = target.generate(
        **inputs, max_new_tokens=48, do_sample=False, assistant_model=draft, speculation_policy=RandomLengths()
    )
    assert torch.equal(text, plain)


@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_every_policy_keeps_its_state_on_the_device(policy: str) -> None:
    target = tiny_model().float().to(CUDA)
    draft = noisy_copy(tiny_model().float(), 0.05).to(CUDA)
    inputs = batch_on(CUDA)
    plain = target.generate(**inputs, max_new_tokens=80, do_sample=False)
    hf_dsde.enable(target)
    text = target.generate(
        **inputs, max_new_tokens=80, do_sample=False, assistant_model=draft, speculation_policy=policy
    )
    assert torch.equal(text, plain)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("target_device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_draft_and_target_may_live_on_different_devices(target_device: str, draft_device: str, do_sample: bool) -> None:
    target = tiny_model().float().to(target_device)
    draft = noisy_copy(tiny_model().float(), 0.05).to(draft_device)
    inputs = batch_on(target.device)
    options = {"max_new_tokens": 40, "repetition_penalty": 1.2, "min_new_tokens": 5, "do_sample": do_sample}
    if do_sample:
        options |= {"temperature": 0.7, "top_p": 0.9}
    plain = target.generate(**inputs, **options)
    hf_dsde.enable(target)
    for policy in hf_dsde.available_policies():
        text = target.generate(**inputs, **options, assistant_model=draft, speculation_policy=policy)
        assert text.device == target.device
        if not do_sample:
            assert torch.equal(text, plain)


def test_bfloat16_differs_from_plain_generate_at_near_ties_only() -> None:
    target = tiny_model(hidden_size=128, intermediate_size=256, num_hidden_layers=4).to(CUDA, torch.bfloat16)
    draft = noisy_copy(target.cpu(), 0.05).to(CUDA)
    target.to(CUDA)
    inputs = batch_on(CUDA, rows=16)
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False)
    hf_dsde.enable(target)
    text = target.generate(
        **inputs, max_new_tokens=64, do_sample=False, assistant_model=draft, speculation_policy="dsde"
    )
    comparison = compare_outputs(target, inputs["input_ids"], inputs["attention_mask"], plain, text, pad_token_id=PAD)
    assert all(row.verdict is not Verdict.DIFFERENT for row in comparison.rows), str(comparison)
