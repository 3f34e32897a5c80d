"""Pictures of a benchmark: speed over a reference, static draft lengths against policies, acceptance, time of a round.

Each picture shows one pair, workload and temperature. What a picture has no numbers for is left out, and a picture
without numbers is not drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_dsde.bench.results import BASELINE, OURS, PEER, BenchResults, CaseResult, Cell, Spread
from hf_dsde.utils.palette import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ZERO_DRAFTS = "static:0"
REFERENCES = ("generate_static", "generate", ZERO_DRAFTS)
"""What speed is compared with: the first of these that all cells of a picture have, or else that any has."""
STATIC = re.compile(r"^static(:(num_draft_tokens=)?\d+)?")
BASELINE_MARKERS = "ph8dH"
PHASES = {"draft": "C0", "verify": "C1", "bookkeeping": "C2", "idle": "0.75"}
"""Parts of a round and their colours. The policy's own seconds are in the first three."""
FEWEST_DRAFTED = 30
"""A position that was drafted less often has no rate worth drawing."""
COLUMNS = 3
"""The most panels side by side."""
BETWEEN_LINES = 0.02
"""Points of different methods at one batch size stand so far apart, in steps between two batch sizes."""


@dataclass(frozen=True)
class _Group:
    """What one picture shows: the last measured case of every method and batch size."""

    pair: str
    workload: str
    temperature: float
    results: BenchResults

    @property
    def title(self) -> str:
        return f"{self.pair}, {self.workload}, T={self.temperature:g}"

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for cell in self.results.cells() if self._has(cell)})

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(case.method for case in self.results.cases if self._has(case.cell)))

    def case(self, method: str, batch: int) -> CaseResult | None:
        found = self.results.find(Cell(self.pair, self.workload, batch, self.temperature), method)
        return found if found is not None and found.repeats else None

    def cases(self, method: str) -> list[CaseResult]:
        found = [self.case(method, batch) for batch in self.batches]
        return [case for case in found if case is not None]

    def reference(self) -> str | None:
        """The method that speed is compared with; None when none of them was measured."""
        measured = [name for name in REFERENCES if self.cases(name)]
        everywhere = [name for name in measured if len(self.cases(name)) == len(self.batches)]
        return next(iter(everywhere + measured), None)

    def statics(self) -> dict[str, dict[int, str]]:
        """Methods that draft a fixed number of tokens: by what they have beside the number, and by the number."""
        series: dict[str, dict[int, str]] = {}
        for method in self.methods:
            length = next((_static_length(case) for case in self.cases(method)), None)
            if length is not None:
                series.setdefault(STATIC.sub("static", method), {})[length] = method
        return series

    def adaptive(self) -> list[str]:
        """Methods of this package that choose the number."""
        found = [(method, self.cases(method)) for method in self.methods]
        return [m for m, cases in found if cases and cases[0].kind == OURS and _static_length(cases[0]) is None]

    def _has(self, cell: Cell) -> bool:
        return (cell.pair, cell.workload, cell.temperature) == (self.pair, self.workload, self.temperature)


def save_plots(results: BenchResults, folder: Path) -> list[Path]:
    """Draw all pictures that the results have numbers for, as PNG files.

    Args:
        results: What to draw.
        folder: Where to; it is made if it does not exist.

    Returns:
        The files, named after picture, pair, workload and temperature.

    Raises:
        ImportError: matplotlib is not installed.
    """
    draw: dict[str, Callable[[_Group], Figure | None]] = {
        "speedup": speedup_figure,
        "draft-length": draft_length_figure,
        "acceptance": acceptance_figure,
        "round-time": round_time_figure,
    }
    _new_figure(1, 1)
    paths: list[Path] = []
    for group in groups(results):
        for name, drawn in draw.items():
            figure = drawn(group)
            if figure is not None:
                setting = f"{group.pair}-{group.workload}-T{group.temperature:g}"
                paths.append(_free_path(folder, re.sub(r"[^\w.]+", "-", f"{name}-{setting}"), paths))
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(paths[-1], dpi=150)
    return paths


def groups(results: BenchResults) -> Iterator[_Group]:
    """The settings that share a picture."""
    for pair, workload, temperature in dict.fromkeys((c.pair, c.workload, c.temperature) for c in results.cells()):
        yield _Group(pair, workload, temperature, results)


def speedup_figure(group: _Group) -> Figure | None:
    """Speed over the reference by batch size: median of the repeats' ratios, bars from the smallest to the largest.

    Of static draft lengths only the best of each batch size is drawn, since they have a picture of their own.
    """
    reference = group.reference()
    lines = {} if reference is None else _speedup_lines(group, reference)
    if not lines:
        return None
    figure = _new_figure(7.2, 4.2)
    axes = figure.subplots()
    axes.axhline(1, color="black", linewidth=1)
    batches = group.batches
    for number, (label, points) in enumerate(lines.items()):
        shift = BETWEEN_LINES * (number - (len(lines) - 1) / 2)
        places = [batches.index(batch) + shift for batch in points]
        _spread_line(axes, places, list(points.values()), label=label, **_style(group, label))
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("rows in the batch")
    _finish(axes, group.title, f"speed over {_name(reference)}")
    _legend(figure, axes)
    return figure


