"""Rounds that are over, as counts and seconds, and who learns of them.

Nothing that a round does depends on it. So the log is kept while the device is busy: one round later where device and
host work at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dsde.costs import LiveCosts
from hf_dsde.decoding.outcome import FinishedRound
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.measurement.counts import RoundRecorder
from hf_dsde.policies.base import PhaseTimes


@dataclass(frozen=True)
class RoundRecord:
    """A round that is over, as the host knows it.

    Attributes:
        plan: What it was to do.
        times: Seconds of its phases.
        drafted: Tokens that each row drafted.
        accepted: How many of them the target accepted.
        emitted: Tokens that each row's text grew by.
        draft_steps: Forward passes of the draft.
        pass_width: Columns of the target's pass.
        pass_rows: Rows in it.
        packed_tokens: Tokens in it when it was packed; None when it was padded.
    """

    plan: RoundPlan
    times: PhaseTimes
    drafted: Sequence[int]
    accepted: Sequence[int]
    emitted: Sequence[int]
    draft_steps: int
    pass_width: int
    pass_rows: int
    packed_tokens: int | None

    @classmethod
    def of(
        cls,
        done: FinishedRound,
        times: PhaseTimes,
        drafted: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int],
        pass_rows: int,
    ) -> RoundRecord:
        """Return the record of a round that is over on the device."""
        return cls(
            plan=done.plan,
            times=times,
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            draft_steps=done.candidates.steps,
            pass_width=done.candidates.width + 1,
            pass_rows=pass_rows,
            packed_tokens=done.packed_tokens,
        )

    @property
    def charged_width(self) -> int:
        """Columns per row that a padded pass would have had for the tokens of this one."""
        if self.packed_tokens is None:
            return self.pass_width
        return max(round(self.packed_tokens / self.pass_rows), 1)


class RoundLog:
    """Tells the statistics and the costs of each round, when it is told to `flush`.

    Args:
        statistics: Count rounds.

    Attributes:
        costs: Learn what passes take; None if nobody needs to know.
        times: Seconds of the last round; None before the first is over.
    """

    def __init__(self, statistics: RoundRecorder) -> None:
        self.costs: LiveCosts | None = None
        self.times: PhaseTimes | None = None
        self._statistics = statistics
        self._passes_before = 0
        self._pending: tuple[RoundRecord, int] | None = None

    def skip_recordings(self, recorded: int) -> None:
        """Charge none of the passes that have been `recorded` so far to a round."""
        self._passes_before = recorded

    def add(self, record: RoundRecord, recorded: int) -> None:
        """Keep a round until the next `flush`.

        Args:
            record: The round.
            recorded: Passes that have been recorded so far. The seconds of a round in which passes were recorded say
                nothing about later rounds.
        """
        self.times = record.times
        self._pending = record, recorded - self._passes_before
        self._passes_before = recorded

    def flush(self) -> None:
        """Pass the round on that was kept."""
        if self._pending is None:
            return
        (record, recorded_passes), self._pending = self._pending, None
        times = record.times
        if self.costs is not None and not recorded_passes:
            self.costs.observe(
                draft_steps=record.draft_steps,
                width=record.charged_width,
                draft=times.draft,
                verify=times.verify,
                overhead=times.bookkeeping,
                resumed=record.plan.resumes,
            )
        self._statistics.record_round(
            times=times,
            drafted=record.drafted,
            accepted=record.accepted,
            emitted=record.emitted,
            active=record.plan.active_rows,
            draft_steps=record.draft_steps,
            pass_width=record.pass_width,
            pass_rows=record.pass_rows,
            packed_tokens=record.packed_tokens,
            recorded_passes=recorded_passes,
        )
