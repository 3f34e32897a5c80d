"""How a grid of replays looks in a terminal. Nothing is computed here that is not a property of a cell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hf_dsde.replay.experiment import ReplayResult
from hf_dsde.replay.results import Cell, Gap

SHOWN_DEVIATION = 1.0
"""Standard deviations over seeds of at least this many points are printed."""
STATIC_OPT = "best fixed length: x plain (k)"
CELL_WIDTH = 12
"""Characters of a column with its frame, when numbers come with deviations."""
FRACTIONAL_WIDTH = 16
"""The same for columns that tell a fractional budget."""


def result_view(result: ReplayResult) -> RenderableType:
    """One table per trace and temperature, and how to read them."""
    parts: list[RenderableType] = []
    for (trace, temperature), cells in groupby(result.cells, key=lambda cell: (cell.trace, cell.temperature)):
        parts += [_Tables(f"{trace}, temperature {temperature}", list(cells)), Text()]
    seeds = result.grid.seeds
    parts.append(
        Text(
            "Replayed from recorded traces, costs in plain steps: no running system was measured. Policies and oracle: "
            f"percent over the column's best fixed length, paired by seed, mean of {seeds} seed{'s' * (seeds > 1)}; "
            f"deviations of {SHOWN_DEVIATION:g} point or more are shown. The best fixed length and the oracle are "
            "known after the fact only.",
            style="dim",
        )
    )
    return Group(*parts)


@dataclass(frozen=True)
class _Tables:
    """The cells of a trace, in one table if the console is wide enough, else in several below each other."""

    title: str
    cells: Sequence[Cell]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [len(score.name) for score in self.cells[0].policies]
        words = [len(word) for cell in self.cells for word in cell.costs.name.split()]
        least = FRACTIONAL_WIDTH if any(cell.fractional for cell in self.cells) else CELL_WIDTH
        width = max(least, max(words) + 3)
        columns = max(1, (options.max_width - max([len(STATIC_OPT), *names]) - 4) // width)
        for start in range(0, len(self.cells), columns):
            yield _table(self.title if start == 0 else f"{self.title}, continued", self.cells[start : start + columns])


def _table(title: str, cells: Sequence[Cell]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left")
    table.add_column("percent over\nbest fixed length", no_wrap=True)
    for cell in cells:
        table.add_column("\n".join([*cell.costs.name.split(), f"B={cell.rows}"]), justify="right", no_wrap=True)
    table.add_row(Text(STATIC_OPT), *(_static_opt(cell) for cell in cells), end_section=True)
    best = [max(cell.policies, key=lambda score: cell.gap(score.speeds).mean, default=None) for cell in cells]
    for name in [score.name for score in cells[0].policies]:
        gaps = (cell.gap(cell.score(name).speeds) for cell in cells)
        marked = (score is not None and score.name == name for score in best)
        table.add_row(Text(name), *(_gap(gap, bold) for gap, bold in zip(gaps, marked, strict=True)))
    table.add_section()
    if any(cell.fractional for cell in cells):
        table.add_row(Text("best fractional budget (k)"), *map(_fractional, cells), style="dim")
    table.add_row(Text("oracle"), *(_gap(cell.gap(cell.oracle)) for cell in cells), style="dim")
    return table


def _static_opt(cell: Cell) -> Text:
    return Text(f"{statistics.fmean(cell.static_opt_speeds):.2f} ({cell.static_opt})")


def _fractional(cell: Cell) -> Text:
    budget = cell.best_budget
    if budget is None:
        return Text("")
    return Text(f"{cell.gap(cell.fractional[budget]).mean:+.1f} ({budget:g})")


def _gap(gap: Gap, bold: bool = False) -> Text:
    deviation = f"±{gap.deviation:.1f}" if gap.deviation >= SHOWN_DEVIATION else ""
    style = "green" if gap.mean >= 0.05 else "red" if gap.mean <= -0.05 else ""
    # Adding zero turns a rounded -0.0 into +0.0.
    return Text(f"{round(gap.mean, 1) + 0.0:+.1f}{deviation}", style=f"bold {style}".strip() if bold else style)
