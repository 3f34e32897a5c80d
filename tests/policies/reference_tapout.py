"""Slow references for the bandits and for TapOut: Python floats and lists of rewards, one row at a time, no tensors.

Written from the formulas (Auer, Cesa-Bianchi and Fischer 2002; Agrawal and Goyal 2013; arXiv 2511.02017; arXiv
2410.18351). A bandit keeps every reward it has seen; the package keeps sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, pvariance

from reference_dsde import entropy, softmax

ARMS = ("max_confidence", "svip", "adaedl", "svip_difference", "logit_margin")


def ucb1(rewards: list[list[float]]) -> list[float]:
    time = sum(map(len, rewards))
    return [fmean(r) + math.sqrt(2 * math.log(time) / len(r)) if r else math.inf for r in rewards]


def ucb_tuned(rewards: list[list[float]]) -> list[float]:
    time = sum(map(len, rewards))

    def index(r: list[float]) -> float:
        variance = pvariance(r) + math.sqrt(2 * math.log(time) / len(r))
        return fmean(r) + math.sqrt(math.log(time) / len(r) * min(1 / 4, variance))

    return [index(r) if r else math.inf for r in rewards]


def murmur(word: int) -> int:
    """The finaliser of MurmurHash3 on 32 bits."""
    word %= 2**32
    word ^= word >> 16
    word = word * 0x85EBCA6B % 2**32
    word ^= word >> 13
    word = word * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def standard_normal(count: int, column: int, seed: int) -> float:
    golden = 0x9E3779B9
    bits = murmur(murmur(count % 2**32 ^ (seed + 1) * golden % 2**32) + (column + 1) * golden)
    return NormalDist().inv_cdf(((bits >> 9) + 0.5) / 2**23)


def thompson(rewards: list[list[float]], seed: int) -> list[float]:
    time = sum(map(len, rewards))
    return [
        (0.5 + math.fsum(r)) / (len(r) + 1) + standard_normal(time, arm, seed) * math.sqrt(0.25 / (len(r) + 1))
        for arm, r in enumerate(rewards)
    ]


def indices(bandit: str, rewards: list[list[float]], seed: int) -> list[float]:
    if bandit == "thompson":
        return thompson(rewards, seed)
    return (ucb1 if bandit == "ucb1" else ucb_tuned)(rewards)


@dataclass
class Constants:
    """Settings of a TapOut policy."""

    bandit: str = "ucb1"
    scope: str = "batch"
    arms: tuple[str, ...] = ARMS
    longest: int = 20
    blend: float = 0.5
    seed: int = 0


@dataclass
class Row:
    """One sequence: AdaEDL's state, and the entropy of the session's newest token."""

    threshold: float = 0.5
    acceptance: float = 0.0
    root_entropy: float | None = None
    arm: int = 0


@dataclass
class ReferenceTapOut:
    """The policy, row by row. `rewards[group][arm]` holds every reward; a group is the batch or a row."""

    rows: list[Row]
    constants: Constants
    rewards: list[list[list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = 1 if self.constants.scope == "batch" else len(self.rows)
        self.rewards = [[[] for _ in self.constants.arms] for _ in range(groups)]

    def group(self, row: int) -> list[list[float]]:
        return self.rewards[0 if self.constants.scope == "batch" else row]

    def candidates(self, row: int, tolerance: float) -> list[int]:
        """The arms whose index is the largest, but for rounding; the first one never played, if there is any."""
        values = indices(self.constants.bandit, self.group(row), self.constants.seed)
        if math.inf in values:
            return [values.index(math.inf)]
        return [arm for arm, value in enumerate(values) if value >= max(values) - tolerance]

    def start_session(self, arms: list[int]) -> None:
        for row, arm in zip(self.rows, arms, strict=True):
            row.arm, row.root_entropy = arm, None

    def stops(self, index: int, logits: list[float]) -> bool:
        row = self.rows[index]
        second, largest = sorted(softmax(logits))[-2:]
        h = entropy(logits)
        before, row.root_entropy = row.root_entropy, math.sqrt(h)
        arm = self.constants.arms[row.arm]
        if arm == "max_confidence":
            return largest < 0.8
        if arm == "svip":
            return math.sqrt(h) > 0.6
        if arm == "adaedl":
            return 1 - math.sqrt(0.2 * h) < row.threshold
        if arm == "svip_difference":
            return before is not None and math.sqrt(h) - before > 0.2
        return largest - second < 0.2

    def observe(self, drafted: list[int], accepted: list[int], active: list[bool]) -> None:
        c = self.constants
        for index, (row, k, a, is_active) in enumerate(zip(self.rows, drafted, accepted, active, strict=True)):
            if not is_active or k == 0:
                continue
            self.group(index)[row.arm].append(c.blend * a / c.longest + (1 - c.blend) * a / k)
            if c.arms[row.arm] == "adaedl":
                row.acceptance = 0.5 * row.acceptance + 0.5 * a / k
                step = 0.01 if row.acceptance < 0.9 else -0.01 if row.acceptance > 0.9 and k < c.longest else 0.0
                row.threshold = 0.9 * row.threshold + 0.1 * (row.threshold + step)
