"""Traces as flat arrays: one entry per recorded position, sequences one after another.

This file knows what a trace's columns mean. It knows nothing of seeds, policies or costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

DIRECT_COLUMNS = {
    "kld": "kld",
    "reverse_kld": "reverse_kld",
    "entropy": "draft_entropy",
    "top1": "draft_top1",
    "top2": "draft_top2",
}
"""Signals that are a column of both tables, whatever happens to the token."""


@dataclass(frozen=True)
class Tails:
    """Real drafts after a rejected token: what a draft looks like once the text has gone another way.

    Attributes:
        lengths: Positions after each block's first rejected token, `[tails]`, at least 1.
        tasks: Index into the trace's tasks, `[tails]`.
        signals: By name, `[tails, longest]`, float32; not a number beyond a tail's length.
    """

    lengths: Integers
    tasks: Integers
    signals: dict[str, Floats]

    @property
    def longest(self) -> int:
        """Positions of the longest tail; 0 when there is none."""
        return int(self.lengths.max(initial=0))


@dataclass(frozen=True)
class TraceTable:
    """The committed positions of one trace at one temperature, and the tails of its drafts.

    Attributes:
        name: What the trace is called in results.
        temperature: 0 for greedy text, 1 for sampled text.
        tasks: Names, sorted.
        sequence_tasks: Index into `tasks` of each sequence, `[sequences]`.
        sequence_names: Number of each sequence within its task, as recorded, `[sequences]`.
        starts: Where each sequence begins in the flat arrays, `[sequences]`.
        lengths: Positions of each sequence, `[sequences]`, at least 1.
        columns: By column name, `[positions]`, float32; `draft_agrees` is bool.
        tails: Drafts after a first rejected token.
    """

    name: str
    temperature: int
    tasks: tuple[str, ...]
    sequence_tasks: Integers
    sequence_names: Integers
    starts: Integers
    lengths: Integers
    columns: dict[str, NDArray[Any]]
    tails: Tails

    @property
    def positions(self) -> int:
        """Recorded positions of all sequences together."""
        return int(self.lengths.sum())

    @property
    def has_sampled_text(self) -> bool:
        """Whether the text was sampled, so that acceptance is a matter of chance."""
        return self.temperature > 0

    @property
    def position_sequences(self) -> Integers:
        """The sequence that each position belongs to, `[positions]`."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    def sequences_of(self, tasks: Sequence[str] | None = None) -> Integers:
        """Indices of the sequences of some tasks, or of all.

        Raises:
            ValueError: A task is not in the trace.
        """
        if tasks is None:
            return np.arange(len(self.starts))
        unknown = [task for task in tasks if task not in self.tasks]
        if unknown:
            raise ValueError(
                f"`tasks` names {unknown[0]!r}, but the trace {self.name!r} has: {', '.join(self.tasks)}. "
                "Name one of these, or leave the filter out."
            )
        return np.flatnonzero(np.isin(self.sequence_tasks, [self.tasks.index(task) for task in tasks]))

    @classmethod
    def load(cls, folder: Path | str, temperature: int, tasks: Sequence[str] | None = None) -> TraceTable:
        """Read a recorded trace.

        Args:
            folder: What `hf-dsde trace` wrote; its last part becomes the trace's name.
            temperature: 0 or 1.
            tasks: Keep only these tasks.

        Raises:
            FileNotFoundError: There is no trace.
            ValueError: The trace has no text at that temperature, or lacks one of the tasks.
        """
        from hf_dsde.trace import load_trace

        trace = load_trace(folder)
        return cls.from_arrow(trace.committed, trace.drafted, temperature, tasks, name=Path(folder).resolve().name)

    @classmethod
    def from_arrow(
        cls,
        committed: pa.Table,
        drafted: pa.Table,
        temperature: int,
        tasks: Sequence[str] | None = None,
        *,
        name: str = "trace",
    ) -> TraceTable:
        """The flat arrays of a trace's two tables; see `load`."""
        rows, names = _selected(committed, temperature, tasks, name)
        task, sequence, position = rows["task"], rows["sequence"], rows["position"]
        starts = np.flatnonzero(position == 0)
        lengths = np.diff(np.append(starts, len(position)))
        in_order = position[0] == 0 and np.array_equal(position, np.arange(len(position)) - np.repeat(starts, lengths))
        if not in_order:
            raise ValueError(
                f"The committed positions of trace {name!r} do not count up from 0 in every sequence: the table is "
                "damaged or in another order; record the trace again."
            )
        columns = {key: values for key, values in rows.items() if key not in ("task", "sequence", "position")}
        return cls(
            name=name,
            temperature=temperature,
            tasks=names,
            sequence_tasks=task[starts],
            sequence_names=sequence[starts],
            starts=starts,
            lengths=lengths,
            columns=columns,
            tails=_tails(drafted, temperature, names),
        )


