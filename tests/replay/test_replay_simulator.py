"""Rounds of a replay against a slow replay in plain Python, and the promises that make comparisons fair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from playing_policies import EVERYTHING, Scripted, Uneven, Witness, scripted_length
from reference_replay import SlowReplay, SlowRound
from synthetic_traces import toy_rows, toy_table

from hf_dsde.policies import Signal, StaticPolicy, available_policies, create_policy
from hf_dsde.replay import CostSetting, PolicySpec, Realization, RecordedStep, Replay, RoundLog, TraceTable, play_priced
from hf_dsde.replay.draws import SequenceQueue, Stream, per_position

SEED = 3
COSTS = CostSetting.linear(0.1)


class Both:
    """The same toy trace for the engine and for the slow replay, with the same random numbers."""

    def __init__(self, temperature: int, **arguments: Any) -> None:
        committed, drafted = toy_rows(1, temperatures=(temperature,), **arguments)
        tables = pa.Table.from_pylist(committed), pa.Table.from_pylist(drafted)
        self.table = TraceTable.from_arrow(*tables, temperature)
        self.realization = Realization(self.table, SEED, 12)
        places = [(row["task"], row["sequence"], row["position"]) for row in committed]
        coins, tails = (per_position(self.table, SEED, stream) for stream in (Stream.COINS, Stream.TAILS))
        self.slow = SlowReplay(
            committed,
            drafted,
            temperature,
            dict(zip(places, coins, strict=True)),
            dict(zip(places, tails, strict=True)),
        )

    def queue(self) -> SequenceQueue:
        return SequenceQueue(self.realization.sequence_starts(), SEED)

    def names(self) -> Iterator[tuple[str, int]]:
        """The queue as the slow replay reads it."""
        queue = self.queue()
        while True:
            index = list(self.table.starts).index(queue.take(1)[0])
            yield self.table.tasks[self.table.sequence_tasks[index]], int(self.table.sequence_names[index])

    def play(self, policy: Any, rows: int, tokens: int, **options: Any) -> RoundLog:
        replay = Replay(policy, self.realization, self.queue(), rows=rows, **options)
        replay.run(tokens)
        return replay.log()


def padded_price(drafted: list[int]) -> float:
    return 0.1 * max(drafted) + 1 + 0.025 * max(drafted)


def packed_price(drafted: list[int]) -> float:
    tokens = sum(drafted) + len(drafted)
    return 0.1 * max(drafted) + 1 + 0.025 * (tokens / len(drafted) - 1) + max(0, tokens - 9) / 9


def assert_same_rounds(log: RoundLog, rounds: list[SlowRound]) -> None:
    assert len(log.steps) == len(rounds)
    assert log.steps.tolist() == [max(r.drafted) for r in rounds]
    assert log.drafted.tolist() == [sum(r.drafted) for r in rounds]
    assert log.accepted.tolist() == [sum(r.accepted) for r in rounds]
    assert log.emitted.tolist() == [sum(r.emitted) for r in rounds]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rows", [1, 4])
class TestAgainstTheSlowReplay:
    @pytest.mark.parametrize("length", [0, 3, 12])
    def test_a_fixed_length_gives_the_same_rounds_and_times(self, temperature: int, rows: int, length: int) -> None:
        both = Both(temperature)
        log = both.play(StaticPolicy(length), rows, 500)
        rounds = both.slow.play(both.names(), rows, 500, lambda row, number: length)
        assert_same_rounds(log, rounds)
        for price, packed in ((padded_price, False), (packed_price, True)):
            setting = CostSetting.linear(0.1, ridge=9 if packed else None, packed=packed)
            expected = math.fsum(price(r.drafted) for r in rounds)
            assert log.time(setting.prices(rows, 12)) == pytest.approx(expected, rel=1e-12)

    def test_a_script_that_stops_inside_rounds_sees_the_same(self, temperature: int, rows: int) -> None:
        both, policy = Both(temperature), Scripted()
        log = both.play(policy, rows, 500, record_lengths=True)
        rounds = both.slow.play(
            both.names(), rows, 500, scripted_length, lambda row, shown: shown["entropy"] > policy.unsure
        )
        assert_same_rounds(log, rounds)
        assert log.lengths is not None
        assert log.lengths.tolist() == [r.drafted for r in rounds]
        expected_time = math.fsum(padded_price(r.drafted) for r in rounds)
        assert log.time(COSTS.prices(rows, 12)) == pytest.approx(expected_time, rel=1e-12)
        for outcome, expected in zip(policy.outcomes, rounds, strict=True):
            assert outcome.drafted.tolist() == expected.drafted
            assert outcome.accepted.tolist() == expected.accepted
            for signal in ("kld", "reverse_kld", "entropy", "confidence", "acceptance"):
                values = getattr(outcome, signal)
                assert values.shape == (rows, max(expected.drafted))
                for row, shown in enumerate(expected.shown):
                    assert values[row, : len(shown)].tolist() == pytest.approx([s[signal] for s in shown], rel=1e-6)
                    assert values[row, len(shown) :].isnan().all()
            following = torch.stack([outcome.next_entropy, outcome.next_probability], 1).tolist()
            assert following == [pytest.approx(pair, rel=1e-6) for pair in expected.following]


class TestContract:
    def test_steps_show_the_draft_and_refuse_what_a_trace_lacks(self) -> None:
        both, policy = Both(1), Scripted()
        both.play(policy, 2, 60)
        step, entropy = policy.steps[0]
        assert isinstance(step, RecordedStep)
        assert entropy.shape == (2,)
        assert step.top_probabilities.shape == (2, 2)
        assert bool((step.top_probabilities[:, 0] >= step.top_probabilities[:, 1]).all())
        assert step.to(torch.device("cpu")) is step
        for name in ("logits", "tokens"):
            with pytest.raises(RuntimeError, match=rf"DraftStep\.{name}.*not available in a replay"):
                getattr(step, name)

    def test_only_what_is_required_is_told(self) -> None:
        policy = Witness()
        policy.requires = frozenset({Signal.KLD})
        Both(0).play(policy, 2, 50)
        told = policy.outcomes[0]
        assert told.kld is not None
        for name in ("reverse_kld", "entropy", "confidence", "acceptance", "next_entropy", "timings"):
            assert getattr(told, name) is None

    def test_policies_that_ask_for_prices_get_those_of_the_setting(self) -> None:
        policy, prices = Witness(4), CostSetting.linear(0.2, ridge=4).prices(2, 12)
        policy.requires = EVERYTHING | {Signal.COSTS, Signal.TIMINGS}
        Both(0).play(policy, 2, 60, prices=prices)
        costs = policy.batch.costs
        assert costs is not None
        assert costs.rows == 2
        assert costs.current.draft_seconds(3) == pytest.approx(0.6)
        assert costs.current.verify.at(5) == pytest.approx(1 + 0.025 * 4 + (10 - 4) / 4)
        assert policy.outcomes[0].timings is None
        times = policy.outcomes[1].timings
        assert times is not None
        assert (times.draft, times.verify) == pytest.approx((0.8, 1 + 0.025 * 4 + 1.5))

    def test_policies_that_ask_for_prices_are_not_played_without(self) -> None:
        policy = Witness()
        policy.requires = frozenset({Signal.COSTS})
        with pytest.raises(ValueError, match=r"`prices` is None.*requires costs"):
            Both(0).play(policy, 2, 50)

    @pytest.mark.parametrize("name", available_policies())
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_every_registered_policy_plays(self, name: str, temperature: int) -> None:
        both = Both(temperature)
        log = both.play(create_policy(name), 3, 120, prices=COSTS.prices(3, 12))
        assert int(log.emitted.sum()) >= 120
        assert int(log.steps.max()) <= 12
        assert bool((log.emitted >= 3).all())


class TestFairness:
    def test_a_queue_hands_out_every_sequence_once_per_pass(self) -> None:
        queue = SequenceQueue([10, 20, 30, 40, 50], seed=1)
        passes = [[int(queue.take(1)[0]) for _ in range(5)] for _ in range(20)]
        assert all(sorted(order) == [10, 20, 30, 40, 50] for order in passes)
        assert len({tuple(order) for order in passes}) > 10
        again = SequenceQueue([10, 20, 30, 40, 50], seed=1)
        assert again.take(7).tolist() == (passes[0] + passes[1])[:7]

    def test_ended_rows_are_refilled_in_the_order_of_the_queue(self) -> None:
        both, policy = Both(0), Witness(2)
        replay = Replay(policy, both.realization, both.queue(), rows=3)
        expected, taken = both.queue(), []
        first = expected.take(3).tolist()
        assert replay._places.tolist() == first
        for _ in range(200):
            before = len(policy.indices)
            replay.run(1)
            if len(policy.indices) > before:
                joined = [row for row, index in enumerate(policy.indices[-1]) if index < 0]
                stayed = [index for index in policy.indices[-1] if index >= 0]
                assert stayed == [row for row in range(3) if row not in joined]
                assert replay._places[joined].tolist() == expected.take(len(joined)).tolist()
                taken += joined
        assert len(taken) > 20

    def test_random_numbers_hang_on_the_place_alone(self) -> None:
        whole = toy_table(1)
        rows = toy_rows(temperatures=(1,))
        part = TraceTable.from_arrow(*(pa.Table.from_pylist(r) for r in rows), 1, ["news"])
        numbers = per_position(whole, 5, Stream.COINS)[np.isin(whole.position_sequences, whole.sequences_of(["news"]))]
        assert np.array_equal(numbers, per_position(part, 5, Stream.COINS))
        assert not np.array_equal(numbers, per_position(part, 6, Stream.COINS))
        assert not np.array_equal(numbers, per_position(part, 5, Stream.TAILS))

    def test_the_same_seed_repeats_a_run_and_another_one_does_not(self) -> None:
        table = toy_table(1)
        speeds = [
            play_priced(PolicySpec("dsde"), Realization(table, seed, 12), seed, [COSTS], rows=2, tokens=500)[0][0]
            for seed in (0, 0, 1)
        ]
        assert speeds[0] == speeds[1] != speeds[2]

    def test_policies_that_know_no_costs_are_played_once(self) -> None:
        both = Both(0)
        settings = [CostSetting.linear(cost) for cost in (0.05, 0.1, 0.3)]
        scored = play_priced(PolicySpec("heuristic"), both.realization, SEED, settings, rows=2, tokens=200)
        assert scored[0][1] is scored[1][1] is scored[2][1]
        assert scored[0][0] > scored[1][0] > scored[2][0]


class TestFilling:
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_lifted_rows_never_accept_less_in_the_same_place(self, temperature: int) -> None:
        both = Both(temperature)
        plain, filled = Scripted(), Scripted()
        plain.unsure = filled.unsure = 1e9
        logs = [both.play(plain, 4, 4), both.play(filled, 4, 4, fill_to_batch=True)]
        assert all(a <= b for a, b in zip(*(p.outcomes[0].accepted.tolist() for p in (plain, filled)), strict=True))
        assert logs[0].steps[0] == logs[1].steps[0]

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_filling_pays_in_a_padded_batch_of_unequal_lengths(self, temperature: int) -> None:
        realization = Realization(toy_table(temperature, sequences=12), SEED, 12)
        specs = [PolicySpec("heuristic", fill_to_batch=fill) for fill in (False, True)]
        alone, lifted = (play_priced(spec, realization, SEED, [COSTS], rows=8, tokens=3000)[0][1] for spec in specs)
        assert lifted.emitted.sum() / len(lifted.steps) > alone.emitted.sum() / len(alone.steps)

    @pytest.mark.parametrize("temperature", [0, 1])
    @pytest.mark.parametrize("cost", [0.05, 0.3])
    def test_filling_never_costs_where_every_row_keeps_its_length(self, temperature: int, cost: float) -> None:
        both, speeds = Both(temperature), []
        for fill in (False, True):
            log = both.play(Uneven(), 4, 1500, fill_to_batch=fill)
            assert set(log.steps.tolist()) == {3}
            speeds.append(log.speed(CostSetting.linear(cost).prices(4, 12)))
        assert speeds[1] > speeds[0]

    def test_filling_changes_nothing_for_equal_lengths(self) -> None:
        both = Both(0)
        logs = [both.play(StaticPolicy(4), 4, 500, fill_to_batch=fill) for fill in (False, True)]
        assert np.array_equal(logs[0].emitted, logs[1].emitted)
