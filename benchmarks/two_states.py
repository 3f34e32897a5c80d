"""Whether a change makes anything slower: two states of the package on one device, call by call in turn.

Hosts and cards differ from run to run by more than most changes bring. So each state has a process of its own, both
stay loaded, and every call of the one is followed by the same call of the other. Only one of them works at a time.

git worktree add ../before COMMIT
python benchmarks/two_states.py --before ../before --pair 8B/deep-1B-strong --prompts prompts.jsonl --output two.json

One row is timed over several prompts, one after another: after a near-tie of half precision, two states may write
different texts, of which one accepts more drafts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import hf_dsde
from hf_dsde.bench.measure import measure_call
from hf_dsde.bench.methods import PolicyMethod, Request, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.measurement.provenance import commit
from hf_dsde.pairs import encode

SERVE = "serve"
"""First argument of a process that stands for one state."""
METHODS = ("static:0", "static:2", "goodput", "dsde")
SINGLE_PROMPTS = 6
"""Prompts that one row is timed over."""
console = Console(width=120)


def serve(pair_name: str, device: str, prompts: str) -> None:
    """Answer calls by their seconds and rounds, a line of JSON for each, until nobody asks."""
    pair = load_named_pair(pair_name, torch.bfloat16 if device == "cuda" else torch.float32, device)
    hf_dsde.enable(pair.target)
    workload = Workload("mix", read_prompt_file(Path(prompts)))
    methods: dict[tuple[int, str], PolicyMethod] = {}  # each knows what passes cost from its own calls only
    _say({"package": str(Path(hf_dsde.__file__).parent), "commit": commit()})
    for line in sys.stdin:
        asked = json.loads(line)
        rows, text = asked["rows"], asked["method"]
        method = methods.setdefault((rows, text), parse_policy(text))
        indices = range(SINGLE_PROMPTS if rows == 1 else 1)
        batches = [encode(pair.tokenizer, workload.batch(rows, index)).to(device) for index in indices]
        calls = [measure_call(method, pair, batch, Request(asked["new_tokens"]), seed=0) for batch in batches]
        rounds = sum(len(call.answer.own.rounds) for call in calls if call.answer.own)
        _say({"seconds": sum(call.seconds for call in calls), "rounds": rounds})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class State:
    """A state of the package in a process of its own.

    Args:
        folder: Where its `hf_dsde` is.
        arguments: Those of `serve`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        path = os.pathsep.join([str(folder.resolve()), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, SERVE, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._folder = folder

    def wait(self) -> str | None:
        """Wait until it is loaded; return its commit, as provenances have it.

        Raises:
            ValueError: If it has loaded another package than that of its folder.
        """
        answer = self._answer()
        found = Path(answer["package"]).parent
        if found != self._folder.resolve():
            raise ValueError(f"{self._folder} holds no `hf_dsde`: its process has imported the one of {found}.")
        own: str | None = answer["commit"]
        return own

    def call(self, rows: int, method: str, new_tokens: int) -> dict[str, Any]:
        """Return seconds and rounds of a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"rows": rows, "method": method, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._folder} has ended; what it wrote last stands above.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(
    states: dict[str, State], rows: list[int], methods: list[str], new_tokens: int, warmups: int, repeats: int
) -> list[dict[str, Any]]:
    """Return, for each number of rows and method, what the timed calls of each state took, and print them."""
    cells = []
    table = Table("rows", "method", "seconds before", "after", "before over after", "rounds before", "after")
    for size in rows:
        for method in methods:
            calls: dict[str, list[dict[str, Any]]] = {name: [] for name in states}
            for turn in range(warmups + repeats):
                for name in sorted(states, reverse=turn % 2 == 1):  # neither is always the first
                    calls[name].append(states[name].call(size, method, new_tokens))
            timed = {name: found[warmups:] for name, found in calls.items()}
            cells.append({"rows": size, "method": method, **timed})
            before, after = ([call["seconds"] for call in timed[name]] for name in ("before", "after"))
            rounds = [str(timed[name][-1]["rounds"]) for name in ("before", "after")]
            spans = [f"{median(found):.3f} [{min(found):.3f}..{max(found):.3f}]" for found in (before, after)]
            table.add_row(str(size), method, *spans, f"{median(before) / median(after):.3f}", *rounds)
    console.print(table)
    return cells


def main(
    before: Annotated[Path, typer.Option(file_okay=False, exists=True, help="Checkout of the other state.")],
    prompts: Annotated[Path, typer.Option(dir_okay=False, exists=True, help="As `hf-dsde bench-prompts` writes them.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="JSON file.")],
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows in both states.")] = "8B/eagle3",
    rows: Annotated[list[int], typer.Option(min=1, help="Rows of a batch.")] = [1, 8, 32, 64],  # noqa: B006 - typer copies it
    method: Annotated[list[str], typer.Option(help="As policies of `hf-dsde bench`.")] = list(METHODS),  # noqa: B006 - likewise
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each row.")] = 128,
    warmups: Annotated[int, typer.Option(min=0, help="Calls of each cell before; they record passes.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each cell.")] = 5,
    device: Annotated[str, typer.Option(help="Where the models are.")] = "cuda",
) -> None:
    """Time this state of the package beside another."""
    folders = {"before": before, "after": Path(hf_dsde.__file__).parents[1]}
    states = {name: State(folder, pair, device, str(prompts)) for name, folder in folders.items()}
    try:
        commits = {name: state.wait() for name, state in states.items()}
        cells = compare(states, rows, method, new_tokens, warmups, repeats)
    finally:
        for state in states.values():
            state.close()
    content = {
        "provenance": collect(device, torch.bfloat16 if device == "cuda" else torch.float32),
        "settings": {"pair": pair, "commits": commits, "new_tokens": new_tokens, "warmups": warmups},
        "cells": cells,
    }
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(*sys.argv[2:])
    else:
        typer.run(main)