COMMITTED_COLUMNS = (
    "task",
    "sequence",
    "position",
    "draft_agrees",
    "target_probability",
    "draft_probability",
    "acceptance",
    "kld",
    "reverse_kld",
    "target_entropy",
    "draft_entropy",
    "draft_top1",
    "draft_top2",
    "residual_draft_probability",
)
DRAFTED_COLUMNS = (
    "task",
    "offset",
    "on_path",
    "target_agrees",
    "draft_probability",
    "acceptance",
    "kld",
    "reverse_kld",
    "draft_entropy",
    "draft_top1",
    "draft_top2",
)


def _selected(
    table: pa.Table, temperature: int, tasks: Sequence[str] | None, name: str
) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Columns of the committed positions at a temperature and of some tasks; tasks as indices, and their names."""
    temperatures = table.column("temperature").to_numpy()
    task = np.asarray(table.column("task").to_pylist(), dtype=object)
    at_temperature = temperatures == temperature
    if not at_temperature.any():
        found = ", ".join(f"{value:g}" for value in np.unique(temperatures)) or "none"
        raise ValueError(f"Trace {name!r} has no text at `temperature` {temperature}; it has: {found}.")
    known = sorted(set(task[at_temperature]))
    unknown = [t for t in tasks or () if t not in known]
    if unknown:
        raise ValueError(
            f"`tasks` names {unknown[0]!r}, but trace {name!r} has: {', '.join(known)}. Name one of these, or leave "
            "the filter out."
        )
    names = tuple(t for t in known if tasks is None or t in tasks)
    keep = at_temperature & np.isin(task, names)
    columns = {key: _column(table, key)[keep] for key in COMMITTED_COLUMNS if key != "task"}
    return {"task": np.searchsorted(names, task[keep].astype(str)), **columns}, names


def _tails(table: pa.Table, temperature: int, names: tuple[str, ...]) -> Tails:
    """Everything after the first rejected token of each drafted block, of the named tasks."""
    task = np.asarray(table.column("task").to_pylist(), dtype=object)
    keep = (table.column("temperature").to_numpy() == temperature) & np.isin(task, names)
    rows = {key: _column(table, key)[keep] for key in DRAFTED_COLUMNS if key != "task"}
    block = np.cumsum(rows["offset"] == 0) - 1
    behind = np.flatnonzero(~rows["on_path"])
    owner, first, counts = np.unique(block[behind], return_index=True, return_counts=True)
    depth = np.arange(len(behind)) - np.repeat(first, counts)
    tail = np.repeat(np.arange(len(owner)), counts)
    if temperature == 0:
        rows["acceptance"] = rows["target_agrees"].astype(np.float32)
    signals: dict[str, Floats] = {}
    for signal, column in {**DIRECT_COLUMNS, "confidence": "draft_probability", "acceptance": "acceptance"}.items():
        values = np.full((len(owner), int(counts.max(initial=0))), np.nan, dtype=np.float32)
        values[tail, depth] = rows[column][behind]
        signals[signal] = values
    task_index = np.searchsorted(names, task[keep].astype(str))
    return Tails(counts.astype(np.int64), task_index[behind][first], signals)


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    values = table.column(name).to_numpy()
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    return values.astype(np.int64) if values.dtype.kind == "i" else values
