"""Results as Parquet: part files while the job runs, one file in the end.

A Parquet file cannot be appended to, since what tells its pieces apart stands at its end. So every part is a whole
file, which gets its name when it is on disk. Parts are joined one row group at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from hf_dsde.batch.output_base import OutputFile
from hf_dsde.batch.output_files import MERGED_NAME, OutputPaths, replacing
from hf_dsde.batch.results import RowResult

SUFFIX = ".parquet"
"""Of the parts, as of the output."""
ROW_GROUP = 8192
"""Rows that are in memory at a time when parts are joined: some 100 MB where texts have a thousand tokens."""
COMPRESSION = "zstd"

SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("token_ids", pa.list_(pa.int64())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field(
            "statistics",
            pa.struct(
                [
                    pa.field("prompt_tokens", pa.int64()),
                    pa.field("new_tokens", pa.int64()),
                    pa.field("rounds", pa.int64()),
                    pa.field("drafted", pa.int64()),
                    pa.field("accepted", pa.int64()),
                    pa.field("seconds", pa.float64()),
                ]
            ),
        ),
    ]
)
"""Columns of an output: the fields of `RowResult`."""


class ParquetOutput(OutputFile):
    """Collects results and writes them as parts.

    Args:
        paths: The files of the output.
        shard: Which process this is.
        shards: How many there are.
        part_rows: Results that make a part.
        part_seconds: Seconds after which the next call of `write` makes a part of fewer.
    """

    def __init__(self, paths: OutputPaths, shard: int, shards: int, part_rows: int, part_seconds: float) -> None:
        self._part_rows = part_rows
        self._part_seconds = part_seconds
        self._waiting: dict[int, RowResult] = {}
        self._since = 0.0
        self._next = 0
        super().__init__(paths, shard, shards)

    def _prepare(self, opening: ExitStack) -> None:  # noqa: ARG002 - no file stays open
        own = re.compile(re.escape(self._name) + r"-(\d+)")
        for source in self._paths.sources(SUFFIX):
            self.done.update(int(index) for piece in _pieces(source) for index in piece.indices)
            if source != self._paths.output and (match := own.fullmatch(source.stem)):
                self._next = max(self._next, int(match[1]) + 1)

    def _write(self, results: Sequence[RowResult]) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.update((result.index, result) for result in results)
        if len(self._waiting) >= self._part_rows or time.monotonic() - self._since >= self._part_seconds:
            self.flush()

    def flush(self) -> None:
        """Write a part of what was collected."""
        if not self._waiting:
            return
        table = pa.Table.from_pylist([result.to_dict() for result in self._waiting.values()], schema=SCHEMA)
        part = self._paths.parts / f"{self._name}-{self._next:06d}{SUFFIX}"
        with replacing(part, self._paths.parts / f"{self._name}.tmp") as file:
            pq.write_table(table, file, compression=COMPRESSION)
        self._next += 1
        self.done.update(self._waiting)
        self._waiting = {}

    def _is_waiting(self, index: int) -> bool:
        return index in self._waiting


class Piece(NamedTuple):
    """A row group of a file, and the indices of its rows, int64 `[rows]`."""

    path: Path
    group: int
    indices: np.ndarray

    def rows(self, chosen: np.ndarray) -> pa.Table:
        """Those of its rows that a mask, bool `[rows]`, chooses."""
        with pq.ParquetFile(self.path) as file:
            table = file.read_row_group(self.group)
        return table if chosen.all() else table.filter(pa.array(chosen))


def read_file(path: Path) -> Iterator[RowResult]:
    """The results in a file."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from map(RowResult.from_dict, batch.to_pylist())


def merge_files(paths: OutputPaths, ordered: bool) -> None:
    """Make the output of all parts; leaves it alone if that is what it is already."""
    pieces = [piece for source in paths.sources(SUFFIX) for piece in _pieces(source)]
    indices = np.concatenate([np.empty(0, np.int64), *(piece.indices for piece in pieces)])
    # A row that is in two files counts where it comes first.
    first = np.zeros(len(indices), bool)
    first[np.unique(indices, return_index=True)[1]] = True
    in_order = not ordered or bool((np.diff(indices) > 0).all())
    if paths.output.exists() and all(p.path == paths.output for p in pieces) and first.all() and in_order:
        return
    chosen = np.split(first, np.cumsum([len(piece.indices) for piece in pieces])[:-1]) if pieces else []
    tables = (_sorted_tables if ordered else _tables)(pieces, chosen)
    with (
        replacing(paths.output, paths.parts / MERGED_NAME) as file,
        pq.ParquetWriter(file, SCHEMA, compression=COMPRESSION) as writer,
    ):
        for table in tables:
            writer.write_table(table, row_group_size=ROW_GROUP)


def _pieces(path: Path) -> Iterator[Piece]:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield Piece(path, group, file.read_row_group(group, columns=["index"]).column("index").to_numpy())


def _tables(pieces: Sequence[Piece], chosen: Sequence[np.ndarray]) -> Iterator[pa.Table]:
    """The chosen rows of the pieces as they come, small ones together."""
    waiting: list[pa.Table] = []
    for piece, mask in zip(pieces, chosen, strict=True):
        if mask.any():
            waiting.append(piece.rows(mask))
        if sum(table.num_rows for table in waiting) >= ROW_GROUP:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _sorted_tables(pieces: Sequence[Piece], chosen: Sequence[np.ndarray]) -> Iterator[pa.Table]:
    """The chosen rows of the pieces by index.

    Each table is gathered from all pieces that have rows between its first and its last index. Rows finish nearly in
    the order in which they were admitted, so these are few pieces as a rule.
    """
    kept = [piece.indices[mask] for piece, mask in zip(pieces, chosen, strict=True)]
    order = np.sort(np.concatenate([np.empty(0, np.int64), *kept]))
    for start in range(0, len(order), ROW_GROUP):
        low, high = order[start], order[min(start + ROW_GROUP, len(order)) - 1]
        masks = [mask & (p.indices >= low) & (p.indices <= high) for p, mask in zip(pieces, chosen, strict=True)]
        tables = [piece.rows(mask) for piece, mask in zip(pieces, masks, strict=True) if mask.any()]
        yield pa.concat_tables(tables).sort_by("index")
