"""The scalars of a position in plain Python floats, straight from their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

FLOOR = 1e-8


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    return max(0.0, math.fsum(a * (math.log(a) - math.log(max(b, FLOOR))) for a, b in zip(p, q, strict=True) if a > 0))


def entropy(p: Sequence[float]) -> float:
    return -math.fsum(a * math.log(a) for a in p if a > 0)


def position_scalars(target_logits: Sequence[float], draft_logits: Sequence[float], token: int) -> dict[str, float]:
    """Every column of a position but `residual_draft_probability`."""
    p, q = softmax(target_logits), softmax(draft_logits)
    target_argmax = max(range(len(p)), key=p.__getitem__)
    draft_argmax = max(range(len(q)), key=q.__getitem__)
    p_sorted, q_sorted = sorted(p, reverse=True), sorted(q, reverse=True)
    return {
        "token": token,
        "target_argmax": target_argmax,
        "draft_argmax": draft_argmax,
        "target_agrees": target_argmax == token,
        "draft_agrees": draft_argmax == token,
        "target_probability": p[token],
        "draft_probability": q[token],
        "acceptance": math.fsum(min(a, b) for a, b in zip(p, q, strict=True)),
        "kld": divergence(p, q),
        "reverse_kld": divergence(q, p),
        "target_entropy": entropy(p),
        "draft_entropy": entropy(q),
        "target_top1": p_sorted[0],
        "target_top2": p_sorted[1],
        "draft_top1": q_sorted[0],
        "draft_top2": q_sorted[1],
    }


def rejected_law(target_logits: Sequence[float], draft_logits: Sequence[float]) -> list[float]:
    """`norm(max(q - p, 0))`: the law of a draft token that was rejected."""
    p, q = softmax(target_logits), softmax(draft_logits)
    left = [max(b - a, 0.0) for a, b in zip(p, q, strict=True)]
    total = math.fsum(left)
    return [value / total for value in left]
