"""The DSDE policy against a row-by-row reference in Python floats, its rules one by one, and mutants that must fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference_dsde as reference
import torch
from policy_calls import check_refused, start, starter

from hf_dsde import signals
from hf_dsde.policies import DSDEStoppingPolicy, RoundOutcome, Signal

MAX_DRAFT_LENGTH = 32
started = starter(DSDEStoppingPolicy)
RELATIVE_AGREEMENT = 2e-5
"""How closely float32 lengths must follow the float64 reference before rounding up; 3.4e-6 was the worst of 69,400."""


def outcome(
    drafted: list[int], accepted: list[int], klds: list[list[float]], active: list[bool] | None = None
) -> RoundOutcome:
    """A round; KLDs of positions that no row drafted are not a number, so that reading them shows."""
    width = max(drafted)
    padded = [row[:k] + [math.nan] * (width - k) for row, k in zip(klds, drafted, strict=True)]
    return RoundOutcome(
        drafted=torch.tensor(drafted),
        accepted=torch.tensor(accepted),
        active=torch.tensor([True] * len(drafted) if active is None else active),
        kld=torch.tensor(padded, dtype=torch.float32).reshape(len(drafted), width),
    )


def random_round(
    asked: list[int], alive: list[bool], generator: torch.Generator
) -> tuple[list[int], list[int], list[list[float]]]:
    """What the models did with the lengths asked for: some rows draft fewer, some nothing, some a few more."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    drafted, accepted, klds = [], [], []
    for length, is_alive in zip(asked, alive, strict=True):
        k = max(0, length + (0, 0, 0, 0, -2, -length, 2)[integer(0, 6)]) if is_alive else 0
        # Stretches of good and of bad agreement, so that lengths sweep from SL_min to SL_max.
        scale = (0.02, 0.15, 0.6)[integer(0, 2)]
        drafted.append(k)
        accepted.append(k if k and integer(0, 1) else integer(0, k))
        exponential = torch.rand(k, generator=generator, dtype=torch.float64).log().neg() * scale
        klds.append([float(x) for x in exponential.float()])
    return drafted, accepted, klds


def disagreement(
    policy: DSDEStoppingPolicy, constants: reference.Constants, rounds: int = 60, rows: int = 6, seed: int = 0
) -> str | None:
    """The first difference between policy and reference over random rounds, None when there is none."""
    generator = torch.Generator().manual_seed(seed)
    start(policy, rows)
    expected = reference.ReferenceDSDE(rows, constants)
    alive = [True] * rows
    undecided = 0
    for number in range(rounds):
        close = True
        for row, predicted in zip(expected.rows, policy.predicted_lengths().tolist(), strict=True):
            if not row.calibrated:
                continue
            exact = expected.predicted(row)
            if not math.isclose(predicted, exact, rel_tol=RELATIVE_AGREEMENT):
                return f"round {number}: SL^ {predicted} instead of {exact}"
            # One rounding error decides a length that lies this close to an integer, and then perhaps the cap.
            close &= predicted == exact or abs(exact - round(exact)) > exact * RELATIVE_AGREEMENT
        lengths = policy.draft_lengths().tolist()
        if close and lengths != expected.draft_lengths():
            return f"round {number}: {lengths} instead of {expected.draft_lengths()}"
        undecided += not close
        drafted, accepted, klds = random_round(lengths, alive, generator)
        expected.observe(drafted, accepted, alive, klds)
        policy.observe(outcome(drafted, accepted, klds, alive))
        if torch.rand(1, generator=generator) < 0.04 and sum(alive) > 2:
            alive[alive.index(True)] = False
    assert undecided <= rounds // 10, "the comparison must not be vacuous"
    return None


