"""What a round costs: seconds of a draft step and of a verification pass, by the batch that they run for.

A `CostModel` is measured, given or loaded, and does not change. `LiveCosts` is one call's view of it: it knows how many
rows are in the passes and follows the timings of the rounds. Nothing here touches a model or a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hf_dsde.argument_checks import check_integer, check_number

OBSERVED_RATE = 0.1
"""Weight of a new timing in the cost of the width it was taken at."""
FAR_CHEAPER = 0.8
"""Below this fraction of what was expected, a timing says that a draft step had been taken for far too dear ..."""
FAR_CHEAPER_RATE = 0.5
"""... and has this weight: no stall makes a step so fast, and a step that is too dear is hardly ever timed again."""
RESUMED_RATE = 0.5
"""Weight of a new timing in what it takes to draft again: such rounds are few."""
MOST_BESIDES = 2.0
"""Passes of one column per row that drafting again, or what a round takes besides, counts as at most."""
SHARED_RATE = 0.05
"""Weight of a new timing in the costs of all other widths: as contexts grow, widths that are not used cost more too."""
LARGEST_RATIO = 1.25
"""A timing counts as at most this many times what was expected: hosts stall, now and then for a dozen rounds ..."""
LEAST_RATIO = 0.5
"""... and as at least this fraction of it."""
VERSION_TOLERANCE = 0.02
"""Costs count as changed when one has moved by this fraction."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds as a function of a count, piecewise linear between measured points.

    Below the first point a curve is flat; beyond the last it continues with the slope of the last two.

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

    def at(self, count: int) -> float:
        """Seconds at a count."""
        counts, seconds = self.counts, self.seconds
        if count <= counts[0] or len(counts) == 1:
            return seconds[0]
        right = next((i for i, known in enumerate(counts) if known >= count), len(counts) - 1)
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
        draft_step: Seconds of one draft step.
        verify: Seconds of the target's pass, by columns per row.
        overhead: Seconds a round takes besides.
        resumption: Seconds that drafting takes besides behind rounds without drafts, all of whose tokens the draft has
            missed; 0 until it has been seen.
    """

    draft_step: float
    verify: CostCurve
    overhead: float = 0.0
    resumption: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_number("draft_step", self.draft_step, 0.0, open_minimum=True)
        check_number("overhead", self.overhead, 0.0)
        check_number("resumption", self.resumption, 0.0)

    def round_seconds(self, draft_steps: int) -> float:
        """Seconds of a round in which every row drafts `draft_steps` tokens."""
        return draft_steps * self.draft_step + self.verify.at(draft_steps + 1) + self.overhead


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
        return {
            str(rows): {
                "draft_step": costs.draft_step,
                "verify": {str(c): s for c, s in zip(costs.verify.counts, costs.verify.seconds, strict=True)},
                "overhead": costs.overhead,
                "resumption": costs.resumption,
            }
            for rows, costs in self.batches.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """The model that `to_dict` described.

        Raises:
            ValueError: If it is no such description.
        """
        try:
            batches = {
                int(rows): BatchCosts(
                    draft_step=costs["draft_step"],
                    verify=_curve(costs["verify"]),
                    overhead=costs.get("overhead", 0.0),
                    resumption=costs.get("resumption", 0.0),
                )
                for rows, costs in values.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as failure:
            raise ValueError(
                f"{_shortened(values)} describes no costs ({failure!r}). Expected, by number of rows: "
                '{"8": {"draft_step": seconds, "verify": {"1": seconds, "5": seconds}, "overhead": seconds}}.'
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
        return cls({rows: BatchCosts(draft_cost, curve)})


class LiveCosts:
    """One call's costs: those of a `CostModel` at first, then what its own rounds show.

    Args:
        model: Where to start.
        rows: Rows in the passes.
        refresh: Whether timings move the costs. Without, decisions that rest on costs can be repeated exactly.

    Attributes:
        version: Grows whenever a cost has changed by a few percent, so that whoever keeps a table of them can tell.
    """

    def __init__(self, model: CostModel, rows: int, *, refresh: bool = True) -> None:
        self._model = model
        self._rows = self._first_rows = rows
        self._refresh = refresh
        self._costs = self._announced = self._first_costs = model.at(rows)
        self._timed_widths = set(self._costs.verify.counts)
        self._by_tokens: dict[int, float] = {}  # seconds of passes of a number of tokens, in more rows than now
        self._drafted = rows, self._costs.draft_step  # rows and seconds of the last draft step that was timed
        self.version = 0

    @property
    def rows(self) -> int:
        """Rows in the passes now."""
        return self._rows

    @property
    def current(self) -> BatchCosts:
        """The costs as they are known now."""
        return self._costs

    @property
    def learnt(self) -> CostModel:
        """What the rounds of the whole batch have shown, before rows left it: smaller batches were not measured."""
        costs = self._costs if self._rows == self._first_rows else self._first_costs
        return CostModel({self._first_rows: costs})

    def set_rows(self, rows: int) -> None:
        """Take note that passes have another number of rows from now on; what was learnt carries over, as ratios.

        Of batches smaller than any that was measured, nothing is known but passes of as few tokens.
        """
        if rows == self._rows:
            return
        if self._rows == self._first_rows:
            self._first_costs = self._costs
        self._by_tokens |= {self._rows * width: self._costs.verify.at(width) for width in self._timed_widths}
        self._timed_widths.clear()
        if self._refresh and rows < min(self._model.batches):
            self._costs = self._with_fewer_rows(rows)
            self._rows = rows
            self._announce()
            return
        before, after = self._model.at(self._rows), self._model.at(rows)
        learnt = self._costs
        widths = tuple(sorted({*after.verify.counts, *learnt.verify.counts}))
        seconds = tuple(after.verify.at(w) * learnt.verify.at(w) / before.verify.at(w) for w in widths)
        draft_step = after.draft_step * learnt.draft_step / before.draft_step
        self._costs = replace(learnt, draft_step=draft_step, verify=CostCurve(widths, seconds))
        self._rows = rows
        self._announce()

    def _with_fewer_rows(self, rows: int) -> BatchCosts:
        """The costs if a pass took what one of as many tokens has taken, in whatever rows; a draft step likewise."""
        widths = self._costs.verify.counts
        verify = CostCurve(widths, tuple(self._pass_seconds(rows * width) for width in widths))
        drafted_rows, draft_step = self._drafted
        draft_step *= self._pass_seconds(rows) / self._pass_seconds(drafted_rows)
        return replace(self._costs, draft_step=draft_step, verify=verify)

    def _pass_seconds(self, tokens: int) -> float:
        """Seconds of a pass of so many tokens, by those that were seen; of fewer, by the slope of the smallest two."""
        counts = tuple(sorted(self._by_tokens))
        curve = CostCurve(counts, tuple(self._by_tokens[count] for count in counts))
        if tokens >= counts[0] or len(counts) == 1:
            return curve.at(tokens)
        slope = max(curve.seconds[1] - curve.seconds[0], 0.0) / (counts[1] - counts[0])
        # Held too dear, a plain step would never be run again to show what it takes.
        return max(curve.seconds[0] - slope * (counts[0] - tokens), curve.seconds[0] / 2)

    def observe(
        self, *, draft_steps: int, width: int, draft: float, verify: float, overhead: float, resumed: bool = False
    ) -> None:
        """Learn from a round.

        Args:
            draft_steps: Draft steps that were made.
            width: Columns per row of the target's pass.
            draft: Seconds of all draft steps together.
            verify: Seconds of the pass.
            overhead: Seconds of everything else.
            resumed: Whether rounds without drafts lie before this one, so that the draft had something to catch up on.
        """
        if not self._refresh:
            return
        known = self._costs
        draft_step, resumption = known.draft_step, known.resumption
        if draft_steps:
            ratio = _bounded_ratio(draft / draft_steps, draft_step)
            if ratio < 1 or not resumed:
                rate = FAR_CHEAPER_RATE if ratio < FAR_CHEAPER else OBSERVED_RATE
                draft_step *= 1 + rate * (ratio - 1)
            self._drafted = self._rows, draft_step
        if draft_steps and resumed:
            besides = min(max(draft - draft_steps * draft_step, 0.0), MOST_BESIDES * known.verify.at(1))
            resumption += (RESUMED_RATE if resumption else 1.0) * (besides - resumption)
        self._timed_widths.add(width)
        expected = known.verify.at(width)
        ratio = _bounded_ratio(verify, expected)
        curve = known.verify.scaled(1 + SHARED_RATE * (ratio - 1))
        curve = curve.with_point(width, expected * (1 + OBSERVED_RATE * (ratio - 1)))
        overhead = known.overhead + OBSERVED_RATE * (min(overhead, MOST_BESIDES * known.verify.at(1)) - known.overhead)
        self._costs = BatchCosts(draft_step, curve, overhead, resumption)
        if self._moved():
            self._announce()

    def _moved(self) -> bool:
        then, now = self._announced, self._costs
        widths = {*then.verify.counts, *now.verify.counts}
        pairs = [(then.draft_step, now.draft_step), *((then.verify.at(w), now.verify.at(w)) for w in widths)]
        besides = abs(now.overhead - then.overhead) + abs(now.resumption - then.resumption)
        return besides / now.verify.at(1) > VERSION_TOLERANCE or any(
            abs(b / a - 1) > VERSION_TOLERANCE for a, b in pairs
        )

    def _announce(self) -> None:
        self._announced = self._costs
        self.version += 1


def _bounded_ratio(measured: float, expected: float) -> float:
    return min(max(measured / expected, LEAST_RATIO), LARGEST_RATIO)


def _between(low: BatchCosts, high: BatchCosts, share: float) -> BatchCosts:
    def mean(a: float, b: float) -> float:
        return a + share * (b - a)

    widths = sorted({*low.verify.counts, *high.verify.counts})
    curve = CostCurve(tuple(widths), tuple(mean(low.verify.at(w), high.verify.at(w)) for w in widths))
    return BatchCosts(
        mean(low.draft_step, high.draft_step),
        curve,
        mean(low.overhead, high.overhead),
        mean(low.resumption, high.resumption),
    )


def _curve(points: Mapping[str, float]) -> CostCurve:
    by_count = sorted((int(count), seconds) for count, seconds in points.items())
    return CostCurve(tuple(count for count, _ in by_count), tuple(seconds for _, seconds in by_count))


def _shortened(values: object) -> str:
    text = json.dumps(values, default=repr)
    return text if len(text) < 200 else f"{text[:200]}..."
