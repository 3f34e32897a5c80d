"""Counts of a call of `generate`: per row, per round, per position of a block, and their sums.

None of them is a ratio; `statistics.py` and the statistics of `batch` derive those, all with `ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_dsde.utils.words import EXACT

if TYPE_CHECKING:
    from hf_dsde.measurement.rounds import RoundRecord


@dataclass(frozen=True)
class RoundCounts:
    """One round, summed over the rows whose text it extended.

    Attributes:
        active: Rows that were generating and whose text had not ended before this round.
        drafted: Draft tokens that lie inside the texts.
        past_end: Draft tokens that lie past the end of a text which ended inside this block.
        accepted: Draft tokens that the target accepted and that are part of a text.
        emitted: Tokens the texts gained, bonus tokens included.
        draft_steps: Forward passes of the draft.
        pass_width: Columns of the target's pass, padding included.
        pass_rows: Rows in the target's pass.
        dropped_rows: Rows that had finished and were left out of it.
        padding: Columns of active rows that carried no real token, summed over those rows.
        idle: Columns of rows that took part in the target's pass with nothing left to generate, summed over those rows.
        packed_tokens: Tokens in the target's pass when it was packed, and `padding` those that were none; None when it
            was padded.
        recorded_passes: Shapes of passes that were recorded meanwhile, in which time the device did nothing else.
        draft_seconds: Seconds spent drafting.
        verify_seconds: Seconds spent in the target's pass and in judging its result.
        bookkeeping_seconds: Seconds spent on everything else.
        policy_seconds: What the policy took of these, on the host.
        text_drafted: Those of `drafted` that came out of texts beside a model.
        text_accepted: Those of `accepted` that did.
    """

    active: int
    drafted: int
    past_end: int
    accepted: int
    emitted: int
    draft_steps: int
    pass_width: int
    pass_rows: int
    dropped_rows: int
    padding: int
    idle: int
    draft_seconds: float
    verify_seconds: float
    bookkeeping_seconds: float
    policy_seconds: float = 0.0
    packed_tokens: int | None = None
    recorded_passes: int = 0
    text_drafted: int = 0
    text_accepted: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether nobody drafted and all rows took part, so that the round was one step of plain decoding."""
        return self.draft_steps == 0 and self.pass_width == 1 and self.dropped_rows == 0


@dataclass(frozen=True)
class RowCounts:
    """One row, summed over its rounds. Fields as in `RoundCounts`; `emitted` is the length of the row's output."""

    rounds: int
    drafted: int
    past_end: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts of one call of `generate`, or of several that were merged.

    Attributes:
        policy: Name of the policy that chose the draft lengths.
        rows: Counts of each row.
        rounds: Counts of each round, in order.
        drafted_by_position: For each position of a block, how many draft tokens inside the texts stood there.
        accepted_by_position: How many of those were accepted.
        plain_steps: Steps that plain decoding of the same texts takes, that is the length of the longest
            output; summed over the calls when merged.
        prefill_seconds: Seconds spent on the prompts, in both models, and on measuring costs where a policy needs them.
        recorded_passes: Shapes of passes that were recorded to be replayed, of both models.
        recording_seconds: Seconds this took, compilation of kernels included: part of the other seconds.
        recording_bytes: Device memory that they hold in addition to the caches.
        acceptance: How drafted tokens were accepted: `exact`, or `lossy:` and the rule with its settings.
    """

    policy: str
    rows: tuple[RowCounts, ...]
    rounds: tuple[RoundCounts, ...]
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    plain_steps: int
    prefill_seconds: float
    recorded_passes: int = 0
    recording_seconds: float = 0.0
    recording_bytes: int = 0
    acceptance: str = EXACT

    @property
    def drafted(self) -> int:
        """Draft tokens inside the texts; `past_end` counts the others."""
        return sum(row.drafted for row in self.rows)

    @property
    def past_end(self) -> int:
        """Draft tokens past the end of a text that ended inside their block."""
        return sum(row.past_end for row in self.rows)

    @property
    def accepted(self) -> int:
        """Draft tokens that became part of a text."""
        return sum(row.accepted for row in self.rows)

    @property
    def text_drafted(self) -> int:
        """Those of `drafted` that came out of texts, where a model drafts beside them."""
        return sum(r.text_drafted for r in self.rounds)

    @property
    def text_accepted(self) -> int:
        """Those of `accepted` that did."""
        return sum(r.text_accepted for r in self.rounds)

    @property
    def emitted(self) -> int:
        """Tokens of all outputs together."""
        return sum(row.emitted for row in self.rows)

    @property
    def row_rounds(self) -> int:
        """Rounds that extended a row, summed over the rows."""
        return sum(row.rounds for row in self.rows)

    @property
    def draft_steps(self) -> int:
        """Forward passes of the draft."""
        return sum(r.draft_steps for r in self.rounds)

    @property
    def padding(self) -> int:
        """Columns of target passes that carried no real token of an active row."""
        return sum(r.padding for r in self.rounds)

    @property
    def idle(self) -> int:
        """Columns of target passes that belonged to rows with nothing left to generate."""
        return sum(r.idle for r in self.rounds)

    @property
    def draft_seconds(self) -> float:
        """Seconds spent drafting."""
        return math.fsum(r.draft_seconds for r in self.rounds)

    @property
    def verify_seconds(self) -> float:
        """Seconds spent in the target's passes and in judging their results."""
        return math.fsum(r.verify_seconds for r in self.rounds)

    @property
    def bookkeeping_seconds(self) -> float:
        """Seconds of the rounds that were neither drafting nor verifying."""
        return math.fsum(r.bookkeeping_seconds for r in self.rounds)

    @property
    def policy_seconds(self) -> float:
        """Seconds of the rounds that the policy took, on the host: part of the other phases."""
        return math.fsum(r.policy_seconds for r in self.rounds)

    @property
    def total_seconds(self) -> float:
        """All measured seconds, prefill included."""
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.bookkeeping_seconds


