"""Prompt lookup for a batch proposes what transformers' generator proposes for each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters import EIGHT, cycling_model
from tiny_calls import QUIET, assert_same_text, plain, speculative
from tiny_models import ragged_batch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_dsde
from hf_dsde.drafting.lookup.prompt_lookup import FirstNgrams

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(0, 4), max_size=2),
)
def test_the_proposals_are_those_of_transformers(
    parts: list[list[int]], size: int, most: int, end_tokens: list[int]
) -> None:
    drafter = hf_dsde.PromptLookupDrafter(size, end_tokens=end_tokens)
    ends = torch.tensor(end_tokens) if end_tokens else None
    generator = PromptLookupCandidateGenerator(ends, most, size, max_length=1000)
    text, grown = drafter.new_text(), list[int]()
    for part in parts:
        text.extend(part)
        grown += part
        theirs, _ = generator.get_candidates(torch.tensor([grown]))
        assert list(drafter.continuation(text, most).tokens) == theirs[0, len(grown) :].tolist()


def first_of_all(self: FirstNgrams) -> tuple[int, int]:
    """A mutant that prefers the shortest n-gram."""
    for size in range(1, self._longest + 1):
        end = self._ends.get(tuple(self.tokens[-size:]))
        if end is not None:
            return size, end
    return 0, 0


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstNgrams, "find", first_of_all)
    with pytest.raises(AssertionError):
        test_the_proposals_are_those_of_transformers()


def rounds(output: hf_dsde.SpeculativeGenerateOutput) -> list[tuple[int, int]]:
    return [(each.drafted, each.accepted) for each in output.speculation_statistics.rounds]


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_call_that_asks_for_it_drafts_and_writes_as_before(size: int | None) -> None:
    target, inputs = cycling_model(), ragged_batch(EIGHT)
    call: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": 40}
    by_name = target.generate(
        **inputs,
        **call,
        do_sample=False,
        prompt_lookup_num_tokens=4,
        max_matching_ngram_size=size,
        speculation_policy=hf_dsde.StaticPolicy(4),
        speculation_config=QUIET.replace(cost_cap=False),  # else rows that bring nothing are looked up less often
        return_dict_in_generate=True,
    )
    generator = PromptLookupCandidateGenerator(torch.tensor([40]), max_matching_ngram_size=size or 2, max_length=1000)
    by_object = speculative(target, generator, inputs, hf_dsde.StaticPolicy(4), **call)
    assert_same_text(by_name, plain(target, inputs, **call))
    assert rounds(by_name) == rounds(by_object)
    assert by_name.speculation_statistics.acceptance_rate > 0.5


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_an_impossible_size_is_refused(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_matching_ngram_size"):
        hf_dsde.PromptLookupDrafter(size)
