"""Slow references for the signals and the DSDE policy: Python floats, lists, one row at a time, no tensors.

Written from the equations alone (arXiv 2509.01083), so that it shares no line and no data layout with the package:
windows are growing lists here and shifted tensors there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    exponentials = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def entropy(logits: list[float]) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(logits) if p > 0)


def kl_divergence(target_logits: list[float], draft_logits: list[float], floor: float = 1e-8) -> float:
    target, draft = softmax(target_logits), softmax(draft_logits)
    return math.fsum(p * (math.log(p) - math.log(max(q, floor))) for p, q in zip(target, draft, strict=True) if p > 0)


def weighted_variance(values: list[float], decay: float) -> float:
    if not values:
        return 0.0
    weights = [decay**age for age in reversed(range(len(values)))]
    total = math.fsum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    return math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / total


def weighted_variance_ratio(
    values: list[float], short: int, decay: float, flat_variance: float, flat_ratio: float
) -> float:
    if len(values) < 2:
        return 0.0
    long_variance = weighted_variance(values, decay)
    if long_variance < flat_variance:
        return flat_ratio
    return weighted_variance(values[-short:], decay) / long_variance


@dataclass
class Constants:
    """The constants of a DSDE variant; the defaults are the paper's."""

    sl_min: int = 2
    ceiling: int = 32
    initial_length: int = 5
    hold: bool = False
    cap: bool = True
    decay: float = 0.85
    short: int = 10
    long: int = 30
    to_first_rejection: bool = False
    coefficient: float = 1.0
    round_sl_max: bool = False
    sl_min_fraction: float = 0.0
    flat_variance: float = 1e-10
    flat_ratio: float = 1.0


def public_code_constants(ceiling: int) -> Constants:
    return Constants(
        sl_min=6,
        ceiling=min(20, ceiling),
        cap=False,
        decay=0.9,
        coefficient=0.5,
        round_sl_max=True,
        sl_min_fraction=0.1,
        flat_variance=1e-6,
        flat_ratio=20.0,
    )


@dataclass
class Row:
    """One sequence's history, every KLD ever seen included."""

    length: int
    klds: list[float] = field(default_factory=list)
    calibration_klds: list[float] = field(default_factory=list)
    best_accepted: int = 0
    last_mean: float = 0.0
    calibrated: bool = False
    active: bool = True


class ReferenceDSDE:
    """The policy, row by row."""

    def __init__(self, rows: int, constants: Constants) -> None:
        self.constants = constants
        self.rows = [Row(min(constants.initial_length, constants.ceiling)) for _ in range(rows)]

    def predicted(self, row: Row) -> float:
        """Eq. 8 with the bounds of Eq. 1, before rounding."""
        c = self.constants
        mean = math.fsum(row.calibration_klds) / len(row.calibration_klds)
        largest = row.best_accepted * (1 + c.coefficient * mean / (max(row.calibration_klds) + 1e-8))
        if c.round_sl_max:
            largest = round(largest)
        floor = min(c.sl_min, c.ceiling)
        largest = min(max(largest, floor), c.ceiling)
        smallest = min(max(math.ceil(c.sl_min_fraction * largest), floor), largest)
        ratio = weighted_variance_ratio(row.klds[-c.long :], c.short, c.decay, c.flat_variance, c.flat_ratio)
        product = (math.exp(2 * row.last_mean) - 1) * ratio
        return (1 - product) * (largest - smallest) + smallest if product <= 1 else float(smallest)

    def draft_lengths(self) -> list[int]:
        lengths = [math.ceil(self.predicted(r)) if r.calibrated else r.length for r in self.rows]
        bounded = [length for length, r in zip(lengths, self.rows, strict=True) if r.calibrated and r.active]
        if self.constants.cap and bounded:
            cap = math.ceil(math.fsum(bounded) / len(bounded))
            lengths = [min(n, cap) if r.calibrated else n for n, r in zip(lengths, self.rows, strict=True)]
        return [min(n, self.constants.ceiling) for n in lengths]

    def observe(self, drafted: list[int], accepted: list[int], active: list[bool], klds: list[list[float]]) -> None:
        c = self.constants
        for row, k, a, is_active, values in zip(self.rows, drafted, accepted, active, klds, strict=True):
            row.active = is_active
            if not is_active or k == 0:
                continue
            counted = values[: min(k, a + 1)] if c.to_first_rejection else values[:k]
            row.klds += counted
            row.last_mean = math.fsum(counted) / len(counted)
            if row.calibrated:
                continue
            row.calibration_klds += counted
            row.best_accepted = max(row.best_accepted, a)
            if not c.hold:
                if a >= row.length:
                    row.length = min(2 * row.length, c.ceiling)
                row.length = max(row.length, min(c.sl_min, c.ceiling))
            row.calibrated = len(row.klds) >= c.long
