"""Tokens per second of whole jobs, by kind of request and by who drafts: texts, a model, or both.

Answers end where the target ends them. Of each kind as many requests are answered as a batch has rows, several times
over, refilled as rows end, as a user's job is; methods take turns, and ratios are those of the same turn. A drafter out
of texts is made again for each job, so that it remembers nothing of the one before.

python benchmarks/text_jobs.py --pair 8B/eagle3 --prompts prompts.jsonl --output text_jobs.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_dsde import BatchGenerator
from hf_dsde.bench.methods import PAIRS_DRAFT, PolicyMethod, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.pairs import Pair

METHODS = ("static:0", "static:8@suffix", "static:4", "static:4@suffix+draft")
TASKS = ("edit", "quote", "math", "open")
console = Console()


def run_job(
    pair: Pair, method: PolicyMethod, prompts: list[str], rows: int, new_tokens: int
) -> tuple[float, dict[str, Any]]:
    """Answer prompts; return the generated tokens per second, and what the job's statistics say."""
    drafters = [pair.draft if name == PAIRS_DRAFT else name for name in method.drafters]
    generator = BatchGenerator(
        pair.target,
        pair.tokenizer,
        assistant_model=drafters if len(drafters) > 1 else drafters[0],
        speculation_policy=method.config,
        batch_size=rows,
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    messages = [{"messages": [{"role": "user", "content": text}]} for text in prompts]
    begun = time.perf_counter()
    tokens = sum(len(result.token_ids) for result in generator.stream(messages))
    seconds = time.perf_counter() - begun
    return tokens / seconds, {"tokens": tokens, "seconds": seconds, **vars(generator.statistics)}


def main(
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")],
    prompts: Annotated[Path, typer.Option(help="Prompts with their tasks, as `hf-dsde bench-prompts` writes them.")],
    output: Annotated[Path, typer.Option(help="JSON file.")],
    task: Annotated[list[str], typer.Option(help="Kinds of requests.")] = list(TASKS),  # noqa: B006 - typer's way
    method: Annotated[
        list[str], typer.Option(help="As policies of `hf-dsde bench`; the first is compared with.")
    ] = list(  # noqa: B006
        METHODS
    ),
    rows: Annotated[list[int], typer.Option(help="Rows of a batch.")] = [8],  # noqa: B006
    batches: Annotated[int, typer.Option(help="Requests of a job, per row.")] = 4,
    most_requests: Annotated[int, typer.Option(help="Requests of a job, at most.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed jobs of each method.")] = 2,
    warmups: Annotated[
        int, typer.Option(help="Jobs of each method before, at most: they end once nobody records passes any more.")
    ] = 6,
    device: Annotated[str, typer.Option(help="Where both models run.")] = "cuda",
) -> None:
    """Measure, print and write."""
    models = load_named_pair(pair, torch.bfloat16 if device == "cuda" else torch.float32, device)
    known = read_prompt_file(prompts)
    methods = [parse_policy(text) for text in method]
    cells = []
    for size in rows:
        for kind in task:
            texts = Workload(kind, known).batch(min(size * batches, most_requests))
            runs: dict[str, list[tuple[float, dict[str, Any]]]] = {each.name: [] for each in methods}
            for _ in range(warmups):
                jobs = [run_job(models, each, texts, size, new_tokens) for each in methods]
                if not any(statistics["recorded_passes"] for _, statistics in jobs):
                    break
            for _ in range(repeats):
                for each in methods:
                    runs[each.name].append(run_job(models, each, texts, size, new_tokens))
            plain = [speed for speed, _ in runs[methods[0].name]]
            table = Table(
                "method", "tokens/s", f"over {methods[0].name}", title=f"{kind}, {size} rows, {len(texts)} texts"
            )
            for name, found in runs.items():
                speeds = [speed for speed, _ in found]
                ratios = [speed / other for speed, other in zip(speeds, plain, strict=True)]
                cells.append(
                    {"rows": size, "task": kind, "method": name, "requests": len(texts), "speeds": speeds}
                    | {"ratios": ratios, "job": found[-1][1]}
                )
                table.add_row(
                    name, f"{median(speeds):.0f}", f"{median(ratios):.3f} {min(ratios):.3f}..{max(ratios):.3f}"
                )
            console.print(table)
            settings = {"pair": pair, "new_tokens": new_tokens, "warmups": warmups, "repeats": repeats}
            content = {"provenance": collect(device, torch.bfloat16), "settings": settings, "cells": cells}
            output.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
