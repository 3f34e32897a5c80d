"""SVIP's stopping rule against plain Python, its knobs, and mutants that must fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference_svip as reference
import torch
from policy_calls import check_refused, start, starter

from hf_dsde.policies import DraftStep, SVIPPolicy

VOCABULARY = 9
started = starter(SVIPPolicy, longest=64)


def step_of(logits: torch.Tensor, scores: torch.Tensor | None = None) -> DraftStep:
    rows = len(logits)
    tokens = torch.zeros(rows, dtype=torch.int64)
    return DraftStep(0, tokens, logits, logits if scores is None else scores, torch.ones(rows, dtype=torch.bool))


def drafted(policy: SVIPPolicy, logits: torch.Tensor) -> list[int]:
    """How many tokens each row drafts of `logits`, `[rows, positions, vocabulary]`."""
    limits = policy.draft_lengths()
    counts = torch.zeros_like(limits)
    drafting = limits > 0
    for position in range(logits.shape[1]):
        counts += drafting
        stops = policy.should_stop(step_of(logits[:, position], 3 * logits[:, position]))
        drafting = drafting & ~stops & (limits > position + 1)
    return counts.tolist()


def disagreement(policy: SVIPPolicy, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    # From drafts that are mostly unsure to one that is always sure, so that the longest draft ends some.
    scale = torch.linspace(2, 14, 24)[:, None, None]
    logits = scale * torch.randn(24, 50, VOCABULARY, generator=generator)
    logits[-1, :, 0] += 200
    start(policy, rows=24, max_draft_length=64)
    expected = [
        reference.drafted_tokens(row, policy.num_draft_tokens, policy.threshold, policy.coefficient)
        for row in logits.double().softmax(-1).tolist()
    ]
    assert len(set(expected)) > 3
    assert max(expected) == policy.num_draft_tokens
    return drafted(policy, logits) != expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "arguments", [{}, {"threshold": 0.45}, {"coefficient": 0.3}, {"num_draft_tokens": 20}], ids=str
)
def test_follows_the_reference(arguments: dict[str, Any], seed: int) -> None:
    assert not disagreement(SVIPPolicy(**arguments), seed)


class NoRoot(SVIPPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return self.coefficient * step.entropy > self.threshold


class EntropyInBits(SVIPPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return (self.coefficient * step.entropy / math.log(2)).sqrt() > self.threshold


class NoCoefficient(SVIPPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return step.entropy.sqrt() > self.threshold


class ProcessedScores(SVIPPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return super().should_stop(step_of(step._scores))


class StopsWhenSure(SVIPPolicy):
    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return ~super().should_stop(step)


@pytest.mark.parametrize("mutant", [NoRoot, EntropyInBits, NoCoefficient, ProcessedScores, StopsWhenSure])
def test_the_reference_catches_mutants(mutant: Callable[[], SVIPPolicy]) -> None:
    assert any(disagreement(mutant(), seed) for seed in range(4))


def test_the_default_stops_above_six_tenths_of_a_nat() -> None:
    """Among two tokens, one of probability 0.5 has ln 2 = 0.693 nats, one of 0.75 has 0.562."""
    logits = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]]).log()
    assert started(rows=3).should_stop(step_of(logits)).tolist() == [True, False, False]
    # Here the entropies are 0.6004 and 0.5996.
    logits = torch.tensor([[0.712, 0.288], [0.7129, 0.2871]]).log()
    assert started(rows=2).should_stop(step_of(logits)).tolist() == [True, False]


def test_an_estimate_that_equals_the_threshold_goes_on() -> None:
    certain = torch.tensor([[0.0, -math.inf], [0.0, -5.0]])
    assert started(rows=2, threshold=0.0).should_stop(step_of(certain)).tolist() == [False, True]


def test_a_coefficient_of_zero_never_stops() -> None:
    assert started(coefficient=0.0).should_stop(step_of(torch.zeros(1, VOCABULARY))).tolist() == [False]


def test_a_round_has_at_most_forty_tokens() -> None:
    assert started(rows=2).draft_lengths().tolist() == [40, 40]
    assert started(max_draft_length=6).draft_lengths().tolist() == [6]
    assert started(num_draft_tokens=3).draft_lengths().tolist() == [3]


def test_asks_for_no_signal_afterwards() -> None:
    assert started().requires == frozenset()


@pytest.mark.parametrize(
    ("arguments", "error", "fragment"),
    [
        ({"threshold": -0.1}, ValueError, "`threshold` is -0.1, but a number of at least 0 is needed"),
        ({"threshold": None}, TypeError, "`threshold` is None"),
        ({"coefficient": math.inf}, ValueError, "`coefficient` is inf"),
        ({"coefficient": "0.15"}, TypeError, "`coefficient` is '0.15'"),
        ({"num_draft_tokens": -1}, ValueError, "`num_draft_tokens` is -1, but an integer of at least 0 is needed"),
        ({"num_draft_tokens": 4.0}, TypeError, "`num_draft_tokens` is 4.0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], fragment: str) -> None:
    check_refused(SVIPPolicy, arguments, error, fragment)
