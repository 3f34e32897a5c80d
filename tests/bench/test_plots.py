"""Pictures of a benchmark show the numbers of its results, and only what there are numbers for."""

from __future__ import annotations

import sys
from math import isnan

import pytest

from hf_dsde.bench import plots
from hf_dsde.bench.results import BASELINE, OURS, PEER, BenchResults, CaseResult, RepeatResult

pytest.importorskip("matplotlib")

BATCHES = (1, 8, 32)
TOKENS = 1000
ADAPTIVE = ("dsde", "goodput")
LENGTHS = (0, 1, 2, 4, 8)


def seconds_of(method, batch, repeat):
    """Made up, different for every case, and slower in the second repeat than in the first."""
    base = {"generate": 10.0, "generate_static": 8.0, "economize": 6.0}.get(method, 4.0 + len(method) / 10)
    return base * (1 + 0.01 * batch) * (1, 1.1, 0.95)[repeat] + 0.05 * repeat


def statistics_of(method, batch):
    return {
        "rounds": 50,
        "acceptance_by_position": [0.8, 0.5, 0.25, 0.1],
        "drafted_by_position": [400, 200, 100, 5],
        "seconds": {
            "draft": 1.0 + len(method),
            "verify": 2.0 + batch,
            "bookkeeping": 0.5,
            "policy": 0.1,
            "prefill": 7.0,
            "idle": 0.25,
            "capture": None,
        },
    }


def case_of(method, batch, **changes):
    kind, settings = OURS, {"policy": method.split(":")[0], "policy_arguments": {}}
    if method.startswith("static:"):
        settings["policy_arguments"] = {"num_draft_tokens": int(method.split(":")[1])}
    if method.startswith("generate"):
        kind, settings = BASELINE, {}
    if method == "economize":
        kind, settings = PEER, {}
    repeats = [RepeatResult(i, 0, seconds_of(method, batch, i), TOKENS) for i in range(3)]
    statistics = statistics_of(method, batch) if kind == OURS else None
    given = {"repeats": repeats, "statistics": statistics, "kind": kind, "settings": settings}
    return CaseResult("8B/1B-weak", "chat", batch, 0.0, method, **{**given, **changes})


METHODS = ("generate", "generate_static", *(f"static:{n}" for n in LENGTHS), *ADAPTIVE, "economize")


def example(methods=METHODS, batches=BATCHES):
    return BenchResults(cases=[case_of(method, batch) for batch in batches for method in methods])


def only_group(results):
    (group,) = plots.groups(results)
    return group


def speedups(method, batch, reference):
    """Median, smallest and largest of the repeats' ratios, counted slowly."""
    ratios = sorted(seconds_of(reference, batch, i) / seconds_of(method, batch, i) for i in range(3))
    return ratios[1], ratios[0], ratios[2]


