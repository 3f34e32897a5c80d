"""Whom a batch waits for, and what drafts out of texts save it: plain numbers."""

from __future__ import annotations

import random

import pytest

from hf_dsde.drafting.choice import Choice
from hf_dsde.drafting.lookup.stragglers import AHEAD, FIRST_GAIN, GAIN_RATE, Stragglers

ROWS = list(range(5))
USUAL = Choice(frozenset({0, 1}), False, saved=9.0, otherwise=2.0, usual=1.0, further=0.3)
"""Two rows take texts' drafts, in a round of 2.3 seconds instead of 2."""


def learnt(gains: list[int], rounds: int = 200) -> Stragglers:
    """Rows that always get the same."""
    found = Stragglers(len(gains))
    for _ in range(rounds):
        found.learn(gains)
    return found


def test_rows_that_are_far_ahead_are_none() -> None:
    tokens = [40, 41, 40 + AHEAD, 41 + AHEAD, 7]
    assert Stragglers(5).among([0, 1, 2, 3], tokens) == [0, 1, 2]
    assert Stragglers(5).among(ROWS, tokens) == [4]
    assert Stragglers(5).among([], tokens) == []


def test_drafts_save_what_most_stragglers_gain() -> None:
    """Of three, the one in the middle got 2 tokens a round: 3 tokens in 2.3 seconds instead of 6."""
    judged = learnt([0, 2, 5, 9, 9]).judged(USUAL, [0, 1, 2], {0: 0.0, 1: 0.0})
    assert judged.saved == pytest.approx(2 * 2.0 - 0.3, rel=1e-6)
    assert judged._replace(saved=USUAL.saved) == USUAL
    assert learnt([9] * 5).judged(USUAL, ROWS, {}).saved == USUAL.saved, "never more than by all rows"


def test_nobody_takes_drafts_that_bring_most_stragglers_nothing() -> None:
    assert learnt([9, 9, 0, 0, 0]).judged(USUAL, ROWS, {0: 8.0, 1: 8.0}) == Choice(frozenset(), True, 0.0, 2.0)
    assert learnt([9, 9, 0, 0, 0]).judged(USUAL, [0, 1, 2], {}).texts == {0, 1}


def test_what_is_expected_now_counts_where_it_is_more() -> None:
    """Also with a model's drafts for the others, of which as much is expected as without texts."""
    nothing = learnt([0] * 5)
    assert nothing.judged(USUAL, [0, 1, 2], {0: 4.0, 1: 3.0}).saved == pytest.approx(3 * 2.0 - 0.3)
    both = Choice(frozenset({0}), True, saved=9.0, otherwise=2.0, usual=2.0, further=-0.5)
    assert learnt([0] * 5).judged(both, ROWS, {0: 4.0}).saved == pytest.approx(0.5)
    alone = both._replace(model=False)
    assert learnt([0] * 5).judged(alone, ROWS, {0: 4.0}).texts == frozenset()


def test_what_nobody_tries_is_tried_again() -> None:
    """A gain of 0 has been forgotten enough after some looks that are not followed by drafts."""
    rows = learnt([0] * 5)
    refused = 0
    while not rows.judged(USUAL, ROWS, {0: 0.1}).texts:
        refused += 1
    assert 20 < refused < 60


def test_gains_are_running_means_of_rows_apart() -> None:
    """Against sums written out; a row that begins another text knows nothing."""
    rng = random.Random(0)
    rounds = [[rng.randrange(6) for _ in ROWS] for _ in range(30)]
    rows = Stragglers(5)
    for accepted in rounds:
        rows.learn(accepted)
    rows.begin([3])
    for row in ROWS:
        weights = [GAIN_RATE * (1 - GAIN_RATE) ** age for age in range(len(rounds))]
        expected = FIRST_GAIN * (1 - GAIN_RATE) ** len(rounds)
        expected += sum(weight * accepted[row] for weight, accepted in zip(weights, reversed(rounds), strict=True))
        expected = FIRST_GAIN if row == 3 else expected
        choice = USUAL._replace(otherwise=1.0, further=0.0, saved=100.0)
        assert rows.judged(choice, [row], {}).saved == pytest.approx(expected)


def test_where_no_text_has_anything_nothing_is_judged() -> None:
    nothing = Choice(frozenset(), True, 0.0, 1.0)
    assert learnt([0] * 5).judged(nothing, ROWS, {}) is nothing
