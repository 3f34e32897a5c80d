"""Slow reference of SVIP (arXiv 2411.18462): Python floats, one row and one token at a time, no tensors."""

from __future__ import annotations

import math


def drafted_tokens(
    distributions: list[list[float]], longest: int = 40, threshold: float = 0.3, coefficient: float = 0.15
) -> int:
    """How many tokens a row drafts, given the draft's distribution at each position."""
    count = 0
    for probabilities in distributions[:longest]:
        count += 1
        entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
        if math.sqrt(coefficient * entropy) > threshold:
            break
    return count
