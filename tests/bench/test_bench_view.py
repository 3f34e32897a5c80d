"""The tables of a results file hold every case, its ratio to each reference, and the reasons for gaps."""

from __future__ import annotations

from rich.console import Console

from hf_dsde.bench.results import BASELINE, OURS, BenchResults, CaseResult, RepeatResult
from hf_dsde.bench.view import results_view


def case(method, seconds, batch=1, prefill=None, **changes):
    shares = (
        [None] * len(seconds) if prefill is None else [s * share for s, share in zip(seconds, prefill, strict=True)]
    )
    repeats = [
        RepeatResult(index, 0, s, 100, share) for index, (s, share) in enumerate(zip(seconds, shares, strict=True))
    ]
    kind = BASELINE if method.startswith("generate") else OURS
    return CaseResult("8B/x", "mix", batch, 0.0, method, kind, repeats=repeats, **changes)


def shown(results):
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(results_view(results))
    return capture.get().splitlines()


def test_a_row_has_speed_with_its_spread_and_ratios():
    statistics = {"acceptance_rate": 0.625, "tokens_per_round": 2.5}
    results = BenchResults(
        cases=[
            case("generate", [4.0, 5.0, 10.0], warmup_seconds=1.25),
            case("generate_static", [2.0, 2.5, 5.0]),
            case("dsde", [1.0, 2.5, 4.0], prefill=[0.05, 0.2, 0.3], statistics=statistics),
        ],
        references=("generate", "generate_static", "absent"),
    )
    lines = shown(results)
    assert "8B/x, mix, temperature 0" in lines[0]
    heading = next(line for line in lines if "method" in line)
    assert "x generate_static" in heading
    assert "absent" not in heading
    row = next(line for line in lines if "dsde" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["1", "dsde", "40.0 [25.0..100.0]", "2.50 [2.00..4.00]", "1.25", "20%", "0.62", "2.50", ""]
    plain = next(line for line in lines if "│ generate " in line)
    assert [cell.strip() for cell in plain.strip("│").split("│")][2:] == [
        "20.0 [10.0..25.0]",
        "",
        "0.50",
        "",
        "",
        "",
        "1.2 s",
    ]


def test_methods_of_a_batch_stand_together_and_other_settings_apart():
    results = BenchResults(cases=[case("a", [1.0]), case("a", [1.0], 8), case("b", [1.0], 1)])
    rows = [line.split("│")[1:3] for line in shown(results) if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["1", "a"], ["1", "b"], ["8", "a"]]
    other = case("a", [1.0])
    other.temperature = 1.0
    results.cases.append(other)
    assert sum("temperature" in line for line in shown(results)) == 2


def test_reasons_for_gaps_and_warnings_stand_below():
    results = BenchResults(
        cases=[
            case("a", [], error="OutOfMemoryError: too\nlarge"),
            case("b", [1.0], skipped="the budget was spent"),
            case("c", [1.0], warnings=["RunnerWarning: runs eagerly"]),
        ]
    )
    lines = [line.strip() for line in shown(results)]
    assert any(line.split("│")[3].strip() == "failed" for line in lines if line.startswith("│"))
    assert any("100.0 [100.0..100.0] skipped" in line for line in lines)
    assert "8B/x, mix, batch 1, T=0, a failed: OutOfMemoryError: too large" in lines
    assert "8B/x, mix, batch 1, T=0, b skipped: the budget was spent" in lines
    assert "8B/x, mix, batch 1, T=0, c warned: RunnerWarning: runs eagerly" in lines
