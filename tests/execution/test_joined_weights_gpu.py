"""One product in place of three in recorded passes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from torch import Tensor

import hf_dsde
from hf_dsde.execution.joined_weights import JoinedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("drafter", ["model", "head"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_call_computes_with_the_weights_of_its_time(
    family: str, drafter: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, call = [], JoinedLinear.__call__

    def noted(self: JoinedLinear, x: Tensor) -> list[Tensor]:
        called.append(len(x))
        return call(self, x)

    monkeypatch.setattr(JoinedLinear, "__call__", noted)
    target = hf_dsde.enable(tiny_model(family).float().to(CUDA))
    target.generation_config.eos_token_id = None
    draft = noisy_copy(target, 0.05) if drafter == "model" else tiny_head(target).to(CUDA)
    inputs = {name: tensor.to(CUDA) for name, tensor in ragged_batch(random_lengths(rows)).items()}
    prompts: dict[str, Any] = {**inputs, "max_new_tokens": 32, "do_sample": False}
    texts = []
    for _ in range(4):
        texts.append(target.generate(**prompts))
        for policy in ("static", "goodput"):  # of the second call on, passes are replayed
            text = target.generate(**prompts, assistant_model=draft, speculation_policy=policy)
            assert torch.equal(text, texts[-1])
        for layer in target.model.layers:
            layer.self_attn.v_proj.weight.data.mul_(-1)
    assert called
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[1])
