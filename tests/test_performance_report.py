"""Documents with numbers are what the result files say, and the numbers are those of the files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import median

import pytest

from hf_dsde.bench.results import OURS, BenchResults, CaseResult, RepeatResult

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
NAMES = re.compile(r"\b(?:8B|32B|1B|SmolLM2-135M-Instruct|4 bits|4-bit|bfloat16|EAGLE-3)")
MOST_LINES = 150


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def head_file(rates: dict[str, list[float]], rows: tuple[int, ...]) -> BenchResults:
    """A file of the head in which a repeat of a method writes so many tokens per second."""
    cases = [
        CaseResult(
            "8B/eagle3",
            "mix",
            batch,
            0.0,
            method,
            OURS,
            repeats=[
                RepeatResult(i, 0, seconds=256 * batch / rate, tokens=256 * batch) for i, rate in enumerate(speeds)
            ],
            statistics={
                "rounds": 100,
                "tokens_per_round": 2.0,
                "mean_draft_steps": 1.0,
                "acceptance_rate": 0.5,
                "seconds": dict.fromkeys(("draft", "verify", "bookkeeping", "idle"), 0.5),
            },
        )
        for batch in rows
        for method, speeds in rates.items()
    ]
    provenance = {"commit": "abcdef1234", "device": "NVIDIA H200", "versions": {}, "copy_bytes_per_second": 4.1e12}
    return BenchResults([{"provenance": provenance, "settings": {"new_tokens": 256}}], cases, ("static:0",))


@pytest.fixture
def other_results(tmp_path):
    """The results, in a folder that a test may add to."""
    from reporting.files import Results

    shutil.copytree(RESULTS, tmp_path / "results", copy_function=lambda source, copy: Path(copy).symlink_to(source))
    return Results(tmp_path / "results")


def line(table: str, *starts: str) -> list[str]:
    """The cells of the row that begins with these."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return next(row for row in rows if row[: len(starts)] == list(starts))


def test_documents_are_what_the_result_files_say():
    import report

    old = [path.name for path in report.outdated(report.documents())]
    assert not old, f"{old} out of date: run python benchmarks/report.py"


