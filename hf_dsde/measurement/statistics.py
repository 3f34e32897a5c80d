"""What a call of `generate` did: counts first, ratios derived from them once.

The recorder keeps one entry per round, plain numbers on the host, and knows nothing of tensors or models. Texts
can be cut after their rounds were recorded (a user's stopping criterion), so rows are settled only in
`finish`: tokens are counted up to the end of each text and not beyond, while work (passes, columns, seconds)
is counted as it was done.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.measurement.counts import (
    RoundCounts,
    RowCounts,
    SpeculationCounts,
    blocks_beyond,
    count_round,
    ratio,
    settle_all,
)
from hf_dsde.measurement.rounds import RoundRecord, RoundRecorder
from hf_dsde.utils.callers import callers_level
from hf_dsde.utils.words import EXACT

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 1
"""Raised whenever a key of `SpeculationStatistics.to_dict` changes its name or its meaning."""


class SpeculationWarning(UserWarning):
    """Speculation made this call slower than plain decoding would have been."""


@dataclass(frozen=True)
class SpeculationStatistics(SpeculationCounts):
    """The counts of one call of `generate`, or of several that were merged, with the ratios that follow from them.

    A ratio whose denominator is zero is `nan` (None in `to_dict`, since JSON has no nan). What could not be
    measured is None.
    """

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, inside the texts. In `[0, 1]`, or nan when nothing was drafted."""
        return ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Acceptance rate of each position of a block; not conditional on the position before."""
        return tuple(ratio(a, d) for a, d in zip(self.accepted_by_position, self.drafted_by_position, strict=True))

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per row and round, bonus token included; nan when there was no round."""
        return ratio(self.emitted, self.row_rounds)

    @property
    def draft_waste(self) -> float:
        """Share of all draft tokens, those past the end included, that reached no text; nan when there were none."""
        return ratio(self.drafted + self.past_end - self.accepted, self.drafted + self.past_end)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows per measured second, prefill included; nan when no time was measured."""
        return ratio(self.emitted, self.total_seconds)

    @property
    def policy_overhead(self) -> float:
        """Share of the rounds' seconds that the policy took for signals, answers and learning; nan without rounds.

        Host seconds: on a CUDA device those of launching the work.
        """
        return ratio(self.policy_seconds, self.draft_seconds + self.verify_seconds + self.bookkeeping_seconds)

    @property
    def plain_step_seconds(self) -> float | None:
        """Seconds of a round in which nobody drafts and every row takes part; None when there was none.

        The median of verification and bookkeeping, and the shortest time in front of the pass: there a GPU waits for
        the host, and in a round after a draft also for a draft pass that was not needed.
        """
        plain = _undisturbed([r for r in self.rounds if r.is_plain])
        if not plain:
            return None
        return median(r.verify_seconds + r.bookkeeping_seconds for r in plain) + min(r.draft_seconds for r in plain)

    @property
    def draft_step_seconds(self) -> float | None:
        """Median seconds of one forward pass of the draft; None when it was never called."""
        drafting = [r for r in self.rounds if r.draft_steps]
        seconds = [r.draft_seconds / r.draft_steps for r in _undisturbed(drafting)]
        return median(seconds) if seconds else None

    @property
    def round_seconds(self) -> float:
        """Seconds of a mean round in the steady state; nan without rounds.

        Each phase is charged its median over the rounds of the same shape (drafting by its steps, verifying by its
        width, both by the rows in them), and rounds in which passes were recorded are left out if there are others, so
        that a one-time cost in a few rounds does not pass for the price of speculation.
        """
        rounds = _undisturbed(self.rounds)
        steady = (
            _steady_total((r.pass_rows, r.draft_steps, r.draft_seconds) for r in rounds)
            + _steady_total((r.pass_rows, r.pass_width, r.verify_seconds) for r in rounds)
            + _steady_total((0, 0, r.bookkeeping_seconds) for r in rounds)
        )
        return ratio(steady, len(rounds))

    @property
    def predicted_speedup(self) -> float | None:
        """Seconds that plain decoding would take per second that decoding took, from measured costs.

            plain_steps * plain_step_seconds / (number of rounds * round_seconds)

        Plain decoding extends every row by one token per step, so it needs as many steps as the longest
        output has tokens; the rounds are what this call needed for the same texts. Counting both to the end
        of the longest row, instead of averaging tokens per row and round, keeps rows that finish early and
        wait from passing for speed. A plain step is priced
        with all rows in it, since plain `generate` keeps finished rows in the batch. Prefill is left out, and
        plain decoding is this package's own, not the stock loop.

        None when no plain round was measured, or when nobody ever drafted.
        """
        plain = self.plain_step_seconds
        decoding = len(self.rounds) * self.round_seconds
        if plain is None or self.draft_steps == 0 or not decoding > 0:
            return None
        return self.plain_steps * plain / decoding

    @property
    def speculation_loses(self) -> bool | None:
        """Whether plain decoding would have been faster; None when `predicted_speedup` is."""
        speedup = self.predicted_speedup
        return None if speedup is None else speedup < 1.0

    def losing_reason(self) -> str | None:
        """One sentence on why speculation loses, with the measured numbers; None unless it does."""
        plain, draft_step, speedup = self.plain_step_seconds, self.draft_step_seconds, self.predicted_speedup
        if not self.speculation_loses or not plain or draft_step is None or speedup is None:
            return None
        return (
            f"Speculation (policy '{self.policy}') is slower than plain decoding: a draft step costs "
            f"{draft_step / plain:.2f} of a target step and a whole round {self.round_seconds / plain:.2f}, "
            f"but at an acceptance rate of {self.acceptance_rate:.2f} a round replaces only "
            f"{ratio(self.plain_steps, len(self.rounds)):.2f} target steps, so {speedup:.2f}x the speed of plain "
            f"decoding is predicted."
        )

    def warn_if_losing(self) -> None:
        """Issue one `SpeculationWarning` when plain decoding would have been faster; else do nothing.

        It names the line that called, from outside this package and the libraries in between.
        """
        reason = self.losing_reason()
        if reason is not None:
            advice = "Use a cheaper draft, draft fewer tokens, or leave out assistant_model."
            warnings.warn(f"{reason} {advice}", SpeculationWarning, stacklevel=callers_level())

    def to_dict(self) -> dict[str, Any]:
        """Counts and ratios in types that `json.dumps` takes; undefined ratios are None."""
        by_round = [asdict(r) for r in self.rounds]
        by_row = [asdict(r) for r in self.rows]
        return {
            "schema_version": SCHEMA_VERSION,
            "policy": self.policy,
            "acceptance": self.acceptance,
            "counts": {name: getattr(self, name) for name in _COUNTS} | {"rounds": len(self.rounds)},
            "seconds": {name: getattr(self, f"{name}_seconds") for name in _PHASES},
            "ratios": {name: _none_if_nan(getattr(self, name)) for name in _RATIOS}
            | {"acceptance_by_position": [_none_if_nan(a) for a in self.acceptance_by_position]},
            "by_position": {
                "drafted": list(self.drafted_by_position),
                "accepted": list(self.accepted_by_position),
            },
            "by_row": {name: [row[name] for row in by_row] for name in RowCounts.__dataclass_fields__},
            "by_round": {name: [r[name] for r in by_round] for name in RoundCounts.__dataclass_fields__},
        }

    @classmethod
    def merge(cls, parts: Sequence[SpeculationStatistics]) -> SpeculationStatistics:
        """Several calls as one, as after a data set went through in batches: rows and rounds follow each other.

        The price of a plain step is then the median over all calls, so calls of very different batch sizes
        are better kept apart.

        Raises:
            ValueError: If `parts` is empty or holds more than one policy, or more than one rule of acceptance.
        """
        policies = sorted({part.policy for part in parts})
        if len(policies) != 1:
            raise ValueError(
                f"`parts` holds statistics of {len(policies)} policies {policies}; merge takes at least one call, "
                f"all of one policy. Group them by `policy` first."
            )
        rules = sorted({part.acceptance for part in parts})
        if len(rules) != 1:
            raise ValueError(
                f"`parts` holds statistics of {len(rules)} rules of acceptance {rules}; merge takes calls of one. "
                f"Group them by `acceptance` first."
            )
        return cls(
            policy=policies[0],
            acceptance=rules[0],
            rows=tuple(row for part in parts for row in part.rows),
            rounds=tuple(r for part in parts for r in part.rounds),
            drafted_by_position=_add_by_position(part.drafted_by_position for part in parts),
            accepted_by_position=_add_by_position(part.accepted_by_position for part in parts),
            plain_steps=sum(part.plain_steps for part in parts),
            prefill_seconds=math.fsum(part.prefill_seconds for part in parts),
            recorded_passes=sum(part.recorded_passes for part in parts),
            recording_seconds=math.fsum(part.recording_seconds for part in parts),
            recording_bytes=sum(part.recording_bytes for part in parts),
        )

    def __str__(self) -> str:
        speedup = self.predicted_speedup
        predicted = "" if speedup is None else f", {speedup:.2f}x plain decoding predicted"
        lossy = "" if self.acceptance == EXACT else f", {self.acceptance}"
        return (
            f"{self.policy}{lossy}: {self.emitted} tokens in {len(self.rows)} rows and {len(self.rounds)} rounds, "
            f"acceptance rate {self.acceptance_rate:.2f}, block efficiency {self.block_efficiency:.2f}, "
            f"{self.tokens_per_second:.1f} tokens/s{predicted}"
        )

    def __rich__(self) -> RenderableType:
        from hf_dsde.measurement import views

        return views.summary(self)

    def _repr_html_(self) -> str:
        from hf_dsde.measurement import views

        return views.summary_html(self)


class StatisticsRecorder(RoundRecorder):
    """Collects one entry per round while a batch is generated.

    Args:
        rows: Number of sequences in the batch.
        policy: Name of the policy that chooses the draft lengths.
        acceptance: How drafted tokens are accepted, as `hf_dsde.lossy_acceptance.described` says it.
    """

    def __init__(self, rows: int, policy: str, acceptance: str = EXACT) -> None:
        self.rows = rows
        self.policy = policy
        self.acceptance = acceptance
        self._rounds: list[RoundRecord] = []
        self._prefill_seconds = 0.0

    def record_prefill(self, seconds: float) -> None:
        """Add seconds spent on prompts."""
        self._prefill_seconds += seconds

    def on_round(self, record: RoundRecord) -> None:
        """Add one round.

        Raises:
            ValueError: If its numbers contradict each other.
        """
        record.check(self.rows)
        self._rounds.append(replace(record, outcome=None))

    def finish(self, output_lengths: Sequence[int], recording: RecordingCosts | None = None) -> SpeculationStatistics:
        """Settle every row at the end of its text and sum up.

        Args:
            output_lengths: Generated tokens of each row that are part of the output, at most what was
                emitted.
            recording: What recording passes has cost in this call; None for nothing.

        Raises:
            ValueError: If `output_lengths` has not one entry per row.
            RuntimeError: If a row's output is longer than what its rounds emitted.
        """
        if len(output_lengths) != self.rows:
            raise ValueError(f"`output_lengths` has {len(output_lengths)} entries; need one per row, {self.rows}.")
        recording = recording or RecordingCosts()
        settled = settle_all(self._rounds, output_lengths)
        return SpeculationStatistics(
            policy=self.policy,
            acceptance=self.acceptance,
            rows=tuple(RowCounts(*counts) for counts in settled.sum(axis=0).tolist()),
            rounds=tuple(
                count_round(entry, RowCounts(*counts), RowCounts(*texts), self.rows)
                for entry, counts, texts in zip(self._rounds, *_totals(self._rounds, settled), strict=True)
            ),
            drafted_by_position=blocks_beyond(settled[..., _DRAFTED]),
            accepted_by_position=blocks_beyond(settled[..., _ACCEPTED], int(settled[..., _DRAFTED].max(initial=0))),
            plain_steps=max(output_lengths, default=0),
            prefill_seconds=self._prefill_seconds,
            recorded_passes=recording.passes,
            recording_seconds=recording.seconds,
            recording_bytes=recording.bytes,
        )


def _totals(rounds: Sequence[RoundRecord], settled: NDArray[np.int64]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sums of every round over all rows, and over those that drafted out of texts."""
    nobody = [False] * settled.shape[1]
    copied = np.array([entry.out_of_texts or nobody for entry in rounds], dtype=bool).reshape(settled.shape[:2])
    return settled.sum(axis=1).tolist(), (settled * copied[..., None]).sum(axis=1).tolist()