def error_bars(axes):
    """For each error bar of a panel, by label: places, medians, smallest and largest values."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        ends = [segment[:, 1] for segment in bars.get_segments()]
        found[container.get_label()] = [
            (x, y, min(end), max(end)) for x, y, end in zip(*line.get_data(), ends, strict=True)
        ]
    return found


def test_speedup_points_are_medians_of_the_repeats_ratios_and_bars_their_extremes():
    (axes,) = plots.speedup_figure(only_group(example())).axes
    bars = error_bars(axes)
    for method in ("dsde", "goodput", "economize", "generate", "static:0"):
        for batch, (place, *drawn) in zip(BATCHES, bars[method], strict=True):
            assert drawn == pytest.approx(speedups(method, batch, "generate_static")), (method, batch)
            assert round(place) == BATCHES.index(batch)


def test_static_lengths_share_one_line_which_is_the_best_at_each_batch_size():
    results = example()
    quick = next(c for c in results.cases if (c.method, c.batch) == ("static:4", 8))
    quick.repeats = [RepeatResult(i, 0, 1.0, TOKENS) for i in range(3)]
    (axes,) = plots.speedup_figure(only_group(results)).axes
    bars = error_bars(axes)
    assert not {"static:1", "static:4", "static:8"} & set(bars)
    middle = sorted(seconds_of("generate_static", 8, i) for i in range(3))[1]
    assert bars["best static"][1][1] == pytest.approx(middle)
    assert bars["best static"][0][1] == pytest.approx(speedups("static:1", 1, "generate_static")[0])


def test_decoding_without_drafts_is_no_static_draft_length_however_fast():
    results = example()
    for case in results.select(method="static:0"):
        case.repeats = [RepeatResult(i, 0, 0.5, TOKENS) for i in range(3)]
    (axes,) = plots.speedup_figure(only_group(results)).axes
    bars = error_bars(axes)
    assert all(best[1] < zero[1] for best, zero in zip(bars["best static"], bars["static:0"], strict=True))


def test_the_reference_is_no_line_of_its_own_and_named_on_the_axis():
    (axes,) = plots.speedup_figure(only_group(example())).axes
    assert "generate_static" not in error_bars(axes)
    assert axes.get_ylabel() == "speed over generate_static"


@pytest.mark.parametrize(
    ("methods", "reference"),
    [
        (METHODS, "generate_static"),
        (tuple(m for m in METHODS if m != "generate_static"), "generate"),
        (tuple(m for m in METHODS if not m.startswith("generate")), "static:0"),
        (("dsde", "goodput"), None),
    ],
)
def test_the_reference_is_the_first_of_the_known_ones(methods, reference):
    assert only_group(example(methods)).reference() == reference


def test_a_reference_that_lacks_a_batch_size_gives_way_to_one_that_has_all():
    results = example()
    failed = next(c for c in results.cases if (c.method, c.batch) == ("generate_static", 32))
    failed.repeats, failed.error = [], "OutOfMemoryError"
    assert only_group(results).reference() == "generate"


def test_a_case_that_failed_has_no_point():
    results = example()
    failed = next(c for c in results.cases if (c.method, c.batch) == ("dsde", 8))
    failed.repeats, failed.error = [], "RuntimeError"
    (axes,) = plots.speedup_figure(only_group(results)).axes
    assert [round(place) for place, *_ in error_bars(axes)["dsde"]] == [0, 2]


def test_draft_length_panels_hold_static_lengths_and_a_line_for_each_policy():
    figure = plots.draft_length_figure(only_group(example()))
    assert [axes.get_title() for axes in figure.axes] == ["1 row", "8 rows", "32 rows"]
    for batch, axes in zip(BATCHES, figure.axes, strict=True):
        bars = error_bars(axes)
        assert [place for place, *_ in bars["static"]] == list(LENGTHS)
        for length, (_, *drawn) in zip(LENGTHS, bars["static"], strict=True):
            assert drawn == pytest.approx(speedups(f"static:{length}", batch, "generate_static"))
        levels = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
        for method in ADAPTIVE:
            expected = speedups(method, batch, "generate_static")
            assert bars[method][0][1:] == pytest.approx(expected)
            assert expected[0] in [pytest.approx(level) for level in levels]
            assert bars[method][0][0] > max(LENGTHS), "the policies' spreads stand beside the static lengths"


def test_acceptance_stops_where_too_little_was_drafted():
    figure = plots.acceptance_figure(only_group(example()))
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"static:8", "dsde", "goodput"}, "of static lengths the longest"
    places, rates = lines["dsde"].get_data()
    assert list(places) == [1, 2, 3]
    assert list(rates) == [0.8, 0.5, 0.25]


def test_a_position_without_rate_leaves_a_gap():
    results = example(("dsde",), (1,))
    results.cases[0].statistics = {"acceptance_by_position": [0.8, None, 0.4]}
    (line,) = plots.acceptance_figure(only_group(results)).axes[0].lines
    rates = list(line.get_ydata())
    assert rates[0] == 0.8
    assert isnan(rates[1])
    assert rates[2] == 0.4


def test_bars_of_a_round_are_milliseconds_and_stand_on_each_other():
    figure = plots.round_time_figure(only_group(example()))
    methods = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert methods == [*(f"static:{n}" for n in LENGTHS), *ADAPTIVE]
    for batch, axes in zip(BATCHES, figure.axes, strict=True):
        bars = {container.get_label(): container.patches for container in axes.containers}
        assert list(bars) == ["draft", "verify", "bookkeeping", "idle"]
        for place, method in enumerate(methods):
            seconds, end = statistics_of(method, batch)["seconds"], 0.0
            for phase, patches in bars.items():
                assert patches[place].get_width() == pytest.approx(1000 * seconds[phase] / 50)
                assert patches[place].get_x() == pytest.approx(end)
                end += patches[place].get_width()


def test_a_file_for_every_picture_with_numbers(tmp_path):
    paths = plots.save_plots(example(), tmp_path / "new")
    assert [path.name for path in paths] == [
        f"{name}-8B-1B-weak-chat-T0.png" for name in ("speedup", "draft-length", "acceptance", "round-time")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_file_for_every_setting_even_where_names_differ_in_signs_only(tmp_path):
    results = example(("generate", "economize"), (1,))
    for pair, temperature in (("8B-1B-weak", 0.0), ("8B/1B-weak", 0.7)):
        results.cases += [case_of(m, 1) for m in ("generate", "economize")]
        for case in results.cases[-2:]:
            case.pair, case.temperature = pair, temperature
    names = [path.name for path in plots.save_plots(results, tmp_path)]
    assert names == [
        "speedup-8B-1B-weak-chat-T0.png",
        "speedup-8B-1B-weak-chat-T0-2.png",
        "speedup-8B-1B-weak-chat-T0.7.png",
    ]


@pytest.mark.parametrize("methods", [(), ("generate",), ("economize",)])
def test_without_numbers_there_is_no_file(methods, tmp_path):
    assert plots.save_plots(example(methods), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_the_same_method_looks_the_same_in_every_picture():
    group = only_group(example())
    colours = [
        {line.get_label(): line.get_color() for line in plots.acceptance_figure(group).axes[0].lines}[method]
        == next(c for c in plots.speedup_figure(group).axes[0].containers if c.get_label() == method)[0].get_color()
        for method in ADAPTIVE
    ]
    assert colours == [True, True]


def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-dsde\[plots\]"):
        plots.save_plots(example(), tmp_path)
