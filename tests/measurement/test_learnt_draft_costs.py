"""What rounds show of drafting: the part that all of them pay, and what a further step costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_draft_costs import ReferenceDraftCosts

from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts


def drafting(common: float, step: float) -> LiveCosts:
    """Costs of one row that are about to be learnt: a common part, and one of each step."""
    curve = CostCurve.line(common + step, step)
    return LiveCosts(CostModel({1: BatchCosts(curve, CostCurve((1, 9), (1.0, 1.2)))}), 1)


def draft_rounds(live: LiveCosts, lengths: list[int], common: float, step: float) -> None:
    """Rounds that draft so much, without noise."""
    for length in lengths:
        seconds = (common + step * length) * (length > 0)
        live.observe(draft_steps=length, width=length + 1, draft=seconds, verify=1 + 0.025 * length, overhead=0.0)


@given(
    timings=st.lists(st.tuples(st.integers(1, 12), st.floats(0.01, 10)), max_size=40),
    common=st.floats(0.0, 2.0),
    step=st.floats(0.01, 2.0),
)
def test_draft_steps_are_learnt_as_the_reference_does(
    timings: list[tuple[int, float]], common: float, step: float
) -> None:
    live, reference = drafting(common, step), ReferenceDraftCosts(common, step)
    for length, seconds in timings:
        live.observe(draft_steps=length, width=length + 1, draft=seconds, verify=1.0, overhead=0.0)
        reference.observe(length, seconds)
        for count in (1, 2, 5, 12):
            assert live.current.draft_seconds(count) == pytest.approx(reference.seconds(count), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("common", "step"), [(0.0, 0.05), (0.0, 0.34), (0.0, 0.6), (1.0, 0.01)])
@pytest.mark.parametrize("lengths", [[1, 2], [2, 3, 4], [1, 6, 6, 6], [1] * 30 + [6] * 30])
def test_drafts_of_several_lengths_show_both_parts(lengths: list[int], common: float, step: float) -> None:
    live = drafting(common, step)
    draft_rounds(live, (lengths * 150)[:300], 0.3, 0.04)
    assert [live.current.draft_seconds(k) for k in (1, 4, 12)] == pytest.approx([0.34, 0.46, 0.78], rel=0.05)


@pytest.mark.parametrize("length", [1, 4])
def test_drafts_of_one_length_leave_a_further_step_what_it_was_measured_to_cost(length: int) -> None:
    live = drafting(0.0, 0.04)
    noise = random.Random(0)
    for _ in range(400):
        draft_rounds(live, [length], 0.3 * noise.uniform(0.9, 1.1), 0.04)
    first, twelve = live.current.draft_seconds(1), live.current.draft_seconds(12)
    assert live.current.draft_seconds(length) == pytest.approx(0.3 + 0.04 * length, rel=0.05)
    assert (twelve - first) / 11 == pytest.approx(0.04)


def test_rounds_of_one_length_forget_what_others_have_shown_of_a_further_step() -> None:
    """Beside a small target a few steps come for nothing, and many do not: only the measured cost says so there."""
    live = drafting(0.0, 0.25)
    draft_rounds(live, [1, 3] * 100, 2.0, 0.03)
    assert live.current.draft_seconds(12) == pytest.approx(2.36, rel=0.02)
    for _ in range(100):
        live.observe(draft_steps=12, width=13, draft=3.0, verify=1.3, overhead=0.0)
    assert live.current.draft_seconds(12) == pytest.approx(3.0, rel=0.02)
    assert live.current.draft_seconds(6) < 2.3, "by the slope of before, it would be 2.8"


def test_what_a_step_was_measured_to_cost_outlives_a_call() -> None:
    live = drafting(0.0, 0.25)
    draft_rounds(live, [1, 3] * 100, 2.0, 0.03)
    model = CostModel.from_dict(live.learnt.to_dict())
    assert model == live.learnt
    later = LiveCosts(model, 1)
    draft_rounds(later, [12] * 200, 0.0, 0.25)
    assert [later.current.draft_seconds(k) for k in (4, 12)] == pytest.approx([1.0, 3.0], rel=0.1)


def test_noise_at_one_length_does_not_wear_down_the_cost_of_a_further_step() -> None:
    """Where there is no common part, timings below what was expected go to the step, those above do not."""
    live = drafting(0.0, 0.1)
    noise = random.Random(0)
    for _ in range(2000):
        draft_rounds(live, [4], 0.0, 0.1 * noise.uniform(0.9, 1.1))
    assert live.current.draft_seconds(12) == pytest.approx(1.2, rel=0.1)


def test_a_step_taken_for_too_dear_gets_cheaper_also_where_all_draft_the_same() -> None:
    live = drafting(0.0, 0.9)
    draft_rounds(live, [1] * 100, 0.0, 0.1)
    assert [live.current.draft_seconds(k) for k in (1, 5)] == pytest.approx([0.1, 0.5], rel=0.01)


def test_the_first_round_of_another_length_tells_of_a_further_step_and_not_of_the_usual_ones() -> None:
    live = drafting(0.0, 0.34)
    draft_rounds(live, [1] * 50, 0.3, 0.04)
    before, version = live.current, live.version
    draft_rounds(live, [4], 0.3, 0.04)
    usual, four = (before.draft_seconds(k) - live.current.draft_seconds(k) for k in (1, 4))
    assert four > 0.2
    assert usual < 0.03 * four
    assert live.version == version + 1


def test_policies_hear_of_a_further_step_that_has_changed_by_itself() -> None:
    live = drafting(0.3, 0.04)
    draft_rounds(live, [2] * 3, 0.3, 0.04)
    version = live.version
    draft_rounds(live, [1, 3] * 100, 0.2, 0.09)  # two steps take what they did
    assert live.version > version + 3


def test_what_rounds_have_shown_of_a_further_step_carries_over_to_fewer_rows() -> None:
    verify = CostCurve((1, 9), (1.0, 1.2))
    model = CostModel({rows: BatchCosts(CostCurve.line(0.05 * rows, 0.05 * rows), verify) for rows in (2, 4)})
    live = LiveCosts(model, 4)
    draft_rounds(live, [2, 4] * 200, 0.6, 0.1)
    live.set_rows(2)
    assert [live.current.draft_seconds(k) for k in (1, 8)] == pytest.approx([0.35, 0.7], rel=0.02)
    live.set_rows(4)
    assert [live.current.draft_seconds(k) for k in (1, 8)] == pytest.approx([0.7, 1.4], rel=0.02)
    untimed = LiveCosts(model, 4)
    untimed.set_rows(2)
    assert untimed.current == model.at(2)