_DRAFTED, _ACCEPTED = (list(RowCounts.__dataclass_fields__).index(name) for name in ("drafted", "accepted"))
_COUNTS = (
    "emitted",
    "drafted",
    "past_end",
    "accepted",
    "text_drafted",
    "text_accepted",
    "row_rounds",
    "draft_steps",
    "padding",
    "idle",
    "plain_steps",
    "recorded_passes",
    "recording_bytes",
)
_PHASES = ("draft", "verify", "bookkeeping", "policy", "prefill", "recording", "total")
_RATIOS = (
    "acceptance_rate",
    "block_efficiency",
    "draft_waste",
    "tokens_per_second",
    "plain_step_seconds",
    "draft_step_seconds",
    "policy_overhead",
    "predicted_speedup",
)


def _none_if_nan(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _undisturbed(rounds: Sequence[RoundCounts]) -> Sequence[RoundCounts]:
    """The rounds in which no pass was recorded, or all of them if there is none."""
    return [r for r in rounds if not r.recorded_passes] or rounds


def _steady_total(shapes_and_seconds: Iterable[tuple[int, int, float]]) -> float:
    """Seconds of all rounds if each took the median of the rounds of its shape, which is two numbers."""
    groups: dict[tuple[int, int], list[float]] = {}
    for rows, width, seconds in shapes_and_seconds:
        groups.setdefault((rows, width), []).append(seconds)
    return math.fsum(len(group) * median(group) for group in groups.values())


def _add_by_position(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))
