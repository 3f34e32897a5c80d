"""Jobs in which a head drafts: what the budget says of its memory, against the tensors that there are."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny_calls import endless_model
from tiny_heads import other_head, tiny_head
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.batch.admission import CacheBudget
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.execution.memory import cache_bytes
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.heads.head import DraftHead

LONGEST_DRAFT = 40
CONFIG = hf_dsde.SpeculationConfig("static", {"num_draft_tokens": 3}, max_draft_length=LONGEST_DRAFT)
PROMPTS = ["abcdef" * 33, "fedcba" * 33]
SLOTS = 256
"""What a row of such a prompt needs, in the steps that caches are made in."""


def pair_of(kind: str) -> tuple[PreTrainedModel, DraftHead]:
    target = endless_model()
    return target, tiny_head(target, draft_vocabulary=60) if kind == "eagle3" else other_head(target, kind)


class Taken:
    """Bytes of all floating-point numbers that a job has made, each time after a head has stored a part of prompts.

    Everything is there at that time: both caches, the states that are kept, and those of the prompts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._before = self._storages()
        self.bytes: list[int] = []
        original = ModelRunner._store_group

        def store_group(runner: ModelRunner, group: Any, tokens: Tensor, states: Any, hidden: list[Tensor]) -> None:
            original(runner, group, tokens, states, hidden)
            if states is not None:
                found = self._storages()
                self.bytes.append(sum(size for place, size in found.items() if place not in self._before))

        monkeypatch.setattr(ModelRunner, "_store_group", store_group)

    def _storages(self) -> dict[int, int]:
        gc.collect()
        found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
        tensors = [tensor for tensor in found if tensor.is_floating_point()]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def texts(target: PreTrainedModel, head: DraftHead, budget: int | None) -> list[list[int]]:
    generator = BatchGenerator(
        target,
        tiny_tokenizer(),
        assistant_model=head,
        speculation_policy=CONFIG,
        batch_size=2,
        max_new_tokens=8,
        cache_budget=budget,
    )
    results = list(generator.stream(PROMPTS, ordered=True))
    assert not any(result.error for result in results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_the_budget_knows_caches_kept_states_and_prompts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = pair_of(kind)
    budget = CacheBudget.of([target, head], None, LONGEST_DRAFT)
    keys_and_values = cache_bytes(target, 1, 1) + cache_bytes(head, 1, 1)
    of_prompts = budget.slot_bytes(0) - keys_and_values
    allowed = 2 * ((SLOTS + 1) * budget.slot_bytes(0) + budget.row_bytes(0))
    taken = Taken(monkeypatch)
    texts(target, head, allowed)
    (found,) = taken.bytes
    read = sum(len(prompt) - 1 for prompt in PROMPTS)
    expected = 2 * ((SLOTS + 1) * keys_and_values + budget.row_bytes(0)) + read * of_prompts
    assert abs(found - expected) <= 3 * of_prompts, "at most a token of each row and one place for what is no token"
    assert found <= allowed


def test_a_batch_is_smaller_where_states_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = pair_of("eagle3")
    allowed = 600_000
    assert allowed > 2 * (SLOTS + 1) * (cache_bytes(target, 1, 1) + cache_bytes(head, 1, 1)), "caches alone would fit"
    expected = texts(target, head, None)
    taken = Taken(monkeypatch)
    assert texts(target, head, allowed) == expected
    assert max(taken.bytes) <= allowed
    assert len(taken.bytes) == 2, "one prompt after the other"


def test_the_plan_says_what_longest_texts_take() -> None:
    target, head = pair_of("eagle3")
    generator = BatchGenerator(
        target, tiny_tokenizer(), assistant_model=head, speculation_policy=CONFIG, batch_size=2, max_new_tokens=8
    )
    plan = generator.memory_plan(PROMPTS)
    (device,) = plan.devices
    assert device.row_bytes == 2 * (LONGEST_DRAFT + 1) * 24 * torch.float64.itemsize
    assert plan.longest_cache_bytes(device) == 2 * ((SLOTS + 1) * device.slot_bytes + device.row_bytes)