def draft_length_figure(group: _Group) -> Figure | None:
    """Speed over the reference by static draft length, and of each policy as a horizontal line with its spread."""
    reference = group.reference()
    series = {label: by_length for label, by_length in group.statics().items() if len(by_length) > 1}
    if reference is None or not series:
        return None
    lengths = sorted({length for by_length in series.values() for length in by_length})
    figure, panels = _panels(group.batches, height=2.6)
    handles: dict[str, Any] = {}
    for batch, axes in panels.items():
        for label, by_length in series.items():
            found = {n: _speedup(group, by_length[n], batch, reference) for n in sorted(by_length)}
            points = {length: speed for length, speed in found.items() if speed is not None}
            style = _style(group, label)
            handles[label] = _spread_line(axes, list(points), list(points.values()), label=label, zorder=3, **style)
        step = (lengths[-1] - lengths[0]) * 0.045
        for number, method in enumerate(group.adaptive()):
            speed = _speedup(group, method, batch, reference)
            if speed is not None:
                style = _style(group, method)
                axes.axhline(speed.median, color=style["color"], linewidth=1, alpha=0.5)
                place = lengths[-1] + step * (number + 1)
                handles[method] = _spread_line(axes, [place], [speed], label=method, **style)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(lengths)
        axes.set_xlabel("draft tokens per row and round")
        _finish(axes, f"{batch} {'row' if batch == 1 else 'rows'}", f"speed over {_name(reference)}")
    figure.suptitle(group.title, fontsize=10)
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def acceptance_figure(group: _Group) -> Figure | None:
    """Acceptance rate of each position of a draft. Of static lengths only the longest, which has all positions."""
    longest = [by_length[max(by_length)] for by_length in group.statics().values()]
    statics = {method for by_length in group.statics().values() for method in by_length.values()}
    methods = [method for method in group.methods if method not in statics or method in longest]
    rates = {(m, b): _acceptance(group.case(m, b)) for m in methods for b in group.batches}
    batches = [batch for batch in group.batches if any(rates[method, batch] for method in methods)]
    if not batches:
        return None
    figure, panels = _panels(batches, height=2.6)
    handles: dict[str, Any] = {}
    for batch, axes in panels.items():
        for method in methods:
            rate = rates[method, batch]
            if rate:
                places = range(1, len(rate) + 1)
                style = _style(group, method)
                (handles[method],) = axes.plot(places, rate, label=method, linewidth=1.3, markersize=4.5, **style)
        axes.set_ylim(0, 1.02)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("position in the draft")
        _finish(axes, f"{batch} {'row' if batch == 1 else 'rows'}", "accepted of drafted")
    figure.suptitle(group.title, fontsize=10)
    figure.legend(handles.values(), handles, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def round_time_figure(group: _Group) -> Figure | None:
    """Where the time of a mean round goes, in milliseconds; prompts are left out."""
    times = {(m, b): _round_milliseconds(group.case(m, b)) for m in group.methods for b in group.batches}
    methods = [method for method in group.methods if any(times[method, batch] for batch in group.batches)]
    batches = [batch for batch in group.batches if any(times[method, batch] for method in methods)]
    if not batches:
        return None
    figure, panels = _panels(batches, height=0.7 + 0.19 * len(methods), share_x=False)
    for batch, axes in panels.items():
        rows = [(place, times[method, batch]) for place, method in enumerate(methods)]
        measured = [(place, parts) for place, parts in rows if parts]
        left = [0.0] * len(measured)
        for phase, colour in PHASES.items():
            widths = [parts[phase] for _, parts in measured]
            axes.barh([p for p, _ in measured], widths, 0.7, left, label=phase, color=colour)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(methods)), methods, fontsize=8)
        axes.set_ylim(len(methods) - 0.4, -0.6)
        axes.set_xlabel("ms per round")
        _finish(axes, f"{batch} {'row' if batch == 1 else 'rows'}", "", grid="x")
    figure.suptitle(group.title, fontsize=10)
    _legend(figure, next(iter(panels.values())))
    return figure


def _speedup_lines(group: _Group, reference: str) -> dict[str, dict[int, Spread]]:
    """For each line of the speed-up picture its points by batch size."""
    series = {label: by_length for label, by_length in group.statics().items() if len(by_length) > 1}
    gathered = {m for by_length in series.values() for length, m in by_length.items() if length > 0}
    lines: dict[str, dict[int, Spread]] = {}
    for label, by_length in series.items():
        drafting = [method for length, method in by_length.items() if length > 0]
        points: dict[int, Spread] = {}
        for batch in group.batches:
            speeds = [_speedup(group, method, batch, reference) for method in drafting]
            best = max((s for s in speeds if s is not None), key=lambda speed: speed.median, default=None)
            if best is not None:
                points[batch] = best
        lines[label if len(drafting) == 1 else f"best {label}"] = points
    for method in group.methods:
        if method not in gathered and method != reference:
            found = {batch: _speedup(group, method, batch, reference) for batch in group.batches}
            lines[method] = {batch: speed for batch, speed in found.items() if speed is not None}
    return {label: points for label, points in lines.items() if points}


