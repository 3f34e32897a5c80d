"""`hf-dsde trace` from files to a trace."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_pair import tiny_pair
from typer.testing import CliRunner

from hf_dsde.cli import main as cli
from hf_dsde.trace import load_trace

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft as folders, each a complete model with its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    pair = tiny_pair(torch.float32)
    for name, model in (("tiny-target", pair.target), ("tiny-draft", pair.draft)):
        model.save_pretrained(root / name)
        pair.tokenizer.save_pretrained(root / name)
    return str(root / "tiny-target"), str(root / "tiny-draft")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    entries = [("letters", "abc"), ("letters", "fed"), ("pairs", "GhIjKl")]
    file.write_text("".join(json.dumps({"task": t, "prompt": p}) + "\n" for t, p in entries), encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def run(*arguments):
    return RUNNER.invoke(cli.app, ["trace", *arguments, "--device", "cpu"])


def test_a_trace_is_recorded_and_summarised(folders, prompts, tmp_path):
    output = tmp_path / "trace"
    result = run(
        "--model", folders[0], "--draft", folders[1], "--prompts", prompts, "--output", str(output),
        "--max-new-tokens", "9", "--batch-size", "2", "--draft-length", "3", "--no-tokens", "--mantissa-bits", "11",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trace = load_trace(output)
    assert not trace.has_tokens
    assert set(trace.committed["sequence"].to_pylist()) == set(range(6))
    assert max(trace.drafted["offset"].to_pylist()) == 2
    assert trace.description["pair"] == {"target": "tiny-target", "draft": "tiny-draft"}
    assert trace.description["mantissa_bits"] == 11
    assert str(tmp_path) not in json.dumps(trace.description["pair"])
    for word in ("letters", "pairs", "overlap"):
        assert word in result.output


def test_one_temperature_and_the_targets_rounded_copy(folders, prompts, tmp_path):
    output = tmp_path / "trace"
    result = run(
        "--model", folders[0], "--rounded-draft", "8", "--prompts", prompts, "--output", str(output),
        "--max-new-tokens", "8", "--temperature", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trace = load_trace(output)
    assert trace.has_tokens
    assert trace.description["temperatures"] == [0]
    assert "8 bits" in trace.description["pair"]["draft"]
    agrees = trace.committed["draft_agrees"].to_pylist()
    assert sum(agrees) >= 0.8 * len(agrees)


def test_a_folder_that_is_taken_is_refused(folders, prompts, tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "notes.txt").write_text("mine", encoding="utf-8")
    result = run(
        "--model", folders[0], "--draft", folders[1], "--prompts", prompts, "--output", str(tmp_path / "trace")
    )
    assert result.exit_code == 2
    assert "not empty" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "org/target"), "--draft is missing"),
        (("--draft", "org/draft"), "--model is missing"),
        (("--model", "org/target", "--draft", "org/draft", "--rounded-draft", "4"), "both name a draft"),
        (("--rounded-draft", "1"), "--rounded-draft"),
        (("--dtype", "int8"), "--dtype"),
    ],
)
def test_what_does_not_go_together_is_refused(prompts, tmp_path, arguments, message):
    result = run("--prompts", prompts, "--output", str(tmp_path / "trace"), *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_temperature_between_is_refused(folders, prompts, tmp_path):
    result = run(
        "--model", folders[0], "--draft", folders[1], "--prompts", prompts, "--output", str(tmp_path / "trace"),
        "--temperature", "0.5",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "temperatures" in result.output


def test_a_bad_line_of_prompts_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}\n", encoding="utf-8")
    result = run("--prompts", str(file), "--output", str(tmp_path / "trace"))
    assert result.exit_code == 2
    assert "line 1" in result.output
