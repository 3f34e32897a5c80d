"""What a place of a trace brings and shows: the law of acceptance, and values after a rejection that do not leak."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from playing_policies import Witness
from synthetic_traces import BLOCK, toy_table

from hf_dsde.replay import JoinedRealization, Realization, Replay, Tails, TraceTable, realization
from hf_dsde.replay.draws import SequenceQueue
from hf_dsde.replay.realization import accepted_runs, chosen_tails, continued_tails

SIGNALS = ("kld", "reverse_kld", "entropy", "confidence", "acceptance")


class TestAcceptance:
    def test_runs_end_at_rejections_and_at_the_end_of_a_sequence(self) -> None:
        accepts = np.array([1, 1, 0, 1, 1, 1, 0, 1], dtype=bool)
        ends = np.array([5, 5, 5, 5, 5, 8, 8, 8])
        assert accepted_runs(accepts, ends).tolist() == [2, 1, 0, 2, 1, 1, 0, 1]

    def test_greedy_drafts_are_accepted_where_they_agree(self) -> None:
        table = toy_table(0)
        played = Realization(table, 0, 12)
        assert np.array_equal(played.run > 0, table.columns["draft_agrees"])

    def test_sampled_drafts_are_accepted_as_often_as_the_distributions_overlap(self) -> None:
        """The committed token is the target's; over its draws and the coins, acceptance is sum min(p, q)."""
        table = toy_table(1, sequences=30, length=80, noise=0.8)
        seeds = range(4)
        accepted = np.mean([Realization(table, seed, 2).run > 0 for seed in seeds], axis=0)
        overlap = table.columns["acceptance"]
        for task in range(2):
            here = table.sequence_tasks[table.position_sequences] == task
            # Each position's deviation is bounded by 1 and their contexts are independent given the text.
            error = 4 * math.sqrt(0.25 / here.sum())
            assert accepted[here].mean() == pytest.approx(overlap[here].mean(), abs=error)
        assert overlap.mean() < 0.9

    def test_accepting_by_agreement_instead_would_be_noticed(self) -> None:
        table = toy_table(1, sequences=30, length=80, noise=0.8)
        assert abs(table.columns["draft_agrees"].mean() - table.columns["acceptance"].mean()) > 0.05


class TestWhatIsShown:
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_text_up_to_the_first_rejection(self, temperature: int) -> None:
        table = toy_table(temperature)
        played = Realization(table, 0, 12)
        columns = table.columns
        for place in range(0, table.positions, 7):
            run, left = int(played.run[place]), int(played.remaining[place])
            for depth in range(min(run + 1, left, 12)):
                at = place + depth
                sampled = "residual_draft_probability" if depth == run else "draft_probability"
                expected = {
                    "kld": columns["kld"][at],
                    "reverse_kld": columns["reverse_kld"][at],
                    "entropy": columns["draft_entropy"][at],
                    "confidence": columns[sampled if temperature else "draft_top1"][at],
                    "acceptance": columns["acceptance"][at] if temperature else float(columns["draft_agrees"][at]),
                }
                for signal, value in expected.items():
                    assert played.block(signal)[place, depth].item() == value

    def test_every_place_of_a_block_has_a_number(self) -> None:
        played = Realization(toy_table(1), 0, 30)
        for signal in (*SIGNALS, "top_probabilities"):
            assert bool(played.block(signal).isfinite().all())

    def test_all_signals_of_a_place_come_from_the_same_draft(self) -> None:
        table = toy_table(1)
        number = 100 * np.arange(len(table.tails.lengths))[:, None] + np.arange(table.tails.longest)
        numbered = {name: np.where(np.isnan(values), values, number) for name, values in table.tails.signals.items()}
        played = Realization(
            dataclasses.replace(table, tails=dataclasses.replace(table.tails, signals=numbered)), 0, 25
        )
        after = torch.arange(25) >= torch.from_numpy(np.minimum(played.run + 1, played.remaining))[:, None]
        first = played.block("kld")[after]
        for signal in SIGNALS[1:]:
            assert torch.equal(played.block(signal)[after], first)

    def test_an_unknown_signal_is_named(self) -> None:
        with pytest.raises(ValueError, match="`signal` is 'mood'"):
            Realization(toy_table(0), 0, 4).block("mood")


