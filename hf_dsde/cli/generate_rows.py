"""The input of `hf-dsde generate` as rows: a file, standard input, or prompts of the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, BinaryIO

from hf_dsde.batch.input_rows import STANDARD_INPUT, read_rows


def input_of(source: str | None, prompts: list[str] | None, column: str | None, lines: Any, *, whole: bool) -> Any:
    """The input as `BatchGenerator.run` takes it; None if there is none.

    Args:
        source: Path, or `-`.
        prompts: The input itself, in its place.
        column: Column of the prompts.
        lines: What lines of standard input are, `jsonl` or `text`.
        whole: Whether standard input is read to its end, so that a job can tell it from another.
    """
    if source is None:
        return list(prompts) if prompts else None
    if source != STANDARD_INPUT:
        return Path(source)
    rows = read_rows(_standard_input(), column, lines=lines)
    return list(rows) if whole else rows


def _standard_input() -> BinaryIO:
    """Standard input, in an object of its own.

    A thread may wait for it when Ctrl-C ends the process, and Python aborts at its exit if that is `sys.stdin` itself.
    """
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except OSError:
        return sys.stdin.buffer
