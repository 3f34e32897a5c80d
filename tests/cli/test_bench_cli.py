"""`hf-dsde bench` hands its arguments to a sweep, keeps a file, shows it again, and answers mistakes with a way out."""

from __future__ import annotations

import json

import pytest
from tiny_pair import PROMPTS, replace_pairs
from typer.testing import CliRunner

from hf_dsde.bench import pairs as bench_pairs
from hf_dsde.bench import provenance, workloads
from hf_dsde.bench.results import BenchResults
from hf_dsde.cli import main as cli
from hf_dsde.config import SpeculationConfig
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.trace.prompts import Prompt

pytestmark = pytest.mark.slow

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The tiny pair in place of every other, and a copy that is quick to time."""
    monkeypatch.setattr(provenance, "COPIED_BYTES", {"cpu": 1 << 16})
    return replace_pairs(monkeypatch, bench_pairs)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    workloads.save_prompts([Prompt("letters", p.text) for p in PROMPTS] + [Prompt("more", "Gh")], file)
    return file


@pytest.fixture
def bench(tmp_path, prompts):
    def run(*arguments, output="results.json", quick=True):
        shared = ("--device", "cpu", "--prompts", str(prompts), "--output", str(tmp_path / output))
        short = ("--new-tokens", "6", "--repeats", "2", "--batch", "2") if quick else ()
        return RUNNER.invoke(cli.app, ["bench", *shared, *short, *arguments])

    return run


def test_a_sweep_is_shown_and_written(bench, tmp_path):
    result = bench(
        "--policy",
        "static:2",
        "--policy",
        "dsde+fill",
        "--baseline",
        "generate",
        "--temperature",
        "0",
        "--temperature",
        "1",
    )
    assert result.exit_code == 0, result.output
    results = BenchResults.load(tmp_path / "results.json")
    assert results.methods() == ["generate", "static:2", "dsde+fill"]
    assert [cell.temperature for cell in results.cells()] == [0.0, 1.0]
    assert {len(case.repeats) for case in results.cases} == {2}
    assert all(repeat.equal_rows == 2 for case in results.select(temperature=0.0) for repeat in case.repeats)
    for text in ("small, mix, temperature 1", "x generate", "static:2", ".."):
        assert text in result.output


def test_the_file_says_how_it_was_made(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dsde.measurement.provenance.commit", lambda: None)
    assert bench("--policy", "static:1", "--commit", "abc123").exit_code == 0
    (run,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    told = run["provenance"]
    assert told["commit"] == "abc123"
    assert told["dtype"] == "float32"
    assert told["copy_bytes_per_second"] > 0
    assert {"python", "torch", "transformers", "triton"} <= set(told["versions"])
    assert run["settings"]["methods"] == ["generate", "static:1"]
    assert run["settings"]["prompts"] == {"mix": 4}
    assert run["settings"]["new_tokens"] == 6


def test_the_commit_may_come_from_the_environment(monkeypatch):
    monkeypatch.setattr("hf_dsde.measurement.provenance.commit", lambda: None)
    monkeypatch.setenv("HF_DSDE_COMMIT", "from-environment")
    import torch

    assert provenance.collect("cpu", torch.float32)["commit"] == "from-environment"
    monkeypatch.setattr("hf_dsde.measurement.provenance.commit", lambda: "from-git+")
    assert provenance.collect("cpu", torch.float32)["commit"] == "from-git+"


def test_a_file_is_added_to_only_when_asked(bench, tmp_path):
    assert bench("--policy", "static:1").exit_code == 0
    refused = bench("--policy", "static:1")
    assert refused.exit_code == 2
    assert "--append" in refused.output
    path = tmp_path / "results.json"
    results = BenchResults.load(path)
    results.cases[1].repeats.pop()
    results.save(path)
    assert bench("--append", "--policy", "static:0", "--workload", "letters").exit_code == 0
    results = BenchResults.load(path)
    assert [(case.method, case.run) for case in results.cases] == [
        ("generate", 0), ("static:1", 0), ("generate", 1), ("static:0", 1),
    ]  # fmt: skip
    assert results.cases[1].skipped == "the run that measured it was broken off"
    assert results.references == ("generate", "static:0")
    assert len(results.runs) == 2


def test_every_runner_is_tried_with_every_policy_that_names_none(bench, tmp_path):
    arguments = ("--policy", "static:1", "--policy", "dsde@eager", "--runner", "eager", "--set", "cost_probe=false")
    assert bench(*arguments).exit_code == 0
    results = BenchResults.load(tmp_path / "results.json")
    assert results.methods() == ["generate", "static:1@eager", "dsde@eager"]
    assert results.cases[1].settings["cost_probe"] is False
    assert results.cases[1].settings["prefill_chunk"] == RuntimeOptions().prefill_chunk
    assert results.cases[1].settings["runner"] == "eager"


def test_a_saved_configuration_is_the_base_of_policies(bench, tmp_path):
    SpeculationConfig("static", {"num_draft_tokens": 3}, max_draft_length=9).save_pretrained(tmp_path / "tuned")
    assert bench("--policy", "static", "--config", str(tmp_path / "tuned")).exit_code == 0
    settings = BenchResults.load(tmp_path / "results.json").cases[1].settings
    assert (settings["policy_arguments"], settings["max_draft_length"]) == ({"num_draft_tokens": 3}, 9)


def test_models_may_be_named(bench, tmp_path, tiny):
    assert bench("--model", "org/target", "--assistant-model", "org/draft").exit_code == 0
    assert tiny[0][:2] == ("org/target", "org/draft")
    assert BenchResults.load(tmp_path / "results.json").cells()[0].pair == "org/target + org/draft"


def test_the_defaults_are_the_small_pair_with_dsde_against_generate(bench, tmp_path):
    result = bench("--new-tokens", "3", "--repeats", "1", "--batch", "1", quick=False)
    assert result.exit_code == 0, result.output
    results = BenchResults.load(tmp_path / "results.json")
    assert (results.cells()[0].pair, results.methods()) == ("small", ["generate", "dsde"])


def test_failures_are_shown_below_the_tables(bench):
    result = bench("--baseline", "assisted", "--batch", "4")
    assert result.exit_code == 0
    assert "assisted skipped: assisted of transformers takes one row, not 4" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "dsed"), "dsed"),
        (("--policy", "static:1@compile"), "a runner (eager, graph) or a drafter"),
        (("--runner", "compile"), "'compile', but one of 'eager', 'graph'"),
        (("--policy", "static:1", "--policy", "static:1"), "none of them twice"),
        (("--baseline", "beam"), "'generate_static'"),
        (("--pair", "7B"), "8B/deep-1B-strong"),
        (("--workload", "poems"), "'letters'"),
        (("--model", "org/target"), "--assistant-model is missing"),
        (("--assistant-model", "org/draft"), "--model is missing"),
        (("--set", "cost_probe"), "FIELD=VALUE"),
        (("--set", "cost_prob=1"), "cost_probe"),
        (("--prompt-batches", "3"), "prompt_batches"),
    ],
)
def test_mistakes_are_answered_before_anything_is_loaded(bench, tiny, arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not tiny


def test_show_prints_the_tables_of_a_file(bench, tmp_path):
    shown = bench("--policy", "static:1").output
    result = RUNNER.invoke(cli.app, ["bench-show", str(tmp_path / "results.json")])
    assert result.exit_code == 0
    table = result.output.strip()
    assert "small, mix, temperature 0" in table
    assert table in shown
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    refused = RUNNER.invoke(cli.app, ["bench-show", str(tmp_path / "other.json")])
    assert refused.exit_code == 2
    assert "no results file" in refused.output


def test_prompts_are_written_for_other_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "collect_prompts", lambda: [Prompt("code", "abc")])
    file = tmp_path / "prompts.jsonl"
    result = RUNNER.invoke(cli.app, ["bench-prompts", "--output", str(file)])
    assert result.exit_code == 0
    assert "1 prompts written" in result.output
    assert workloads.read_prompt_file(file) == [Prompt("code", "abc")]

    def missing():
        raise ImportError("install it")

    monkeypatch.setattr(workloads, "collect_prompts", missing)
    assert "install it" in RUNNER.invoke(cli.app, ["bench-prompts", "--output", str(file)]).output


def test_policies_may_be_compared_without_a_baseline(bench, tmp_path):
    assert bench("--policy", "static:0", "--policy", "static:1", "--no-baseline").exit_code == 0
    results = BenchResults.load(tmp_path / "results.json")
    assert results.methods() == ["static:0", "static:1"]
    assert results.references == ("static:0",)
    both = bench("--no-baseline", "--baseline", "generate", output="other.json")
    assert both.exit_code == 2
    assert "--no-baseline" in both.output
