"""TapOut against a row-by-row reference in plain Python, its arms one by one, its two scopes, and mutants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference_tapout as reference
import torch
from policy_calls import check_refused, outcome, start, starter

from hf_dsde.policies import DraftStep, RoundOutcome, TapOutPolicy, bandits, tapout
from hf_dsde.policies.bandits import ArmStatistics

VOCABULARY = 12
started = starter(TapOutPolicy)


def step(logits: torch.Tensor, position: int = 0, drafting: torch.Tensor | None = None) -> DraftStep:
    alive = torch.ones(len(logits), dtype=torch.bool) if drafting is None else drafting
    return DraftStep(position, logits.argmax(-1), logits, logits, alive)


def of_probabilities(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def session(
    policy: TapOutPolicy, expected: reference.ReferenceTapOut, alive: list[bool], generator: torch.Generator
) -> tuple[list[int], str | None]:
    """Draft until every row has stopped: how many tokens each drafted, and the first disagreement about a stop."""
    asked = policy.draft_lengths()
    # Some rows draft nothing, and some are cut short as if their text had to end soon.
    limit = asked - 3 * (torch.rand(len(asked), generator=generator) < 0.2) * (asked > 3)
    limit = limit * torch.tensor(alive) * (torch.rand(len(asked), generator=generator) < 0.9)
    drafting, drafted, position = limit > 0, torch.zeros_like(limit), 0
    while drafting.any():
        # From nearly flat to nearly certain, so that every arm both stops and goes on.
        logits = torch.randn(len(asked), VOCABULARY, generator=generator)
        logits = logits * 6 * torch.rand(len(asked), 1, generator=generator)
        stops = policy.should_stop(step(logits, position, drafting))
        for row in range(len(asked)):
            if drafting[row] and expected.stops(row, logits[row].tolist()) != bool(stops[row]):
                return [], f"row {row}, position {position}, arm {expected.rows[row].arm}: {bool(stops[row])}"
        drafted += drafting
        drafting = drafting & (limit > position + 1) & ~stops
        position += 1
    return drafted.tolist(), None


def disagreement(
    policy: TapOutPolicy, constants: reference.Constants, rounds: int = 50, rows: int = 5, seed: int = 0
) -> str | None:
    """The first difference between policy and reference over random sessions, None when there is none."""
    generator = torch.Generator().manual_seed(seed)
    start(policy, rows, constants.longest)
    expected = reference.ReferenceTapOut([reference.Row() for _ in range(rows)], constants)
    alive, undecided = [True] * rows, 0
    for number in range(rounds):
        arms = policy.chosen.tolist()
        for row, arm in enumerate(arms):
            candidates = expected.candidates(row, tolerance=2e-5)
            if arm not in candidates:
                return f"round {number}: row {row} plays {arm} instead of {candidates}"
            undecided += alive[row] and len(candidates) > 1
        expected.start_session(arms)
        drafted, difference = session(policy, expected, alive, generator)
        if difference is not None:
            return f"round {number}: {difference}"
        chance = torch.rand(rows, generator=generator)
        accepted = [round(float(c) * k) for c, k in zip(chance, drafted, strict=True)]
        policy.observe(outcome(drafted, accepted, alive))
        expected.observe(drafted, accepted, alive)
        thresholds = [row.threshold for row in expected.rows]
        if policy._adaedl.thresholds.tolist() != pytest.approx(thresholds, rel=1e-5):
            return f"round {number}: lambda {policy._adaedl.thresholds.tolist()} instead of {thresholds}"
        if torch.rand(1, generator=generator) < 0.03 and sum(alive) > 2:
            alive[alive.index(True)] = False
    assert undecided <= rounds * rows // 10, "the comparison must not be vacuous"
    return None


CASES: dict[str, tuple[dict[str, Any], reference.Constants]] = {
    "ucb1": ({}, reference.Constants()),
    "ucb_tuned": ({"bandit": "ucb_tuned"}, reference.Constants(bandit="ucb_tuned")),
    "thompson": ({"bandit": "thompson", "seed": 3}, reference.Constants(bandit="thompson", seed=3)),
    "ucb1-row": ({"scope": "row"}, reference.Constants(scope="row")),
    "ucb_tuned-row": ({"scope": "row", "bandit": "ucb_tuned"}, reference.Constants(scope="row", bandit="ucb_tuned")),
    "thompson-row": ({"scope": "row", "bandit": "thompson"}, reference.Constants(scope="row", bandit="thompson")),
    "other-blend": (
        {"blend": 0.8, "num_draft_tokens": 7, "arms": ["svip_difference", "adaedl", "logit_margin"]},
        reference.Constants(blend=0.8, longest=7, arms=("svip_difference", "adaedl", "logit_margin")),
    ),
    "adaedl-only": ({"arms": ["adaedl"]}, reference.Constants(arms=("adaedl",))),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_follows_the_reference_over_random_sessions(case: str, seed: int) -> None:
    arguments, constants = CASES[case]
    assert disagreement(TapOutPolicy(**arguments), constants, seed=seed) is None


class RewardIsTheRate(TapOutPolicy):
    def _reward(self, outcome: RoundOutcome) -> torch.Tensor:
        return outcome.accepted / outcome.drafted.clamp_min(1)


class RewardIsTheLength(TapOutPolicy):
    def _reward(self, outcome: RoundOutcome) -> torch.Tensor:
        return outcome.accepted / self._length


class RewardCountsTheBonus(TapOutPolicy):
    def _reward(self, outcome: RoundOutcome) -> torch.Tensor:
        return super()._reward(replace(outcome, accepted=outcome.accepted + 1))


class MarginTurnedRound(TapOutPolicy):
    def arm_stops(self, step: DraftStep) -> torch.Tensor:
        stops = super().arm_stops(step)
        stops[:, 4] = ~stops[:, 4]
        return stops


class EntropyInsteadOfItsRoot(TapOutPolicy):
    def arm_stops(self, step: DraftStep) -> torch.Tensor:
        stops = super().arm_stops(step)
        stops[:, 1] = step.entropy > self.entropy_threshold
        return stops


class DifferenceAcrossSessions(TapOutPolicy):
    def arm_stops(self, step: DraftStep) -> torch.Tensor:
        step.position = max(step.position, 1)
        return super().arm_stops(step)


class DifferenceToTheFirstToken(TapOutPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        before = self._rows
        stops = super().should_stop(step)
        if step.position > 0:
            self._state = before
        return stops


class EveryRoundTeachesAdaEDL(TapOutPolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(outcome)
        self._adaedl.observe(outcome)


class ChosenOnlyOnce(TapOutPolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        arm = self._arm
        super().observe(outcome)
        self._arm = arm


class RowsShareNothing(TapOutPolicy):
    def __init__(self) -> None:
        super().__init__(scope="row")


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (RewardIsTheRate, "ucb1"),
        (RewardIsTheLength, "ucb1"),
        (RewardCountsTheBonus, "ucb1"),
        (RewardCountsTheBonus, "thompson"),
        (MarginTurnedRound, "ucb1"),
        (EntropyInsteadOfItsRoot, "ucb1"),
        (DifferenceAcrossSessions, "ucb1"),
        (DifferenceToTheFirstToken, "ucb1"),
        (EveryRoundTeachesAdaEDL, "ucb1"),
        (ChosenOnlyOnce, "ucb1"),
        (RowsShareNothing, "ucb1"),
    ],
)
def test_the_reference_catches_mutants(mutant: Callable[..., TapOutPolicy], case: str) -> None:
    arguments, constants = CASES[case]
    assert any(disagreement(mutant(**arguments), constants, seed=seed) for seed in range(3))


def greedy(statistics: ArmStatistics, _seed: int) -> torch.Tensor:
    return torch.where(statistics.plays > 0, statistics.mean, torch.inf)


def ucb1_of_half_the_logarithm(statistics: ArmStatistics, _seed: int) -> torch.Tensor:
    return torch.where(statistics.plays > 0, statistics.mean + bandits._log_time_per_play(statistics).sqrt(), torch.inf)


def ucb_tuned_without_its_bound(statistics: ArmStatistics, _seed: int) -> torch.Tensor:
    spread = (bandits._log_time_per_play(statistics) * statistics.variance).sqrt()
    return torch.where(statistics.plays > 0, statistics.mean + spread, torch.inf)


def thompson_without_prior(statistics: ArmStatistics, seed: int) -> torch.Tensor:
    draws = bandits.standard_normal(statistics.plays.sum(-1), statistics.plays.shape[-1], seed)
    return statistics.mean + draws * (bandits.LARGEST_VARIANCE / statistics.plays.clamp_min(1)).sqrt()


@pytest.mark.parametrize(
    ("bandit", "mutant"),
    [
        ("ucb1", greedy),
        ("ucb1", ucb1_of_half_the_logarithm),
        ("ucb1", lambda statistics, _: bandits.ucb_tuned_index(statistics)),
        ("ucb_tuned", lambda statistics, _: bandits.ucb1_index(statistics)),
        ("ucb_tuned", ucb_tuned_without_its_bound),
        ("thompson", thompson_without_prior),
        ("thompson", lambda statistics, seed: bandits.thompson_index(statistics, seed + 1)),
    ],
)
def test_the_reference_catches_other_bandits(
    bandit: str, mutant: Callable[[ArmStatistics, int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tapout.BANDITS, bandit, mutant)
    arguments, constants = CASES[bandit]
    assert any(disagreement(TapOutPolicy(**arguments), constants, seed=seed) for seed in range(3))


class TestArms:
    """Worked numbers. H(0.9, 0.1) = 0.3251, root 0.5702; H(0.85, 0.15) = 0.4227, root 0.6502; H(1/2, 1/2) = 0.6931."""

    def stops(self, *rows: list[float], position: int = 0, policy: TapOutPolicy | None = None) -> dict[str, list[bool]]:
        policy = started(len(rows)) if policy is None else policy
        stops = policy.arm_stops(step(of_probabilities(*rows), position))
        return {arm: stops[:, index].tolist() for index, arm in enumerate(policy.arms)}

    def test_max_confidence_stops_below_four_fifths(self) -> None:
        assert self.stops([0.79, 0.21], [0.81, 0.19], [0.19, 0.81])["max_confidence"] == [True, False, False]

    def test_svip_stops_above_a_root_of_0_6(self) -> None:
        assert self.stops([0.9, 0.1], [0.85, 0.15])["svip"] == [False, True]

    def test_adaedl_stops_where_its_bound_falls_below_lambda(self) -> None:
        # 1 - sqrt(0.2 H) is 0.5 at H = 1.25 nats: four even chances have 1.386, three have 1.099.
        assert self.stops([0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0])["adaedl"] == [True, False]

    def test_svip_difference_stops_where_the_entropy_rises(self) -> None:
        policy = started(3)
        first = of_probabilities([0.9, 0.1], [0.85, 0.15], [0.5, 0.5])
        assert policy.arm_stops(step(first))[:, 3].tolist() == [False] * 3
        policy.should_stop(step(first))
        # The root of ln 2 is 0.8326: 0.2624 above the first row's, 0.1823 above the second's.
        second = self.stops([0.5, 0.5], [0.5, 0.5], [0.9, 0.1], position=1, policy=policy)
        assert second["svip_difference"] == [True, False, False]

    def test_svip_difference_forgets_the_session_before(self) -> None:
        policy = started()
        policy.should_stop(step(of_probabilities([0.99, 0.01])))
        assert self.stops([0.5, 0.5], position=0, policy=policy)["svip_difference"] == [False]
        assert self.stops([0.5, 0.5], position=1, policy=policy)["svip_difference"] == [True]

    def test_logit_margin_stops_where_two_tokens_are_nearly_as_likely(self) -> None:
        assert self.stops([0.59, 0.41, 0.0], [0.61, 0.39, 0.0], [0.4, 0.1, 0.5])["logit_margin"] == [True, False, True]

    def test_thresholds_are_knobs(self) -> None:
        policy = started(
            1,
            confidence_threshold=0.5,
            entropy_threshold=0.9,
            adaedl_threshold=0.9,
            difference_threshold=1.0,
            margin_threshold=0.7,
        )
        policy.should_stop(step(of_probabilities([0.99, 0.01])))
        assert self.stops([0.79, 0.21], position=1, policy=policy) == {
            "max_confidence": [False],
            "svip": [False],
            "adaedl": [True],
            "svip_difference": [False],
            "logit_margin": [True],
        }


class TestReward:
    def test_blends_length_and_rate(self) -> None:
        policy = started(3, num_draft_tokens=10)
        policy.observe(outcome([5, 10, 4], [3, 10, 0]))
        # 0.5 * 3/10 + 0.5 * 3/5, 0.5 * 1 + 0.5 * 1, 0
        assert policy.statistics.rewards.tolist() == pytest.approx([0.45 + 1.0, 0, 0, 0, 0])
        assert policy.statistics.squares.tolist() == pytest.approx([0.45**2 + 1.0, 0, 0, 0, 0])

    def test_longest_draft_is_the_loops_if_that_is_shorter(self) -> None:
        policy = started(1, max_draft_length=4)
        assert policy.draft_lengths().tolist() == [4]
        policy.observe(outcome([4], [2]))
        assert policy.statistics.rewards.tolist() == pytest.approx([0.5, 0, 0, 0, 0])

    def test_is_at_most_one_though_the_loop_lifted_the_draft(self) -> None:
        policy = started(1, num_draft_tokens=2)
        policy.observe(outcome([6], [6]))
        assert policy.statistics.rewards.tolist() == [1.0, 0, 0, 0, 0]

    def test_finished_rows_earn_nothing(self) -> None:
        policy = started(2)
        policy.observe(outcome([5, 5], [5, 5], [False, True]))
        assert policy.statistics.plays.tolist() == [1, 0, 0, 0, 0]


class TestScope:
    def test_a_new_sequence_uses_what_the_batch_knows(self) -> None:
        policy = started(2)
        for accepted in (0, 8, 0, 0, 0):
            policy.observe(outcome([8, 8], [accepted] * 2))
        assert policy.chosen.tolist() == [1, 1]
        policy.select_rows(torch.tensor([1, -1, -1]))
        assert policy.chosen.tolist() == [1, 1, 1]
        assert policy.statistics.plays.tolist() == [2] * 5

    @pytest.mark.parametrize("bandit", bandits.BANDITS)
    def test_a_row_alone_plays_as_it_does_in_a_batch(self, bandit: str) -> None:
        together, alone = started(3, scope="row", bandit=bandit), started(1, scope="row", bandit=bandit)
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            assert together.chosen[1].item() == alone.chosen.item()
            accepted = torch.randint(0, 9, (3,), generator=generator).tolist()
            together.observe(outcome([8, 8, 8], accepted))
            alone.observe(outcome([8], accepted[1:2]))


@pytest.mark.parametrize("scope", tapout.SCOPES)
def test_seeds_draw_differently_and_equal_calls_equally(scope: str) -> None:
    def played(seed: int) -> list[list[int]]:
        policy, arms = started(2, bandit="thompson", scope=scope, seed=seed), []
        for _ in range(20):
            arms.append(policy.chosen.tolist())
            policy.observe(outcome([8, 8], [3, 5]))
        return arms

    assert played(1) == played(1)
    assert played(1) != played(2)


@pytest.mark.parametrize(
    ("arguments", "error", "fragments"),
    [
        ({"bandit": "exp3"}, ValueError, ["`bandit` is 'exp3'", "'ucb1', 'ucb_tuned', 'thompson'"]),
        ({"scope": "call"}, ValueError, ["`scope` is 'call'", "'batch', 'row'"]),
        ({"arms": "svip"}, TypeError, ["`arms` is 'svip'", "a list", "'logit_margin'"]),
        ({"arms": []}, TypeError, ["`arms` is []", "one or more"]),
        ({"arms": ["svip", "margin"]}, ValueError, ["`arms` is 'margin'", "'logit_margin'"]),
        ({"arms": ["svip", "svip"]}, ValueError, ["only once"]),
        ({"num_draft_tokens": 0}, ValueError, ["`num_draft_tokens` is 0", "at least 1", "'static'"]),
        ({"blend": 1.5}, ValueError, ["`blend` is 1.5"]),
        ({"seed": -1}, ValueError, ["`seed` is -1"]),
        ({"seed": 2**32}, ValueError, ["`seed` is 4294967296"]),
        ({"confidence_threshold": math.nan}, ValueError, ["`confidence_threshold` is nan"]),
        ({"entropy_threshold": -0.1}, ValueError, ["`entropy_threshold` is -0.1"]),
        ({"adaedl_threshold": 2}, ValueError, ["`adaedl_threshold` is 2"]),
        ({"difference_threshold": None}, TypeError, ["`difference_threshold` is None"]),
        ({"margin_threshold": "0.2"}, TypeError, ["`margin_threshold` is '0.2'"]),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], fragments: list[str]) -> None:
    check_refused(TapOutPolicy, arguments, error, fragments)
