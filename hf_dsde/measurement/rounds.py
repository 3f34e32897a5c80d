"""Rounds that are over, and the contract between the decoding loop and whoever wants to know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_dsde.policies.base import PhaseTimes, RoundOutcome, Signal

LEAST_SHARE = 0.01
"""Of a phase's seconds, what passes are charged with at least: looks are timed by another clock."""


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A round that is over, before texts are settled. Sequences have one entry per row and lie on the host.

    Attributes:
        drafted: Tokens each row drafted; 0 for rows that are not active.
        accepted: How many of them the target accepted, before any end of text.
        emitted: Tokens each row gained, bonus or correction token included, after stopping criteria.
        active: Rows that were generating when the round began.
        draft_steps: Forward passes of the draft.
        pass_width: Columns of the target's pass, padding included.
        pass_rows: Rows in it, those included that had finished and still kept their place.
        times: Seconds of the phases.
        packed_tokens: Tokens in the target's pass when it was packed; None when it was padded.
        recorded_passes: Shapes of passes that were recorded meanwhile: the seconds say nothing about later rounds.
        index: Number of the round, from 0.
        resumed: Whether the draft first had to read tokens of several rounds.
        outcome: What the policy learnt from, on the device, with the signals that listeners require. None if a plain
            step overtook the policy's wish for drafts.
        out_of_texts: Rows whose drafts are out of texts, where a model drafts for others; empty where there are none.
        looks: What of `times` the host has spent on looking texts up; None where it has looked at none.
    """

    drafted: Sequence[int]
    accepted: Sequence[int]
    emitted: Sequence[int]
    active: Sequence[bool]
    draft_steps: int
    pass_width: int
    pass_rows: int
    times: PhaseTimes
    packed_tokens: int | None = None
    recorded_passes: int = 0
    index: int = 0
    resumed: bool = False
    outcome: RoundOutcome | None = None
    out_of_texts: Sequence[bool] = ()
    looks: PhaseTimes | None = None

    @property
    def charged_width(self) -> float:
        """Columns per row of the pass: for a packed one, the mean, which is rarely a whole number."""
        if self.packed_tokens is None:
            return self.pass_width
        return max(self.packed_tokens / self.pass_rows, 1.0)

    @property
    def charged_times(self) -> PhaseTimes:
        """Seconds of the phases without looks at texts: these are no part of any draft step, nor of every round."""
        times, looks = self.times, self.looks
        if looks is None:
            return times
        draft = max(times.draft - looks.draft, LEAST_SHARE * times.draft)
        bookkeeping = max(times.bookkeeping - looks.bookkeeping, LEAST_SHARE * times.bookkeeping)
        return replace(times, draft=draft, bookkeeping=bookkeeping)

    def check(self, rows: int) -> None:
        """Raise ValueError if the numbers contradict each other, or are not those of so many rows."""
        for name in ("drafted", "accepted", "emitted", "active"):
            if len(getattr(self, name)) != rows:
                raise ValueError(f"`{name}` has {len(getattr(self, name))} entries; need one per row, {rows}.")
        for row in range(rows):
            drafted, accepted, emitted = self.drafted[row], self.accepted[row], self.emitted[row]
            if not self.active[row] and (drafted or accepted or emitted):
                raise ValueError(
                    f"Row {row} is not `active` but has drafted={drafted}, accepted={accepted}, emitted={emitted}; "
                    f"pass zeros for finished rows."
                )
            if not (0 <= accepted <= drafted and 0 <= emitted <= accepted + 1):
                raise ValueError(
                    f"Row {row} has drafted={drafted}, accepted={accepted}, emitted={emitted}; "
                    f"need 0 <= accepted <= drafted and 0 <= emitted <= accepted + 1."
                )
        if not sum(self.active) <= self.pass_rows <= rows:
            raise ValueError(
                f"`pass_rows` is {self.pass_rows}; need at least the {sum(self.active)} active rows and at most {rows}."
            )
        widest = max(self.drafted, default=0)
        if self.pass_width < widest + 1:
            raise ValueError(
                f"`pass_width` is {self.pass_width}, but the longest draft of {widest} tokens needs {widest + 1} "
                "columns."
            )


class RoundListener(ABC):
    """Wants to know of every round. No round depends on it.

    It hears of a round while the device is busy with the next one, or at once where device and host take turns, and of
    the last one before the call returns. What it raises ends the call.
    """

    requires: frozenset[Signal] = frozenset()
    """Signals that `RoundRecord.outcome` must have, whatever the policy asks for; `Signal.COSTS` has costs measured."""

    @abstractmethod
    def on_round(self, record: RoundRecord) -> None:
        """Take note of a round that is over."""


class RoundRecorder(RoundListener):
    """Counts for a loop: its rounds, and the seconds between them."""

    @abstractmethod
    def record_prefill(self, seconds: float) -> None:
        """Add seconds spent on prompts."""