def _speedup(group: _Group, method: str, batch: int, reference: str) -> Spread | None:
    case = group.case(method, batch)
    return None if case is None else group.results.ratio(case, reference)


def _static_length(case: CaseResult) -> int | None:
    """The fixed draft length of a case of ours; None when it is none."""
    if case.kind != OURS or case.settings.get("policy") != "static":
        return None
    length: int = case.settings.get("policy_arguments", {}).get("num_draft_tokens", 5)
    return length


def _acceptance(case: CaseResult | None) -> list[float]:
    """Rates by position as far as they rest on enough drafts; nan where there were too few in between."""
    statistics = (case.statistics if case is not None else None) or {}
    rates = statistics.get("acceptance_by_position") or []
    drafted = statistics.get("drafted_by_position") or [FEWEST_DRAFTED] * len(rates)
    kept = [nan if r is None or d < FEWEST_DRAFTED else r for r, d in zip(rates, drafted, strict=True)]
    while kept and kept[-1] != kept[-1]:
        kept.pop()
    return kept


def _round_milliseconds(case: CaseResult | None) -> dict[str, float]:
    """Milliseconds of each phase in a mean round; empty when they are unknown."""
    statistics = (case.statistics if case is not None else None) or {}
    seconds, rounds = statistics.get("seconds") or {}, statistics.get("rounds")
    if not rounds or any(seconds.get(phase) is None for phase in PHASES):
        return {}
    return {phase: 1000 * max(seconds[phase], 0.0) / rounds for phase in PHASES}


def _name(method: str | None) -> str:
    return "decoding without drafts" if method == ZERO_DRAFTS else str(method)


def _style(group: _Group, label: str) -> dict[str, Any]:
    """How a method is drawn, alike in all pictures of a group: ours solid, peers dashed, others grey and dotted."""
    if STATIC.match(label.removeprefix("best ")):
        labels = [*group.statics()]
        series = STATIC.sub("static", label.removeprefix("best "))
        grey = ("black", "0.4", "0.6")[labels.index(series) % 3 if series in labels else 0]
        return {"color": grey, "marker": "x" if label.startswith("best ") else ".", "linestyle": "-"}
    cases = group.cases(label)
    kind = cases[0].kind if cases else OURS
    alike = [m for m in group.methods if (c := group.cases(m)) and c[0].kind == kind and m not in _all_statics(group)]
    number = alike.index(label) if label in alike else 0
    if kind == BASELINE:
        return {"color": "0.45", "marker": BASELINE_MARKERS[number % len(BASELINE_MARKERS)], "linestyle": ":"}
    # Colours go on where those of ours end, and come back with another stroke.
    number += 0 if kind == OURS else len(group.adaptive())
    style = "--" if kind == PEER else "-" if number < len(COLOURS) else "-."
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "linestyle": style}


def _all_statics(group: _Group) -> set[str]:
    return {method for by_length in group.statics().values() for method in by_length.values()}


def _spread_line(axes: Axes, places: Sequence[float], spreads: Sequence[Spread], **style: Any) -> Any:
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.smallest for spread in spreads]
    above = [spread.largest - spread.median for spread in spreads]
    return axes.errorbar(places, medians, [below, above], linewidth=1.3, markersize=4.5, capsize=2, **style)


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "Plots need matplotlib, which is not installed. Install it with `pip install 'hf-dsde[plots]'`."
        ) from missing
    return Figure(figsize=(width, height), layout="constrained")


def _panels(batches: Sequence[int], height: float, *, share_x: bool = True) -> tuple[Figure, dict[int, Axes]]:
    """A figure with a panel for each batch size, in rows of `COLUMNS`; `height` is that of a panel, in inches."""
    lines = -(-len(batches) // COLUMNS)
    # Four stand in a square rather than three above one.
    columns = -(-len(batches) // lines)
    figure = _new_figure(2.2 + 2.9 * columns, 0.6 + height * lines)
    grid = figure.subplots(lines, columns, sharex=share_x, sharey=True, squeeze=False).flatten()
    for unused in grid[len(batches) :]:
        unused.remove()
    for axes in grid[: len(batches)]:
        axes.tick_params(labelbottom=True)
    return figure, dict(zip(batches, grid, strict=False))


def _finish(axes: Axes, title: str, label: str, grid: Literal["x", "y"] = "y") -> None:
    axes.set_title(title, fontsize=9)
    place = axes.get_subplotspec()
    if place is not None and place.is_first_col():
        axes.set_ylabel(label)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)


def _free_path(folder: Path, name: str, taken: Sequence[Path]) -> Path:
    """A file name of its own for settings that differ in nothing but signs that a file name cannot have."""
    path, number = folder / f"{name}.png", 2
    while path in taken:
        path, number = folder / f"{name}-{number}.png", number + 1
    return path
