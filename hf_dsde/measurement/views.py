"""How statistics look: in a terminal (rich, also without colour) and in a notebook (plain HTML).

Nothing is computed here that is not a property of the objects shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hf_dsde.measurement.statistics import SpeculationStatistics

_BAR_WIDTH = 20
UNKNOWN = "-"
"""What stands where nothing was measured."""


def summary(statistics: SpeculationStatistics) -> RenderableType:
    """Statistics for a rich console: the important numbers, acceptance by position, and where the time went."""
    parts: list[RenderableType] = [_pairs_table(f"Speculation, policy '{statistics.policy}'", numbers(statistics))]
    if statistics.drafted:
        parts.append(_bars_table("Acceptance by draft position", "position", acceptance_bars(statistics)))
    if statistics.total_seconds > 0:
        parts.append(_bars_table("Time", "phase", time_bars(statistics)))
    reason = statistics.losing_reason()
    if reason is not None:
        parts.append(Text(reason, style="yellow"))
    return Group(*parts)


def summary_html(statistics: SpeculationStatistics) -> str:
    """The same as `summary` in HTML that needs no style sheet; every text is escaped."""
    title = f"Speculation, policy '{statistics.policy}'"
    parts = [_html_table(title, [[name, value] for name, value in numbers(statistics)])]
    if statistics.drafted:
        rows = [[name, _bar(share), value] for name, share, value in acceptance_bars(statistics)]
        parts.append(_html_table("Acceptance by draft position", rows))
    if statistics.total_seconds > 0:
        rows = [[name, _bar(share), value] for name, share, value in time_bars(statistics)]
        parts.append(_html_table("Time", rows))
    reason = statistics.losing_reason()
    if reason is not None:
        parts.append(f"<p><strong>{escape(reason)}</strong></p>")
    return "<div>" + "".join(parts) + "</div>"


def numbers(statistics: SpeculationStatistics) -> list[tuple[str, str]]:
    """Name and value of each number worth a line."""
    columns = sum(len(statistics.rows) * r.pass_width for r in statistics.rounds)
    return [
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


def _pairs_table(title: str, pairs: list[tuple[str, str]]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def _bars_table(title: str, first_column: str, bars: list[tuple[str, float, str]]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False)
    table.add_column(first_column)
    table.add_column("share", width=_BAR_WIDTH, no_wrap=True)
    table.add_column("value", justify="right")
    for name, share, value in bars:
        table.add_row(Text(name), _Bar(share), Text(value))
    return table


def _html_table(title: str, rows: list[list[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class _Bar:
    """A bar for a rich console, drawn with what the console's encoding has."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(_bar(self.share, "#", ".") if options.ascii_only else _bar(self.share))


def _bar(share: float, full: str = "\u2588", empty: str = "\u2591") -> str:
    """A bar whose whole length shows, so that it can be read without colour and without a frame."""
    filled = 0 if math.isnan(share) else round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    return full * filled + empty * (_BAR_WIDTH - filled)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in a format, or `UNKNOWN`."""
    return UNKNOWN if value is None or math.isnan(value) else f"{value:{form}}{unit}"


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1000, ".2f", " ms")
