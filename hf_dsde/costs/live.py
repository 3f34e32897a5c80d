"""One call's view of costs: it knows how many rows are in the passes and follows the timings of the rounds."""

from __future__ import annotations

import math
from dataclasses import replace

from hf_dsde.costs.model import BatchCosts, CostCurve, CostModel

OBSERVED_RATE = 0.1
"""Weight of a new timing in the cost of the width it was taken at."""
FAR_CHEAPER = 0.8
"""Below this fraction of what was expected, a timing says that drafting had been taken for far too dear ..."""
FAR_CHEAPER_RATE = 0.5
"""... and has this weight: no stall makes steps so fast, and steps that are too dear are hardly ever timed again."""
LEAST_VARIANCE = 0.25
"""Of the lengths of rounds, in steps squared, as if every other round drafted one step more."""
RETURN_RATE = 0.03
"""Weight of what a draft step was measured to cost, in a round as long as all of late, where nothing shows it."""
RESUMED_RATE = 0.5
"""Weight of a new timing in what it takes to draft again: such rounds are few."""
MAX_EXTRA_STEPS = 2.0
"""Upper bound, in plain steps, on a measured catch-up or overhead."""
TEXTS_FORGETTING = 0.99
"""What is left of the extra seconds of texts' drafts after a round without: held too dear, they would not be tried."""
SHARED_RATE = 0.05
"""Weight of a new timing in the costs of all other widths: as contexts grow, widths that are not used cost more too."""
LARGEST_RATIO = 1.25
"""A timing counts as at most this many times what was expected, or of what drafting usually takes, by as much more if
that is longer: hosts stall, now and then for a dozen rounds ..."""
LEAST_RATIO = 0.5
"""... and as at least this fraction of it."""
VERSION_TOLERANCE = 0.02
"""Costs count as changed when one has moved by this fraction."""


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
        self._timed_widths: set[float] = set(self._costs.verify.counts)
        self._by_tokens: dict[int, float] = {}  # seconds of passes of a number of tokens, in more rows than now
        self._drafted = rows, self._costs.draft  # rows of the last draft steps that were timed, and what was known then
        self._usual_steps: float | None = None  # a running average over rounds with drafts, ...
        self._steps_variance = 0.0  # ... and that of the squared distance from it
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
        self._by_tokens |= {round(self._rows * width): self._costs.verify.at(width) for width in self._timed_widths}
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
        draft = learnt.draft
        if self._usual_steps is None:
            draft = after.draft
        elif draft and before.draft and after.draft:
            # The shape is what the rounds have shown, and the ratio holds for the steps that they made.
            draft = draft.scaled(after.draft.at(self._usual_steps) / before.draft.at(self._usual_steps))
        verify = CostCurve(widths, seconds)
        self._costs = replace(learnt, draft=draft, verify=verify, measured_step=after.measured_step)
        self._rows = rows
        self._announce()

    def _with_fewer_rows(self, rows: int) -> BatchCosts:
        """The costs if a pass took what one of as many tokens has taken, in whatever rows; draft steps likewise."""
        widths = self._costs.verify.counts
        verify = CostCurve(widths, tuple(self._pass_seconds(rows * width) for width in widths))
        drafted_rows, draft = self._drafted
        if draft is not None:
            draft = draft.scaled(self._pass_seconds(rows) / self._pass_seconds(drafted_rows))
        return replace(self._costs, draft=draft, verify=verify)

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
        self,
        *,
        draft_steps: int,
        width: float,
        draft: float,
        verify: float,
        overhead: float,
        resumed: bool = False,
        out_of_texts: bool = False,
    ) -> None:
        """Learn from a round.

        Args:
            draft_steps: Draft steps that were made.
            width: Columns per row of the target's pass, at least 1; their mean where rows have different numbers. What
                lies between two whole numbers moves the costs of both, the nearer one's more.
            draft: Seconds of all draft steps together.
            verify: Seconds of the pass.
            overhead: Seconds of everything else.
            resumed: Whether rounds without drafts lie before this one, so that the draft had something to catch up on.
            out_of_texts: Whether texts drafted beside a model.
        """
        if not self._refresh:
            return
        known = self._costs
        drafting, resumption, texts = known.draft, known.resumption, TEXTS_FORGETTING * known.texts
        if out_of_texts:
            extra = min(max(draft - known.draft_seconds(draft_steps), 0.0), MAX_EXTRA_STEPS * known.verify.at(1))
            texts = known.texts + (OBSERVED_RATE if known.texts else 1.0) * (extra - known.texts)
        elif draft_steps:
            drafting = self._drafting_after(draft_steps, draft, resumed)
            self._drafted = self._rows, drafting
        if draft_steps and resumed and not out_of_texts:
            expected = drafting.at(draft_steps) if drafting else 0.0
            extra = min(max(draft - expected, 0.0), MAX_EXTRA_STEPS * known.verify.at(1))
            resumption += (RESUMED_RATE if resumption else 1.0) * (extra - resumption)
        self._timed_widths.add(width)
        expected = known.verify.at(width)
        ratio = _bounded_ratio(verify, expected)
        curve = known.verify.scaled(1 + SHARED_RATE * (ratio - 1))
        low = math.floor(width)
        for count, share in ((low, low + 1 - width), (low + 1, width - low)):
            if share:
                rate = SHARED_RATE + share * (OBSERVED_RATE - SHARED_RATE)
                curve = curve.with_point(count, known.verify.at(count) * (1 + rate * (ratio - 1)))
        overhead = known.overhead + OBSERVED_RATE * (
            min(overhead, MAX_EXTRA_STEPS * known.verify.at(1)) - known.overhead
        )
        self._costs = BatchCosts(drafting, curve, overhead, resumption, texts, known.measured_step)
        if self._moved():
            self._announce()

    def _drafting_after(self, steps: int, seconds: float, resumed: bool) -> CostCurve | None:
        """What drafting costs, after a timing of some steps.

        It has a part that all rounds with drafts pay, and one that each step pays. A timing says what their sum is at
        its number of steps, and moves both there as least squares over the last rounds would: those whose lengths are
        spread tell what a further step costs. Where all draft the same nothing does, and it goes back to what it was
        measured to be, while the common part takes up what differs: what short drafts have shown need not hold for
        long ones, since a host that the device waits for makes a few steps look cheap.
        """
        known = self._costs.draft
        if known is None:
            self._usual_steps = steps
            return CostCurve.line(seconds / steps, seconds / steps) if seconds > 0 else None
        usual = steps if self._usual_steps is None else self._usual_steps
        expected, common = known.at(steps), known.at(usual)
        if resumed and seconds >= expected:
            return known
        rate = FAR_CHEAPER_RATE if seconds < FAR_CHEAPER * expected else OBSERVED_RATE
        longest = expected + (LARGEST_RATIO - 1) * max(expected, common)
        change = rate * (min(max(seconds, LEAST_RATIO * expected), longest) - expected)
        distance = steps - usual
        weight = change / (distance**2 + max(self._steps_variance, LEAST_VARIANCE))
        unseen = max(1 - self._steps_variance / LEAST_VARIANCE, 0.0)
        further = known.slope + weight * distance
        further += RETURN_RATE * unseen * (self._costs.measured_step - further)
        common += change - weight * distance**2
        further = min(max(further, 0.0), common / usual)  # neither part is negative
        self._usual_steps = usual + OBSERVED_RATE * distance
        self._steps_variance += OBSERVED_RATE * (distance**2 - self._steps_variance)
        return CostCurve.line(common - (usual - 1) * further, further)

    def _moved(self) -> bool:
        then, now = self._announced, self._costs
        widths = {*then.verify.counts, *now.verify.counts}
        steps = {count for curve in (then.draft, now.draft) if curve for count in curve.counts}
        pairs = [(then.draft_seconds(k), now.draft_seconds(k)) for k in steps]
        pairs += [(then.verify.at(w), now.verify.at(w)) for w in widths]
        extra = abs(now.overhead - then.overhead) + abs(now.resumption - then.resumption)
        return extra / now.verify.at(1) > VERSION_TOLERANCE or any(abs(b - a) > VERSION_TOLERANCE * a for a, b in pairs)

    def _announce(self) -> None:
        self._announced = self._costs
        self.version += 1


def _bounded_ratio(measured: float, expected: float) -> float:
    return min(max(measured / expected, LEAST_RATIO), LARGEST_RATIO)
