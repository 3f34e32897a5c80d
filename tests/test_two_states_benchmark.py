"""The benchmark that times two states of the package beside each other."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import tiny_pair

import hf_dsde
from hf_dsde.measurement.provenance import commit

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "two_states.py"


class Timed:
    """Stands for a process: notes what it is asked in a list that both share."""

    def __init__(self, name: str, asked: list[tuple[str, int, str]]) -> None:
        self.name, self.asked = name, asked

    def call(self, rows: int, method: str, new_tokens: int) -> dict[str, Any]:
        assert new_tokens == 7
        self.asked.append((self.name, rows, method))
        return {"seconds": float(len(self.asked)), "rounds": 3}


def test_states_take_turns_and_warm_up() -> None:
    asked: list[tuple[str, int, str]] = []
    states = {name: Timed(name, asked) for name in ("before", "after")}
    compare = runpy.run_path(str(BENCHMARK))["compare"]
    cells = compare(states, [1, 4], ["static:0", "dsde"], new_tokens=7, warmups=1, repeats=2)
    assert [(cell["rows"], cell["method"]) for cell in cells] == [
        (1, "static:0"),
        (1, "dsde"),
        (4, "static:0"),
        (4, "dsde"),
    ]
    turn = ["after", "before", "before", "after", "after", "before"]  # neither is always the first
    assert [name for name, _, _ in asked] == 4 * turn
    assert [call["seconds"] for call in cells[0]["before"]] == [3.0, 6.0]
    assert [call["seconds"] for call in cells[0]["after"]] == [4.0, 5.0]


def test_a_process_answers_by_seconds_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"word {number}"}) + "\n" for number in range(6)))
    calls = [{"rows": rows, "method": "static:0", "new_tokens": 5} for rows in (1, 2)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(call) + "\n" for call in calls)))
    benchmark = runpy.run_path(str(BENCHMARK))
    serve = benchmark["serve"]
    serve.__globals__["load_named_pair"] = lambda *_: tiny_pair()
    serve("8B/eagle3", "cpu", str(prompts))
    package, single, batch = map(json.loads, capsys.readouterr().out.splitlines())
    assert package == {"package": str(Path(hf_dsde.__file__).parent), "commit": commit()}
    assert single["rounds"] == 5 * benchmark["SINGLE_PROMPTS"]
    assert batch["rounds"] == 5
    assert min(single["seconds"], batch["seconds"]) > 0
