"""Slow references for the batch table: nearest size by logarithms, survival by counting, the best length by trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction


def nearest_length(table: dict[int, int], rows: int) -> int:
    """The length of the size whose ratio to `rows` is nearest to 1, the larger of two: exact, without logarithms."""

    def ratio(size: int) -> Fraction:
        return max(Fraction(size, rows), Fraction(rows, size))

    nearest = min(ratio(size) for size in table)
    return table[max(size for size in table if ratio(size) == nearest)]


def survival(rounds: list[tuple[int, int]]) -> list[float]:
    """Chances that the first 1, 2, ... tokens are accepted, from (drafted, accepted): one factor per tested token."""
    chances: list[float] = []
    chance = 1.0
    for token in range(1, max((k for k, _ in rounds), default=0) + 1):
        tested = accepted = 0
        for k, a in rounds:
            if k >= token and a >= token - 1:
                tested += 1
                accepted += a >= token
        if tested == 0:
            break
        chance *= accepted / tested
        chances.append(chance)
    return chances


def seconds_per_token(chances: list[float], length: int, draft: float, verify: Callable[[int], float]) -> float:
    """`(t_L(s) + s t_S) / l(s)` with `l(s)` the sum over all outcomes of their chance times their tokens."""
    tokens = 0.0
    for accepted in range(length + 1):
        reached = chances[accepted - 1] if accepted else 1.0
        further = chances[accepted] if accepted < length else 0.0
        tokens += (reached - further) * (accepted + 1)
    return (verify(length + 1) + length * draft) / tokens


def best_length(chances: list[float], draft: float, verify: Callable[[int], float]) -> int:
    best, least = 0, math.inf
    for length in range(len(chances) + 1):
        seconds = seconds_per_token(chances, length, draft, verify)
        if seconds < least * (1 - 1e-12):
            best, least = length, seconds
    return best
