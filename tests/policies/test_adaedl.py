"""AdaEDL against a reference that drafts token by token, its rules one by one, and mutants that must fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference_adaedl as reference
import torch
from policy_calls import check_refused, outcome, start, starter

from hf_dsde.policies import AdaEDLPolicy, DraftStep, RoundOutcome, SVIPPolicy

VOCABULARY = 7
LONGEST = 5
started = starter(AdaEDLPolicy)


def uniform_step(choices: list[int], drafting: list[bool] | None = None) -> DraftStep:
    """A step at which each row's draft chooses evenly among some tokens: an entropy of `ln choices`."""
    logits = torch.full((len(choices), VOCABULARY), -math.inf)
    for row, count in enumerate(choices):
        logits[row, :count] = 0.0
    drew = torch.tensor([True] * len(choices) if drafting is None else drafting)
    return DraftStep(0, torch.zeros(len(choices), dtype=torch.int64), logits, logits, drew)


def draft(policy: AdaEDLPolicy, logits: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """How many tokens each row drafts when the loop asks after each, as it does; scores are not the raw logits."""
    counts = torch.zeros_like(limits)
    drafting = limits > 0
    for position in range(logits.shape[1]):
        counts += drafting
        tokens = torch.full_like(limits, position % VOCABULARY)
        stops = policy.should_stop(
            DraftStep(position, tokens, logits[:, position], 3 * logits[:, position], drafting.clone())
        )
        drafting &= ~stops & (limits > position + 1)
    return counts


def disagreement(policy: AdaEDLPolicy, seed: int, rounds: int = 50) -> str:
    """Where a policy leaves the reference over random rounds of a batch; empty if nowhere."""
    generator = torch.Generator().manual_seed(seed)
    rows = 4
    start(policy, rows)
    expected = [
        reference.ReferenceRow(policy.gamma, policy.threshold, LONGEST, policy.end_condition) for _ in range(rows)
    ]
    agreeable = torch.tensor([0.0, 0.5, 0.9, 1.0])
    for number in range(rounds):
        logits = torch.randn(rows, LONGEST, VOCABULARY, generator=generator) * (
            0.5 + 3 * torch.rand(rows, LONGEST, 1, generator=generator)
        )
        active = torch.rand(rows, generator=generator) < 0.9
        room = torch.randint(0, 3 * LONGEST, (rows,), generator=generator)
        limits = torch.minimum(policy.draft_lengths(), room) * active
        drafted = draft(policy, logits, limits)
        probabilities = logits.double().softmax(-1).tolist()
        counts = reference.drafted_tokens(expected, probabilities, limits.tolist(), policy.scope)
        if drafted.tolist() != counts:
            return f"round {number}: drafted {drafted.tolist()}, not {counts}"
        spoiled = torch.rand(rows, generator=generator) >= agreeable
        accepted = torch.where(spoiled, (torch.rand(rows, generator=generator) * drafted).long(), drafted)
        policy.observe(RoundOutcome(drafted, accepted, active))
        for row, count, matches in zip(expected, drafted.tolist(), accepted.tolist(), strict=True):
            if count:
                row.observe(count, matches)
        if any(abs(row.rate - 0.9) < 1e-6 for row in expected):
            return ""  # A tie with the target rate, after 2 of 5, 5 of 5 three times, say: rounding decides.
        for name, values in (("threshold", policy.thresholds), ("rate", policy.acceptance_rates)):
            wanted = [getattr(row, name) for row in expected]
            if values.tolist() != pytest.approx(wanted, abs=2e-6):
                return f"round {number}: {name} {values.tolist()}, not {wanted}"
    return ""


CASES: dict[str, dict[str, Any]] = {
    "row": {},
    "batch": {"scope": "batch"},
    "full": {"end_condition": "full"},
    "as in DSDE's experiments": {"gamma": 0.1, "end_condition": "full", "scope": "batch"},
    "high threshold": {"threshold": 0.7},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", CASES)
def test_follows_the_reference(case: str, seed: int) -> None:
    assert not disagreement(AdaEDLPolicy(num_draft_tokens=LONGEST, **CASES[case]), seed)


class OtherGamma(AdaEDLPolicy):
    def _bounds(self, step: DraftStep) -> torch.Tensor:
        return 1 - (1.1 * self.gamma * step.entropy).sqrt()


class NoRoot(AdaEDLPolicy):
    def _bounds(self, step: DraftStep) -> torch.Tensor:
        return 1 - self.gamma * step.entropy


class EntropyInBits(AdaEDLPolicy):
    def _bounds(self, step: DraftStep) -> torch.Tensor:
        return 1 - (self.gamma * step.entropy / math.log(2)).sqrt()


class ProcessedScores(AdaEDLPolicy):
    def _bounds(self, step: DraftStep) -> torch.Tensor:
        return super()._bounds(DraftStep(0, step.tokens, step._scores, step.logits, step.drafting))


class RateOfTheLongest(AdaEDLPolicy):
    def _next_rate(self, outcome: RoundOutcome) -> torch.Tensor:
        return 0.5 * self.acceptance_rates + 0.5 * outcome.accepted / self.num_draft_tokens


class SlowRate(AdaEDLPolicy):
    def _next_rate(self, outcome: RoundOutcome) -> torch.Tensor:
        return 0.9 * self.acceptance_rates + 0.1 * outcome.accepted / outcome.drafted.clamp_min(1)


class RateOfTheRoundBefore(AdaEDLPolicy):
    def _direction(self, rate: torch.Tensor, outcome: RoundOutcome) -> torch.Tensor:
        return super()._direction(self.acceptance_rates, outcome)


class RateOfTheRoundAlone(AdaEDLPolicy):
    def _direction(self, rate: torch.Tensor, outcome: RoundOutcome) -> torch.Tensor:
        return super()._direction(outcome.accepted / outcome.drafted.clamp_min(1), outcome)


class WrongWay(AdaEDLPolicy):
    def _direction(self, rate: torch.Tensor, outcome: RoundOutcome) -> torch.Tensor:
        return -super()._direction(rate, outcome)


class WithoutThresholdDecay(AdaEDLPolicy):
    def _direction(self, rate: torch.Tensor, outcome: RoundOutcome) -> torch.Tensor:
        return 10 * super()._direction(rate, outcome)


class AlwaysFalls(AdaEDLPolicy):
    def _may_fall(self, outcome: RoundOutcome) -> torch.Tensor:
        return outcome.active


class OtherEndCondition(AdaEDLPolicy):
    def _may_fall(self, outcome: RoundOutcome) -> torch.Tensor:
        if self.end_condition == "full":
            return outcome.drafted < self.num_draft_tokens
        return outcome.accepted >= self.num_draft_tokens


class DraftedInFull(AdaEDLPolicy):
    def _may_fall(self, outcome: RoundOutcome) -> torch.Tensor:
        return outcome.accepted >= outcome.drafted


class FinishedRowsLearn(AdaEDLPolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        everyone = torch.ones_like(outcome.active)
        super().observe(RoundOutcome(outcome.drafted.clamp_min(1), outcome.accepted, everyone))


class RowsThatDoNotDraftCount(AdaEDLPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return (self._bounds(step) < self.thresholds).any().expand_as(step.drafting)


class AllRowsHaveToAgree(AdaEDLPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return ((self._bounds(step) < self.thresholds) | ~step.drafting).all().expand_as(step.drafting)


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (OtherGamma, "row"),
        (NoRoot, "row"),
        (EntropyInBits, "row"),
        (ProcessedScores, "row"),
        (RateOfTheLongest, "row"),
        (SlowRate, "row"),
        (RateOfTheRoundBefore, "row"),
        (RateOfTheRoundAlone, "row"),
        (WrongWay, "row"),
        (WithoutThresholdDecay, "row"),
        (AlwaysFalls, "row"),
        (AlwaysFalls, "full"),
        (OtherEndCondition, "row"),
        (OtherEndCondition, "full"),
        (DraftedInFull, "full"),
        (FinishedRowsLearn, "row"),
        (RowsThatDoNotDraftCount, "batch"),
        (AllRowsHaveToAgree, "batch"),
    ],
)
def test_the_reference_catches_mutants(mutant: Callable[..., AdaEDLPolicy], case: str) -> None:
    assert any(disagreement(mutant(num_draft_tokens=LONGEST, **CASES[case]), seed) for seed in range(6))


class TestStopping:
    def test_stops_where_the_bound_falls_below_the_threshold(self) -> None:
        """Bounds of 1, 1 - sqrt(0.2 ln 3) = 0.5313 and 1 - sqrt(0.2 ln 4) = 0.4734."""
        policy = started(rows=3)
        step = uniform_step([1, 3, 4])
        assert policy._bounds(step).tolist() == pytest.approx([1.0, 0.531249, 0.473446], abs=1e-5)
        assert policy.should_stop(step).tolist() == [False, False, True]

    def test_gamma_of_dsdes_experiments_tolerates_twice_the_entropy(self) -> None:
        assert started(rows=2, gamma=0.1).should_stop(uniform_step([4, 7])).tolist() == [False, False]
        assert started(rows=2).should_stop(uniform_step([4, 7])).tolist() == [True, True]

    def test_a_bound_that_equals_the_threshold_goes_on(self) -> None:
        assert started(rows=2, threshold=1.0).should_stop(uniform_step([1, 2])).tolist() == [False, True]

    def test_one_unsure_row_stops_the_batch(self) -> None:
        assert started(rows=3, scope="batch").should_stop(uniform_step([1, 4, 1])).tolist() == [True] * 3
        assert started(rows=3, scope="batch").should_stop(uniform_step([1, 3, 1])).tolist() == [False] * 3

    def test_a_row_that_no_longer_drafts_stops_nobody(self) -> None:
        step = uniform_step([1, 4, 1], drafting=[True, False, True])
        assert started(rows=3, scope="batch").should_stop(step).tolist() == [False] * 3

    def test_without_adaptation_it_is_svip_with_another_name_for_its_constants(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(200, VOCABULARY, generator=generator)
        step = DraftStep(0, torch.zeros(200, dtype=torch.int64), logits, logits, torch.ones(200, dtype=torch.bool))
        stops = started(rows=200, gamma=0.15, threshold=0.7).should_stop(step)
        assert stops.tolist() == SVIPPolicy().should_stop(step).tolist()
        assert 20 < int(stops.sum()) < 180

    def test_a_round_has_at_most_seven_tokens(self) -> None:
        assert started(rows=2).draft_lengths().tolist() == [7, 7]
        assert started(max_draft_length=6).draft_lengths().tolist() == [6]
        assert started(num_draft_tokens=3).draft_lengths().tolist() == [3]


class TestAdaptation:
    def test_worked_example(self) -> None:
        """Fully accepted drafts: AR 0.5, 0.75, 0.875 raise the threshold by 0.001 each, 0.9375 lets it fall."""
        policy = started()
        for rate, threshold in ((0.5, 0.501), (0.75, 0.502), (0.875, 0.503), (0.9375, 0.502), (0.96875, 0.501)):
            policy.observe(outcome([6], [6]))
            assert policy.acceptance_rates.item() == pytest.approx(rate)
            assert policy.thresholds.item() == pytest.approx(threshold, abs=1e-6)

    @pytest.mark.parametrize("end_condition", ["not_full", "full"])
    def test_a_full_draft_with_a_rejection_lets_the_threshold_stay(self, end_condition: str) -> None:
        policy = started(end_condition=end_condition)
        for _ in range(8):
            policy.observe(outcome([6], [6]))
        before = policy.thresholds.item()
        policy.observe(outcome([7], [6]))
        assert policy.acceptance_rates.item() > 0.9
        assert policy.thresholds.item() == before

    def test_the_longest_draft_is_the_loops_where_that_is_shorter(self) -> None:
        policy = started(max_draft_length=4, end_condition="full")
        policy._rows.acceptance_rate.fill_(0.98)
        policy.observe(outcome([4], [4]))
        assert policy.thresholds.item() == pytest.approx(0.499, abs=1e-6)

    def test_rejections_raise_the_threshold_without_bound(self) -> None:
        policy = started(threshold=1.0)
        for _ in range(5):
            policy.observe(outcome([1], [0]))
        assert policy.thresholds.item() == pytest.approx(1.005, abs=1e-5)
        assert policy.should_stop(uniform_step([1])).tolist() == [True]

    def test_finished_rows_stay(self) -> None:
        policy = started()
        policy.observe(outcome([5], [0], [False]))
        assert policy.thresholds.tolist() == [0.5]
        assert policy.acceptance_rates.tolist() == [0.0]


@pytest.mark.parametrize(
    ("arguments", "error", "fragment"),
    [
        ({"gamma": -0.1}, ValueError, "`gamma` is -0.1, but a number of at least 0 is needed"),
        ({"gamma": math.nan}, ValueError, "`gamma` is nan"),
        ({"threshold": 1.5}, ValueError, "`threshold` is 1.5, but a number of at least 0 and at most 1"),
        ({"threshold": "0.5"}, TypeError, "`threshold` is '0.5'"),
        ({"num_draft_tokens": -1}, ValueError, "`num_draft_tokens` is -1, but an integer of at least 0"),
        ({"num_draft_tokens": True}, TypeError, "`num_draft_tokens` is True"),
        ({"end_condition": "max"}, ValueError, "`end_condition` is 'max', but one of 'not_full', 'full'"),
        ({"scope": "rows"}, ValueError, "`scope` is 'rows', but one of 'row', 'batch'"),
        ({"scope": None}, TypeError, "`scope` is None"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], fragment: str) -> None:
    check_refused(AdaEDLPolicy, arguments, error, fragment)
