"""Fixed lengths, fractions and the oracle: equal to what policy objects do, and no worse than any of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from synthetic_traces import toy_table
from tiny_policies import ScriptedLengths

from hf_dsde.policies import StaticPolicy, available_policies
from hf_dsde.replay import CostSetting, PolicySpec, Realization, Replay, play_priced
from hf_dsde.replay.draws import SequenceQueue
from hf_dsde.replay.references import _Oracle, fractional_budgets, fractional_log, oracle_log, static_log, walked_run

SEED, LIMIT = 5, 8


def realization(temperature: int, **arguments) -> Realization:
    return Realization(toy_table(temperature, **arguments), SEED, LIMIT)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 8])
def test_a_fixed_length_is_what_the_policy_object_plays(temperature: int, rows: int, length: int) -> None:
    played = realization(temperature)
    replay = Replay(StaticPolicy(length), played, SequenceQueue(played.sequence_starts(), SEED), rows=rows)
    replay.run(700)
    expected, log = replay.log(), static_log(played, SEED, length, rows=rows, tokens=700)
    for name in ("steps", "drafted", "accepted", "emitted"):
        assert np.array_equal(getattr(log, name), getattr(expected, name))


class TestFractions:
    @pytest.mark.parametrize("budget", [0.0, 2.0, 8.0])
    def test_a_whole_budget_is_a_fixed_length(self, budget: float) -> None:
        played = realization(1)
        log = fractional_log(played, SEED, budget, rows=4, tokens=500)
        expected = static_log(played, SEED, int(budget), rows=4, tokens=500)
        assert np.array_equal(log.emitted, expected.emitted)
        assert np.array_equal(log.drafted, expected.drafted)

    def test_the_extra_token_goes_round(self) -> None:
        played = realization(0)
        policy = ScriptedLengths((2 + np.eye(4, dtype=int)).tolist() * 99)
        replay = Replay(policy, played, SequenceQueue(played.sequence_starts(), SEED), rows=4)
        replay.run(700)
        log = fractional_log(played, SEED, 2.25, rows=4, tokens=700)
        for name in ("steps", "drafted", "accepted", "emitted"):
            assert np.array_equal(getattr(log, name), getattr(replay.log(), name))

    def test_they_are_tried_in_eighths(self) -> None:
        assert fractional_budgets(2) == [i / 8 for i in range(17)]


class TestOracle:
    @pytest.mark.parametrize("temperature", [0, 1])
    @pytest.mark.parametrize("rows", [1, 6])
    def test_no_policy_and_no_fixed_length_is_faster(self, temperature: int, rows: int) -> None:
        played, tokens = realization(temperature, noise=0.7), 100 + 50 * rows
        settings = [CostSetting.linear(0.1), CostSetting.linear(0.3), CostSetting.linear(0.05, ridge=10, packed=True)]
        speeds = {
            name: [
                speed for speed, _ in play_priced(PolicySpec(name), played, SEED, settings, rows=rows, tokens=tokens)
            ]
            for name in available_policies()
        }
        for index, setting in enumerate(settings):
            prices = setting.prices(rows, LIMIT)
            best = oracle_log(played, SEED, prices, rows=rows, tokens=tokens).speed(prices)
            for length in range(LIMIT + 1):
                assert best >= static_log(played, SEED, length, rows=rows, tokens=tokens).speed(prices)
            assert {name: best >= of_policy[index] for name, of_policy in speeds.items()} == dict.fromkeys(speeds, True)

    def test_alone_it_drafts_what_will_be_accepted_and_is_worth_it(self) -> None:
        played, prices = realization(1), CostSetting.linear(0.1, slope=0.0).prices(1, LIMIT)
        log = oracle_log(played, SEED, prices, rows=1, tokens=900)
        assert np.array_equal(log.drafted, log.accepted)
        assert int(log.accepted.sum()) > 200

    @pytest.mark.parametrize("rows", [1, 4])
    def test_it_does_not_draft_the_last_token_of_a_text(self, rows: int) -> None:
        """That one comes free with the pass, however good the draft."""
        played, prices = realization(0, noise=0.1), CostSetting.linear(0.01, slope=0.0, packed=True).prices(rows, LIMIT)
        assert bool((played.run == played.remaining).any())
        log = oracle_log(played, SEED, prices, rows=rows, tokens=900)
        assert np.array_equal(log.emitted, log.accepted + rows)
        assert np.array_equal(log.drafted, log.accepted)

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_round_is_the_best_of_all_that_there_are(self, packed: bool) -> None:
        """Every choice of three rows and up to three drafts, tried one by one."""
        played = Realization(toy_table(0), SEED, 3)
        prices = CostSetting.linear(0.12, slope=0.1, ridge=5, packed=packed).prices(3, 3)
        oracle = _Oracle(played, SEED, prices, 3, 100)
        choose = oracle._packed_lengths if packed else oracle._padded_lengths
        generator = np.random.default_rng(1)
        for _ in range(60):
            useful, worth = generator.integers(0, 5, 3), generator.uniform(0.05, 0.6, 3)

            def net(lengths, useful=useful, worth=worth) -> float:
                time = prices.rounds(np.array([max(lengths)]), np.array([sum(lengths)]))[0]
                return float(sum(w * min(k, u) for k, u, w in zip(lengths, useful, worth, strict=True)) - time)

            every = itertools.product(range(4), repeat=3) if packed else ((k, k, k) for k in range(4))
            assert net(choose(useful, worth).tolist()) == pytest.approx(max(map(net, every)))

    def test_a_task_s_token_is_worth_the_time_it_takes(self) -> None:
        played = realization(0)
        prices = CostSetting.linear(0.1).prices(2, LIMIT)
        run = walked_run(played, SEED, np.full(played.table.positions, 3), rows=2, tokens=400)
        values = _Oracle(played, SEED, prices, 2, 400).values(run, by_task=True)
        for task in (0, 1):
            spent = gained = 0.0
            for places, emitted in zip(run.places.tolist(), run.emitted.tolist(), strict=True):
                for place, tokens in zip(places, emitted, strict=True):
                    if played.task[place] == task:
                        spent += (0.3 + 1.075) / 2
                        gained += tokens
            assert values[task] == pytest.approx(spent / gained)
        assert values[0] < values[1]  # the second task's draft is the worse one
