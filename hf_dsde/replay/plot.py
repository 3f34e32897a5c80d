"""A picture of a grid of replays: how far each policy lies from the best fixed length, by batch size and costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dsde.replay.experiment import ReplayResult
from hf_dsde.replay.results import Cell, Gap
from hf_dsde.utils.palette import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

"""All but the grey, which is the oracle's."""
"""One more than colours, so that a colour comes back with another marker."""
LINEAR_WITHIN = 10.0
"""Gaps are drawn to scale up to this many percent, and logarithmically beyond."""


def save_plot(result: ReplayResult, path: Path) -> None:
    """Draw gap over batch size, a panel for each trace, temperature and cost setting.

    Args:
        result: What to draw.
        path: Where to; the suffix decides the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "Plots need matplotlib, which is not installed. Install it with `pip install 'hf-dsde[plots]'`."
        ) from missing
    lines = list(dict.fromkeys((cell.trace, cell.temperature) for cell in result.cells))
    columns = list(dict.fromkeys(cell.costs.name for cell in result.cells))
    figure = Figure(figsize=(2.2 + 3.3 * len(columns), 1.2 + 2.9 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), len(columns), sharex=True, sharey=True, squeeze=False)
    for line, (trace, temperature) in enumerate(lines):
        for column, costs in enumerate(columns):
            cells = [c for c in result.cells if (c.trace, c.temperature, c.costs.name) == (trace, temperature, costs)]
            _panel(panels[line][column], cells)
            panels[line][column].set_title(f"{trace}, T={temperature}, {costs}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("rows in the batch")
    for panel in panels[:, 0]:
        panel.set_ylabel("percent over best fixed length")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, cells: Sequence[Cell]) -> None:
    places = range(len(cells))
    axes.axhline(0, color="black", linewidth=1)
    for number, name in enumerate([score.name for score in cells[0].policies] if cells else []):
        gaps = [cell.gap(cell.score(name).speeds) for cell in cells]
        _line(
            axes, places, gaps, label=name, color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)]
        )
    oracle = [cell.gap(cell.oracle) for cell in cells]
    _line(axes, places, oracle, label="oracle", color="0.45", linestyle=":", marker="")
    axes.set_xticks(list(places), [str(cell.rows) for cell in cells])
    axes.set_yscale("symlog", linthresh=LINEAR_WITHIN, linscale=1)
    axes.set_yticks([-80, -40, -20, -10, -5, 0, 5, 10, 20, 40])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    axes.minorticks_off()
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, places: Sequence[int], gaps: Sequence[Gap], **style: Any) -> None:
    means, deviations = [gap.mean for gap in gaps], [gap.deviation for gap in gaps]
    axes.errorbar(places, means, deviations, linewidth=1.3, markersize=4.5, capsize=2, **style)