CASES: dict[str, tuple[dict[str, Any], reference.Constants]] = {
    "paper": ({}, reference.Constants()),
    "reference": ({"variant": "reference"}, reference.public_code_constants(MAX_DRAFT_LENGTH)),
    "reference-with-cap": (
        {"variant": "reference", "cap": True, "sl_min": 1},
        reference.Constants(**{**vars(reference.public_code_constants(MAX_DRAFT_LENGTH)), "cap": True, "sl_min": 1}),
    ),
    "ceiling-8": ({"sl_max": 8}, reference.Constants(ceiling=8)),
    "no-cap": ({"cap": False}, reference.Constants(cap=False)),
    "first-rejection": ({"kld_positions": "to_first_rejection"}, reference.Constants(to_first_rejection=True)),
    "other-windows": (
        {"short_window": 4, "long_window": 12, "decay": 0.7, "initial_length": 3, "sl_min": 1},
        reference.Constants(short=4, long=12, decay=0.7, initial_length=3, sl_min=1),
    ),
    "held": ({"warmup": "hold"}, reference.Constants(hold=True, initial_length=2)),
    "held-at-six": ({"warmup": "hold", "initial_length": 6}, reference.Constants(hold=True, initial_length=6)),
    "held-below-the-minimum": (
        {"warmup": "hold", "initial_length": 2, "sl_min": 4},
        reference.Constants(hold=True, initial_length=2, sl_min=4),
    ),
    "reference-held": (
        {"variant": "reference", "warmup": "hold", "initial_length": 12},
        reference.Constants(
            **{**vars(reference.public_code_constants(MAX_DRAFT_LENGTH)), "hold": True, "initial_length": 12}
        ),
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES)
def test_follows_the_reference_over_random_rounds(case: str, seed: int) -> None:
    arguments, constants = CASES[case]
    assert disagreement(DSDEStoppingPolicy(**arguments), constants, seed=seed) is None


class UnweightedVariance(DSDEStoppingPolicy):
    def _variance_ratio(self) -> Any:
        return signals.weighted_variance_ratio(self._rows.window, self.short_window, 1.0, self._rows.filled)


class OldestWeighsMost(DSDEStoppingPolicy):
    def _variance_ratio(self) -> Any:
        return signals.weighted_variance_ratio(self._rows.window[:, ::-1], self.short_window, self.decay)


class NoVarianceRatio(DSDEStoppingPolicy):
    def _variance_ratio(self) -> Any:
        return np.ones_like(self._rows.last_mean)


class LinearScalingFactor(DSDEStoppingPolicy):
    def _scaling_factor(self) -> Any:
        return 2 * self._rows.last_mean


class MeanOfTheWindow(DSDEStoppingPolicy):
    def _scaling_factor(self) -> Any:
        return signals.scaling_factor(self._rows.window.mean(1))


class CapBeforeRoundingUp(DSDEStoppingPolicy):
    def _lengths(self) -> Any:
        exact = self.predicted_lengths()
        counted = self._rows.active & ~self.calibrating
        cap = (exact * counted).sum() / max(counted.sum(), 1)
        lengths = np.ceil(np.minimum(exact, cap)).astype(np.int64)
        return np.where(self.calibrating, self._rows.calibration_length, lengths)


class CapCountsEveryRow(DSDEStoppingPolicy):
    def _length_cap(self, lengths: Any) -> int:
        return math.ceil(lengths.mean())


class CapCountsFinishedRows(DSDEStoppingPolicy):
    def _length_cap(self, lengths: Any) -> int:
        counted = ~self.calibrating
        return math.ceil((lengths * counted).sum() / max(counted.sum(), 1))


class CapBindsCalibration(DSDEStoppingPolicy):
    def _lengths(self) -> Any:
        lengths = super()._lengths()
        return np.minimum(lengths, self._length_cap(lengths)) if not self.calibrating.all() else lengths


class EveryPosition(DSDEStoppingPolicy):
    def _counted_positions(self, drafted: Any, accepted: Any, active: Any) -> Any:
        return drafted * active


class AlwaysDoubles(DSDEStoppingPolicy):
    def _next_length(self, accepted: Any) -> Any:
        return (2 * self._rows.calibration_length).clip(self._floor, self._ceiling)


class LiftedToTheMinimum(DSDEStoppingPolicy):
    def _next_length(self, accepted: Any) -> Any:
        return super()._next_length(accepted).clip(self._floor)


class HeldLengthIsSLMax(DSDEStoppingPolicy):
    def _bounds(self) -> Any:
        sl_min, sl_max = super()._bounds()
        return sl_min, sl_max.clip(max=self.initial_length)


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (UnweightedVariance, "no-cap"),
        (OldestWeighsMost, "no-cap"),
        (NoVarianceRatio, "no-cap"),
        (LinearScalingFactor, "no-cap"),
        (MeanOfTheWindow, "no-cap"),
        (CapBeforeRoundingUp, "paper"),
        (CapCountsEveryRow, "paper"),
        (CapCountsFinishedRows, "paper"),
        (CapBindsCalibration, "paper"),
        (EveryPosition, "first-rejection"),
        (AlwaysDoubles, "paper"),
        (AlwaysDoubles, "held-at-six"),
        (LiftedToTheMinimum, "held-below-the-minimum"),
        (HeldLengthIsSLMax, "held-at-six"),
    ],
)
def test_the_reference_catches_mutants(mutant: Callable[..., DSDEStoppingPolicy], case: str) -> None:
    arguments, constants = CASES[case]
    assert any(disagreement(mutant(**arguments), constants, seed=seed) for seed in range(4))


