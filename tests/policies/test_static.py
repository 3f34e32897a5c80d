"""The fixed draft length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policy_calls import starter

from hf_dsde.policies import RoundOutcome, StaticPolicy

started = starter(StaticPolicy)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_every_row_drafts_the_same(length: int) -> None:
    assert started(3, num_draft_tokens=length).draft_lengths().tolist() == [length] * 3


def test_default_is_five() -> None:
    assert started(1).draft_lengths().tolist() == [5]


def test_the_loops_limit_holds() -> None:
    assert started(2, max_draft_length=4, num_draft_tokens=9).draft_lengths().tolist() == [4, 4]


def test_outcomes_change_nothing() -> None:
    policy = started(2)
    policy.observe(RoundOutcome(torch.tensor([5, 5]), torch.tensor([0, 5]), torch.tensor([True, True])))
    assert policy.draft_lengths().tolist() == [5, 5]


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)])
def test_bad_length_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"`num_draft_tokens` is {value!r}, but an integer of at least 0 is needed"):
        StaticPolicy(num_draft_tokens=value)
