"""The means of a trace per task and temperature: how well the draft resembles the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from hf_dsde.trace.schema import Trace


@dataclass(frozen=True)
class TaskSummary:
    """What one task looks like at one temperature.

    Attributes:
        task: The task.
        temperature: 0 or 1.
        sequences: Answers.
        positions: Their tokens.
        agreement: Share of positions at which the draft's most likely token is the committed one. At temperature 0
            that is the acceptance rate of a draft token whose prefix is text.
        overlap: Mean of `sum_x min(p(x), q(x))`, the same at temperature 1.
        kld: Mean KL(target || draft), nats.
        reverse_kld: Mean KL(draft || target), nats.
        accepted_per_round: Mean number of draft tokens accepted per round that drafted.
        target_agreement: Share of positions at which the committed token is the target's most likely one: 1 at
            temperature 0, but for rounding.
    """

    task: str
    temperature: float
    sequences: int
    positions: int
    agreement: float
    overlap: float
    kld: float
    reverse_kld: float
    accepted_per_round: float
    target_agreement: float


def summarise(trace: Trace) -> list[TaskSummary]:
    """Summaries in the order in which temperatures and tasks come in the trace."""
    committed, drafted = trace.committed, trace.drafted
    keys, drafted_keys = _keys(committed), _keys(drafted)
    summaries = []
    for key in dict.fromkeys(keys):
        rows = np.array([other == key for other in keys])
        drafts = np.array([other == key for other in drafted_keys], dtype=bool)
        first = drafts & (_column(drafted, "offset") == 0)
        mean = {
            name: float(_column(committed, name)[rows].mean(dtype=np.float64))
            for name in ("draft_agrees", "target_agrees", "acceptance", "kld", "reverse_kld")
        }
        summaries.append(
            TaskSummary(
                task=key[0],
                temperature=key[1],
                sequences=len(np.unique(_column(committed, "sequence")[rows])),
                positions=int(rows.sum()),
                agreement=mean["draft_agrees"],
                overlap=mean["acceptance"],
                kld=mean["kld"],
                reverse_kld=mean["reverse_kld"],
                accepted_per_round=float(_column(drafted, "accepted")[drafts].sum() / max(1, first.sum())),
                target_agreement=mean["target_agrees"],
            )
        )
    return summaries


def _keys(table: pa.Table) -> list[tuple[str, float]]:
    return list(zip(table["task"].to_pylist(), table["temperature"].to_pylist(), strict=True))


def _column(table: pa.Table, name: str) -> np.ndarray:
    values: np.ndarray = table[name].to_numpy()
    return values
