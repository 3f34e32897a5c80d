"""Jobs that are killed, interrupted and run again: no row is lost, none is done twice, and no text is another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_job import BAD_ROW, MORE_ROWS, NEW_TOKENS, ROWS, SCENARIOS, generator, prompts
from tiny_pair import tiny_pair
from watched_forward import watch

from hf_dsde.batch import job
from hf_dsde.batch.output import read_results

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills forks")
FIELDS = ("index", "text", "token_ids", "finish_reason", "error")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("resumed_job.py")
    folder = tmp_path_factory.mktemp("jobs")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results in the order of the input, without what a run costs."""
    return sorted(({name: row[name] for name in FIELDS} for row in results), key=lambda row: row["index"])


@pytest.mark.slow
def test_a_job_that_nobody_kills_writes_what_generate_gives_for_each_prompt_alone(reports):
    pair = tiny_pair(torch.float64)
    results = contents(reports["whole"]["results"])
    assert len(results) == ROWS
    for row, prompt in zip(results, prompts(), strict=True):
        if row["index"] == BAD_ROW:
            assert row["finish_reason"] == "error"
            continue
        inputs = pair.tokenizer(prompt, return_tensors="pt")
        text = pair.target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0]
        assert row["token_ids"] == text[inputs["input_ids"].shape[1] :].tolist(), prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jsonl", "parquet", "seldom"])
def test_a_job_that_is_killed_again_and_again_ends_as_if_it_had_not_been(reports, name):
    report, kills = reports[name], SCENARIOS[name][3]
    assert report["codes"] == [-9] * len(kills) + [0]
    rows = contents(report["results"])
    assert [row["index"] for row in rows] == list(range(SCENARIOS[name][1]))
    assert rows[:ROWS] == contents(reports["whole"]["results"])
    # Every attempt kept what those before it had written, and the kills came in the middle of the work.
    assert report["done"] == sorted(report["done"])
    assert 0 < report["done"][-1] < len(rows)


@pytest.mark.slow
def test_kills_leave_nothing_behind_once_the_job_is_done(reports):
    for name, report in reports.items():
        output = f"out{SCENARIOS[name][0]}"
        assert report["files"] == [output, f"{output}.job.json"]


def test_an_interrupted_job_keeps_what_was_finished_and_goes_on_with_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "WRITE_SECONDS", 1e9)
    rows = prompts()[:10]
    whole = list(generator().stream(rows, ordered=True))
    made = generator()
    watch(made._model, KeyboardInterrupt, lambda call, _: call == 12)
    with pytest.raises(KeyboardInterrupt):
        made.run(rows, tmp_path / "out.jsonl")
    kept = list(read_results(tmp_path / "out.jsonl"))
    assert 0 < len(kept) < len(rows)
    report = generator().run(rows, tmp_path / "out.jsonl", ordered=True)
    assert (report.rows, report.skipped) == (len(rows) - len(kept), len(kept))
    assert report.statistics.texts == report.rows
    texts = [(row.index, row.token_ids, row.finish_reason) for row in read_results(tmp_path / "out.jsonl")]
    assert texts == [(row.index, row.token_ids, row.finish_reason) for row in whole]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_finished_job_runs_no_model_again(tmp_path, suffix):
    rows = prompts()[:4]
    generator().run(rows, tmp_path / f"out{suffix}")
    before = (tmp_path / f"out{suffix}").read_bytes()
    made = generator()
    passes = watch(made._model)
    report = made.run(rows, tmp_path / f"out{suffix}")
    assert (report.rows, report.skipped, passes.calls) == (0, len(rows), 0)
    assert (tmp_path / f"out{suffix}").read_bytes() == before
    again = made.run(rows, tmp_path / f"out{suffix}", overwrite=True)
    assert again.rows == len(rows)
    assert passes.calls > 0


def test_results_of_other_settings_or_other_data_are_never_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    generator().run(prompts()[:2], path)
    with pytest.raises(ValueError, match=r"max_new_tokens.*5.*6"):
        generator(max_new_tokens=6).run(prompts()[:2], path)
    with pytest.raises(ValueError, match=r"input\.hash"):
        generator().run(prompts()[1:3], path)
    assert len(list(read_results(path))) == 2


def test_a_job_over_a_file_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "WRITE_SECONDS", 0.0)
    source = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts()[:8]]
    source.write_text("\n".join([*lines[:4], "{broken", *lines[4:]]) + "\n")
    made = generator()
    watch(made._model, lambda: RuntimeError("the machine stops"), lambda call, _: call == 6)
    with pytest.raises(RuntimeError, match="the machine stops"):
        made.run(source, tmp_path / "out.parquet")
    generator().run(source, tmp_path / "out.parquet", ordered=True)
    results = list(read_results(tmp_path / "out.parquet"))
    assert [row.index for row in results] == list(range(9))
    assert [row.index for row in results if row.error] == [4]
    alone = [row.token_ids for row in generator().stream(prompts()[:8], ordered=True)]
    assert [row.token_ids for row in results if not row.error] == alone


def test_the_job_of_more_rows_is_longer_than_the_wait_between_writes():
    assert MORE_ROWS > ROWS
    assert SCENARIOS["seldom"][2] == job.WRITE_SECONDS
