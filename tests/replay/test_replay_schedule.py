"""Conditions that change on the way, and whether a policy follows them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from playing_policies import Witness
from synthetic_traces import toy_table
from torch import Tensor

from hf_dsde.policies import BatchInfo, RoundOutcome, StoppingPolicy
from hf_dsde.replay import Phase, Realization, TraceTable, play_schedule, useless_draft


class Cautious(StoppingPolicy):
    """Drafts by the batch's recent acceptance: nothing when it is poor, but for one draft in every eighth round."""

    name = "cautious"

    def __init__(self, probes: bool = True) -> None:
        self.probes = probes

    def start(self, batch: BatchInfo) -> None:
        self.rows, self.rounds, self.rate = batch.rows, 0, 0.7

    def draft_lengths(self) -> Tensor:
        length = 4 if self.rate > 0.5 else 1 if self.rate > 0.25 or (self.probes and self.rounds % 8 == 0) else 0
        return torch.full((self.rows,), length)

    def observe(self, outcome: RoundOutcome) -> None:
        self.rounds += 1
        tested = int(torch.minimum(outcome.drafted, outcome.accepted + 1).sum())
        if tested:
            self.rate += 0.3 * (int(outcome.accepted.sum()) / tested - self.rate)


@pytest.fixture(params=[0, 1])
def table(request) -> TraceTable:
    return toy_table(request.param, tasks=("code", "math", "news"), noise=0.4)


def mean_lengths(run, phase: int) -> np.ndarray:
    return run.lengths(phase).mean(1)


class TestDrift:
    def run(self, table: TraceTable, policy: StoppingPolicy):
        phases = [Phase(800), Phase(800, table=1), Phase(800)]
        return play_schedule(policy, [table, useless_draft(table)], phases, 0, rows=4)

    def test_a_policy_that_measures_falls_to_nothing_and_comes_back(self, table: TraceTable) -> None:
        run = self.run(table, Cautious())
        good, bad, again = (mean_lengths(run, phase) for phase in range(3))
        assert good.mean() > 2
        assert bool((bad[50:] <= 1).all())
        assert bad[50:].mean() < 0.3
        assert again[50:].mean() > 2

    def test_one_that_stops_measuring_does_not_come_back(self, table: TraceTable) -> None:
        run = self.run(table, Cautious(probes=False))
        assert mean_lengths(run, 1)[50:].max() == 0
        assert mean_lengths(run, 2).max() == 0

    def test_a_change_of_draft_leaves_the_texts_alone(self, table: TraceTable) -> None:
        """Whatever the draft, the same tokens are read in the same order."""
        same = play_schedule(Witness(3), [table, table], [Phase(300), Phase(300, table=1)], 0, rows=2)
        once = play_schedule(Witness(3), [table], [Phase(300), Phase(300)], 0, rows=2)
        assert np.array_equal(same.log.emitted, once.log.emitted)
        assert same.begins == once.begins

    def test_a_change_of_draft_takes_effect_at_once(self, table: TraceTable) -> None:
        phases = [Phase(300), Phase(300, table=1), Phase(300)]
        run = play_schedule(Witness(3), [table, useless_draft(table)], phases, 0, rows=4)
        accepted = run.log.accepted
        assert accepted[: run.begins[1]].sum() > 50
        assert accepted[run.begins[1] : run.begins[2]].max() == 0
        assert accepted[run.begins[2] : run.begins[2] + 2].max() > 0

    def test_different_texts_are_refused(self, table: TraceTable) -> None:
        with pytest.raises(ValueError, match="in the middle of a text"):
            play_schedule(Witness(3), [table, toy_table(0, sequences=2)], [Phase(50), Phase(50, table=1)], 0, rows=2)


class TestOrder:
    def test_tasks_follow_each_other(self, table: TraceTable) -> None:
        kinds = dict(table.columns)
        kinds["kld"] = table.sequence_tasks[table.position_sequences].astype(np.float32)
        told = replace(table, columns=kinds)
        policy = Witness(1)
        order = ("news", "code", "math")
        run = play_schedule(policy, [told], [Phase(400, (task,)) for task in order], 3, rows=2)
        for phase, task in enumerate(order):
            ends = (*run.begins[1:], len(policy.outcomes))
            # Rows finish the sequence they are at, so the second half of a phase is all of its task.
            late = policy.outcomes[(run.begins[phase] + ends[phase]) // 2 : ends[phase]]
            assert {float(outcome.kld[row, 0]) for outcome in late for row in range(2)} == {
                float(told.tasks.index(task))
            }

    def test_phases_end_with_their_tokens(self, table: TraceTable) -> None:
        run = play_schedule(Witness(2), [table], [Phase(100), Phase(200)], 1, rows=2)
        emitted = run.log.emitted.cumsum()
        assert emitted[run.begins[1] - 1] >= 100 > emitted[run.begins[1] - 2]
        assert len(run.lengths(0)) == run.begins[1]

    def test_nothing_to_play_and_unknown_tasks_are_named(self, table: TraceTable) -> None:
        with pytest.raises(ValueError, match="`phases` is empty"):
            play_schedule(Witness(2), [table], [], 0, rows=1)
        with pytest.raises(ValueError, match="`tasks` names 'poems'"):
            play_schedule(Witness(2), [table], [Phase(10, ("poems",))], 0, rows=1)


def test_a_useless_draft_is_never_right_and_looks_like_failures(table: TraceTable) -> None:
    useless = useless_draft(table)
    played = Realization(useless, 0, 6)
    assert played.run.max() == 0
    failed = ~table.columns["draft_agrees"]
    for name in ("kld", "draft_entropy", "draft_top1"):
        assert set(useless.columns[name]) <= set(table.columns[name][failed])
    assert useless.columns["kld"].mean() > table.columns["kld"].mean()
    assert np.array_equal(useless.columns["target_entropy"], table.columns["target_entropy"])
