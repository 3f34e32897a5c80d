"""Results as Parquet. Such a file cannot be appended to, so jobs keep lines of JSON until they make one of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from hf_dsde.batch.prefetch import in_groups

ROW_GROUP = 2048
"""Rows that are in memory at a time: some 200 MB where texts have a thousand tokens."""

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


def write_rows(file: IO[bytes], rows: Iterable[dict[str, Any]]) -> None:
    """Write results, as `RowResult.to_dict` gives them, to a file."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        # Of two groups, no name keeps the first while the second is read.
        for table in map(partial(pa.Table.from_pylist, schema=SCHEMA), in_groups(rows, ROW_GROUP)):
            writer.write_table(table)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The results in a file, as `RowResult.from_dict` takes them."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def read_indices(path: Path) -> list[int]:
    """The `index` of each result in a file, in its order."""
    with pq.ParquetFile(path) as file:
        return file.read(columns=["index"]).column("index").to_pylist()
