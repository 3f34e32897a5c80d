"""`hf-dsde replay` hands its arguments on and answers mistakes with a way out."""

from __future__ import annotations

import json

import pytest
from synthetic_traces import write_trace
from typer.testing import CliRunner

from hf_dsde.cli.main import app
from hf_dsde.costs import CostModel
from hf_dsde.policies import available_policies

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("traces") / "toy", temperatures=(0,))


def run(*arguments):
    return RUNNER.invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})


def small(folder, *arguments):
    return run(folder, "--temperature", 0, "--batch", 2, "--tokens", 100, "--seeds", 1, *arguments)


def test_a_table_a_file_and_a_picture(folder, tmp_path) -> None:
    file, plot = tmp_path / "out" / "result.json", tmp_path / "out" / "plot.png"
    result = small(folder, "--policy", "static", "--policy", "dsde+fill", "--json", file, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "dsde+fill" in result.output
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert [cell["costs"] for cell in cells] == ["c=0.05", "c=0.1", "c=0.3"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_every_registered_policy_is_played_unless_told_otherwise(folder) -> None:
    result = small(folder, "--draft-cost", 0.1, "--task", "code")
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in available_policies())


def test_settings_reach_the_grid(folder, tmp_path) -> None:
    costs, file = tmp_path / "gpu.json", tmp_path / "result.json"
    costs.write_text(json.dumps(CostModel.relative(0.1, [1, 1.1, 1.3]).to_dict()), encoding="utf-8")
    result = small(
        folder, "--policy", "static", "--costs", costs, "--draft-cost", 0.2, "--ridge", 5, "--packed", "--slope", 0.1,
        "--max-draft-length", 4, "--json", file,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    grid = json.loads(file.read_text(encoding="utf-8"))["grid"]
    assert [setting["name"] for setting in grid["costs"]] == ["c=0.2 ridge 5 packed", "gpu packed"]
    assert grid["costs"][0]["slope"] == 0.1
    assert grid["max_draft_length"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "dsed"), "no policy 'dsed'"),
        (("--policy", "static:draft=3"), "num_draft_tokens"),
        (("--policy", "static:"), "NAME:ARGUMENT=VALUE"),
        (("--temperature", "1"), "no text at"),
        (("--draft-cost", "0"), "draft_step"),
        (("--task", "poems"), "poems"),
    ],
)
def test_mistakes_are_answered_with_what_is_accepted(folder, arguments, message) -> None:
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_without_a_trace_is_refused(tmp_path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "trace.json" in result.output