def settle(entry: RoundRecord, row: int, left: list[int]) -> RowCounts:
    """What a round counts for a row whose text still lacks `left[row]` tokens; takes them off `left`."""
    if not entry.active[row] or not left[row]:
        return RowCounts(0, 0, 0, 0, 0)
    drafted, accepted = entry.drafted[row], entry.accepted[row]
    emitted = min(entry.emitted[row], left[row])
    left[row] -= emitted
    # A text that ends before the bonus token leaves draft tokens behind which nobody judged: to call them
    # rejected would bias the acceptance rate, to call them accepted would count tokens that are in no output.
    ends_inside_block = left[row] == 0 and emitted <= accepted
    inside = min(drafted, emitted) if ends_inside_block else drafted
    return RowCounts(1, inside, drafted - inside, min(accepted, emitted), emitted)


def settle_all(rounds: Sequence[RoundRecord], output_lengths: Sequence[int]) -> NDArray[np.int64]:
    """What `settle` says of every round and row, `[rounds, rows, fields of RowCounts]`, all rounds at once.

    Raises:
        RuntimeError: If a row's output is longer than what its rounds emitted.
    """
    shape = len(rounds), len(output_lengths)
    drafted, accepted, emitted, active = (
        np.array([getattr(entry, name) for entry in rounds], dtype=np.int64).reshape(shape)
        for name in ("drafted", "accepted", "emitted", "active")
    )
    lengths = np.array(output_lengths, dtype=np.int64)
    ends = np.minimum(emitted.cumsum(axis=0), lengths)
    begins = np.vstack([np.zeros_like(lengths)[None], ends])[:-1]
    missing = lengths - (ends[-1] if rounds else 0)
    if missing.any():
        raise RuntimeError(
            f"Internal error: rows are {missing.tolist()} tokens longer than what was recorded as emitted; every token "
            f"of `output_lengths` {list(output_lengths)} has to come from a recorded round."
        )
    counted = (active > 0) & (begins < lengths)
    gained = ends - begins
    inside = np.where((ends == lengths) & (gained <= accepted), np.minimum(drafted, gained), drafted)
    counts = np.stack([counted, inside, drafted - inside, np.minimum(accepted, gained), gained], axis=-1)
    return counts * counted[..., None]


def count_round(entry: RoundRecord, total: RowCounts, texts: RowCounts, rows: int) -> RoundCounts:
    """One round from what `settle` left of it: the sum over all `rows`, and over those that drafted out of texts."""
    real_columns = total.rounds + total.drafted + total.past_end
    if entry.packed_tokens is None:
        padding = total.rounds * entry.pass_width - real_columns
        idle = (entry.pass_rows - total.rounds) * entry.pass_width
    else:
        padding, idle = entry.packed_tokens - real_columns, 0
    return RoundCounts(
        active=total.rounds,
        drafted=total.drafted,
        past_end=total.past_end,
        accepted=total.accepted,
        emitted=total.emitted,
        draft_steps=entry.draft_steps,
        pass_width=entry.pass_width,
        pass_rows=entry.pass_rows,
        dropped_rows=rows - entry.pass_rows,
        padding=padding,
        idle=idle,
        draft_seconds=entry.times.draft,
        verify_seconds=entry.times.verify,
        bookkeeping_seconds=entry.times.bookkeeping,
        policy_seconds=entry.times.policy,
        packed_tokens=entry.packed_tokens,
        recorded_passes=entry.recorded_passes,
        text_drafted=texts.drafted,
        text_accepted=texts.accepted,
    )


def blocks_beyond(block_lengths: Any, positions: int | None = None) -> tuple[int, ...]:
    """How many blocks, any integers in an array or a sequence, reach beyond each position."""
    lengths = np.asarray(block_lengths, dtype=np.int64).ravel()
    if positions is None:
        positions = int(lengths.max(initial=0))
    ending = np.bincount(np.minimum(lengths, positions), minlength=positions + 1)
    return tuple((len(lengths) - ending.cumsum()[:positions]).tolist())


def ratio(numerator: float, denominator: float) -> float:
    """The quotient of two counts or sums, nan when the denominator is zero."""
    return numerator / denominator if denominator else math.nan