def marked(temperature: int) -> TraceTable:
    """A trace whose committed positions all show 1, and whose tails all show 2."""
    table = toy_table(temperature)
    columns = dict(table.columns)
    for name in ("kld", "reverse_kld", "draft_entropy", "acceptance", "draft_top1", "residual_draft_probability"):
        columns[name] = np.ones(table.positions, dtype=np.float32)
    if temperature == 0:
        columns["draft_probability"] = columns["draft_top1"]
    signals = {name: np.where(np.isnan(v), v, 2).astype(np.float32) for name, v in table.tails.signals.items()}
    return dataclasses.replace(table, columns=columns, tails=dataclasses.replace(table.tails, signals=signals))


def assert_nothing_leaks(table: TraceTable) -> int:
    """Play six drafts everywhere and look at every position after a rejection; returns how many there were."""
    policy, played = Witness(6), Realization(table, 2, 12)
    Replay(policy, played, SequenceQueue(played.sequence_starts(), 2), rows=3).run(600)
    seen = 0
    for outcome in policy.outcomes:
        tested = torch.arange(6) <= outcome.accepted[:, None]
        for signal in ("kld", "reverse_kld", "entropy"):
            values = getattr(outcome, signal)
            assert bool((values[~tested] == 2).all()), f"{signal} of the committed text after a rejection"
            # After the end of a text nothing is committed either; all other tested positions are.
            assert bool((values[tested] <= 2).all())
        seen += int((~tested).sum())
    return seen


class TestLeaks:
    """Positions after a rejection are the next round's own tokens; a replay that shows them flatters its signals."""

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_positions_after_a_rejection_come_from_real_drafts_gone_astray(self, temperature: int) -> None:
        assert assert_nothing_leaks(marked(temperature)) > 200

    @pytest.mark.parametrize("temperature", [0, 1])
    @pytest.mark.parametrize(
        "mutant",
        [
            lambda run, remaining: remaining,
            lambda run, remaining: np.minimum(run + 2, remaining),
            lambda run, remaining: np.minimum(np.maximum(run + 1, 3), remaining),
        ],
        ids=["whole text", "one further", "three always"],
    )
    def test_mutants_that_show_the_committed_text_fail(self, mutant, temperature, monkeypatch) -> None:
        monkeypatch.setattr(realization, "first_off_path", mutant)
        with pytest.raises(AssertionError, match="after a rejection"):
            assert_nothing_leaks(marked(temperature))

    def test_the_rejected_token_itself_is_still_of_the_text(self) -> None:
        played = Realization(marked(1), 0, 12)
        places = np.flatnonzero((played.run < 12) & (played.run < played.remaining))
        assert bool((played.block("kld")[places, played.run[places]] == 1).all())

    def test_drafts_after_the_end_of_a_text_are_astray(self) -> None:
        played = Realization(marked(0), 0, 12)
        last = np.flatnonzero(played.remaining == 1)
        assert bool((played.block("kld")[last, 0] == 1).all())
        assert bool((played.block("kld")[last, 1:] == 2).all())


