"""What a round costs: seconds of its draft steps and of its verification pass, by the batch that they run for.

Measured, given or loaded; it does not change. Nothing here touches a model or a tensor.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hf_dsde.utils.checks import check_integer, check_number

LINE_COUNTS = (1, 8)
"""Where a straight curve has its points."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds as a function of a count, piecewise linear between measured points.

    Below the first point a curve is flat, down to 0, which takes no time; beyond the last it continues with the slope
    of the last two.

    Attributes:
        counts: Where it was measured, ascending.
        seconds: What was measured there, more than 0.

    Raises:
        ValueError: If the points do not ascend, or their numbers differ.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the points."""
        object.__setattr__(self, "counts", tuple(self.counts))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        if not self.counts or len(self.counts) != len(self.seconds):
            raise ValueError(
                f"`counts` has {len(self.counts)} entries and `seconds` {len(self.seconds)}; a curve needs as many of "
                "one as of the other, and at least one."
            )
        for count, seconds in zip(self.counts, self.seconds, strict=True):
            check_integer("counts", count, 1)
            check_number("seconds", seconds, 0.0, open_minimum=True)
        if any(a >= b for a, b in pairwise(self.counts)):
            raise ValueError(f"`counts` is {self.counts}, but ascending counts are needed.")

    @classmethod
    def line(cls, first: float, further: float) -> CostCurve:
        """A straight curve.

        Args:
            first: Seconds at 1, more than 0.
            further: Seconds that each count beyond 1 adds, at least 0.
        """
        low, high = LINE_COUNTS
        return cls(LINE_COUNTS, (first, first + (high - low) * further))

    @property
    def slope(self) -> float:
        """Seconds that a further count adds, on the way from the first point to the last; 0 if there is one only."""
        rise, run = self.seconds[-1] - self.seconds[0], self.counts[-1] - self.counts[0]
        return rise / run if run else 0.0

    def at(self, count: float) -> float:
        """Seconds at a count, which may be an average of counts."""
        counts, seconds = self.counts, self.seconds
        if count <= 0:
            return 0.0
        if count <= counts[0] or len(counts) == 1:
            return seconds[0]
        right = min(bisect_left(counts, count), len(counts) - 1)
        if count == counts[right]:
            return seconds[right]
        share = (count - counts[right - 1]) / (counts[right] - counts[right - 1])
        value = seconds[right - 1] + share * (seconds[right] - seconds[right - 1])
        # Noise can make the last slope negative; a wider pass is never taken to be cheaper for that.
        return value if count <= counts[-1] else max(value, seconds[-1])

    def scaled(self, factor: float) -> CostCurve:
        """The curve with all seconds multiplied."""
        return CostCurve(self.counts, tuple(factor * second for second in self.seconds))

    def with_point(self, count: int, seconds: float) -> CostCurve:
        """The curve with one point moved or added."""
        points = dict(zip(self.counts, self.seconds, strict=True)) | {count: seconds}
        return CostCurve(tuple(sorted(points)), tuple(points[known] for known in sorted(points)))


@dataclass(frozen=True)
class BatchCosts:
    """Costs of the passes of one batch size.

    Attributes:
        draft: Seconds of all draft steps of a round, by their number; None where drafts are free, or not timed yet.
            Given at a single number of steps, they are shared equally, and further ones cost as much.
        verify: Seconds of the target's pass, by columns per row.
        overhead: Extra seconds of a round, beyond both.
        resumption: Extra seconds of the first round with drafts after rounds without, in which the draft reads the
            tokens that it missed; 0 until it has been seen.
        texts: Extra seconds of a round in which texts draft beside a model, without the looks at them: nothing of it is
            made ready ahead. 0 until it has been seen.
        measured_step: Seconds of a draft step by itself: what a further one is taken to cost where rounds have not
            shown it. By default, or if it is 0, the slope of `draft`.
    """

    draft: CostCurve | None
    verify: CostCurve
    overhead: float = 0.0
    resumption: float = 0.0
    texts: float = 0.0
    measured_step: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not isinstance(self.draft, CostCurve | None):
            raise TypeError(
                f"`draft` is {self.draft!r}, but a curve over draft steps is needed, or None. Steps that all cost the "
                "same are `CostCurve.line(seconds, seconds)`."
            )
        if self.draft is not None and len(self.draft.counts) == 1:
            step = self.draft.seconds[0] / self.draft.counts[0]
            object.__setattr__(self, "draft", CostCurve.line(step, step))
        if self.measured_step == 0:
            object.__setattr__(self, "measured_step", self._slope)
        check_number("overhead", self.overhead, 0.0)
        check_number("resumption", self.resumption, 0.0)
        check_number("texts", self.texts, 0.0)
        check_number("measured_step", self.measured_step, 0.0)

    def draft_seconds(self, steps: int) -> float:
        """Seconds of a round's draft steps; none take no time."""
        return 0.0 if self.draft is None else self.draft.at(steps)

    def round_seconds(self, draft_steps: int) -> float:
        """Seconds of a round in which every row drafts `draft_steps` tokens."""
        return self.draft_seconds(draft_steps) + self.verify.at(draft_steps + 1) + self.overhead

    @property
    def _slope(self) -> float:
        return 0.0 if self.draft is None else self.draft.slope

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON holds them; without what is as it is by default."""
        return {
            "draft": {} if self.draft is None else _points(self.draft),
            "verify": _points(self.verify),
            "overhead": self.overhead,
            "resumption": self.resumption,
            **({"texts": self.texts} if self.texts else {}),
            **({"measured_step": self.measured_step} if self.measured_step != self._slope else {}),
        }


@dataclass(frozen=True)
class CostModel:
    """Costs of a pair of models by batch size.

    Attributes:
        batches: What was measured, by number of rows. Other batch sizes are interpolated linearly; beyond the smallest
            and the largest the nearest one counts.

    Raises:
        ValueError: If there is none, or a number of rows is no positive integer.
    """

    batches: Mapping[int, BatchCosts]

    def __post_init__(self) -> None:
        """Check the batch sizes."""
        if not self.batches:
            raise ValueError("`batches` is empty; costs of at least one batch size are needed.")
        for rows in self.batches:
            check_integer("batches", rows, 1)
        object.__setattr__(self, "batches", dict(sorted(self.batches.items())))

    def at(self, rows: int) -> BatchCosts:
        """Costs at a batch size."""
        known = list(self.batches)
        if rows <= known[0]:
            return self.batches[known[0]]
        if rows >= known[-1]:
            return self.batches[known[-1]]
        right = next(i for i, size in enumerate(known) if size >= rows)
        share = (rows - known[right - 1]) / (known[right] - known[right - 1])
        return _between(self.batches[known[right - 1]], self.batches[known[right]], share)

    def merged(self, other: CostModel) -> CostModel:
        """Both, `other`'s where both know a batch size."""
        return CostModel({**self.batches, **other.batches})

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON holds them."""
        return {str(rows): costs.to_dict() for rows, costs in self.batches.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """The model that `to_dict` described. `"draft_step": seconds` may stand for drafts whose steps cost the same.

        Raises:
            ValueError: If it is no such description.
        """
        try:
            batches = {
                int(rows): BatchCosts(
                    draft=_equal_steps(costs["draft_step"]) if "draft_step" in costs else _draft_curve(costs["draft"]),
                    verify=_curve(costs["verify"]),
                    overhead=costs.get("overhead", 0.0),
                    resumption=costs.get("resumption", 0.0),
                    texts=costs.get("texts", 0.0),
                    measured_step=costs.get("measured_step", 0.0),
                )
                for rows, costs in values.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as failure:
            raise ValueError(
                f"{_shortened(values)} describes no costs ({failure!r}). Expected, by number of rows: "
                '{"8": {"draft": {"1": seconds, "4": seconds}, "verify": {"1": seconds, "5": seconds}, "overhead": '
                "seconds}}; the draft's seconds are those of all steps of a round."
            ) from failure
        return cls(batches)

    @classmethod
    def relative(cls, draft_cost: float, verify: Sequence[float], rows: int = 1) -> CostModel:
        """Costs in units of a plain step.

        Args:
            draft_cost: Cost of a draft step.
            verify: Cost of a pass of 1, 2, ... columns per row; the first is usually 1.
            rows: The batch size they hold for.
        """
        curve = CostCurve(tuple(range(1, len(verify) + 1)), tuple(verify))
        return cls({rows: BatchCosts(_equal_steps(draft_cost), curve)})


def _between(low: BatchCosts, high: BatchCosts, share: float) -> BatchCosts:
    def mean(a: float, b: float) -> float:
        return a + share * (b - a)

    def curve(a: CostCurve, b: CostCurve) -> CostCurve:
        counts = tuple(sorted({*a.counts, *b.counts}))
        return CostCurve(counts, tuple(mean(a.at(count), b.at(count)) for count in counts))

    return BatchCosts(
        curve(low.draft, high.draft) if low.draft and high.draft else low.draft or high.draft,
        curve(low.verify, high.verify),
        mean(low.overhead, high.overhead),
        mean(low.resumption, high.resumption),
        mean(low.texts, high.texts),
        mean(low.measured_step, high.measured_step),
    )


def _equal_steps(seconds: float) -> CostCurve | None:
    return CostCurve.line(seconds, seconds) if check_number("draft_step", seconds, 0.0) else None


def _draft_curve(points: Mapping[str, float]) -> CostCurve | None:
    return _curve(points) if points else None


def _points(curve: CostCurve) -> dict[str, float]:
    return {str(count): seconds for count, seconds in zip(curve.counts, curve.seconds, strict=True)}


def _curve(points: Mapping[str, float]) -> CostCurve:
    by_count = sorted((int(count), seconds) for count, seconds in points.items())
    return CostCurve(tuple(count for count, _ in by_count), tuple(seconds for _, seconds in by_count))


def _shortened(values: object) -> str:
    text = json.dumps(values, default=repr)
    return text if len(text) < 200 else f"{text[:200]}..."
