"""Slow reference of AdaEDL (arXiv 2410.18351): Python floats, one row and one token at a time, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass


def entropy(probabilities: list[float]) -> float:
    """In nats."""
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


@dataclass
class ReferenceRow:
    """One sequence: its threshold lambda and its acceptance rate AR."""

    gamma: float = 0.2
    threshold: float = 0.5
    longest: int = 7
    end_condition: str = "not_full"
    rate: float = 0.0

    def is_unsure(self, probabilities: list[float]) -> bool:
        """Whether drafting ends after a token of this distribution."""
        return 1 - math.sqrt(self.gamma * entropy(probabilities)) < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        self.rate = 0.5 * self.rate + (1 - 0.5) * (accepted / drafted)
        may_fall = {"full": accepted == self.longest, "not_full": drafted != self.longest}[self.end_condition]
        moved = self.threshold
        if self.rate < 0.9:
            moved = self.threshold + 0.01
        elif self.rate > 0.9 and may_fall:
            moved = self.threshold - 0.01
        self.threshold = 0.9 * self.threshold + (1 - 0.9) * moved


def drafted_tokens(
    rows: list[ReferenceRow], distributions: list[list[list[float]]], limits: list[int], scope: str
) -> list[int]:
    """How many tokens each row drafts in a round.

    Args:
        rows: All sequences.
        distributions: The draft's distribution at each position, by row.
        limits: The most tokens that each row may draft.
        scope: "row" or "batch".
    """
    counts = [0] * len(rows)
    stopped = [False] * len(rows)
    for position in range(max(limits)):
        unsure = []
        for i, row in enumerate(rows):
            if position < limits[i] and not stopped[i]:
                counts[i] += 1
                if row.is_unsure(distributions[i][position]):
                    unsure.append(i)
        for i in range(len(rows)) if unsure and scope == "batch" else unsure:
            stopped[i] = True
    return counts
