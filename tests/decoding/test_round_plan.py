"""Rounds follow each other by plans alone: no model is needed to say what the next round does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.decoding.plan import RoundKind, RoundPlan, next_plan


def after(
    previous: RoundPlan | None, wanted: list[int], *, going_on: list[bool] | None = None, **flags: bool
) -> RoundPlan:
    rows = [True] * len(wanted) if going_on is None else going_on
    host = torch.device("cpu")
    return next_plan(previous, wanted, rows, host, **{"probes": False, "plain_begun": False, **flags})


def test_a_walk_through_all_kinds_of_rounds() -> None:
    first = after(None, [2, 0])
    assert (first.kind, first.index, first.width, first.resumes) == (RoundKind.DRAFT, 0, 2, False)
    assert not first.foretells_plain(1)

    plain = after(first, [0, 0])
    assert (plain.kind, plain.index, plain.drafts) == (RoundKind.PLAIN, 1, False)
    assert plain.foretells_plain(1)
    assert not plain.foretells_plain(2)

    probe = after(plain, [3, 1], probes=True)
    assert (probe.kind, probe.lengths.tolist(), probe.deferred) == (RoundKind.PROBE, [0, 0], None)
    assert probe.foretells_plain(2)

    overtaken = after(probe, [3, 1], plain_begun=True)
    assert (overtaken.kind, overtaken.length_counts) == (RoundKind.OVERTAKEN, [0, 0])
    assert overtaken.deferred == [3, 1]
    assert not overtaken.foretells_plain(1), "what waits is drafted next"

    drafts = after(overtaken, [*overtaken.deferred])
    assert (drafts.kind, drafts.index, drafts.length_counts) == (RoundKind.DRAFT, 4, [3, 1])
    assert drafts.resumes, "three rounds went by without the draft"
    assert not after(drafts, [1, 1]).resumes


def test_a_plain_step_that_has_begun_defers_no_wish_for_another() -> None:
    plan = after(after(None, [0, 0]), [0, 0], plain_begun=True)
    assert (plan.kind, plan.deferred) == (RoundKind.PLAIN, None)


def test_a_hurried_round_foretells_a_plain_step_unless_drafts_wait() -> None:
    drafts = after(None, [2, 0], hurried=True)
    assert drafts.foretells_plain(2)
    overtaken = after(drafts, [1, 1], plain_begun=True, hurried=True)
    assert overtaken.overtaken
    assert not overtaken.foretells_plain(1)


def test_rows_that_have_ended_draft_nothing_and_are_in_no_pass() -> None:
    plan = after(None, [2, 4, 0], going_on=[True, False, True])
    assert plan.lengths.tolist() == list(plan.length_counts) == [2, 0, 0]
    assert plan.active.tolist() == list(plan.active_rows) == [True, False, True]
    assert plan.pass_counts(plan.length_counts) == [3, 0, 1]
    assert plan.width == 2


@pytest.mark.parametrize("flags", [{}, {"probes": True}, {"plain_begun": True}])
def test_a_batch_that_has_ended_drafts_nothing(flags: dict[str, bool]) -> None:
    plan = after(None, [0, 0], going_on=[False, False], **flags)
    assert not plan.drafts
    assert not any(plan.active_rows)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=3, max_size=3), st.booleans(), st.booleans()), min_size=1)
)
def test_device_and_host_agree_in_any_order_of_rounds(rounds: list[tuple[list[int], bool, bool]]) -> None:
    plan: RoundPlan | None = None
    streak = 0
    for index, (wanted, probes, begun) in enumerate(rounds):
        plan = after(plan, wanted, probes=probes, plain_begun=begun)
        assert plan.index == index
        assert plan.lengths.tolist() == list(plan.length_counts)
        assert plan.plain_streak == streak
        assert (plan.kind is RoundKind.DRAFT) == plan.drafts
        assert (plan.kind is RoundKind.OVERTAKEN) == (plan.deferred is not None)
        assert plan.drafts == (any(wanted) and not probes and not begun)
        streak = 0 if plan.drafts else streak + 1