def fill_window(policy: DSDEStoppingPolicy, window: list[float], accepted: int = 5) -> None:
    """Feed one row its window in rounds of five."""
    for first in range(0, len(window), 5):
        policy.observe(outcome([5], [accepted if first == 0 else 0], [window[first : first + 5]]))


@pytest.mark.parametrize(("decay", "ratio"), [(0.85, 0.953065117), (0.9, 0.941471498)])
def test_worked_example(decay: float, ratio: float) -> None:
    """Thirty KLDs in rounds of five, the last round's mean 0.178, and an SL_max of 10."""
    policy = started(sl_max=10, decay=decay)
    fill_window(policy, [0.05 + 0.02 * ((7 * i) % 11) for i in range(30)])
    policy._rows.best_accepted.fill(10)
    assert policy._variance_ratio().item() == pytest.approx(ratio, rel=1e-5)
    assert policy._scaling_factor().item() == pytest.approx(0.427607548, rel=1e-5)
    if decay == 0.85:
        assert policy.predicted_lengths().item() == pytest.approx(6.7396973, rel=1e-5)
        assert policy.draft_lengths().tolist() == [7]


class TestCalibration:
    @pytest.mark.parametrize(("sl_max", "loop"), [(7, 32), (None, 7)])
    def test_stays_under_both_ceilings(self, sl_max: int | None, loop: int) -> None:
        policy = started(sl_max=sl_max, max_draft_length=loop)
        policy.observe(outcome([5], [5], [[0.1] * 5]))
        assert policy.draft_lengths().tolist() == [7]

    def test_holds_the_variants_sl_min(self) -> None:
        assert started(warmup="hold", variant="reference").draft_lengths().tolist() == [6]
        assert started(warmup="hold", sl_min=3).draft_lengths().tolist() == [3]
        assert started(warmup="hold", max_draft_length=1).draft_lengths().tolist() == [1]


class TestDirection:
    def both(self, kld: float, reverse_kld: float) -> RoundOutcome:
        whole = torch.full((1, 5), 1.0)
        return RoundOutcome(
            torch.tensor([5]), torch.tensor([3]), torch.tensor([True]), kld=kld * whole, reverse_kld=reverse_kld * whole
        )

    @pytest.mark.parametrize(("direction", "mean"), [("target_draft", 0.25), ("draft_target", 0.75)])
    def test_reads_the_divergence_asked_for(self, direction: str, mean: float) -> None:
        policy = started(kld_direction=direction)
        policy.observe(self.both(0.25, 0.75))
        assert policy._rows.last_mean.tolist() == [mean]
        assert policy._rows.window[0, -5:].tolist() == [mean] * 5

    def test_requires_only_that_one(self) -> None:
        assert DSDEStoppingPolicy().requires == {Signal.KLD}
        assert DSDEStoppingPolicy(kld_direction="draft_target").requires == {Signal.REVERSE_KLD}

    def test_a_missing_one_is_named(self) -> None:
        policy = started(kld_direction="draft_target")
        with pytest.raises(ValueError, match=r"outcome\.reverse_kld=None.*Signal\.REVERSE_KLD"):
            policy.observe(outcome([1], [0], [[0.1]]))


