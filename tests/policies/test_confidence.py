"""The confidence threshold and its adaptation against plain Python, and against transformers' own update."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_confidence as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_calls import check_refused, starter
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import ConfidenceCriteria

from hf_dsde.policies import ConfidencePolicy, DraftStep, RoundOutcome, Signal

started = starter(ConfidencePolicy)

# Few distinct values, so that samples of equal confidence and thresholds of equal cost are common.
confidences = st.sampled_from([0.05, 0.125, 0.25, 0.375, 0.5, 0.75, 0.875, 1.0])
rounds_of_a_row = st.lists(st.tuples(st.lists(confidences, max_size=5), st.floats(0, 1)), min_size=1, max_size=12)


def outcome(scores: list[list[float]], accepted: list[int], active: list[bool] | None = None) -> RoundOutcome:
    width = max(len(row) for row in scores)
    padded = [row + [math.nan] * (width - len(row)) for row in scores]
    return RoundOutcome(
        drafted=torch.tensor([len(row) for row in scores]),
        accepted=torch.tensor(accepted),
        active=torch.tensor([True] * len(scores) if active is None else active),
        confidence=torch.tensor(padded, dtype=torch.float32).reshape(len(scores), width),
    )


def step(scores: torch.Tensor, tokens: list[int]) -> DraftStep:
    return DraftStep(0, torch.tensor(tokens), scores, scores, torch.ones(len(tokens), dtype=torch.bool))


class TestStopping:
    def test_stops_after_a_token_below_the_threshold(self) -> None:
        scores = torch.tensor([[0.39, 0.61], [0.41, 0.59], [0.4, 0.6]]).log()
        assert started(rows=3).should_stop(step(scores, [0, 0, 1])).tolist() == [True, False, False]

    def test_agrees_with_transformers_criterion(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scores = 2 * torch.randn(64, 8, generator=generator)
        tokens = torch.randint(0, 8, (64,), generator=generator)
        criterion = ConfidenceCriteria(0.3)
        expected = [criterion(t.reshape(1, 1), (s.unsqueeze(0),)) for s, t in zip(scores, tokens, strict=True)]
        assert started(rows=64, threshold=0.3).should_stop(step(scores, tokens.tolist())).tolist() == expected

    def test_zero_never_stops(self) -> None:
        scores = torch.tensor([[-100.0, 0.0]])
        assert started(threshold=0.0).should_stop(step(scores, [0])).tolist() == [False]

    def test_a_round_has_at_most_twenty_tokens(self) -> None:
        assert started(rows=2).draft_lengths().tolist() == [20, 20]
        assert started(max_draft_length=6).draft_lengths().tolist() == [6]
        assert started(num_draft_tokens=3).draft_lengths().tolist() == [3]


class TestAdaptation:
    def test_needs_more_than_five_samples_of_both_outcomes(self) -> None:
        policy = started(rows=3)
        policy.observe(outcome([[0.9] * 5, [0.9] * 6, [0.9, 0.8, 0.9, 0.9, 0.9, 0.2]], [4, 6, 5]))
        assert policy.thresholds.tolist() == pytest.approx([0.4, 0.4, 0.8])

    def test_finished_rows_stay(self) -> None:
        policy = started()
        policy.observe(outcome([[0.9, 0.8, 0.9, 0.9, 0.9, 0.2]], [5], [False]))
        assert policy.thresholds.tolist() == pytest.approx([0.4])

    def test_can_be_switched_off(self) -> None:
        policy = started(adapt=False)
        policy.observe(outcome([[0.9, 0.8, 0.9, 0.9, 0.9, 0.2]], [5]))
        assert policy.thresholds.tolist() == pytest.approx([0.4])
        assert policy.requires == frozenset()
        assert ConfidencePolicy().requires == {Signal.CONFIDENCE}

    def test_missing_signal_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"outcome\.confidence"):
            started().observe(RoundOutcome(torch.tensor([0]), torch.tensor([0]), torch.tensor([True])))

    @given(st.lists(rounds_of_a_row, min_size=1, max_size=3), st.sampled_from([6, 9, 512]))
    @settings(deadline=None, max_examples=120)
    def test_follows_the_reference_row_by_row(self, rows: list[list[tuple[list[float], float]]], history: int) -> None:
        policy = started(rows=len(rows), history=history)
        expected = [reference.ReferenceRow(0.4, history) for _ in rows]
        for number in range(max(len(row) for row in rows)):
            drafts = [row[number] if number < len(row) else ([], 0.0) for row in rows]
            accepted = [round(share * len(scores)) for scores, share in drafts]
            policy.observe(outcome([scores for scores, _ in drafts], accepted))
            for row, (scores, _), matches in zip(expected, drafts, accepted, strict=True):
                if scores:
                    row.observe(scores, matches)
            assert policy.thresholds.tolist() == pytest.approx([row.threshold for row in expected], abs=0, rel=1e-7)


def roc_curve(labels: list[int], scores: list[float]) -> tuple[Any, Any, Any]:
    """What transformers asks of scikit-learn, as arrays of float64."""
    return tuple(np.array([float(x) for x in values]) for values in reference.roc_curve(labels, scores))


def cost(threshold: float, labels: list[int], scores: list[float]) -> float:
    fpr, tpr, thresholds = reference.roc_curve(labels, scores)
    index = min(range(len(thresholds)), key=lambda i: abs(thresholds[i] - threshold))
    return float(fpr[index] + 3 * (1 - tpr[index]))


@pytest.mark.parametrize("seed", range(5))
def test_follows_transformers_own_update(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row through `update_candidate_strategy` itself, which keeps all samples and one threshold."""
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: True)
    # Versions differ in whether they import scikit-learn with the module or inside the method.
    metrics = SimpleNamespace(roc_curve=roc_curve)
    monkeypatch.setitem(sys.modules, "sklearn", SimpleNamespace(metrics=metrics))
    monkeypatch.setitem(sys.modules, "sklearn.metrics", metrics)
    monkeypatch.setattr(candidate_generator, "roc_curve", roc_curve, raising=False)
    theirs = object.__new__(AssistedCandidateGenerator)
    theirs.assistant_generation_config = SimpleNamespace(
        num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4
    )
    theirs.generation_config = SimpleNamespace(assistant_confidence_threshold=0.4)
    theirs.probs, theirs.matches = [], []
    ours = started()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        length = int(torch.randint(1, 6, (1,), generator=generator))
        scores = torch.rand(length, generator=generator).tolist()
        matches = next((i for i, q in enumerate(scores) if q < torch.rand(1, generator=generator)), length)
        theirs.probs.extend(scores)
        theirs.update_candidate_strategy(torch.zeros(1, 1), torch.zeros(1, length + 1, 2), matches)
        ours.observe(outcome([scores], [matches]))
        threshold = theirs.assistant_generation_config.assistant_confidence_threshold
        if not math.isclose(ours.thresholds.item(), threshold, rel_tol=1e-6):
            # Their costs are rounded floats: of equal ones, rounding may prefer another than the strictest.
            both = [cost(t, theirs.matches, theirs.probs) for t in (ours.thresholds.item(), threshold)]
            assert both[0] == pytest.approx(both[1], abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "fragment"),
    [
        ({"threshold": 1.5}, ValueError, "`threshold` is 1.5, but a number of at least 0 and at most 1"),
        ({"threshold": "0.4"}, TypeError, "`threshold` is '0.4'"),
        ({"num_draft_tokens": -1}, ValueError, "`num_draft_tokens` is -1"),
        ({"adapt": None}, TypeError, "`adapt` is None, but True or False"),
        ({"history": 5}, ValueError, "`history` is 5, but an integer of at least 6"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], fragment: str) -> None:
    check_refused(ConfidencePolicy, arguments, error, fragment)
