"""The bandits' indices against plain Python, their choices, and what they find out."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import reference_tapout as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hf_dsde.policies.bandits import (
    BANDITS,
    ArmStatistics,
    best_arm,
    standard_normal,
    thompson_index,
    ucb1_index,
    ucb_tuned_index,
)

CPU = torch.device("cpu")
rewards_of_arms = st.lists(st.lists(st.floats(0, 1, width=16), max_size=30), min_size=1, max_size=6)


def statistics_of(rewards: list[list[float]]) -> ArmStatistics:
    return ArmStatistics(
        torch.tensor([len(r) for r in rewards]),
        torch.tensor([sum(r) for r in rewards]),
        torch.tensor([sum(x * x for x in r) for r in rewards]),
    )


@pytest.mark.parametrize("bandit", BANDITS)
@given(rewards=rewards_of_arms, seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=150)
def test_indices_are_the_references(bandit: str, rewards: list[list[float]], seed: int) -> None:
    index = BANDITS[bandit](statistics_of(rewards), seed)
    # A variance of nearly 0 is the difference of two sums: its root keeps half of float32's digits.
    expected = reference.indices(bandit, rewards, seed)
    assert index.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


class TestWorkedValues:
    """Arms played 2 and 8 times with mean rewards 0.5 and 0.6, t = 10, ln t = 2.302585."""

    rewards = ([0.2, 0.8], [0.5, 0.7] * 4)

    def test_ucb1(self) -> None:
        # The roots of 2 ln 10 / 2 and 2 ln 10 / 8 are 1.5174271 and 0.7587136.
        assert ucb1_index(statistics_of(list(self.rewards))).tolist() == pytest.approx([2.0174271, 1.3587136])

    def test_ucb_tuned(self) -> None:
        # V = 0.09 + 1.517 and 0.01 + 0.759, both above 1/4: 0.5 + sqrt(1.1512925 / 4), 0.6 + sqrt(0.2878231 / 4)
        assert ucb_tuned_index(statistics_of(list(self.rewards))).tolist() == pytest.approx([1.0364914, 0.8682457])

    def test_ucb_tuned_with_a_small_variance(self) -> None:
        # 500 plays of 1/2 in each arm: V = sqrt(2 ln 1000 / 500) = 0.1662258, sqrt(ln 1000 / 500 V) = 0.0479215
        index = ucb_tuned_index(statistics_of([[0.5] * 500] * 2))
        assert index.tolist() == pytest.approx([0.5479215] * 2, abs=1e-5)

    def test_thompson_is_centred_between_prior_and_mean(self) -> None:
        draws = torch.stack([thompson_index(statistics_of(list(self.rewards)), seed) for seed in range(2000)])
        assert draws.mean(0).tolist() == pytest.approx([0.5, 5.3 / 9], abs=0.03)
        assert draws.std(0).tolist() == pytest.approx([(0.25 / 3) ** 0.5, (0.25 / 9) ** 0.5], rel=0.06)


def test_thompson_plays_an_arm_as_often_as_it_is_believed_to_be_the_best() -> None:
    rewards = [[0.2, 0.8, 0.4], [0.5, 0.7, 0.9, 0.6]]
    seeds = 4000
    second = sum(best_arm(thompson_index(statistics_of(rewards), seed)).item() for seed in range(seeds))
    posteriors = NormalDist((0.5 + 2.7) / 5, (0.25 / 5) ** 0.5), NormalDist((0.5 + 1.4) / 4, (0.25 / 4) ** 0.5)
    share = 1 - (posteriors[0] - posteriors[1]).cdf(0.0)
    assert 0.6 < share < 0.8
    assert second / seeds == pytest.approx(share, abs=4 * (share * (1 - share) / seeds) ** 0.5)


class TestChoice:
    def test_first_of_equal_arms(self) -> None:
        index = torch.tensor([[0.1, 0.7, 0.7], [torch.inf, 0.0, torch.inf], [0.2, 0.2, 0.2], [0.0, 0.1, 0.9]])
        assert best_arm(index).tolist() == [1, 0, 0, 2]

    @pytest.mark.parametrize("bandit", ["ucb1", "ucb_tuned"])
    def test_the_bounds_play_every_arm_once_in_order(self, bandit: str) -> None:
        statistics = ArmStatistics.nothing(4, device=CPU)
        for arm in range(4):
            assert best_arm(BANDITS[bandit](statistics, 0)).item() == arm
            statistics = statistics.plus(ArmStatistics.of_plays(torch.arange(4) == arm, torch.tensor(1.0)))

    @pytest.mark.parametrize(("bandit", "share"), [("ucb1", 0.6), ("ucb_tuned", 0.8), ("thompson", 0.8)])
    def test_finds_the_best_of_three_arms(self, bandit: str, share: float) -> None:
        """Forty rows with a bandit each, rewards of 0 or 1 with chances 0.2, 0.5 and 0.8, 400 plays."""
        rows, chances = 40, torch.tensor([0.2, 0.5, 0.8])
        generator = torch.Generator().manual_seed(0)
        statistics = ArmStatistics.nothing(rows, 3, device=CPU)
        for _ in range(400):
            arm = best_arm(BANDITS[bandit](statistics, 0))
            reward = (torch.rand(rows, generator=generator) < chances[arm]).float()
            played = arm.unsqueeze(-1) == torch.arange(3)
            statistics = statistics.plus(ArmStatistics.of_plays(played, reward.unsqueeze(-1)))
        assert statistics.plays.sum(-1).tolist() == [400] * rows
        assert statistics.plays[:, 2].float().mean().item() / 400 > share
        assert int(statistics.plays.min()) >= 1


class TestStatistics:
    def test_rewards_of_arms_that_were_not_played_do_not_count(self) -> None:
        statistics = ArmStatistics.of_plays(torch.tensor([True, False]), torch.tensor([0.5, torch.nan]))
        assert statistics.plays.tolist() == [1, 0]
        assert statistics.rewards.tolist() == [0.5, 0.0]
        assert statistics.squares.tolist() == [0.25, 0.0]

    def test_mean_and_variance(self) -> None:
        statistics = statistics_of([[0.25, 0.75], [0.5], []])
        assert statistics.mean.tolist() == [0.5, 0.5, 0.0]
        assert statistics.variance.tolist() == [0.0625, 0.0, 0.0]

    def test_pooling_adds_rows(self) -> None:
        played = torch.tensor([[True, False], [True, False], [False, True]])
        pooled = ArmStatistics.of_plays(played, torch.tensor([[0.5], [1.0], [0.25]])).pooled()
        assert pooled.plays.tolist() == [2, 1]
        assert pooled.rewards.tolist() == [1.5, 0.25]
        assert pooled.squares.tolist() == [1.25, 0.0625]


class TestDraws:
    @given(count=st.integers(0, 2**40), seed=st.integers(0, 2**32 - 1))
    @settings(deadline=None, max_examples=150)
    def test_are_the_references(self, count: int, seed: int) -> None:
        expected = [reference.standard_normal(count, column, seed) for column in range(5)]
        assert standard_normal(torch.tensor(count), 5, seed).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)

    @pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
    def test_are_standard_normal_and_independent(self, seed: int) -> None:
        draws = standard_normal(torch.arange(20_000), 5, seed)
        assert stats.kstest(draws.flatten().double().numpy(), "norm").pvalue > 0.001
        shifted = torch.cat([draws[1:], draws[:-1]], dim=1)
        unrelated = torch.corrcoef(shifted.T) - torch.eye(10)
        assert unrelated.abs().max().item() < 5 / 20_000**0.5

    def test_are_finite_and_the_same_for_a_row_alone(self) -> None:
        counts = torch.tensor([0, 3, 2**31, 2**32 - 1])
        draws = standard_normal(counts, 3, 5)
        assert draws.isfinite().all()
        for count, row in zip(counts, draws, strict=True):
            assert standard_normal(count, 3, 5).tolist() == row.tolist()
