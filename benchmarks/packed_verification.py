"""Packed against padded verification, in one process: lengths per row, large batches.

python benchmarks/packed_verification.py --prompts prompts.jsonl --output benchmarks/results/packed_verification.json
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_dsde import SpeculationConfig
from hf_dsde.bench.methods import Method, PolicyMethod, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.results import BenchResults
from hf_dsde.bench.sweep import Sweep, SweepOptions
from hf_dsde.bench.view import results_view
from hf_dsde.bench.workloads import Workload, read_prompt_file

FORMS = ("padded", "packed", "auto")


def methods(policies: list[str]) -> tuple[Method, ...]:
    """Every policy with every form of the pass, and decoding without drafts."""
    forms = [
        PolicyMethod(f"{policy} {form}", parse_policy(policy, SpeculationConfig(verification=form)).config)
        for policy in policies
        for form in FORMS
    ]
    return (*forms, parse_policy("static:0"))


def main(
    prompts: Annotated[Path, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")],
    output: Annotated[Path, typer.Option(help="JSON file.")],
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")] = "8B/deep-1B-strong",
    batch: Annotated[list[int], typer.Option(help="Rows.")] = [32, 64, 128],  # noqa: B006 - typer copies it
    policy: Annotated[list[str], typer.Option(help="As in `hf-dsde bench`.")] = ["dsde", "goodput"],  # noqa: B006
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    new_tokens: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed calls of each method.")] = 3,
    budget_seconds: Annotated[float | None, typer.Option(help="No call begins after it.")] = None,
) -> None:
    """Measure, print and write."""
    options = SweepOptions(
        methods=methods(policy),
        batches=tuple(batch),
        temperatures=(temperature,),
        new_tokens=new_tokens,
        repeats=repeats,
        budget_seconds=budget_seconds,
    )
    results = BenchResults(references=("static:0", *(f"{name} padded" for name in policy)))
    results.runs.append({"provenance": collect("cuda", torch.bfloat16), "settings": options.to_dict()})
    workload = Workload("mix", read_prompt_file(prompts))
    pairs = {pair: partial(load_named_pair, pair, torch.bfloat16, "cuda")}
    Sweep(options, pairs, [workload], results, save=lambda: results.save(output)).run()
    Console().print(results_view(results))


if __name__ == "__main__":
    typer.run(main)
