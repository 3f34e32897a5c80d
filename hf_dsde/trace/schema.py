"""What a recorded trace holds, and how one is read.

A trace is a folder of `committed.parquet`, `drafted.parquet` and `trace.json`. The files are tables of scalars: what a
replay of draft-length policies needs to know of a pair, without texts and without models. The meaning of the columns is
described in `docs/traces.md`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

FORMAT = "hf_dsde.trace"
VERSION = 1
DESCRIPTION_NAME = "trace.json"
COMMITTED = "committed"
DRAFTED = "drafted"
TABLES = (COMMITTED, DRAFTED)

TOKEN_COLUMNS = ("token", "target_argmax", "draft_argmax")
"""Token ids; a trace that is to hold no text leaves them out."""
AGREEMENT_COLUMNS = ("target_agrees", "draft_agrees")
SIGNAL_COLUMNS = (
    "target_probability",
    "draft_probability",
    "acceptance",
    "kld",
    "reverse_kld",
    "target_entropy",
    "draft_entropy",
    "target_top1",
    "target_top2",
    "draft_top1",
    "draft_top2",
    "residual_draft_probability",
)
"""Scalars of the two raw distributions at a position, float32."""

_VERSION_KEY = b"hf_dsde.trace_version"
_TABLE_KEY = b"hf_dsde.trace_table"
_WHERE = {
    COMMITTED: [("position", pa.int32())],
    DRAFTED: [
        ("round", pa.int32()),
        ("start", pa.int32()),
        ("offset", pa.int32()),
        ("on_path", pa.bool_()),
        ("accepted", pa.bool_()),
    ],
}


def table_schema(table: str, tokens: bool = True) -> pa.Schema:
    """Columns, types and metadata of one of a trace's tables.

    Args:
        table: `COMMITTED` or `DRAFTED`.
        tokens: Whether `TOKEN_COLUMNS` are among the columns.
    """
    fields = [
        ("task", pa.dictionary(pa.int32(), pa.string())),
        ("temperature", pa.float32()),
        ("sequence", pa.int32()),
        *_WHERE[table],
        *((name, pa.int32()) for name in TOKEN_COLUMNS if tokens),
        *((name, pa.bool_()) for name in AGREEMENT_COLUMNS),
        *((name, pa.float32()) for name in SIGNAL_COLUMNS),
    ]
    metadata = {_TABLE_KEY: table.encode(), _VERSION_KEY: str(VERSION).encode()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields], metadata=metadata)


@dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        committed: One row per generated token, ordered by sequence and position.
        drafted: One row per drafted token, ordered by sequence, round and offset.
        description: What `trace.json` says.
    """

    committed: pa.Table
    drafted: pa.Table
    description: dict[str, Any]

    @property
    def has_tokens(self) -> bool:
        """Whether the tables name tokens."""
        return TOKEN_COLUMNS[0] in self.committed.column_names


def load_trace(folder: Path | str) -> Trace:
    """Read a trace.

    Args:
        folder: What `record_trace` wrote.

    Raises:
        FileNotFoundError: There is no trace.
        ValueError: The trace is of another version, or its files do not belong together.
    """
    folder = Path(folder)
    description = _description(folder)
    tables = {name: _table(folder, name, description) for name in TABLES}
    return Trace(tables[COMMITTED], tables[DRAFTED], description)


def _description(folder: Path) -> dict[str, Any]:
    file = folder / DESCRIPTION_NAME
    if not file.is_file():
        raise FileNotFoundError(
            f"`folder` is {str(folder)!r}, which holds no {DESCRIPTION_NAME}: pass the folder of a finished trace, "
            "as `hf-dsde trace --output` writes it"
        )
    description: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if description.get("format") != FORMAT:
        raise ValueError(f"{file} is of format {description.get('format')!r}, not {FORMAT!r}")
    _check_version(file, description.get("version"))
    return description


def _table(folder: Path, name: str, description: dict[str, Any]) -> pa.Table:
    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the trace is incomplete, record it again")
    # Not `read_table`, which takes folders called `name=value` on the way for further columns.
    with pq.ParquetFile(path) as file:
        found = file.schema_arrow
        metadata = found.metadata or {}
        _check_version(path, metadata.get(_VERSION_KEY, b"").decode())
        expected = table_schema(name, tokens=bool(description.get("tokens")))
        if metadata.get(_TABLE_KEY) != name.encode() or not found.equals(expected):
            raise ValueError(
                f"{path} has the columns {', '.join(found.names)}, but version {VERSION} of a trace's table {name!r} "
                f"has {', '.join(expected.names)}: record the trace again"
            )
        table = file.read()
    promised = description.get("rows", {}).get(name)
    if table.num_rows != promised:
        raise ValueError(
            f"{path} has {table.num_rows} rows, but {DESCRIPTION_NAME} speaks of {promised}: the files are not of one "
            "trace; record it again"
        )
    return table


def _check_version(file: Path, version: object) -> None:
    if str(version) != str(VERSION):
        raise ValueError(
            f"{file} is of version {version or 'unknown'}, but this hf_dsde reads version {VERSION} of traces: record "
            "the trace again, or read it with the release that wrote it"
        )
