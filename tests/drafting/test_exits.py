"""DEL's tokens per layer, acceptance of exits, and confidence, against a slow reference and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import reference_exits as slow
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.drafting.exits import ExitStatistics, best_length, tokens_per_layer


@pytest.mark.parametrize(
    ("acceptance", "layer", "layers", "length", "expected"),
    [
        (0.8, 4, 32, 0, 1 / 32),
        (0.8, 4, 32, 1, 1.8 / 36),
        (0.5, 8, 32, 3, 1.875 / 56),
        (1.0, 8, 32, 4, 5 / 64),
        (0.0, 8, 32, 4, 1 / 64),
    ],
)
def test_tokens_per_layer_by_hand(acceptance: float, layer: int, layers: int, length: int, expected: float) -> None:
    assert tokens_per_layer(acceptance, layer, layers, length) == pytest.approx(expected, rel=1e-12)


def test_the_best_length_by_hand() -> None:
    """(1 + .5)/(8 + 32) < 1/32 < (1 + .9)/40, and at .3 one layer of four is worth one token."""
    assert best_length(0.25, 8, 32, 12)[0] == 0  # 1.25 / 40 is no more than 1 / 32
    assert best_length(0.26, 8, 32, 12)[0] == 1
    assert best_length(1.0, 8, 32, 12) == (12, 13 / 128)
    assert best_length(0.9, 8, 32, 0) == (0, 1 / 32)


@given(st.floats(0, 1), st.integers(1, 40), st.integers(1, 80), st.integers(0, 12))
def test_the_best_length_is_that_of_the_closed_form(a: float, layer: int, layers: int, longest: int) -> None:
    length, value = best_length(a, layer, layers, longest)
    values = [slow.tokens_per_layer(a, layer, layers, n) for n in range(longest + 1)]
    assert value == pytest.approx(values[length], rel=1e-9)
    assert value == pytest.approx(max(values), rel=1e-9)


def played(seed: int, decay: float) -> tuple[ExitStatistics, slow.Reference]:
    """Both, after the same random rounds: rows sit out, finish, and begin other texts."""
    numbers = np.random.default_rng(seed)
    rows, exits, layers, head = int(numbers.integers(1, 5)), [1, 2, 5], 8, 0.7
    fast = ExitStatistics(rows, exits, layers, head, decay)
    reference = slow.Reference(exits, layers, head, decay, rows)
    # Right ones more often in later exits, and with more confidence.
    skill = numbers.uniform(0, 1, size=(len(exits), 1))
    for _ in range(int(numbers.integers(1, 12))):
        width = int(numbers.integers(1, 6))
        counts = numbers.integers(0, width + 1, size=rows)
        text = numbers.integers(0, 9, size=(rows, width))
        right = numbers.uniform(size=(len(exits), rows, width)) < skill[:, :, None]
        shadows = np.where(right, text, 9)
        confidence = (numbers.uniform(size=shadows.shape) * np.where(right, 1.0, 0.7)).astype(np.float32)
        texts = [row[:count].tolist() for row, count in zip(text, counts, strict=True)]
        for each in (fast, reference):
            each.learn(*((shadows, confidence) if each is fast else (shadows.tolist(), confidence.tolist())), texts)
        if numbers.uniform() < 0.3:
            begun = [int(numbers.integers(rows))]
            fast.begin(begun)
            reference.begin(begun)
    return fast, reference


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_learnt_is_what_the_reference_learns(seed: int, decay: float) -> None:
    fast, reference = played(seed, decay)
    for place in range(3):
        assert fast.acceptance(place) == pytest.approx(reference.acceptance(place), rel=1e-9)
        assert fast.row_acceptance(place) == pytest.approx(reference.row_acceptance(place), rel=1e-9)
        assert fast.threshold(place) == pytest.approx(reference.threshold(place), rel=1e-6)
        most = [3, 12, 1, 7][: reference.rows]
        assert fast.lengths(place, most) == reference.lengths(place, most)
    for longest in (1, 4, 12):
        assert fast.best_exit(longest) == reference.best_exit(longest)
        assert fast.exit_for(longest) == reference.exit_for(longest)


def test_columns_after_the_text_teach_nothing() -> None:
    """A row that has written two tokens of four columns was right in both, whatever it guessed after them."""
    statistics = ExitStatistics(1, [1], 4, 0.0, 1.0)
    shadows, confidence = np.array([[[5, 6, 1, -1]]]), np.array([[[0.9, 0.7, 0.1, 0.1]]], dtype=np.float32)
    statistics.learn(shadows, confidence, [[5, 6]])
    assert statistics.acceptance(0) == pytest.approx(3 / 4)
    assert statistics.threshold(0) == 0.0, "no token has been wrong"


def test_the_threshold_lies_halfway_and_only_where_confidence_tells() -> None:
    statistics = ExitStatistics(1, [1, 2], 4, 0.0, 1.0)
    shadows = np.array([[[5, 6, 9]], [[5, 9, 9]]])
    confidence = np.array([[[0.9, 0.7, 0.2]], [[0.1, 0.5, 0.7]]], dtype=np.float32)
    statistics.learn(shadows, confidence, [[5, 6, 7]])
    assert statistics.threshold(0) == pytest.approx(0.5, rel=1e-6)
    assert statistics.threshold(1) == 0.0, "it is surer of what is wrong"