class TestTails:
    def test_they_begin_after_the_first_rejected_token_of_a_block(self) -> None:
        table = toy_table(1, tasks=("code",), sequences=3)
        assert 1 <= table.tails.lengths.min() <= table.tails.longest == BLOCK - 1
        depth = np.arange(BLOCK - 1)
        for values in table.tails.signals.values():
            assert np.array_equal(np.isnan(values), depth >= table.tails.lengths[:, None])

    LENGTHS = np.array([7] * 80 + [4] * 50 + [4] * 20 + [7] * 40 + [1] * 5)
    TASKS = np.array([0] * 130 + [1] * 60 + [2] * 5)
    """Task 0 has enough of lengths 7 and 4, task 1 enough of at least 4 only, task 2 too few of all."""

    def pool(self, task: int, rejected: int, limit: int = 12) -> set[int]:
        """All that can be chosen."""
        draws = np.linspace(0, 1, 2000, endpoint=False)
        many = np.ones(2000, dtype=np.int64)
        chosen = chosen_tails(Tails(self.LENGTHS, self.TASKS, {}), task * many, rejected * many, limit, draws, "toy")
        return set(chosen.tolist())

    def having(self, tasks: set[int], lengths: set[int]) -> set[int]:
        return set(np.flatnonzero(np.isin(self.TASKS, list(tasks)) & np.isin(self.LENGTHS, list(lengths))).tolist())

    def test_they_come_from_blocks_of_the_task_rejected_at_the_same_offset(self) -> None:
        assert self.pool(task=0, rejected=0) == self.having({0}, {7})
        assert self.pool(task=0, rejected=3) == self.having({0}, {4})

    def test_where_these_are_few_from_blocks_of_the_task_rejected_earlier(self) -> None:
        assert self.pool(task=1, rejected=3) == self.having({1}, {4, 7})

    def test_where_these_are_few_from_all_tasks(self) -> None:
        assert self.pool(task=1, rejected=0) == self.having({0, 1}, {7})
        assert self.pool(task=2, rejected=6) == self.having({0, 1, 2}, {1, 4, 7})

    def test_after_late_rejections_they_are_as_long_as_the_draft_can_go_on(self) -> None:
        assert self.pool(task=0, rejected=7, limit=12) == self.having({0}, {4})
        assert self.pool(task=0, rejected=11, limit=12) == self.having({0}, {4, 7})
        assert self.pool(task=2, rejected=20, limit=12) == self.having({0, 1, 2}, {1, 4, 7})

    def test_short_ones_go_on_with_the_last_positions_of_others(self) -> None:
        values = np.array([[1, 2, 3], [4, np.nan, np.nan], [7, 8, 9]], dtype=np.float32)
        tails = Tails(np.array([3, 1, 3]), np.zeros(3, dtype=np.int64), {"kld": values})
        continued = continued_tails(tails, "kld", 5)
        assert continued[0, :3].tolist() == [1, 2, 3]
        assert continued[0, 3:].tolist() in ([2, 3], [8, 9])
        assert continued[1, 0] == 4
        assert continued[1, 1:4].tolist() in ([1, 2, 3], [7, 8, 9])
        assert continued[1, 4] in (3, 9)
        assert np.array_equal(continued_tails(tails, "kld", 2)[[0, 2]], values[[0, 2], :2])

    def test_a_trace_without_any_is_refused(self) -> None:
        table = toy_table(0)
        empty = Tails(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), {"kld": np.zeros((0, 0), np.float32)})
        with pytest.raises(ValueError, match="No drafted block of trace 'toy'"):
            Realization(dataclasses.replace(table, tails=empty), 0, 4).block("kld")


class TestJoining:
    def test_parts_stand_one_after_the_other(self) -> None:
        tables = [toy_table(0), toy_table(0, noise=3.0)]
        joined = JoinedRealization(tables, 4, 8)
        parts = [Realization(table, 4, 8) for table in tables]
        assert np.array_equal(joined.run, np.concatenate([part.run for part in parts]))
        assert torch.equal(joined.block("kld"), torch.cat([part.block("kld") for part in parts]))
        assert joined.starts_in(1, ["news"])[0] == tables[0].positions + parts[1].sequence_starts(["news"])[0]

    def test_a_draft_changes_only_over_the_same_texts(self) -> None:
        same = [toy_table(0), toy_table(0, noise=3.0)]
        assert JoinedRealization(same, 0, 8).shift(0, 1) == same[0].positions
        with pytest.raises(ValueError, match="their sequences differ"):
            JoinedRealization([toy_table(0), toy_table(0, sequences=3)], 0, 8).shift(0, 1)
