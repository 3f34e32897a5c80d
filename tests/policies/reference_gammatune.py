"""Slow reference of GammaTune (arXiv 2504.00030, Algorithm 1): Python floats, one row at a time, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass


def clip(value: float, least: float, most: float) -> float:
    return max(least, min(most, value))


@dataclass
class ReferenceRow:
    """One sequence: its draft length gamma and the mean gamma-bar of what it accepts."""

    gamma: int = 3
    mean: float = 3.0
    delta: int = 2
    eta: float = 0.3
    least: int = 1
    most: int = 10

    def observe(self, drafted: int, accepted: int) -> None:
        """What the row learns from the first gamma tokens of its draft."""
        drafted, accepted = min(drafted, self.gamma), min(accepted, self.gamma)
        if accepted == self.gamma:
            self.gamma = int(clip(accepted + self.delta, self.least, self.most))
        elif accepted == drafted:  # ended early, by a limit or by GammaTune+, and nothing was rejected
            self.gamma = max(self.gamma, int(clip(accepted + self.delta, self.least, self.most)))
        else:
            self.mean = clip((1 - self.eta) * self.mean + self.eta * accepted, self.least, self.most)
            self.gamma = math.ceil(self.mean)


def drafted_tokens(distributions: list[list[float]], longest: int, threshold: float) -> int:
    """How many tokens GammaTune+ drafts, given the draft's distribution at each position."""
    count = 0
    for probabilities in distributions[:longest]:
        count += 1
        if max(probabilities) < threshold:
            break
    return count
