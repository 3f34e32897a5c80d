"""What each policy takes of a round of the packaged pair, by the statistics: signals, answers and learning.

python benchmarks/policy_overhead.py --output benchmarks/results/policy_overhead_cpu.json
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import hf_dsde
from hf_dsde import pairs
from hf_dsde.cli.demo.prompts import DEMO_PROMPTS
from hf_dsde.config import SpeculationConfig
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.measurement import provenance
from hf_dsde.measurement.statistics import SpeculationStatistics


def main(
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option()] = "cpu",
    rows: Annotated[int, typer.Option(min=1, help="Batch size; the demo's prompts are repeated.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Calls per policy; policies take turns.")] = 3,
) -> None:
    """Run every registered policy and print its share of the rounds."""
    pair = pairs.load_packaged_pair(getattr(torch, dtype), torch.device(device))
    hf_dsde.enable(pair.target)
    texts = [prompt.text for prompt in DEMO_PROMPTS]
    prompts = [texts[i % len(texts)] for i in range(rows)]
    inputs = pairs.encode(pair.tokenizer, prompts).to(device)
    measured: dict[str, list[SpeculationStatistics]] = {name: [] for name in hf_dsde.available_policies()}
    pairs.generate_once(pair, inputs, SpeculationConfig("auto"), max_new_tokens=16, do_sample=False)  # warms up
    for _ in range(repeats):
        for name, runs in measured.items():
            config = SpeculationConfig(name, options=RuntimeOptions(cost_probe=False))
            out, _ = pairs.generate_once(pair, inputs, config, max_new_tokens=max_new_tokens, do_sample=False)
            runs.append(out.speculation_statistics)
    scores = {name: _score(runs) for name, runs in measured.items()}
    Console().print(_table(scores))
    if output is not None:
        result = {
            "provenance": provenance.collect(device),
            "settings": {"dtype": dtype, "rows": rows, "max_new_tokens": max_new_tokens, "repeats": repeats},
            "policies": scores,
        }
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _score(runs: list[SpeculationStatistics]) -> dict[str, Any]:
    rounds = [r for run in runs for r in run.rounds]
    seconds = [r.draft_seconds + r.verify_seconds + r.bookkeeping_seconds for r in rounds]
    overheads = [run.policy_overhead for run in runs]
    return {
        "policy_overhead": {"median": median(overheads), "smallest": min(overheads), "largest": max(overheads)},
        "policy_milliseconds_per_round": 1e3 * sum(r.policy_seconds for r in rounds) / len(rounds),
        "round_milliseconds": 1e3 * sum(seconds) / len(rounds),
        "draft_steps_per_round": sum(r.draft_steps for r in rounds) / len(rounds),
    }


def _table(scores: dict[str, dict[str, Any]]) -> Table:
    table = Table("policy", "share of rounds", "range", "ms a round", "round, ms", "draft steps a round")
    for name, score in scores.items():
        overhead = score["policy_overhead"]
        table.add_row(
            name,
            f"{overhead['median']:.2%}",
            f"{overhead['smallest']:.2%} to {overhead['largest']:.2%}",
            f"{score['policy_milliseconds_per_round']:.2f}",
            f"{score['round_milliseconds']:.0f}",
            f"{score['draft_steps_per_round']:.1f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
