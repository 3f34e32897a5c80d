"""How results of batch inference look: a text in a terminal, and the counts of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hf_dsde.batch.input_rows import PROMPT_COLUMNS
from hf_dsde.batch.job_statistics import JobStatistics
from hf_dsde.batch.results import RowResult
from hf_dsde.measurement.views import number
from hf_dsde.utils.words import EXACT


def result_view(result: RowResult, row: Any, column: str | None) -> RenderableType:
    """A result below its prompt.

    Args:
        result: What became of the row.
        row: The row as it was read.
        column: The column that holds the prompts, if one was named.
    """
    title = Text(f"row {result.index}: {_shown(row, column)}", overflow="ellipsis", no_wrap=True)
    if result.error is not None:
        return Group(Rule(title, align="left"), Text(f"error: {result.error}", style="red"))
    return Group(Rule(title, align="left"), Text((result.text or "").strip()))


def summary(statistics: JobStatistics, seconds: float, policy: str) -> Table:
    """Counts and ratios of a job.

    Args:
        statistics: What was counted.
        seconds: How long it took.
        policy: Name of the policy.
    """
    speed = statistics.new_tokens / seconds if seconds else None
    table = Table(title=f"Speculation, policy '{policy}'", show_header=False)
    if statistics.acceptance != EXACT:
        table.add_row("acceptance", statistics.acceptance)
    table.add_row("texts", f"{statistics.texts:,}")
    table.add_row("prompt tokens", f"{statistics.prompt_tokens:,}")
    table.add_row("new tokens", f"{statistics.new_tokens:,}")
    table.add_row("new tokens per second", number(speed, ",.1f"))
    table.add_row("block efficiency", number(statistics.block_efficiency, ".2f"))
    table.add_row("acceptance rate", number(statistics.acceptance_rate, ".1%"))
    table.add_row("mean draft length", number(statistics.mean_draft_length, ".2f"))
    table.add_row("idle rows, share of rounds", number(statistics.idle_share, ".1%"))
    return table


def print_template_note() -> None:
    """Say where nobody asked that plain text goes into the chat template, on standard error."""
    Console(stderr=True).print(
        "Prompts of plain text go into the model's chat template, as what a user asks; --no-chat hands them over as "
        "they stand.",
        style="dim",
        soft_wrap=True,
    )


def print_errors(console: Console, statistics: JobStatistics) -> None:
    """Say how many rows gave no text, if there are any."""
    if statistics.failed:
        rows = "1 row" if statistics.failed == 1 else f"{statistics.failed:,} rows"
        console.print(f"{rows} in error: no text, and the reason in the result's field error", style="yellow")


def _shown(row: Any, column: str | None) -> str:
    """A row's prompt on one line, as far as it is text."""
    if isinstance(row, Mapping):
        names = PROMPT_COLUMNS if column is None else (column,)
        row = next((row[name] for name in names if row.get(name) is not None), None)
    if isinstance(row, list) and row and isinstance(row[-1], Mapping):
        row = row[-1].get("content")
    return " ".join(row.split()) if isinstance(row, str) else ""
