"""Rows of an input file or of standard input, one after another, and what identifies a file.

Reading knows formats, not prompts: whether a row is a usable prompt is `requests.py`'s question. A row that cannot even
be read takes part as a `BrokenRow`, so that the indices of all others stay what they are.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal

from hf_dsde.batch.chat_prompts import TEMPLATE_COLUMNS
from hf_dsde.utils.checks import check_choice

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

STANDARD_INPUT = "-"
PROMPT_COLUMNS = ("messages", "prompt", "text", "input_ids")
"""Columns that are found without being named."""
ROW_OPTIONS = ("max_new_tokens", "stop_strings", *TEMPLATE_COLUMNS)
"""Columns beside the prompt that change how a single row is generated."""
_COMPANIONS = (*ROW_OPTIONS, "attention_mask")
_BATCH_ROWS = 256
_CHUNK_BYTES = 1 << 20
_LONGEST_CELL = 2**31 - 1
"""Characters; the standard library's own limit is shorter than long prompts are."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BrokenRow:
    """A row that could not be read; `error` says where and why."""

    error: str


def read_rows(
    path_or_stream: str | Path | BinaryIO, column: str | None = None, *, lines: Literal["jsonl", "text"] = "jsonl"
) -> Iterator[Any]:
    """Iterate over the rows of a file, in a form that `RequestBuilder.build` takes.

    | suffix | rows |
    | --- | --- |
    | `.jsonl`, `.ndjson` | one JSON value a line. Lines of nothing but white space are no rows and get no index. |
    | `.json` | the items of one JSON array, which is read as a whole |
    | `.txt` | one prompt a line; an empty line is an empty prompt, so that row n is line n + 1 |
    | `.parquet` | mappings, read a few hundred rows at a time |
    | `.csv` | mappings of column names to text; the first line names the columns. `max_new_tokens` holds numbers |

    The text is UTF-8. A line that is not, that is no JSON, or that has too few or too many cells becomes a `BrokenRow`.

    Args:
        path_or_stream: A file with one of these suffixes, or a binary stream of lines; `-` is standard input.
        column: The column that holds the prompts. From Parquet and CSV files only this one is read, and those that set
            options of a row; other formats ignore it here.
        lines: Whether the lines of a stream are JSON values (`jsonl`) or prompts (`text`). A file's suffix says it.

    Raises:
        FileNotFoundError, IsADirectoryError: The path is no file.
        ValueError: The suffix is unknown, the file is not of its suffix's format, or it has no such column. For the
            files that are read piece by piece, the second can also be raised between rows.
    """
    check_choice("lines", lines, ("jsonl", "text"))
    if isinstance(path_or_stream, io.TextIOBase):
        raise TypeError("`path_or_stream` is a text stream, but bytes are needed. Pass its `.buffer`.")
    if not isinstance(path_or_stream, (str, Path)):
        return _read_lines(path_or_stream, lines)
    if str(path_or_stream) == STANDARD_INPUT:
        return _read_lines(sys.stdin.buffer, lines)
    path = _existing_file(path_or_stream)
    readers: dict[str, Callable[[], Iterator[Any]]] = {
        ".jsonl": lambda: _read_lines(path, "jsonl"),
        ".ndjson": lambda: _read_lines(path, "jsonl"),
        ".json": lambda: _read_array(path),
        ".txt": lambda: _read_lines(path, "text"),
        ".parquet": lambda: _read_parquet(path, column),
        ".csv": lambda: _read_csv(path, column),
    }
    if (reader := readers.get(path.suffix.lower())) is not None:
        return reader()
    raise ValueError(
        f"The input {str(path)!r} has the suffix {path.suffix!r}, but one of {', '.join(readers)} is needed. "
        "Convert it, or pass its lines through standard input ('-')."
    )


def columns_read(names: Sequence[str], column: str | None) -> list[str]:
    """Those of a table's columns that make requests: prompts, and what else rows may have of their own.

    Args:
        names: Names of the table's columns.
        column: The column that holds the prompts; None for the known ones.
    """
    prompts = PROMPT_COLUMNS if column is None else (column,)
    return [name for name in names if name in prompts or name in _COMPANIONS]


def check_columns(table: str, names: Sequence[str], column: str | None) -> None:
    """Refuse a table in which no column can hold prompts.

    Args:
        table: What the table is called in the message.
        names: Names of its columns.
        column: The column that holds the prompts; None for the known ones.

    Raises:
        ValueError: There is no such column.
    """
    present = f"Its columns are: {', '.join(names)}"
    if column is None and not set(PROMPT_COLUMNS) & set(names):
        known = ", ".join(f"`{name}`" for name in PROMPT_COLUMNS)
        raise ValueError(f"{table} has none of the columns {known}. {present}; pass `column` to name one of them.")
    if column is not None and column not in names:
        raise ValueError(f"{table} has no column `{column}`. {present}.")


