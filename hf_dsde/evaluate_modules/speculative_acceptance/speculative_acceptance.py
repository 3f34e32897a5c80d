"""The measurement `speculative_acceptance`: how many draft tokens a target accepted, over any number of batches.

Every ratio is the property of the same name of `SpeculationStatistics`; this file collects counts and checks them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import evaluate

from hf_dsde.measurement.counts import RowCounts
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.utils.checks import check_integer

_DESCRIPTION = """
Acceptance in speculative decoding, from counts of each sequence: what share of the draft tokens the target accepted,
and how many tokens a sequence gained in each round.
"""

_CITATION = """
@inproceedings{leviathan2023fast,
  title = {Fast Inference from Transformers via Speculative Decoding},
  author = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle = {International Conference on Machine Learning},
  year = {2023}
}
"""

_INPUTS = """
Args:
    data: One entry per sequence: a dict or a dataclass, as the `RowCounts` of `SpeculationStatistics.rows`, with
        `rounds`: rounds that extended the sequence;
        `drafted`: draft tokens inside its text;
        `accepted`: how many of them the target accepted;
        `emitted` or `new_tokens`: tokens that its text gained, bonus tokens included;
        `past_end`: draft tokens past the end of its text; 0 if absent.
        Further keys are ignored.
    drafted_by_position: For `compute` only, with the next one: for each position of a block, how many draft tokens of
        all sequences together stood there.
    accepted_by_position: How many of those were accepted.

Returns:
    acceptance_rate: Accepted per drafted token.
    block_efficiency: Emitted tokens per sequence and round, bonus tokens included.
    mean_draft_length: Draft tokens per sequence and round, those past the end included.
    acceptance_by_position: Acceptance rate of each position, not conditional on the one before; only if counts by
        position were given.
    rows, row_rounds, drafted, accepted, emitted, past_end: the counts that they come from.
    A ratio whose denominator is zero is nan.

Example:
    >>> import evaluate
    >>> from hf_dsde.evaluate_modules import module_path
    >>> acceptance = evaluate.load(module_path("speculative_acceptance"))
    >>> acceptance.add_batch(data=[{"rounds": 4, "drafted": 8, "accepted": 6, "new_tokens": 10}])
    >>> acceptance.add_batch(data=[{"rounds": 1, "drafted": 2, "accepted": 0, "new_tokens": 1}])
    >>> result = acceptance.compute()
    >>> result["acceptance_rate"], result["block_efficiency"], result["mean_draft_length"]
    (0.6, 2.2, 2.0)
"""

_COUNTS = tuple(field.name for field in dataclasses.fields(RowCounts))


class SpeculativeAcceptance(evaluate.Measurement):  # type: ignore[misc]  # `evaluate` is not annotated
    """Acceptance rate, block efficiency and draft length of any number of sequences."""

    def _info(self) -> evaluate.MeasurementInfo:
        counts = {name: datasets.Value("int64") for name in _COUNTS}
        return evaluate.MeasurementInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"data": counts}),
        )

    def add_batch(self, *, data: Iterable[Any]) -> None:
        """Add the counts of some sequences.

        Raises:
            TypeError: If a count is no integer, or an entry neither a dict nor a dataclass.
            ValueError: If a count is missing, or the counts of a sequence contradict each other; nothing is added.
        """
        super().add_batch(data=[dataclasses.asdict(_row_counts(entry, row)) for row, entry in enumerate(data)])

    def add(self, *, data: Any) -> None:
        """Add the counts of one sequence; see `add_batch`."""
        self.add_batch(data=[data])

    def _compute(
        self,
        data: Sequence[Mapping[str, int]],
        drafted_by_position: Sequence[int] | None = None,
        accepted_by_position: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        by_position = _positions(drafted_by_position, accepted_by_position)
        statistics = SpeculationStatistics(
            policy="",
            rows=tuple(RowCounts(**entry) for entry in data),
            rounds=(),
            drafted_by_position=by_position[0] if by_position else (),
            accepted_by_position=by_position[1] if by_position else (),
            plain_steps=0,
            prefill_seconds=0.0,
        )
        result: dict[str, Any] = {
            "acceptance_rate": statistics.acceptance_rate,
            "block_efficiency": statistics.block_efficiency,
            "mean_draft_length": _mean_draft_length(statistics),
        }
        if by_position:
            _check_sums(statistics)
            result["acceptance_by_position"] = list(statistics.acceptance_by_position)
        names = ("row_rounds", "drafted", "accepted", "emitted", "past_end")
        return result | {"rows": len(statistics.rows)} | {name: getattr(statistics, name) for name in names}


def _row_counts(entry: Any, row: int) -> RowCounts:
    if isinstance(entry, Mapping):
        given = dict(entry)
    elif dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        given = dataclasses.asdict(entry)
    else:
        raise TypeError(
            f"`data[{row}]` is {entry!r}; need a dict or a dataclass with the counts of a sequence. Leave out "
            f"sequences without any."
        )
    given.setdefault("past_end", 0)
    given.setdefault("emitted", given.get("new_tokens"))
    missing = [name for name in _COUNTS if given.get(name) is None]
    if missing:
        raise ValueError(
            f"`data[{row}]` has keys {sorted(given)} and lacks {missing}; need 'rounds', 'drafted', 'accepted' and "
            f"'emitted' (or 'new_tokens'), each a count."
        )
    counts = RowCounts(**{name: check_integer(f"data[{row}][{name!r}]", given[name], 0) for name in _COUNTS})
    # What `RoundRecord.check` demands, summed over the rounds of a row, and that texts are counted to their end.
    consistent = (
        counts.accepted <= counts.drafted
        and counts.accepted <= counts.emitted <= counts.accepted + counts.rounds
        and (counts.rounds > 0 or counts.drafted + counts.past_end == 0)
    )
    if not consistent:
        raise ValueError(
            f"`data[{row}]` is {counts}; need accepted <= drafted, accepted <= emitted <= accepted + rounds (one bonus "
            f"token a round), and no draft tokens without a round."
        )
    return counts


def _positions(
    drafted: Sequence[int] | None, accepted: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if drafted is None and accepted is None:
        return None
    if drafted is None or accepted is None or len(drafted) != len(accepted):
        raise ValueError(
            f"`drafted_by_position` is {drafted} and `accepted_by_position` is {accepted}; need both, with one count "
            f"for each position, or neither."
        )
    for position, (of_drafted, of_accepted) in enumerate(zip(drafted, accepted, strict=True)):
        check_integer(f"drafted_by_position[{position}]", of_drafted, 0)
        check_integer(f"accepted_by_position[{position}]", of_accepted, 0, of_drafted)
    return tuple(drafted), tuple(accepted)


def _check_sums(statistics: SpeculationStatistics) -> None:
    """Refuse counts by position of other sequences than were added: a forgotten batch, or one call of several."""
    for name in ("drafted", "accepted"):
        by_position, total = sum(getattr(statistics, f"{name}_by_position")), getattr(statistics, name)
        if by_position != total:
            raise ValueError(
                f"`{name}_by_position` sums to {by_position}, but the sequences of `data` have {name}={total} "
                f"together; pass sums over all sequences that were added, as `SpeculationStatistics.merge` makes them."
            )


def _mean_draft_length(statistics: SpeculationStatistics) -> float:
    drafted = statistics.drafted + statistics.past_end
    return drafted / statistics.row_rounds if statistics.row_rounds else math.nan
