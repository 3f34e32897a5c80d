"""The input of `hf-dsde generate` as rows: a file, standard input, or prompts of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hf_dsde.batch.input_rows import STANDARD_INPUT, input_identity, read_rows


class AskedRows:
    """Rows of a file whose plain texts are messages of a user.

    Args:
        path: The file.
        column: The column that holds the prompts, if one was named.
    """

    def __init__(self, path: str, column: str | None) -> None:
        self._path, self._column = path, column

    @property
    def _fingerprint(self) -> dict[str, Any]:
        """What a job knows its input by, as data sets have it."""
        return {"asked": True, **input_identity(self._path)}

    def __iter__(self) -> Iterator[Any]:
        return map(_asked, read_rows(self._path, self._column))


def _asked(row: Any) -> Any:
    return [{"role": "user", "content": row}] if isinstance(row, str) else row


def input_of(
    source: str | None, prompts: list[str] | None, column: str | None, lines: Any, *, asks: bool, whole: bool
) -> Any:
    """The input as `BatchGenerator.run` takes it; None if there is none.

    Args:
        source: Path, or `-`.
        prompts: The input itself, in its place.
        column: Column of the prompts.
        lines: What lines of standard input are, `jsonl` or `text`.
        asks: Whether plain texts become messages.
        whole: Whether standard input is read to its end, so that a job can tell it from another.
    """
    if source is None:
        return [_asked(text) if asks else text for text in prompts] if prompts else None
    if source != STANDARD_INPUT:
        return AskedRows(source, column) if asks else Path(source)
    rows = read_rows(_standard_input(), column, lines=lines)
    if asks:
        rows = map(_asked, rows)
    return list(rows) if whole else rows


def _standard_input() -> BinaryIO:
    """Standard input, in an object of its own.

    A thread may wait for it when Ctrl-C ends the process, and Python aborts at its exit if that is `sys.stdin` itself.
    """
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except OSError:
        return sys.stdin.buffer
