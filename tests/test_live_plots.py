"""Pictures show the numbers that they are given, and watching a call changes nothing about it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_calls import pair, speculative
from tiny_rounds import round_record

from hf_dsde import plots
from hf_dsde.plots import LivePlot, acceptance_figure, speed_figure, time_figure
from hf_dsde.policies import RoundOutcome
from hf_dsde.policies.registry import create_policy

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]])


def generate(policy, *listeners):
    return speculative(*pair(), {"input_ids": PROMPTS}, policy, max_new_tokens=24, speculation_listeners=listeners)


def record(index, drafted, kld, active=None):
    """A round with what a plot looks at."""
    zeros, active = [0] * len(drafted), active or [True] * len(drafted)
    outcome = RoundOutcome(*map(torch.tensor, (drafted, zeros, active)), None if kld is None else torch.tensor(kld))
    return round_record(drafted, zeros, active=active, index=index, outcome=outcome)


def same(found, expected):
    """Whether nested lists are equal, nan being equal to nan."""
    return torch.equal(
        torch.tensor(found).nan_to_num(-1.0), torch.tensor(expected, dtype=torch.float32).nan_to_num(-1.0)
    )


@pytest.mark.parametrize("name", ["static", "heuristic", "confidence", "dsde", "svip", "tapout", "goodput", "auto"])
def test_watching_shows_the_lengths_and_changes_neither_them_nor_texts(name):
    alone, plot = generate(name), LivePlot(len(PROMPTS))
    watched = generate(name, plot)
    assert torch.equal(alone.sequences, watched.sequences)
    before, after = alone.speculation_statistics, watched.speculation_statistics
    assert after.rows == before.rows
    assert [r.draft_steps for r in after.rounds] == [r.draft_steps for r in before.rounds]
    lengths, klds = plot.rounds()
    drafted = [sum(int(n) for n in each if not math.isnan(n)) for each in lengths]
    assert drafted == [r.drafted + r.past_end for r in before.rounds]
    assert len(klds) == len(lengths)


def test_klds_are_means_over_what_was_drafted():
    plot = LivePlot(3)
    plot.on_round(record(0, [2, 1, 0, 2], [[1.0, 3.0], [5.0, math.nan], [math.nan, 7.0], [0.0, 0.0]]))
    plot.on_round(record(1, [0, 0, 0, 0], None, [True, False, True, True]))
    lengths, klds = plot.rounds()
    assert same(lengths, [[2, 1, 0], [0, math.nan, 0]])
    assert same(klds, [[2.0, 5.0, math.nan], [math.nan] * 3])


def test_rows_that_the_batch_lacks_are_unknown_and_each_call_begins_again():
    plot = LivePlot(2)
    for _ in range(2):
        plot.on_round(record(0, [1], [[0.5]]))
        lengths, klds = plot.rounds()
        assert same(lengths, [[1, math.nan]])
        assert same(klds, [[0.5, math.nan]])


def test_the_picture_has_a_line_for_each_row_in_both_panels():
    with LivePlot(rows=2, labels=["first", "second"]) as plot:
        generate("static", plot)
    upper, lower = plot.figure().axes
    lengths, klds = plot.rounds()
    for axes, values in ((upper, lengths), (lower, klds)):
        shown = [list(line.get_ydata()) for line in axes.get_lines()]
        assert same(shown, [list(row) for row in zip(*values, strict=True)])
    assert [line.get_label() for line in upper.get_lines()] == ["first", "second"]


class Display:
    """Stands for a notebook: keeps the pictures and when they came."""

    def __init__(self, clock):
        self.clock, self.drawn = clock, []

    def __call__(self, picture, display_id):
        assert display_id
        self.update(picture)
        return self

    def update(self, picture):
        assert picture.data.startswith(b"\x89PNG")
        self.drawn.append(self.clock.now)


@pytest.fixture
def notebook(monkeypatch):
    """A notebook in which a round takes 0.2 seconds; drawing takes what `drawing` says."""
    clock = SimpleNamespace(now=100.0, drawing=0.0)
    shown = Display(clock)
    module = SimpleNamespace(display=shown, Image=lambda data, **_: SimpleNamespace(data=data))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(plots, "_in_notebook", lambda: True)
    monkeypatch.setattr(plots, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def png(figure):
        clock.now += clock.drawing
        return b"\x89PNG"

    monkeypatch.setattr(plots, "_png", png)
    return clock, shown


def play(plot, clock, rounds):
    with plot:
        for index in range(rounds):
            clock.now += 0.2
            plot.on_round(record(index, [1, 1, 1], [[0.5]] * 3))


def test_a_notebook_sees_a_picture_every_half_second_and_the_last_one(notebook):
    clock, shown = notebook
    play(LivePlot(), clock, rounds=10)
    assert shown.drawn == pytest.approx([100.2, 100.8, 101.4, 102.0, 102.0])


def test_slow_drawing_takes_a_tenth_of_the_time(notebook):
    clock, shown = notebook
    clock.drawing = 0.5
    play(LivePlot(), clock, rounds=100)
    assert (len(shown.drawn) - 1) * clock.drawing <= 0.11 * (clock.now - 100.0)
    assert len(shown.drawn) >= 4


def test_a_picture_is_drawn_although_generation_fails(notebook):
    _, shown = notebook
    with pytest.raises(ZeroDivisionError), LivePlot():
        raise ZeroDivisionError
    assert len(shown.drawn) == 1


def test_outside_notebooks_nothing_is_shown(capsys):
    with LivePlot() as plot:
        generate("static", plot)
    assert capsys.readouterr() == ("", "")


def test_a_png_is_a_picture_and_the_same_each_time():
    plot = LivePlot()
    generate("static", plot)
    first, second = plots._png(plot.figure()), plots._png(plot.figure())
    assert first.startswith(b"\x89PNG")
    assert first == second


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="`rows` is 0"):
        LivePlot(rows=0)
    with pytest.raises(ValueError, match=r"`labels` has 1 entries; need one per row shown, `rows` = 2"):
        LivePlot(rows=2, labels=["only"])


def test_missing_matplotlib_is_said_before_anything_is_generated(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-dsde\[plots\]"):
        LivePlot()


def test_acceptance_is_drawn_by_position_of_calls_that_drafted():
    calls = {f"{n} tokens": generate(create_policy("static", num_draft_tokens=n)) for n in (0, 2, 4)}
    statistics = {name: output.speculation_statistics for name, output in calls.items()}
    (axes,) = acceptance_figure(statistics, fewest=1).axes
    assert {line.get_label(): tuple(line.get_ydata()) for line in axes.get_lines()} == {
        name: statistics[name].acceptance_by_position for name in ("2 tokens", "4 tokens")
    }
    assert all(line.get_xdata()[0] == 1 for line in axes.get_lines())


def test_positions_with_few_draft_tokens_are_left_out():
    statistics = generate("heuristic").speculation_statistics
    fewest = sorted(statistics.drafted_by_position)[len(statistics.drafted_by_position) // 2]
    (line,) = acceptance_figure({"heuristic": statistics}, fewest).axes[0].get_lines()
    kept = sum(count >= fewest for count in statistics.drafted_by_position)
    assert 0 < kept < len(statistics.drafted_by_position)
    assert tuple(line.get_ydata()) == statistics.acceptance_by_position[:kept]


def test_bars_add_up_to_the_seconds_of_each_call():
    calls = {name: generate(name).speculation_statistics for name in ("static", "dsde")}
    (axes,) = time_figure(calls).axes
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*axes.containers, strict=True)]
    assert ends == pytest.approx([statistics.total_seconds for statistics in calls.values()])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["static", "dsde"]


def test_speed_has_lengths_in_order_and_a_level_for_each_policy():
    (axes,) = speed_figure({4: 30.0, 0: 10.0, 2: 20.0}, {"dsde": 25.0, "auto": 28.0}).axes
    fixed, *levels = axes.get_lines()
    assert list(fixed.get_xdata()) == [0, 2, 4]
    assert list(fixed.get_ydata()) == [10.0, 20.0, 30.0]
    assert {line.get_label(): set(line.get_ydata()) for line in levels} == {"dsde": {25.0}, "auto": {28.0}}
