"""What lets a drafted token stand by the papers' formulas, in plain Python: for one text, position by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MARGIN = 1e-4
"""Where a float32 may fall on the other side of a threshold, nothing is said."""

Verdict = tuple[bool, float]
"""Whether a token stands, and how far it is from the threshold, in nats."""


def law_of(scores: Sequence[float]) -> list[float]:
    masses = [math.exp(score - max(scores)) for score in scores]
    return [mass / math.fsum(masses) for mass in masses]


def consultant(laws: Sequence[Sequence[float]], tokens: Sequence[int], epsilon: float, beta: float) -> list[Verdict]:
    """r_i = beta * r_(i-1) + (1 - beta) * -ln p_i(x_i); x_i stands while r_i <= epsilon."""
    verdicts, r = [], 0.0
    for p, x in zip(laws, tokens, strict=True):
        r = beta * r + (1 - beta) * (-math.log(p[x]) if p[x] > 0 else math.inf)
        verdicts.append((r <= epsilon, abs(r - epsilon)))
    return verdicts


def typical(laws: Sequence[Sequence[float]], tokens: Sequence[int], epsilon: float, delta: float) -> list[Verdict]:
    """x_i stands where p_i(x_i) > min(epsilon, delta * exp(-H(p_i)))."""
    verdicts = []
    for p, x in zip(laws, tokens, strict=True):
        entropy = -math.fsum(mass * math.log(mass) for mass in p if mass > 0)
        least = min(epsilon, delta * math.exp(-entropy))
        verdicts.append((p[x] > least, abs(math.log(p[x] / least)) if p[x] > 0 else math.inf))
    return verdicts


Reference = Callable[[Sequence[Sequence[float]], Sequence[int]], list[Verdict]]
"""Takes the target's law at every position of a block, and the tokens drafted there."""


def expected_end(laws: list[list[float]], verdicts: list[Verdict], tokens: list[int], greedy: bool) -> int | None:
    """How many tokens are accepted; None where float32 could decide otherwise."""
    for position, (token, (stands, distance)) in enumerate(zip(tokens, verdicts, strict=True)):
        if greedy and laws[position][token] == max(laws[position]):
            continue
        if distance < MARGIN:
            return None
        if not stands:
            return position
    return len(tokens)
