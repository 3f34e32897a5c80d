"""The command line hands its arguments on and answers mistakes with a way out."""

from __future__ import annotations

import json

import pytest
from tiny_pair import SERVINGS, replace_pairs
from typer.testing import CliRunner

from hf_dsde.cli import main as cli
from hf_dsde.cli.demo import run as demo

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The tiny pair in place of every other, on the CPU, with prompts that its tokenizer can read."""
    original = demo.DemoOptions
    monkeypatch.setattr(demo, "DemoOptions", lambda **options: original(**options, servings=SERVINGS))
    return replace_pairs(monkeypatch)


def run(*arguments):
    return RUNNER.invoke(cli.app, [*arguments, "--device", "cpu"])


def test_demo_prints_a_table_and_writes_the_result(tmp_path):
    path = tmp_path / "results" / "demo.json"
    result = run("demo", "--max-new-tokens", "6", "--repeats", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "3 equal" in result.output
    assert result.output.index("medium: abc") < result.output.index("2 requests alone"), "answers come first"
    assert result.output.count("medium: abc") == 1
    alone, together = json.loads(path.read_text(encoding="utf-8"))["servings"]
    assert [method["method"] for method in together["methods"]] == ["plain generate", "auto", "dsde"]
    assert (alone["dtype"], alone["batches"]) == ("float32", [["medium"], ["long"]])


def test_demo_runs_what_it_is_told(tmp_path, tiny):
    path = tmp_path / "demo.json"
    asked = ("--policy", "heuristic", "--dtype", "bfloat16", "--dtype", "float32")
    result = run("demo", "--max-new-tokens", "4", "--repeats", "1", *asked, "--json", str(path))
    assert result.exit_code == 0, result.output
    servings = json.loads(path.read_text(encoding="utf-8"))["servings"]
    assert [serving["dtype"] for serving in servings] == ["bfloat16", "bfloat16", "float32", "float32"]
    assert [method["statistics"]["policy"] for method in servings[0]["methods"][1:]] == ["heuristic"]
    assert len(tiny) == 2


def test_demo_fails_when_a_promise_is_broken(monkeypatch):
    monkeypatch.setattr(demo.DemoResult, "is_exact", False)
    result = run("demo", "--max-new-tokens", "4", "--repeats", "1")
    assert result.exit_code == 1
    assert "differ" in result.output


def test_an_unknown_policy_is_refused_with_the_known_ones():
    result = run("demo", "--policy", "dsed")
    assert result.exit_code == 2
    assert "'dsed'" in result.output
    assert "dsde" in result.output
