"""The signals against plain Python in float64, at their edges, and as properties."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dsde import signals

sys.path.insert(0, str(Path(__file__).parent / "policies"))

import reference_dsde as reference

INFINITY = math.inf
logits_lists = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12)
kld_lists = st.lists(st.floats(0, 18, width=32), min_size=1, max_size=40)


def worked_window() -> NDArray[np.float32]:
    """Thirty KLDs between 0.05 and 0.25 in a fixed scramble, newest last."""
    return floats([[0.05 + 0.02 * ((7 * i) % 11) for i in range(30)]])


def floats(values: list[list[float]]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def paired_logits(vocabulary: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = 4 * torch.randn(count, vocabulary, generator=generator)
    return target, target + 2 * torch.randn(count, vocabulary, generator=generator)


class TestTokenProbability:
    def test_is_the_softmax_at_the_token(self) -> None:
        scores, _ = paired_logits(50, 6, seed=0)
        tokens = torch.tensor([0, 49, 3, 3, 17, 8])
        expected = [reference.softmax(row)[t] for row, t in zip(scores.tolist(), tokens.tolist(), strict=True)]
        assert signals.token_probability(scores, tokens).tolist() == pytest.approx(expected, rel=1e-5)

    def test_filtered_scores_renormalise_over_what_is_left(self) -> None:
        scores = torch.tensor([[0.0, 0.0, -INFINITY]])
        assert signals.token_probability(scores, torch.tensor([1])).item() == pytest.approx(0.5)
        assert signals.token_probability(scores, torch.tensor([2])).item() == 0.0

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_keeps_leading_shape_and_answers_in_float32(self, dtype: torch.dtype) -> None:
        scores = torch.zeros(2, 3, 4, dtype=dtype)
        probability = signals.token_probability(scores, torch.zeros(2, 3, dtype=torch.int64))
        assert probability.shape == (2, 3)
        assert probability.dtype == torch.float32


class TestEntropy:
    def test_agrees_with_float64(self) -> None:
        logits, _ = paired_logits(200, 8, seed=1)
        expected = [reference.entropy(row) for row in logits.tolist()]
        assert signals.entropy(logits).tolist() == pytest.approx(expected, rel=1e-5)

    def test_uniform_is_log_of_the_support(self) -> None:
        logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -INFINITY]])
        assert signals.entropy(logits).item() == pytest.approx(math.log(4))

    def test_half_precision_logits_are_summed_in_float32(self) -> None:
        logits = torch.zeros(1, 100_000, dtype=torch.bfloat16)
        entropy = signals.entropy(logits)
        assert entropy.dtype == torch.float32
        assert entropy.item() == pytest.approx(math.log(100_000), rel=1e-4)


class TestKLDivergence:
    def test_agrees_with_float64(self) -> None:
        target, draft = paired_logits(300, 20, seed=2)
        expected = [reference.kl_divergence(p, q) for p, q in zip(target.tolist(), draft.tolist(), strict=True)]
        assert signals.kl_divergence(target, draft).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)

    def test_identical_distributions_are_at_zero(self) -> None:
        target, _ = paired_logits(50_000, 2, seed=3)
        assert signals.kl_divergence(target, target).abs().max().item() < 1e-6

    def test_tokens_that_only_the_target_knows_cost_the_floor(self) -> None:
        target = torch.tensor([[0.0, 0.0]])
        draft = torch.tensor([[0.0, -INFINITY]])
        expected = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-8)
        assert signals.kl_divergence(target, draft).item() == pytest.approx(expected, rel=1e-5)

    def test_tokens_that_the_target_excludes_cost_nothing(self) -> None:
        target = torch.tensor([[0.0, 0.0, -INFINITY, -INFINITY]])
        draft = torch.tensor([[0.0, 0.0, 0.0, -INFINITY]])
        expected = math.log(0.5) - math.log(1 / 3)
        assert signals.kl_divergence(target, draft).item() == pytest.approx(expected, rel=1e-5)

    def test_floor_is_the_callers(self) -> None:
        target = torch.tensor([[0.0, -INFINITY]])
        draft = torch.tensor([[-INFINITY, 0.0]])
        assert signals.kl_divergence(target, draft, floor=1e-3).item() == pytest.approx(-math.log(1e-3), rel=1e-5)

    def test_keeps_leading_shape_and_answers_in_float32(self) -> None:
        logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
        kld = signals.kl_divergence(logits, logits)
        assert kld.shape == (2, 3)
        assert kld.dtype == torch.float32

    @given(logits_lists, st.data())
    @settings(deadline=None, max_examples=60)
    def test_is_never_negative(self, target: list[float], data: st.DataObject) -> None:
        draft = data.draw(st.lists(st.floats(-30, 30, width=32), min_size=len(target), max_size=len(target)))
        kld = signals.kl_divergence(torch.tensor([target]), torch.tensor([draft])).item()
        assert kld >= 0
        assert kld == pytest.approx(max(reference.kl_divergence(target, draft), 0), rel=1e-4, abs=1e-5)


class TestWeightedVariance:
    def test_worked_value(self) -> None:
        window = worked_window()
        assert signals.weighted_variance(window[:, -10:], 0.85).item() == pytest.approx(0.00340494543, rel=1e-5)
        assert signals.weighted_variance(window, 0.85).item() == pytest.approx(0.00357262622, rel=1e-5)

    @given(kld_lists, st.floats(0.5, 1.0))
    @settings(deadline=None, max_examples=80)
    def test_agrees_with_float64(self, values: list[float], decay: float) -> None:
        variance = signals.weighted_variance(floats([values]), decay).item()
        assert variance == pytest.approx(reference.weighted_variance(values, decay), rel=1e-4, abs=1e-9)

    @given(kld_lists, st.integers(0, 5))
    @settings(deadline=None, max_examples=60)
    def test_entries_outside_the_count_are_invisible(self, values: list[float], junk: int) -> None:
        padded = floats([[math.nan] * junk + values])
        counted = signals.weighted_variance(padded, 0.85, np.array([len(values)]))
        np.testing.assert_allclose(counted, signals.weighted_variance(floats([values]), 0.85), rtol=1e-5, atol=1e-9)

    def test_no_entries_have_no_variance(self) -> None:
        assert signals.weighted_variance(floats([[1] * 4] * 2), 0.9, np.array([0, 1])).tolist() == [0.0, 0.0]


class TestWeightedVarianceRatio:
    @pytest.mark.parametrize(("decay", "expected"), [(0.85, 0.953065117), (0.9, 0.941471498)])
    def test_worked_value(self, decay: float, expected: float) -> None:
        assert signals.weighted_variance_ratio(worked_window(), 10, decay).item() == pytest.approx(expected, rel=1e-5)

    def test_one_entry_says_nothing(self) -> None:
        window = floats([[0.0, 0.0, 0.3], [0.0, 0.1, 0.3]])
        ratio = signals.weighted_variance_ratio(window, 2, 0.85, np.array([1, 2]))
        assert ratio[0].item() == 0.0
        assert ratio[1].item() == pytest.approx(1.0)

    def test_flat_window_has_the_ratio_that_the_caller_names(self) -> None:
        window = floats([[0.4] * 30])
        assert signals.weighted_variance_ratio(window, 10, 0.85).item() == 1.0
        assert signals.weighted_variance_ratio(window, 10, 0.9, flat_variance=1e-6, flat_ratio=20.0).item() == 20.0

    @given(st.lists(st.floats(0, 18, width=32), min_size=2, max_size=30), st.integers(1, 12), st.floats(0.6, 1.0))
    @settings(deadline=None, max_examples=100)
    def test_agrees_with_float64(self, values: list[float], short: int, decay: float) -> None:
        window = floats([[0.0] * (30 - len(values)) + values])
        ratio = signals.weighted_variance_ratio(
            window, short, decay, np.array([len(values)]), flat_variance=1e-6, flat_ratio=20.0
        )
        if abs(reference.weighted_variance(values, decay) - 1e-6) > 1e-9:
            expected = reference.weighted_variance_ratio(values, short, decay, 1e-6, 20.0)
            assert ratio.item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_scaling_factor_worked_value() -> None:
    assert signals.scaling_factor(floats([[0.178]])).item() == pytest.approx(0.427607548, rel=1e-6)


@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, 1.5, -2.0, 7.0, -math.inf]) | st.floats(-9, 9, width=32), min_size=5, max_size=5
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_two_largest_are_those_of_sorting(rows: list[list[float]]) -> None:
    expected = [sorted(row, reverse=True)[:2] for row in rows]
    assert signals.two_largest(torch.tensor(rows)).tolist() == expected


def test_acceptance_probability_is_one_minus_total_variation() -> None:
    target, draft = (torch.softmax(x, -1) for x in paired_logits(20, 5, seed=5))
    expected = 1 - 0.5 * (target - draft).abs().sum(-1)
    torch.testing.assert_close(signals.acceptance_probability(target, draft), expected)
    assert signals.acceptance_probability(target, target).tolist() == pytest.approx([1.0] * 5)


class TestMemory:
    """What lies in between is bounded, whatever the batch."""

    @pytest.mark.parametrize("signal", ["entropy", "kl_divergence"])
    @pytest.mark.parametrize("shape", [(5, 7, 40), (35, 40), (2, 0, 40), (0, 3, 40), (40,), (1, 1, 40), (2, 3, 4, 40)])
    def test_parts_give_the_numbers_of_the_whole(self, signal, shape, monkeypatch):
        function = getattr(signals, signal)
        logits = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
        inputs = logits[:1] if signal == "entropy" else logits
        whole = function(*inputs)
        assert whole.shape == shape[:-1]
        monkeypatch.setattr(signals, "CPU_CACHE_ELEMENTS", 100)
        assert torch.equal(function(*inputs), whole)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_no_tensor_is_larger_than_a_part(self, device, monkeypatch):
        largest = []

        class Sizes(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and not func.is_view:
                    largest.append(result.numel())
                return result

        monkeypatch.setattr(signals, "CPU_CACHE_ELEMENTS", 3000)
        monkeypatch.setattr(signals, "DEVICE_ELEMENTS", 3000)
        target, draft = torch.randn(12, 9, 100, device=device), torch.randn(12, 8, 100, device=device)
        with Sizes():
            signals.kl_divergence(target[:, :8], draft)
        assert 0 < max(largest) <= 3000
