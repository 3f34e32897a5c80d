"""Transformers' +2 / -1 rule, per row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_calls import outcome, starter

from hf_dsde.policies import HeuristicPolicy

started = starter(HeuristicPolicy)


def test_never_below_one() -> None:
    policy = started(initial_length=2)
    for _ in range(2):
        policy.observe(outcome([1], [0]))
    assert policy.draft_lengths().tolist() == [1]


def test_growth_stops_at_the_loops_limit_and_turns_at_once() -> None:
    policy = started(1, max_draft_length=6)
    for _ in range(5):
        policy.observe(outcome([6], [6]))
    assert policy.draft_lengths().tolist() == [6]
    policy.observe(outcome([6], [5]))
    assert policy.draft_lengths().tolist() == [5]


def test_tokens_beyond_the_rows_own_length_are_not_held_against_it() -> None:
    policy = started(2)
    policy.observe(outcome([9, 9], [5, 4]))
    assert policy.draft_lengths().tolist() == [7, 4]


def test_rows_that_drafted_nothing_or_have_finished_stay() -> None:
    policy = started(3)
    policy.observe(outcome([0, 5, 5], [0, 5, 5], [True, False, True]))
    assert policy.draft_lengths().tolist() == [5, 5, 7]


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), max_size=40))
def test_follows_transformers_rule(rounds: list[tuple[int, float]]) -> None:
    """`num_assistant_tokens` of `AssistedCandidateGenerator.update_candidate_strategy`, stated again."""
    policy, num_assistant_tokens = started(1, max_draft_length=100), 5
    for cut, share in rounds:
        candidates = max(num_assistant_tokens - cut, 0)
        matches = round(share * candidates)
        policy.observe(outcome([candidates], [matches]))
        if candidates:
            num_assistant_tokens = (
                num_assistant_tokens + 2 if matches == candidates else max(1, num_assistant_tokens - 1)
            )
        assert policy.draft_lengths().tolist() == [num_assistant_tokens]


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.0, TypeError)])
def test_bad_length_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"`initial_length` is {value!r}, but an integer of at least 1 is needed"):
        HeuristicPolicy(initial_length=value)
