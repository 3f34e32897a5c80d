"""Pictures of single calls, for notebooks: what happens while a batch is generated, and what came of it.

Figures are matplotlib's own and belong to the caller; nothing here opens a window.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from math import inf, nan
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.policies import RoundOutcome, Signal
from hf_dsde.utils.checks import check_integer
from hf_dsde.utils.palette import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECONDS_BETWEEN_DRAWINGS = 0.5
LARGEST_SHARE = 0.1
"""A live plot spends no more than this part of the time on drawing, its last picture aside."""
PHASES = {"prefill": "0.6", "draft": "C0", "verify": "C1", "bookkeeping": "C2"}
"""Parts of a call and their colours, those of the benchmark's pictures where these have them."""
DOTS_PER_INCH = 80


class LivePlot(RoundListener):
    """Shows draft length and divergence of a few rows, round by round, while `generate` runs.

        with LivePlot(rows=3) as plot:
            model.generate(**inputs, assistant_model=draft, speculation_policy="dsde", speculation_listeners=[plot])

    In a notebook the picture is redrawn in place; elsewhere nothing is shown, and `figure` gives the picture at any
    time. What is drawn is fetched from the device when it is drawn, not every round. Drawing is no part of a round on a
    CPU; on a GPU it counts as verification where it takes longer than the target's pass, beside which it is done.

    Args:
        rows: How many rows of the batch are shown, the first ones. Where rows come and go, a row is a place in the
            batch.
        labels: Names of these rows; by default their numbers.

    Raises:
        ValueError: If `rows` is less than 1, or there is not one label per row.
        ImportError: If matplotlib is not installed.
    """

    requires = frozenset({Signal.KLD})

    def __init__(self, rows: int = 3, labels: list[str] | None = None) -> None:
        self._rows = check_integer("rows", rows, 1)
        self._labels = [f"row {row}" for row in range(rows)] if labels is None else list(labels)
        if len(self._labels) != rows:
            raise ValueError(f"`labels` has {len(self._labels)} entries; need one per row shown, `rows` = {rows}.")
        _new_figure(1, 1)  # A missing matplotlib is said before anything is generated.
        self._next_drawing = inf
        self._handle: Any = None
        self._forget()

    def on_round(self, record: RoundRecord) -> None:
        """Keep the round on the device, and draw if it is time. The first round of a call begins another picture."""
        if record.index == 0:
            self._forget()
        if record.outcome is not None:
            self._pending.append(_lengths_and_klds(record.outcome, self._rows))
            self._redraw_if_due()

    def rounds(self) -> tuple[list[list[float]], list[list[float]]]:
        """Draft lengths and mean KLDs (nats) by round and row; fetches what is still on the device.

        A length is nan where the row had ended or the batch has no such row, a KLD also where nothing was drafted.
        """
        if self._pending:
            fetched = torch.stack(self._pending).tolist()
            self._lengths += [lengths for lengths, _ in fetched]
            self._klds += [klds for _, klds in fetched]
            self._pending.clear()
        return self._lengths, self._klds

    def figure(self) -> Figure:
        """The picture of the rounds so far: draft lengths above, mean KLD of each round's drafts below."""
        lengths, klds = self.rounds()
        figure = _new_figure(7.2, 4.2)
        upper, lower = figure.subplots(2, 1, sharex=True)
        for row, label in enumerate(self._labels):
            places = range(1, len(lengths) + 1)
            upper.plot(places, [each[row] for each in lengths], label=label, **_style(row))
            lower.plot(places, [each[row] for each in klds], **_style(row))
        _finish(upper, "Draft length of each row", "draft tokens")
        _finish(lower, "Divergence of draft and target, mean of each round's draft", "KLD in nats")
        upper.set_ylim(bottom=0)
        lower.set_ylim(bottom=0)
        lower.set_xlabel("round")
        lower.locator_params(axis="x", integer=True)
        upper.locator_params(axis="y", integer=True)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
        return figure

    def __enter__(self) -> LivePlot:  # noqa: PYI034 - Self needs Python 3.11
        if _in_notebook():
            self._next_drawing = 0.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._next_drawing < inf:
            self._draw()
        self._next_drawing, self._handle = inf, None

    def _forget(self) -> None:
        self._pending: list[Tensor] = []
        self._lengths: list[list[float]] = []
        self._klds: list[list[float]] = []

    def _redraw_if_due(self) -> None:
        started = time.perf_counter()
        if started < self._next_drawing:
            return
        self._draw()
        ended = time.perf_counter()
        self._next_drawing = ended + max(SECONDS_BETWEEN_DRAWINGS, (ended - started) * (1 / LARGEST_SHARE - 1))

    def _draw(self) -> None:
        from IPython.display import Image, display

        picture = Image(_png(self.figure()), format="png")  # type: ignore[no-untyped-call] # as all of IPython
        if self._handle is None:
            self._handle = display(picture, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(picture)


def acceptance_figure(calls: Mapping[str, SpeculationStatistics], fewest: int = 10) -> Figure:
    """Draw the acceptance rate of each position of a draft, a line for each call that drafted.

    Args:
        calls: Statistics by the name that the legend shows.
        fewest: Positions at which a call drafted fewer tokens are left out: their rates are chance.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = _new_figure(6.4, 3.2)
    axes = figure.subplots()
    for number, (name, statistics) in enumerate(calls.items()):
        # Later positions are drafted less often, so what is left out is the end.
        drafted = statistics.drafted_by_position
        rates = [rate for rate, n in zip(statistics.acceptance_by_position, drafted, strict=True) if n >= fewest]
        if rates:
            axes.plot(range(1, len(rates) + 1), rates, label=name, **_style(number))
    axes.set_ylim(0, 1.02)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("position in the draft")
    _finish(axes, f"Acceptance by position, of at least {fewest} draft tokens each", "accepted of drafted")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def time_figure(calls: Mapping[str, SpeculationStatistics]) -> Figure:
    """Draw where the seconds of each call went, as stacked bars.

    Args:
        calls: Statistics by the name that the axis shows.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = _new_figure(6.4, 1.2 + 0.28 * len(calls))
    axes = figure.subplots()
    left = [0.0] * len(calls)
    for phase, colour in PHASES.items():
        seconds = [float(getattr(statistics, f"{phase}_seconds")) for statistics in calls.values()]
        axes.barh(range(len(calls)), seconds, 0.7, left, label=phase, color=colour)
        left = [start + width for start, width in zip(left, seconds, strict=True)]
    axes.set_yticks(range(len(calls)), list(calls), fontsize=8)
    axes.set_ylim(len(calls) - 0.4, -0.6)
    axes.set_xlabel("seconds of the whole call")
    _finish(axes, "Where the time goes", "", grid="x")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def speed_figure(by_length: Mapping[int, float], by_policy: Mapping[str, float]) -> Figure:
    """Draw speed by fixed draft length, and a horizontal line for each policy that chooses lengths itself.

    Args:
        by_length: Tokens per second by draft length; 0 stands for decoding without drafts.
        by_policy: Tokens per second by policy.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = _new_figure(7.2, 3.6)
    axes = figure.subplots()
    lengths = sorted(by_length)
    axes.plot(lengths, [by_length[n] for n in lengths], "o-", color="black", markersize=4.5, label="fixed length")
    for number, (name, speed) in enumerate(by_policy.items()):
        stroke = "--" if number < len(COLOURS) else ":"
        axes.axhline(speed, color=COLOURS[number % len(COLOURS)], linestyle=stroke, linewidth=1.3, label=name)
    axes.set_xticks(lengths)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft tokens per row and round")
    _finish(axes, "Speed by fixed draft length, and of policies", "tokens per second")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _lengths_and_klds(outcome: RoundOutcome, rows: int) -> Tensor:
    """Draft lengths and mean KLDs of the first rows, `[2, rows]`, float32, nan where there is none."""
    drafted, active = outcome.drafted[:rows], outcome.active[:rows]
    lengths = drafted.float().masked_fill(~active, nan)
    means = torch.full_like(lengths, nan)
    if outcome.kld is not None and outcome.kld.shape[1]:
        # Positions that were not drafted hold anything, nan included.
        sums = outcome.kld[:rows].float().masked_fill(~outcome.positions[:rows], 0.0).sum(1)
        means = torch.where(drafted > 0, sums / drafted, means)
    both = torch.stack([lengths, means])
    return torch.nn.functional.pad(both, (0, rows - both.shape[1]), value=nan)


def _in_notebook() -> bool:
    """Whether displays can be updated in place, as in notebooks and not in IPython's terminal."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the version of matplotlib in it, equal figures are equal bytes.
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "Plots need matplotlib, which is not installed. Install it with `pip install 'hf-dsde[plots]'`."
        ) from missing
    return Figure(figsize=(width, height), layout="constrained", dpi=DOTS_PER_INCH)


def _style(number: int) -> dict[str, Any]:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    return {"color": colour, "marker": marker, "linewidth": 1.3, "markersize": 4.5}


def _finish(axes: Axes, title: str, label: str, grid: Literal["x", "y"] = "y") -> None:
    axes.set_title(title, fontsize=9)
    axes.set_ylabel(label)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
