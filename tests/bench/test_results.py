"""A results file keeps what was measured, and pairs calls of the same repeat for its ratios."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from hf_dsde.bench.results import BASELINE, OURS, BenchResults, CaseResult, Cell, RepeatResult, Spread


def case(method, seconds, *, kind=OURS, batch=1, run=0, **changes):
    repeats = [RepeatResult(index, 0, s, 100) for index, s in enumerate(seconds)]
    return CaseResult("8B/x", "mix", batch, 0.0, method, kind, repeats=repeats, run=run, **changes)


def full_results():
    plain = case("generate", [4.0, 8.0, 2.0], kind=BASELINE, warmup_seconds=9.0)
    ours = case("dsde", [2.0, 2.0, 2.0], settings={"policy": "dsde"}, statistics={"acceptance_rate": 0.5})
    failed = case("static:4", [], error="OutOfMemoryError: too large")
    return BenchResults([{"provenance": {}, "settings": {}}], [plain, ours, failed], ("generate", "static:0"))


def test_a_file_gives_back_what_was_saved(tmp_path):
    results = full_results()
    path = tmp_path / "deep" / "results.json"
    results.save(path)
    assert BenchResults.load(path) == results
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["cases"][1]["ratio"]["generate"]["median"] == pytest.approx(2.0)
    assert written["cases"][1]["tokens_per_second"] == {"median": 50.0, "smallest": 50.0, "largest": 50.0}
    assert written["cases"][2]["tokens_per_second"] is None


def test_ratios_are_taken_repeat_by_repeat():
    plain, ours, failed = full_results().cases
    expected = [p.seconds / o.seconds for p, o in zip(plain.repeats, ours.repeats, strict=True)]
    assert ours.ratio_to(plain) == Spread(median(expected), min(expected), max(expected))
    # The ratio of the medians would be another number.
    slow = case("slow", [1.0, 9.0, 3.0], kind=BASELINE)
    assert ours.ratio_to(slow).median == 1.5
    assert case("dsde", [3.0, 1.0, 9.0]).ratio_to(slow).median == pytest.approx(1 / 3)
    assert failed.ratio_to(plain) is None


def test_only_repeats_that_both_have_are_compared():
    ours, plain = case("dsde", [1.0, 1.0, 1.0]), case("generate", [2.0], kind=BASELINE)
    assert ours.ratio_to(plain) == Spread(2.0, 2.0, 2.0)


def test_runs_of_different_times_are_not_compared():
    results = BenchResults(cases=[case("generate", [2.0], kind=BASELINE), case("dsde", [1.0], run=1)])
    assert results.ratio(results.cases[1], "generate") is None
    assert results.cases[1].ratio_to(results.cases[0]) is None
    results.cases.append(case("generate", [3.0], kind=BASELINE, run=1))
    assert results.ratio(results.cases[1], "generate").median == 3.0
    assert results.find(Cell("8B/x", "mix", 1, 0.0), "generate") is results.cases[2]
    assert results.find(Cell("8B/x", "mix", 1, 0.0), "generate", run=0) is results.cases[0]


def test_a_reference_has_no_ratio_to_itself():
    results = full_results()
    assert results.ratios(results.cases[0]) == {}
    assert list(results.ratios(results.cases[1])) == ["generate"]


def test_selecting_and_listing():
    results = BenchResults(cases=[case("a", [1.0]), case("b", [1.0]), case("a", [1.0], batch=8)])
    assert [c.batch for c in results.select(method="a")] == [1, 8]
    assert results.select(method="a", batch=8) == [results.cases[2]]
    assert results.methods() == ["a", "b"]
    assert [cell.batch for cell in results.cells()] == [1, 8]


def test_what_json_cannot_hold_becomes_null(tmp_path):
    results = BenchResults(cases=[case("a", [1.0], statistics={"x": float("nan"), "y": [float("inf"), 1.0]})])
    results.save(tmp_path / "r.json")
    assert BenchResults.load(tmp_path / "r.json").cases[0].statistics == {"x": None, "y": [None, 1.0]}


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    full_results().save(path)
    before = path.read_bytes()

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        BenchResults().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_other_files_are_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json is no results file"):
        BenchResults.load(path)


def test_peak_memory_is_the_most_of_all_calls():
    repeats = [RepeatResult(0, 0, 1.0, 1, peak_memory_bytes=5), RepeatResult(1, 0, 1.0, 1, peak_memory_bytes=7)]
    assert CaseResult("p", "w", 1, 0.0, "m", OURS, repeats=repeats).peak_memory_bytes == 7
    assert case("a", [1.0]).peak_memory_bytes is None
