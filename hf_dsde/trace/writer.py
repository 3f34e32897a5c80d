"""Writes a trace so that it is either complete or not there.

Rows are written to a folder beside the final one, a row group at a time, and the folder gets its name when everything
is in it. This module knows files and encodings. It knows no model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from hf_dsde.trace.schema import DESCRIPTION_NAME, FORMAT, SIGNAL_COLUMNS, TABLES, VERSION, table_schema
from hf_dsde.utils.checks import check_integer

ROW_GROUP = 1 << 16
"""Rows that are collected before they are written: about 5 MB of scalars."""
FLOAT32_MANTISSA_BITS = 23
MINIMUM_MANTISSA_BITS = 7

Columns = Mapping[str, Any]
"""Arrays of one length by name; a single value stands for a column of it."""


def round_mantissa(values: np.ndarray, bits: int) -> np.ndarray:
    """Round float32 values to nearest, to `bits` explicit bits of mantissa (ties to even).

    The bits that are left out become 0, which a compressor that sees the bytes of all values one after the other makes
    short work of. The relative error is at most `2^-(bits + 1)`: 12 bits are good for 3.9 decimal digits.

    Args:
        values: Finite, float32, any shape.
        bits: From 1 to 23; 23 changes nothing.
    """
    dropped = FLOAT32_MANTISSA_BITS - bits
    if dropped == 0:
        return values
    raw = np.ascontiguousarray(values).view(np.uint32)
    # A carry out of the mantissa raises the exponent by one, which is what rounding up to a power of two means.
    half = np.uint32((1 << (dropped - 1)) - 1) + ((raw >> np.uint32(dropped)) & np.uint32(1))
    kept = np.uint32(0xFFFFFFFF ^ ((1 << dropped) - 1))
    return ((raw + half) & kept).view(np.float32)


class TraceWriter:
    """Takes rows in the order of the tables; a `with` block that ends without `finish` leaves nothing behind.

    Args:
        folder: Where the trace goes. Must not exist, or be empty.
        tokens: Whether token columns are written.
        mantissa_bits: How precisely float columns are stored.

    Raises:
        FileExistsError: There is something in the folder.
    """

    def __init__(self, folder: Path, *, tokens: bool, mantissa_bits: int = FLOAT32_MANTISSA_BITS) -> None:
        self._bits = check_integer("mantissa_bits", mantissa_bits, MINIMUM_MANTISSA_BITS, FLOAT32_MANTISSA_BITS)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"`folder` is {str(folder)!r}, which is not empty: delete it or choose another one")
        self._folder = folder
        self._tokens = tokens
        self._schemas = {name: table_schema(name, tokens) for name in TABLES}
        self._rows = dict.fromkeys(TABLES, 0)
        self._waiting: dict[str, list[pa.Table]] = {name: [] for name in TABLES}

    def __enter__(self) -> TraceWriter:  # noqa: PYI034 - Self needs Python 3.11
        """Open the files, in a folder beside the final one."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final place, hence on the same file system, where renaming is one step.
        self._partial = Path(tempfile.mkdtemp(dir=self._folder.parent, prefix=f".{self._folder.name}-partial-"))
        self._files = {
            name: pq.ParquetWriter(self._partial / f"{name}.parquet", schema, **_encodings(schema))
            for name, schema in self._schemas.items()
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each table so far."""
        return dict(self._rows)

    def add(self, table: str, columns: Columns) -> None:
        """Append rows.

        Args:
            table: Which table.
            columns: Every column of the table by name; token columns are ignored where they are not wanted.
        """
        schema = self._schemas[table]
        count = max((len(values) for values in columns.values() if isinstance(values, np.ndarray)), default=0)
        if count == 0:
            return
        arrays = [self._array(columns[field.name], field, count) for field in schema]
        self._waiting[table].append(pa.Table.from_arrays(arrays, schema=schema))
        self._rows[table] += count
        if sum(part.num_rows for part in self._waiting[table]) >= ROW_GROUP:
            self._write_waiting(table)

    def finish(self, description: Mapping[str, Any]) -> None:
        """Write what is left and `trace.json`, and give the folder its name."""
        for name, file in self._files.items():
            self._write_waiting(name)
            file.close()
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "tokens": self._tokens,
            "mantissa_bits": self._bits,
            "rows": self.rows,
            **description,
        }
        text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        (self._partial / DESCRIPTION_NAME).write_text(text, encoding="utf-8")
        # `mkdtemp` keeps others out, which a trace has no reason to.
        self._partial.chmod(0o755)
        if self._folder.exists():
            self._folder.rmdir()
        self._partial.rename(self._folder)

    def _array(self, values: Any, field: pa.Field, count: int) -> pa.Array:
        if not isinstance(values, np.ndarray):
            values = np.full(count, values)
        if field.name in SIGNAL_COLUMNS:
            values = round_mantissa(values.astype(np.float32), self._bits)
        if pa.types.is_dictionary(field.type):
            return pa.array(values, pa.string()).dictionary_encode().cast(field.type)
        return pa.array(values, field.type)

    def _write_waiting(self, table: str) -> None:
        if self._waiting[table]:
            # Every part has a dictionary of its own.
            whole = pa.concat_tables(self._waiting[table]).unify_dictionaries().combine_chunks()
            self._files[table].write_table(whole, row_group_size=ROW_GROUP)
            self._waiting[table] = []


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Options of `ParquetWriter`: the bytes of floats apart by place, differences of counters, all compressed."""
    repeated = ["task", "temperature"]
    encoding = {}
    for field in schema:
        if pa.types.is_floating(field.type) and field.name not in repeated:
            encoding[field.name] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_integer(field.type):
            encoding[field.name] = "DELTA_BINARY_PACKED"
    return {
        "compression": "zstd",
        "compression_level": 12,
        "use_dictionary": repeated,
        "column_encoding": encoding,
        "write_statistics": False,
    }
