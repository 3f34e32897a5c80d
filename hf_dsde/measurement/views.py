"""How statistics look: in a terminal (rich, also without colour) and in a notebook (plain HTML).

Nothing is computed here that is not a property of the objects shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hf_dsde.utils.words import EXACT

if TYPE_CHECKING:
    from hf_dsde.measurement.statistics import SpeculationStatistics

_BAR_WIDTH = 20
UNKNOWN = "-"
"""What stands where nothing was measured."""


def summary(statistics: SpeculationStatistics) -> RenderableType:
    """Statistics for a rich console: the important numbers, acceptance by position, and where the time went."""
    reason = statistics.losing_reason()
    notes = [] if reason is None else [Text(reason, style="yellow")]
    return Group(*(_table(title, rows) for title, rows in _sections(statistics)), *notes)


def summary_html(statistics: SpeculationStatistics) -> str:
    """The same as `summary` in HTML that needs no style sheet; every text is escaped."""
    reason = statistics.losing_reason()
    note = "" if reason is None else f"<p><strong>{escape(reason)}</strong></p>"
    return "<div>" + "".join(_html_table(title, rows) for title, rows in _sections(statistics)) + note + "</div>"


def _sections(statistics: SpeculationStatistics) -> Iterator[tuple[str, list[tuple[str | _Bar, ...]]]]:
    """The title and the cells of each table; those of numbers have two columns, those of shares a bar between them."""
    yield f"Speculation, policy '{statistics.policy}'", [*numbers(statistics)]
    if statistics.drafted:
        yield "Acceptance by draft position", [(n, _Bar(share), v) for n, share, v in acceptance_bars(statistics)]
    if statistics.total_seconds > 0:
        yield "Time", [(name, _Bar(share), value) for name, share, value in time_bars(statistics)]


def numbers(statistics: SpeculationStatistics) -> list[tuple[str, str]]:
    """Name and value of each number worth a line."""
    columns = sum(len(statistics.rows) * r.pass_width for r in statistics.rounds)
    texts = f"{statistics.text_drafted}, {statistics.text_accepted} of them accepted"
    return [
        *([] if statistics.acceptance == EXACT else [("acceptance", statistics.acceptance)]),
        ("rows", str(len(statistics.rows))),
        ("rounds", str(len(statistics.rounds))),
        ("tokens emitted", str(statistics.emitted)),
        ("tokens per second", number(statistics.tokens_per_second, ".1f")),
        ("block efficiency", number(statistics.block_efficiency, ".2f")),
        ("acceptance rate", number(statistics.acceptance_rate, ".1%")),
        (
            "drafted",
            f"{statistics.drafted + statistics.past_end}, wasted {number(statistics.draft_waste, '.1%')}",
        ),
        *([("of them out of texts", texts)] if statistics.text_drafted else []),
        ("draft steps", str(statistics.draft_steps)),
        ("padding columns", number(statistics.padding / columns if columns else math.nan, ".1%")),
        ("idle columns", number(statistics.idle / columns if columns else math.nan, ".1%")),
        ("draft step", _milliseconds(statistics.draft_step_seconds)),
        ("plain target step", _milliseconds(statistics.plain_step_seconds)),
        ("policy, share of rounds", number(statistics.policy_overhead, ".1%")),
        ("predicted speedup", number(statistics.predicted_speedup, ".2f", "x")),
    ]


def acceptance_bars(statistics: SpeculationStatistics) -> list[tuple[str, float, str]]:
    """Position (from 1), acceptance rate and its text, for every draft position."""
    rates = statistics.acceptance_by_position
    drafted = statistics.drafted_by_position
    return [
        (str(position), rate, f"{number(rate, '.0%')} of {count}")
        for position, (rate, count) in enumerate(zip(rates, drafted, strict=True), start=1)
    ]


def time_bars(statistics: SpeculationStatistics) -> list[tuple[str, float, str]]:
    """Phase, its share of the measured time and its text."""
    total = statistics.total_seconds
    phases = ("prefill", "draft", "verify", "bookkeeping")
    seconds = [(phase, float(getattr(statistics, f"{phase}_seconds"))) for phase in phases]
    return [(phase, value / total, f"{value / total:.0%}, {value:.3g} s") for phase, value in seconds]


def _table(title: str, rows: list[tuple[str | _Bar, ...]]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False)
    table.add_column()
    if len(rows[0]) == 3:
        table.add_column(width=_BAR_WIDTH, no_wrap=True)
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _html_table(title: str, rows: list[tuple[str | _Bar, ...]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class _Bar:
    """A bar whose whole length shows, so that it can be read without colour and without a frame."""

    share: float

    def __str__(self) -> str:
        filled = 0 if math.isnan(self.share) else round(min(max(self.share, 0.0), 1.0) * _BAR_WIDTH)
        return "\u2588" * filled + "\u2591" * (_BAR_WIDTH - filled)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = str(self)
        yield Text(bar.replace("\u2588", "#").replace("\u2591", ".") if options.ascii_only else bar)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in a format, or `UNKNOWN`."""
    return UNKNOWN if value is None or math.isnan(value) else f"{value:{form}}{unit}"


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1000, ".2f", " ms")