class TestAfterCalibration:
    def test_models_that_agree_draft_the_longest(self) -> None:
        policy = started(sl_max=8)
        fill_window(policy, [0.0] * 30)
        policy._rows.best_accepted.fill(12)
        assert policy.draft_lengths().tolist() == [8]

    def test_reference_calls_a_flat_window_unstable(self) -> None:
        flat = [0.1] * 30
        paper, public = started(sl_max=20), started(variant="reference")
        for policy in (paper, public):
            fill_window(policy, flat)
            policy._rows.best_accepted.fill(16)
        assert public.draft_lengths().tolist() == [6]
        assert paper.draft_lengths().tolist() == [math.ceil((1 - math.expm1(0.2)) * 18 + 2)]

    def test_temperature_divides_the_mean(self) -> None:
        policy = started(temperature_scaling=0.5)
        fill_window(policy, [0.1, 0.2, 0.1, 0.3, 0.2] * 6)
        assert policy._scaling_factor().item() == pytest.approx(math.expm1(2 * 0.18 / 0.5), rel=1e-5)

    def test_nonsense_divergence_reads_as_the_worst(self) -> None:
        policy = started()
        fill_window(policy, [0.1, 0.2, 0.1, 0.3, 0.2] * 6)
        policy.observe(
            RoundOutcome(
                torch.tensor([2]), torch.tensor([0]), torch.tensor([True]), kld=torch.tensor([[math.nan, math.inf]])
            )
        )
        assert policy.draft_lengths().tolist() == [2]
        assert np.isfinite(policy._rows.window).all()

    def test_length_never_exceeds_what_the_loop_allows(self) -> None:
        policy = started(max_draft_length=1)
        assert policy.draft_lengths().tolist() == [1]
        fill_window(policy, [0.0] * 30)
        assert policy.draft_lengths().tolist() == [1]


def test_signal_is_required() -> None:
    assert DSDEStoppingPolicy.requires == {Signal.KLD}
    with pytest.raises(ValueError, match=r"outcome\.kld=None"):
        started().observe(RoundOutcome(torch.tensor([0]), torch.tensor([0]), torch.tensor([True])))


@pytest.mark.parametrize(
    ("arguments", "error", "fragments"),
    [
        ({"sl_max": 1}, ValueError, ["`sl_max` is 1", "at least 2", "smaller `sl_min`"]),
        ({"sl_max": 4, "variant": "reference"}, ValueError, ["`sl_max` is 4", "at least 6", "'reference'"]),
        ({"sl_max": 8.0}, TypeError, ["`sl_max` is 8.0", "integer"]),
        ({"sl_min": 0}, ValueError, ["`sl_min` is 0", "at least 1", "never draft again"]),
        ({"sl_min": True}, TypeError, ["`sl_min` is True"]),
        ({"variant": "papers"}, ValueError, ["`variant` is 'papers'", "'paper', 'reference'"]),
        ({"decay": 0.0}, ValueError, ["`decay` is 0.0", "greater than 0 and at most 1"]),
        ({"decay": math.nan}, ValueError, ["`decay` is nan"]),
        ({"short_window": 31}, ValueError, ["`short_window` is 31", "from 1 to 30", "`long_window` is 30"]),
        ({"long_window": 1}, ValueError, ["`long_window` is 1", "at least 2"]),
        ({"initial_length": 0}, ValueError, ["`initial_length` is 0", "at least 1"]),
        ({"warmup": "held"}, ValueError, ["`warmup` is 'held'", "'grow', 'hold'"]),
        ({"kld_direction": "reverse"}, ValueError, ["`kld_direction` is 'reverse'", "'draft_target'"]),
        ({"cap": 1}, TypeError, ["`cap` is 1", "True or False"]),
        ({"kld_positions": "accepted"}, ValueError, ["`kld_positions` is 'accepted'", "'to_first_rejection'"]),
        ({"temperature_scaling": -1.0}, ValueError, ["`temperature_scaling` is -1.0"]),
        ({"sl_min_fraction": 1.5}, ValueError, ["`sl_min_fraction` is 1.5", "at most 1"]),
        ({"flat_variance": 0.0}, ValueError, ["`flat_variance` is 0.0", "greater than 0"]),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], fragments: list[str]) -> None:
    check_refused(DSDEStoppingPolicy, arguments, error, fragments)
