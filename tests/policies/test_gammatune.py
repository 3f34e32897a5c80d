"""GammaTune and GammaTune+ against plain Python, their rules one by one, and mutants that must fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference_gammatune as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_calls import check_refused, outcome, start, starter

from hf_dsde.policies import DraftStep, GammaTunePlusPolicy, GammaTunePolicy, RoundOutcome, StoppingPolicy

VOCABULARY = 7
ROWS = 4
started = starter(GammaTunePolicy)
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"initial_length": 8, "growth": 1, "smoothing": 0.5},
    {"min_length": 2, "max_length": 6, "smoothing": 0.1},
    {"initial_length": 1, "growth": 4},
]


def expected_row(policy: GammaTunePolicy, max_draft_length: int = 32) -> reference.ReferenceRow:
    most = min(policy.max_length, max_draft_length)
    least = min(policy.min_length, most)
    first = max(least, min(policy.initial_length, most))
    return reference.ReferenceRow(first, float(first), policy.growth, policy.smoothing, least, most)


def difference(policy: GammaTunePolicy, expected: list[reference.ReferenceRow]) -> str:
    lengths, means = [row.gamma for row in expected], [row.mean for row in expected]
    if policy.draft_lengths().tolist() != lengths:
        return f"lengths {policy.draft_lengths().tolist()}, not {lengths}"
    if policy.mean_accepted.tolist() != pytest.approx(means, rel=1e-5):
        return f"means {policy.mean_accepted.tolist()}, not {means}"
    return ""


def learn(policy: GammaTunePolicy, expected: list[reference.ReferenceRow], result: RoundOutcome) -> str:
    """Give a round to both and say where they part."""
    policy.observe(result)
    values = (result.drafted.tolist(), result.accepted.tolist(), result.active.tolist())
    for row, drafted, accepted, active in zip(expected, *values, strict=True):
        if active and drafted:
            row.observe(drafted, accepted)
    return difference(policy, expected)


def disagreement(policy: GammaTunePolicy, seed: int, rounds: int = 30) -> str:
    """Where a policy leaves the reference over random rounds; empty if nowhere.

    Rows accept about their own number of tokens, some rounds are cut short or lifted to the batch's longest.
    """
    generator = torch.Generator().manual_seed(seed)
    start(policy, ROWS)
    expected = [expected_row(policy) for _ in range(ROWS)]
    for number in range(rounds):
        lengths = policy.draft_lengths()
        active = torch.rand(ROWS, generator=generator) < 0.9
        cut = torch.randint(0, 4, (ROWS,), generator=generator) * (torch.rand(ROWS, generator=generator) < 0.3)
        lifted = lengths.max() if torch.rand((), generator=generator) < 0.3 else lengths
        drafted = (lifted - cut).clamp_min(0) * active
        run = (torch.rand(ROWS, generator=generator) * torch.tensor([2.0, 5.0, 9.0, 30.0])).long()
        found = learn(policy, expected, RoundOutcome(drafted, torch.minimum(drafted, run), active))
        if found:
            return f"round {number}: {found}"
    return ""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("policy", [GammaTunePolicy, GammaTunePlusPolicy])
def test_follows_the_reference(policy: type[GammaTunePolicy], arguments: dict[str, Any], seed: int) -> None:
    assert not disagreement(policy(**arguments), seed)


@given(
    rounds=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20),
    arguments=st.sampled_from(ARGUMENTS),
    limit=st.integers(1, 12),
)
@settings(deadline=None, max_examples=150)
def test_any_history_follows_the_reference(
    rounds: list[tuple[int, int]], arguments: dict[str, Any], limit: int
) -> None:
    policy = started(max_draft_length=limit, **arguments)
    expected = [expected_row(policy, limit)]
    for drafted, accepted in rounds:
        assert not learn(policy, expected, outcome([drafted], [min(accepted, drafted)]))


class MeanLearnsFromFullAcceptance(GammaTunePolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        mean = self._next_mean(outcome.accepted)
        super().observe(outcome)
        self._rows.mean = torch.where(outcome.active & (outcome.drafted > 0), mean, self._rows.mean)


class OldAndNewSwapped(GammaTunePolicy):
    def _next_mean(self, accepted: torch.Tensor) -> torch.Tensor:
        mean = self.smoothing * self.mean_accepted + (1 - self.smoothing) * accepted
        return mean.clamp(self._floor, self._ceiling)


class RoundedDown(GammaTunePolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        before = self.mean_accepted
        super().observe(outcome)
        floor = self.mean_accepted.floor().long().clamp_min(self._floor)
        self._rows.length = torch.where(self.mean_accepted != before, floor, self._rows.length)


class MeanWithoutBounds(GammaTunePolicy):
    def _next_mean(self, accepted: torch.Tensor) -> torch.Tensor:
        return self.mean_accepted + self.smoothing * (accepted - self.mean_accepted)


class GrowthWithoutBounds(GammaTunePolicy):
    def _longer(self, accepted: torch.Tensor) -> torch.Tensor:
        return accepted + self.growth


class GrowthFromTheMean(GammaTunePolicy):
    def _longer(self, accepted: torch.Tensor) -> torch.Tensor:
        grown = (self.mean_accepted.ceil().long() + self.growth).clamp(self._floor, self._ceiling)
        return torch.maximum(grown, self._rows.length)


class ShortDraftsShorten(GammaTunePolicy):
    def _longer(self, accepted: torch.Tensor) -> torch.Tensor:
        return (accepted + self.growth).clamp(self._floor, self._ceiling)


class ShortDraftsCountAsRejected(GammaTunePolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        drafted = torch.where(outcome.drafted > 0, self.draft_lengths(), 0)
        super().observe(RoundOutcome(drafted, outcome.accepted, outcome.active))


class LiftedDraftsCountInFull(GammaTunePolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        state = self._rows
        learning = outcome.active & (outcome.drafted > 0)
        full = outcome.accepted >= outcome.drafted
        mean = self._next_mean(outcome.accepted)
        length = torch.where(full, self._longer(outcome.accepted), mean.ceil().long())
        state.length = torch.where(learning, length, state.length)
        state.mean = torch.where(learning & ~full, mean, state.mean)


class FinishedRowsLearn(GammaTunePolicy):
    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(RoundOutcome(outcome.drafted.clamp_min(1), outcome.accepted, torch.ones_like(outcome.active)))


@pytest.mark.parametrize(
    "mutant",
    [
        MeanLearnsFromFullAcceptance,
        OldAndNewSwapped,
        RoundedDown,
        MeanWithoutBounds,
        GrowthWithoutBounds,
        GrowthFromTheMean,
        ShortDraftsShorten,
        ShortDraftsCountAsRejected,
        LiftedDraftsCountInFull,
        FinishedRowsLearn,
    ],
)
def test_the_reference_catches_mutants(mutant: Callable[[], GammaTunePolicy]) -> None:
    assert any(disagreement(mutant(), seed) for seed in range(5))


class TestLengths:
    def test_worked_example(self) -> None:
        """From (3, 3): A = 3 gives 5; A = 2 of 5 gives a mean of 2.7 and 3; A = 3 gives 5 again."""
        policy = started()
        for drafted, accepted, length, mean in ((3, 3, 5, 3.0), (5, 2, 3, 2.7), (3, 3, 5, 2.7)):
            policy.observe(outcome([drafted], [accepted]))
            assert policy.draft_lengths().tolist() == [length]
            assert policy.mean_accepted.item() == pytest.approx(mean)

    def test_growth_ends_at_the_bound_and_a_rejection_returns_to_the_mean_at_once(self) -> None:
        policy = started()
        lengths = []
        for _ in range(5):
            length = policy.draft_lengths().item()
            policy.observe(outcome([length], [length]))
            lengths.append(policy.draft_lengths().item())
        assert lengths == [5, 7, 9, 10, 10]
        policy.observe(outcome([10], [0]))
        assert policy.draft_lengths().tolist() == [3]

    @pytest.mark.parametrize("accepted", range(1, 10))
    @pytest.mark.parametrize("initial", [1, 10])
    def test_a_mean_never_crosses_the_length_that_it_approaches(self, initial: int, accepted: int) -> None:
        """Its exact value comes ever closer and stays on its side, so that from above one token more is drafted."""
        policy = started(initial_length=initial)
        for _ in range(200):
            policy._rows.length.fill_(10)
            policy.observe(outcome([10], [accepted]))
        assert policy.draft_lengths().tolist() == [accepted + 1 if initial > accepted else accepted]

    def test_rows_that_have_finished_stay(self) -> None:
        policy = started(rows=2)
        policy.observe(outcome([3, 3], [3, 3], [False, True]))
        assert policy.draft_lengths().tolist() == [3, 5]


def even_step(choices: list[int]) -> DraftStep:
    """A step at which each row's draft chooses evenly among some tokens; processing made all of them certain."""
    logits = torch.full((len(choices), VOCABULARY), -math.inf)
    for row, count in enumerate(choices):
        logits[row, :count] = 0.0
    scores = torch.full_like(logits, -math.inf)
    scores[:, 0] = 0.0
    rows = len(choices)
    return DraftStep(0, torch.zeros(rows, dtype=torch.int64), logits, scores, torch.ones(rows, dtype=torch.bool))


