"""Rounds as a loop could report them, of a few numbers, and who keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.policies import PhaseTimes, Signal


class Notes(RoundListener):
    """Keeps all rounds that it hears of."""

    def __init__(self, *required: Signal) -> None:
        self.requires = frozenset(required)
        self.events: list[Any] = []

    def on_round(self, record: RoundRecord) -> None:
        self.events.append(record)


def phases(draft: float = 0.0, verify: float = 0.0, bookkeeping: float = 0.0, policy: float = 0.0) -> PhaseTimes:
    """The seconds of a round."""
    return PhaseTimes(draft, verify, bookkeeping, policy)


def round_record(drafted: Sequence[int], accepted: Sequence[int], **changes: Any) -> RoundRecord:
    """A round of all rows, padded, in which no text ended, unless `changes` say otherwise."""
    passes = {"draft_steps": max(drafted), "pass_width": max(drafted) + 1, "pass_rows": len(drafted)}
    rows = {"emitted": [count + 1 for count in accepted], "active": [True] * len(drafted), "times": phases()}
    return RoundRecord(drafted=drafted, accepted=accepted, **{**passes, **rows, **changes})
