"""Counts of a job over a data set, in constant memory: rounds are summed up as they come."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from hf_dsde.batch.results import RowStatistics
from hf_dsde.measurement.counts import ratio, settle
from hf_dsde.measurement.rounds import RoundRecord, RoundRecorder
from hf_dsde.utils.words import EXACT

_COUNTED = 4
"""Per row and round: whether it was active, and tokens drafted, accepted and emitted."""
_NEVER = np.iinfo(np.int64).max


@dataclass
class JobStatistics:
    """What a job did so far.

    Attributes:
        texts: Texts that were finished.
        failed: Rows that gave none.
        prompt_tokens: Tokens of the finished texts' prompts.
        new_tokens: Tokens of the finished texts.
        drafted: Draft tokens inside the finished texts.
        accepted: How many of those the target accepted.
        rounds: Rounds of the batch.
        row_rounds: Rounds in which a row was generating, summed over the rows.
        idle_row_rounds: Rounds in which a row of the batch had nothing to generate, summed over the rows.
        draft_steps: Forward passes of the draft.
        prefill_seconds: Host seconds spent on prompts.
        draft_seconds: Seconds spent drafting.
        verify_seconds: Seconds spent in the target's passes and in judging their results.
        bookkeeping_seconds: Seconds of the rounds that were neither.
        recorded_passes: Shapes of passes that were recorded during rounds, which made these longer: later jobs of
            the same kind record fewer.
        batch_sizes: Rows of the batch, each time it was set up.
        acceptance: How drafted tokens are accepted: `exact`, or `lossy:` and the rule with its settings.
    """

    texts: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    row_rounds: int = 0
    idle_row_rounds: int = 0
    draft_steps: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    recorded_passes: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    acceptance: str = EXACT

    @property
    def idle_share(self) -> float:
        """Share of row-rounds without anything to generate, in [0, 1]; nan before the first round."""
        return ratio(self.idle_row_rounds, self.idle_row_rounds + self.row_rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, inside the finished texts; nan when nothing was drafted."""
        return ratio(self.accepted, self.drafted)

    @property
    def mean_draft_length(self) -> float:
        """Drafted tokens per row and round, inside the finished texts; nan before the first."""
        return ratio(self.drafted, self.row_rounds)

    @property
    def block_efficiency(self) -> float:
        """Tokens of finished texts per row and round; nan before the first round."""
        return ratio(self.new_tokens, self.row_rounds)

    def add_text(self, row: RowStatistics) -> None:
        """Count a finished text."""
        self.texts += 1
        self.prompt_tokens += row.prompt_tokens
        self.new_tokens += row.new_tokens
        self.drafted += row.drafted
        self.accepted += row.accepted


class RowCounter(RoundRecorder):
    """Records rounds for a loop whose rows come and go: sums for the job, and for the texts that are under way.

    A round costs a few operations on arrays, however many rows there are: the models wait for it.

    Args:
        rows: Rows of the batch.
        job: Where the sums go.
    """

    def __init__(self, rows: int, job: JobStatistics) -> None:
        self._rows = rows
        self._job = job
        self._sums = np.zeros((_COUNTED, rows), dtype=np.int64)
        # A text may turn out to have ended some rounds ago, so that rounds are kept while their texts are under way.
        self._recent: deque[RoundRecord] = deque()
        self._recorded = 0
        self._first = np.zeros(rows, dtype=np.int64)
        self._begun = [time.perf_counter()] * rows

    def begin(self, row: int) -> None:
        """Let a row begin another text."""
        self._sums[:, row] = 0
        self._first[row] = self._recorded
        self._begun[row] = time.perf_counter()

    def end(self, row: int, prompt_tokens: int, new_tokens: int) -> RowStatistics:
        """Return what a row's text has cost, and forget its rounds."""
        rounds, drafted, accepted, emitted = self._sums[:, row].tolist()
        for record in reversed(self._recent):
            if not record.active[row]:
                continue
            own = record.drafted[row], record.accepted[row], record.emitted[row]
            # Without this round; then with what of it is part of the text.
            rounds, drafted, accepted, emitted = rounds - 1, drafted - own[0], accepted - min(own[1:]), emitted - own[2]
            left = new_tokens - emitted
            if left > 0:
                remaining = [0] * self._rows
                remaining[row] = left
                last = settle(record, row, remaining)
                rounds, drafted, accepted = rounds + 1, drafted + last.drafted, accepted + last.accepted
                break
            if not rounds:
                break
        self._sums[:, row] = 0
        self._first[row] = _NEVER
        return RowStatistics(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            seconds=time.perf_counter() - self._begun[row],
        )

    def record_prefill(self, seconds: float) -> None:
        """As for any recorder."""
        self._job.prefill_seconds += seconds

    def on_round(self, record: RoundRecord) -> None:
        """As for any listener."""
        job = self._job
        counts = np.array((record.active, record.drafted, record.accepted, record.emitted), dtype=np.int64)
        counts *= counts[0]
        running = int(counts[0].sum())
        job.rounds += 1
        job.row_rounds += running
        job.idle_row_rounds += self._rows - running
        job.draft_steps += record.draft_steps
        job.draft_seconds += record.times.draft
        job.verify_seconds += record.times.verify
        job.bookkeeping_seconds += record.times.bookkeeping
        job.recorded_passes += record.recorded_passes
        self._sums += counts
        self._sums[2] -= np.maximum(counts[2] - counts[3], 0)  # accepted, but cut off by the end of the text
        self._recent.append(replace(record, outcome=None))
        self._recorded += 1
        needed = self._recorded - int(self._first.min())
        while len(self._recent) > max(needed, 0):
            self._recent.popleft()
