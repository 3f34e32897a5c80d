"""Bandit rules: which of a few arms to play next, from the rewards that each has brought.

Pure functions over tensors whose last dimension counts the arms. Rewards lie in [0, 1]. Nothing here knows what an arm
does, keeps a state or waits for the device; random numbers are functions of a seed and a count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_VARIANCE = 0.25
"""The most variance that a reward between 0 and 1 can have."""
PRIOR_MEAN = 0.5
"""Thompson sampling's belief in an arm that was never played, worth one play."""

GOLDEN_RATIO = 0x9E3779B9
"""2^32 / phi, odd: its multiples lie far apart modulo 2^32."""
LOWER_BITS = 0xFFFFFFFF


class ArmStatistics(NamedTuple):
    """What is known of each arm.

    Attributes:
        plays: How often it was played, shape `[..., arms]`, int64.
        rewards: Sum of its rewards, shape `[..., arms]`, float32.
        squares: Sum of their squares, shape `[..., arms]`, float32.
    """

    plays: Tensor
    rewards: Tensor
    squares: Tensor

    @classmethod
    def nothing(cls, *shape: int, device: torch.device) -> ArmStatistics:
        """Statistics of arms that were never played."""
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )

    @classmethod
    def of_plays(cls, played: Tensor, reward: Tensor) -> ArmStatistics:
        """Statistics of arms that were played once or not at all.

        Args:
            played: Which were, shape `[..., arms]`, bool.
            reward: What it brought, float32, of a shape that broadcasts; anything where nothing was played.
        """
        counted = torch.where(played, reward, 0.0)
        return cls(played.long(), counted, counted.square())

    def plus(self, others: ArmStatistics) -> ArmStatistics:
        """The statistics of both together, of equal shapes."""
        return ArmStatistics(self.plays + others.plays, self.rewards + others.rewards, self.squares + others.squares)

    def pooled(self) -> ArmStatistics:
        """The statistics of all rows together, `[rows, arms]` to `[arms]`."""
        return ArmStatistics(*(values.sum(0) for values in self))

    @property
    def mean(self) -> Tensor:
        """Mean reward of each arm, shape `[..., arms]`, float32; 0 before the first play."""
        return self.rewards / self.plays.clamp_min(1)

    @property
    def variance(self) -> Tensor:
        """Variance of each arm's rewards, shape `[..., arms]`, float32, divided by the number of plays."""
        return (self.squares / self.plays.clamp_min(1) - self.mean.square()).clamp_min(0.0)


def ucb1_index(statistics: ArmStatistics) -> Tensor:
    """UCB1 (Auer, Cesa-Bianchi and Fischer 2002, Fig. 1): `mean + sqrt(2 ln t / n)`.

    Args:
        statistics: n is an arm's number of plays, t that of all arms together.

    Returns:
        Shape `[..., arms]`, float32; infinite for arms that were never played.
    """
    return _until_played(statistics, statistics.mean + (2 * _log_time_per_play(statistics)).sqrt())


def ucb_tuned_index(statistics: ArmStatistics) -> Tensor:
    """UCB1-Tuned (Auer, Cesa-Bianchi and Fischer 2002, Sec. 4): `mean + sqrt(ln t / n min(1/4, V))`.

    `V = variance + sqrt(2 ln t / n)` bounds the arm's variance from above.

    Args:
        statistics: n is an arm's number of plays, t that of all arms together.

    Returns:
        Shape `[..., arms]`, float32; infinite for arms that were never played.
    """
    per_play = _log_time_per_play(statistics)
    variance = (statistics.variance + (2 * per_play).sqrt()).clamp_max(LARGEST_VARIANCE)
    return _until_played(statistics, statistics.mean + (per_play * variance).sqrt())


def thompson_index(statistics: ArmStatistics, seed: int) -> Tensor:
    """Thompson sampling with Gaussian posteriors: one draw of each arm's mean reward.

    `(1/2 + sum of rewards) / (n + 1) + z sqrt(1/4 / (n + 1))` with z standard normal: what is believed of a mean when
    rewards scatter with the largest variance that values in [0, 1] can have, and one reward of 1/2 was seen beforehand.
    Agrawal and Goyal (2013, Alg. 2) use the same form with a variance of 1 and a prior mean of 0.

    Args:
        statistics: n is an arm's number of plays. The draw is new whenever the plays of all arms together are.
        seed: Seed of the draws.

    Returns:
        Shape `[..., arms]`, float32.
    """
    plays = statistics.plays + 1
    draws = standard_normal(statistics.plays.sum(-1), statistics.plays.shape[-1], seed)
    return (PRIOR_MEAN + statistics.rewards) / plays + draws * (LARGEST_VARIANCE / plays).sqrt()


def best_arm(index: Tensor) -> Tensor:
    """The arm of the largest index, the first of equal ones, `[..., arms]` to `[...]`, int64."""
    arms = index.shape[-1]
    # `argmax` names any of several largest values.
    is_best = index == index.amax(-1, keepdim=True)
    return torch.where(is_best, torch.arange(arms, device=index.device), arms - 1).amin(-1)


def standard_normal(count: Tensor, columns: int, seed: int) -> Tensor:
    """Draws from the standard normal that depend on nothing but their arguments.

    A generator's next number depends on how often it was asked, by whom and on which device. These can be asked for
    again, for any row alone, and on a device without generators.

    Args:
        count: Shape `[...]`, int64. Each value has draws of its own; only its lower 32 bits count.
        columns: Number of draws per count.
        seed: Any integer from 0 to 2^32 - 1.

    Returns:
        Shape `[..., columns]`, float32.
    """
    column = torch.arange(1, columns + 1, device=count.device)
    key = (seed + 1) * GOLDEN_RATIO & LOWER_BITS
    bits = _scrambled(_scrambled(count ^ key).unsqueeze(-1) + column * GOLDEN_RATIO)
    # 23 bits and a half are the most that float32 keeps apart from 1.
    return torch.special.ndtri(((bits >> 9).float() + 0.5) / 2**23)


def _scrambled(values: Tensor) -> Tensor:
    """Lower 32 bits, mixed by the finaliser of MurmurHash3 (Appleby): one bit in, every bit out. int64 to int64."""
    bits = values & LOWER_BITS
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & LOWER_BITS
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & LOWER_BITS
    return bits ^ (bits >> 16)


def _log_time_per_play(statistics: ArmStatistics) -> Tensor:
    """`ln t / n` of each arm, shape `[..., arms]`, float32."""
    time = statistics.plays.sum(-1, keepdim=True).clamp_min(1)
    return time.log() / statistics.plays.clamp_min(1)


def _until_played(statistics: ArmStatistics, index: Tensor) -> Tensor:
    return torch.where(statistics.plays > 0, index, torch.inf)


BANDITS: dict[str, Callable[[ArmStatistics, int], Tensor]] = {
    "ucb1": lambda statistics, _seed: ucb1_index(statistics),
    "ucb_tuned": lambda statistics, _seed: ucb_tuned_index(statistics),
    "thompson": thompson_index,
}
"""Each rule's index by name, from statistics and a seed that only Thompson sampling uses."""