def input_identity(path: str | Path) -> dict[str, Any]:
    """What tells whether a file is the same input: its name, its bytes' number, and their SHA-256 as hex digits.

    The folder does not count, so that an interrupted run can go on elsewhere. The file is read once, piece by piece.

    Raises:
        ValueError: The path is `-`; standard input can be read only once.
    """
    if str(path) == STANDARD_INPUT:
        raise ValueError("Standard input ('-') cannot be identified. Write it to a file to be able to resume.")
    path = _existing_file(path)
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"name": path.name, "size": size, "sha256": digest.hexdigest()}


def _existing_file(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"The input {str(path)!r} is a folder. Pass one of its files.")
    if not path.exists():
        raise FileNotFoundError(f"There is no input file {str(path)!r}.")
    return path


def _read_lines(path_or_stream: Path | BinaryIO, kind: str) -> Iterator[Any]:
    # A stream that was handed in is left open for whoever opened it.
    opened = path_or_stream.open("rb") if isinstance(path_or_stream, Path) else nullcontext(path_or_stream)
    with opened as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            # Only the line's end goes: other white space may be meant.
            content = content.removesuffix(b"\n").removesuffix(b"\r")
            if kind == "text":
                yield _decoded(content, number)
            elif content.strip():
                yield _parsed(content, number)


def _decoded(content: bytes, number: int) -> str | BrokenRow:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        return BrokenRow(f"line {number} is no UTF-8 ({failure.reason} at byte {failure.start}); text must be UTF-8")


def _parsed(content: bytes, number: int) -> Any:
    text = _decoded(content, number)
    if isinstance(text, BrokenRow):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        return BrokenRow(f"line {number} is no JSON ({failure}); each line must be one JSON value")


def _read_array(path: Path) -> Iterator[Any]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as failure:
        raise ValueError(
            f"{str(path)!r} holds no JSON ({failure}). JSON Lines belong into a '.jsonl' file."
        ) from failure
    if not isinstance(rows, list):
        raise ValueError(  # noqa: TRY004  the content of a file is at fault, not the type of an argument
            f"{str(path)!r} holds a JSON {type(rows).__name__}, but an array of rows is needed."
        )
    return iter(rows)


def _read_parquet(path: Path, column: str | None) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as failure:
        raise ValueError(f"{str(path)!r} is no Parquet file ({failure}).") from failure
    schema = file.schema_arrow
    check_columns(repr(str(path)), schema.names, column)
    columns = schema.names if column is None else columns_read(schema.names, column)
    decoders = {name: decoder for name in columns if (decoder := _decoder(schema.field(name).type)) is not None}

    def rows() -> Iterator[Any]:
        with file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    yield {**row, **{name: decode(row[name]) for name, decode in decoders.items()}}

    return rows()


def _decoder(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What puts what JSON says in place of JSON, as Arrow keeps values of mixed types; None if no JSON is in there."""
    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda text: None if text is None else json.loads(text)
    fields = (kind.field(place) for place in range(kind.num_fields))
    inner = {field.name: decoder for field in fields if (decoder := _decoder(field.type)) is not None}

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: inner[name](part) if name in inner else part for name, part in value.items()}
        return value if value is None else [part_of(part) for part in value for part_of in inner.values()]

    return decode if inner else None


def _read_csv(path: Path, column: str | None) -> Iterator[Any]:
    csv.field_size_limit(_LONGEST_CELL)

    def opened() -> IO[str]:
        # What is no UTF-8 is escaped, for the row that has it to be refused.
        return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")

    with opened() as file:
        names = next(csv.reader(file), [])
    if not names or any(isinstance(_cell("", name), bytes) for name in names):
        raise ValueError(f"{str(path)!r} is no CSV file whose first line names its columns in UTF-8.")
    check_columns(repr(str(path)), names, column)
    columns = names if column is None else columns_read(names, column)

    def rows() -> Iterator[Any]:
        number = 1
        with opened() as file:
            lines = filter(None, csv.reader(file))
            next(lines)
            try:
                for number, cells in enumerate(lines, start=2):
                    if len(cells) == len(names):
                        yield {name: _cell(name, cells[names.index(name)]) for name in columns}
                    else:
                        yield BrokenRow(f"row {number} of the CSV file has {len(cells)} cells, not {len(names)}")
            except csv.Error as failure:
                raise ValueError(f"{str(path)!r} cannot be read as CSV beyond row {number} ({failure}).") from failure

    return rows()


def _cell(name: str, content: str) -> str | int | bytes | None:
    """The text of a cell, or its bytes when they are no UTF-8; in a column of numbers its number, or None if empty."""
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError:
            return content.encode(errors="surrogateescape")
    if name not in ROW_OPTIONS:
        return content
    if not content:
        return None
    # Whatever is no number is left as it is for the request to be refused with its own words.
    return int(content) if name == "max_new_tokens" and content.strip().lstrip("-").isdecimal() else content