class TestEarlyStop:
    def test_stops_after_a_token_of_a_distribution_without_a_likely_one(self) -> None:
        policy = start(GammaTunePlusPolicy(), rows=3)
        assert policy.should_stop(even_step([1, 2, 3])).tolist() == [False, False, True]

    def test_the_token_that_was_drawn_does_not_matter(self) -> None:
        logits = torch.tensor([[0.7, 0.2, 0.1]]).log()
        policy = start(GammaTunePlusPolicy(), rows=1)
        for token in range(3):
            step = DraftStep(0, torch.tensor([token]), logits, logits, torch.tensor([True]))
            assert policy.should_stop(step).tolist() == [False]

    def test_a_probability_that_equals_the_threshold_goes_on(self) -> None:
        policy = start(GammaTunePlusPolicy(threshold=1.0), rows=2)
        assert policy.should_stop(even_step([1, 2])).tolist() == [False, True]

    def test_zero_never_stops(self) -> None:
        policy = start(GammaTunePlusPolicy(threshold=0.0), rows=1)
        assert policy.should_stop(even_step([7])).tolist() == [False]

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("threshold", [0.25, 0.4, 0.8])
    def test_whole_rounds_follow_the_reference(self, threshold: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        policy = start(GammaTunePlusPolicy(threshold=threshold), ROWS)
        expected = [expected_row(policy) for _ in range(ROWS)]
        for _ in range(25):
            logits = 3 * torch.randn(ROWS, 10, VOCABULARY, generator=generator)
            lengths = policy.draft_lengths()
            drafting, drafted = lengths > 0, torch.zeros_like(lengths)
            for position in range(10):
                drafted += drafting
                step = DraftStep(position, drafted, logits[:, position], -logits[:, position], drafting)
                drafting = drafting & ~policy.should_stop(step) & (lengths > position + 1)
            probabilities = logits.double().softmax(-1).tolist()
            assert drafted.tolist() == [
                reference.drafted_tokens(row, state.gamma, threshold)
                for row, state in zip(probabilities, expected, strict=True)
            ]
            run = (torch.rand(ROWS, generator=generator) * torch.tensor([2.0, 5.0, 9.0, 30.0])).long()
            active = torch.ones(ROWS, dtype=torch.bool)
            assert not learn(policy, expected, RoundOutcome(drafted, torch.minimum(drafted, run), active))


@pytest.mark.parametrize(
    ("arguments", "error", "fragment"),
    [
        ({"initial_length": 0}, ValueError, "`initial_length` is 0, but an integer of at least 1 is needed"),
        ({"growth": 0}, ValueError, "`growth` is 0, but an integer of at least 1"),
        ({"growth": 2.0}, TypeError, "`growth` is 2.0"),
        ({"smoothing": 0.0}, ValueError, "`smoothing` is 0.0, but a number greater than 0 and at most 1"),
        ({"smoothing": None}, TypeError, "`smoothing` is None"),
        ({"min_length": 0}, ValueError, "`min_length` is 0, but an integer of at least 1 is needed. A row that"),
        ({"min_length": 4, "max_length": 3}, ValueError, "`max_length` is 3, but an integer of at least 4"),
    ],
)
@pytest.mark.parametrize("policy", [GammaTunePolicy, GammaTunePlusPolicy])
def test_bad_arguments_are_named(
    policy: Callable[..., StoppingPolicy], arguments: dict[str, Any], error: type[Exception], fragment: str
) -> None:
    check_refused(policy, arguments, error, fragment)


@pytest.mark.parametrize(("threshold", "error"), [(1.1, ValueError), (-0.1, ValueError), ("0.4", TypeError)])
def test_bad_threshold_is_named(threshold: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"`threshold` is {threshold!r}, but a number of at least 0 and at most 1"):
        GammaTunePlusPolicy(threshold=threshold)
