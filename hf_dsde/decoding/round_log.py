"""Rounds that are over, and when those who listen hear of them.

Nothing that a round does depends on it. So listeners run while the device is busy: one round later where device and
host work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_dsde.decoding.outcome import FinishedRound
from hf_dsde.measurement.clock import PhaseClock
from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.policies.base import PhaseTimes, RoundOutcome


class RoundLog:
    """Ends rounds, and tells listeners of each: at once, or while the device runs the next one.

    Args:
        listeners: Are told in this order.
        clock: Measures rounds.
        overlaps: Whether device and host work at the same time.

    Attributes:
        listeners: The same; more may be added.
        times: Seconds of the last round that listeners were told of; None before the first.
    """

    def __init__(self, listeners: Sequence[RoundListener], clock: PhaseClock, *, overlaps: bool) -> None:
        self.listeners = list(listeners)
        self._clock = clock
        self._overlaps = overlaps
        self.times: PhaseTimes | None = None
        self._passes_before = 0
        self._pending: Callable[[], RoundRecord] | None = None

    def skip_recordings(self, recorded: int) -> None:
        """Charge none of the passes that have been `recorded` so far to a round."""
        self._passes_before = recorded

    def add(
        self,
        done: FinishedRound,
        outcome: RoundOutcome | None,
        drafted: Sequence[int],
        accepted: Sequence[int],
        emitted: Sequence[int],
        *,
        policy_seconds: float,
        pass_rows: int,
        recorded: int,
        looking_seconds: float = 0.0,
    ) -> None:
        """End a round; where device and host work at the same time, keep it until the next `flush`.

        Args:
            done: The round.
            outcome: What the policy learnt from it.
            drafted: Tokens that each row drafted.
            accepted: How many of them the target accepted.
            emitted: Tokens that each row's text grew by.
            policy_seconds: What the policy took.
            pass_rows: Rows in the target's pass.
            recorded: Passes that have been recorded so far.
            looking_seconds: What the host has just spent on looking texts up, for the next round.
        """
        self._clock.looked(looking_seconds)
        if not self._overlaps:
            self._clock.mark()
        phases, looks = self._clock.phases(policy_seconds), self._clock.looks
        new_passes = recorded - self._passes_before

        def record() -> RoundRecord:
            self.times = phases()
            return RoundRecord(
                drafted=drafted,
                accepted=accepted,
                emitted=emitted,
                active=done.plan.active_rows,
                draft_steps=done.candidates.steps,
                pass_width=done.candidates.width + 1,
                pass_rows=pass_rows,
                times=self.times,
                packed_tokens=done.packed_tokens,
                recorded_passes=new_passes,
                index=done.plan.index,
                resumed=done.plan.resumes,
                outcome=outcome,
                out_of_texts=done.candidates.unjudged,
                looks=looks,
            )

        self._pending = record
        self._passes_before = recorded
        if not self._overlaps:
            self.flush()

    def flush(self) -> None:
        """Pass on a round that was kept."""
        pending, self._pending = self._pending, None
        if pending is not None:
            record = pending()
            for listener in self.listeners:
                listener.on_round(record)
