"""A cache that cannot fit is refused before it is made, with what to lower."""

from __future__ import annotations

import pytest
import torch
from stored import store_texts
from tiny_models import ragged_batch, random_lengths, tiny_model
from tiny_pair import tiny_pair

import hf_dsde
from hf_dsde.execution import memory
from hf_dsde.execution.model_runner import EagerRunner
from hf_dsde.execution.options import RuntimeOptions


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_predicted_bytes_are_those_of_the_cache_that_is_made(family: str) -> None:
    model = tiny_model(family)
    runner = EagerRunner(model, 3, 32, RuntimeOptions())
    tokens = torch.zeros(3, 5, dtype=torch.long)
    with runner.active(), torch.no_grad():
        store_texts(runner, tokens, [5, 2, 4])
    held = sum(
        states.untyped_storage().nbytes()
        for layer in runner.cache.ragged_layers
        for states in (layer.keys, layer.values)
    )
    assert memory.cache_bytes(model, 3, runner.cache.capacity + 1) == held


def test_a_cache_that_cannot_fit_is_refused_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair()
    target, draft = pair.target, pair.draft
    hf_dsde.enable(target)
    calls = []
    target.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"rows of \d+ tokens.*Lower the batch size.*max_new_tokens"):
        target.generate(
            **ragged_batch(random_lengths(4)), max_new_tokens=8, assistant_model=draft, speculation_policy="static"
        )
    assert not calls
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    target.generate(
        **ragged_batch(random_lengths(4)), max_new_tokens=8, assistant_model=draft, speculation_policy="static"
    )
    assert calls


def test_a_cpu_does_not_say_how_much_is_free() -> None:
    assert memory.free_bytes(torch.device("cpu")) is None
