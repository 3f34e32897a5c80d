"""Rows that come and go are counted as single calls of `generate` count theirs."""

from __future__ import annotations

import random

import pytest
from tiny_rounds import round_record

from hf_dsde.batch.job_statistics import JobStatistics, RowCounter
from hf_dsde.measurement.counts import settle
from hf_dsde.policies.base import PhaseTimes

TIMES = PhaseTimes(0.5, 0.25, 0.125)
ROWS = 5


def _round(numbers, active):
    """Counts of one round that a loop could report."""
    drafted = [numbers.randint(0, 4) if on else 0 for on in active]
    accepted = [numbers.randint(0, count) for count in drafted]
    emitted = [count + 1 if on else 0 for count, on in zip(accepted, active, strict=True)]
    cut = numbers.randrange(ROWS)
    emitted[cut] = min(emitted[cut], numbers.randint(1, 3))  # as when a token of the block ends the text
    return {"drafted": drafted, "accepted": accepted, "emitted": emitted, "active": active}


@pytest.mark.parametrize("seed", range(20))
def test_texts_cost_what_their_rounds_add_up_to_also_when_they_ended_some_rounds_ago(seed):
    numbers = random.Random(seed)
    job = JobStatistics()
    counter = RowCounter(ROWS, job)
    rounds = [[] for _ in range(ROWS)]
    active = [True] * ROWS
    row_rounds = 0
    for _ in range(60):
        counts = _round(numbers, list(active))
        counter.on_round(round_record(**counts, draft_steps=2, times=TIMES, recorded_passes=3))
        row_rounds += sum(active)
        for row in range(ROWS):
            if active[row]:
                own = {name: (counts[name][row],) for name in ("drafted", "accepted", "emitted", "active")}
                rounds[row].append(round_record(**own))
        for row in range(ROWS):
            if active[row] and numbers.random() < 0.15:
                length = max(sum(entry.emitted[0] for entry in rounds[row]) - numbers.choice([0, 0, 1, 3, 9]), 0)
                left = [length]
                expected = [settle(entry, 0, left) for entry in rounds[row]]
                found = counter.end(row, 7, length)
                for name in ("rounds", "drafted", "accepted"):
                    assert getattr(found, name) == sum(getattr(counts, name) for counts in expected)
                assert (found.prompt_tokens, found.new_tokens) == (7, length)
                rounds[row], active[row] = [], False
            elif not active[row] and numbers.random() < 0.5:
                counter.begin(row)
                active[row] = True
    assert (job.rounds, job.row_rounds, job.idle_row_rounds) == (60, row_rounds, 60 * ROWS - row_rounds)
    assert (job.draft_steps, job.draft_seconds, job.verify_seconds) == (120, 30.0, 15.0)
    assert job.recorded_passes == 180


def test_rounds_are_kept_only_while_a_text_of_theirs_is_under_way():
    counter = RowCounter(2, JobStatistics())
    for index in range(1000):
        counter.on_round(round_record([0, 0], [0, 0]))
        counter.end(0, 1, 1)
        counter.begin(0)
        if index % 10 == 9:
            counter.end(1, 1, 10)
            counter.begin(1)
        assert len(counter._recent) <= 11