def test_a_changed_document_is_noticed_and_nothing_is_written(tmp_path):
    import report

    for name in ("docs/policies.md", "README.md", "docs/performance.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(report.REPOSITORY / name, tmp_path / name)
    changed = tmp_path / "docs/performance.md"
    changed.write_text(changed.read_text().replace("1.02", "1.03", 1))
    before = changed.read_text()
    assert report.outdated(report.documents(repository=tmp_path)) == [changed]
    assert changed.read_text() == before


def test_only_the_part_between_the_marks_is_replaced():
    import report

    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.between_marks(text, "new \\1") == f"before\n{report.BEGIN}\n\nnew \\1\n\n{report.END}\nafter\n"
    for wrong in ("no marks", text + text):
        with pytest.raises(ValueError, match="one part between"):
            report.between_marks(wrong, "new")


def test_every_result_file_is_used():
    import report
    from reporting.files import Results

    results = Results()
    for document in (report.performance, report.policies_part, report.readme_part):
        document(results)
    root = BENCHMARKS.parent
    places = [*(root / "docs").glob("*.md"), root / "CONTRIBUTING.md", root / "hf_dsde" / "utils" / "tuning.py"]
    named = {name for path in places for name in re.findall(r"\w+\.json", path.read_text())}
    files = {path.name for path in RESULTS.rglob("*") if path.is_file()}
    assert files - results.used - named == set()


def test_texts_have_no_numbers_of_their_own():
    for path in sorted((BENCHMARKS / "reporting").glob("*.md")):
        text = re.sub(
            r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|\$\{?\w+\}?", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        words = [word for word in NAMES.sub("", text).split() if re.search(r"\d", word)]
        assert words == [], f"{path.name} has numbers that no file holds"


def test_speeds_are_those_of_the_repeats():
    from reporting import speed
    from reporting.files import Results

    content = json.loads((RESULTS / "gpu" / speed.MEASURED[speed.HEAD]).read_text())
    calls = {
        case["method"]: {one["repeat"]: one["tokens"] / one["seconds"] for one in case["repeats"]}
        for case in content["cases"]
        if case["batch"] == 8 and case["pair"] == speed.HEAD
    }
    table = speed.speeds(Results())
    columns = line(table, "pair")
    cells = line(table, f"`{speed.HEAD}`", "8")
    assert cells[2].split()[0] == f"{median(calls['static:0'].values()):,.0f}"
    for method in ("static:4", "goodput", "dsde", "dsde+cap"):
        ratios = [rate / calls["static:0"][repeat] for repeat, rate in calls[method].items()]
        shown = cells[columns.index(f"`{method}`")]
        assert shown.startswith(f"{median(ratios):.2f}")
        assert shown.endswith(f"[{min(ratios):.2f}..{max(ratios):.2f}]") or min(ratios) == max(ratios)
    best = max((method for method in calls if method != "static:0"), key=lambda m: median(calls[m].values()))
    assert cells[3].endswith(f"(`{best}`)")


@pytest.fixture
def replaced(other_results):
    """Results in which the head's file is another: the ratio of its medians would be 1.5."""
    from reporting import speed

    rates = {"static:0": [100.0, 200.0, 400.0], "goodput": [300.0, 220.0, 440.0], "static:2": [10.0, 20.0, 40.0]}
    assert median(rates["goodput"]) / median(rates["static:0"]) == 1.5
    file = other_results.folder / "gpu" / speed.MEASURED[speed.HEAD]
    file.unlink()  # a link to the real one
    head_file(rates, (1, 8, 32, 64)).save(file)
    return other_results


def test_ratios_are_of_each_repeat(replaced):
    from reporting import speed

    cells = line(speed.speeds(replaced), f"`{speed.HEAD}`", "8")
    assert cells[2:5] == ["200 [100..400]", "1.10 (`goodput`)", "0.10"]
    assert cells[7] == "1.10 [1.10..3.00]"
    assert cells[10].endswith(", 3")
    assert "(abcdef1)" in cells[10] or replaced.commit(speed.MEASURED[speed.HEAD]) != "abcdef1"
    vllm = [cell for cell in json.loads((RESULTS / "gpu" / speed.VLLM).read_text())["cells"] if cell["batch"] == 8]
    assert line(speed.beside_others(replaced), "8")[2] == f"{200 / median(vllm[0]['tokens_per_second']):.2f}"


def test_performance_is_one_page():
    import report

    assert len((report.REPOSITORY / "docs/performance.md").read_text().splitlines()) <= MOST_LINES


def test_the_commit_is_that_of_the_name_where_the_provenance_is_stale(other_results):
    for name, commit in (("one_0abc123.json", "aaaaaaa+"), ("two.json", "0abc123fff")):
        content = {"provenance": {"commit": commit}}
        (other_results.folder / "gpu" / name).write_text(json.dumps(content))
    assert other_results.commit("one_0abc123.json") == other_results.commit("two.json") == "0abc123"
    assert other_results.stale("one_0abc123.json") == "aaaaaaa+"
    assert other_results.stale("two.json") is None


def test_replays_are_shown_for_both_drafts():
    from reporting import study
    from reporting.files import Results

    cells = json.loads((RESULTS / study.ALL).read_text())["cells"]

    def stated(trace: str, rows: int, costs: str) -> float:
        wanted = {"trace": trace, "temperature": 1, "batch": rows, "costs": costs}
        found = [cell for cell in cells if wanted.items() <= cell.items()]
        return found[0]["policies"]["svip"]["gap_percent"]

    shown = line(study.comparison(Results(), 1), "`svip`")
    places = [(rows, costs) for rows in (1, 8, 32) for costs in ("c=0.05", "c=0.1", "c=0.3")]
    assert shown[1:] == [
        f"{stated('smollm2-distilled', *place):+.1f} / {stated('smollm2-4bit', *place):+.1f}" for place in places
    ]


@pytest.mark.parametrize(("value", "text"), [(-0.04, "0.0"), (0.04, "0.0"), (-0.06, "-0.1"), (7.25, "+7.2")])
def test_a_zero_has_no_sign(value, text):
    from reporting.study import signed

    assert signed(value) == text


def test_paragraphs_and_items_are_wrapped_and_tables_and_code_are_not():
    from reporting.markdown import WIDTH, reflowed

    long = "word " * 60
    table, block = "| " + "cell | " * 60, "```sh\n" + "x " * 100 + "\n\n- y\n```"
    made = reflowed(f"# Title {long.strip()}\n\n{long}\n\n- {long}\n- short\n\n{table}\n\n{block}\n")
    lines = made.splitlines()
    assert table in lines
    assert block in made
    assert "- short" in lines
    assert all(len(text) <= WIDTH for text in lines if text.startswith(("word", "- ", "  ")))
    assert made.endswith("```\n")
    assert made.split() == f"# Title {long} {long} - {long} - short {table} {block}".split()
