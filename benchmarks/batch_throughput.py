"""Tokens per second over a data set: rows refilled at once, one batch after the other, and through `Dataset.map`.

Answers have different lengths: each prompt may emit a number of tokens drawn once, and does. Methods take turns. For
the rounds of the last refilled run, it is also shown how many rows were left and how many tokens they drafted.

python benchmarks/batch_throughput.py --pair 8B/deep-1B-strong --prompts prompts.jsonl --output throughput.json
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import datasets
import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_dsde import BatchGenerator, RoundListener, RoundRecord
from hf_dsde.bench.methods import Request, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.pairs import Pair

console = Console()


def make_generator(
    pair: Pair, policy: str, batch_size: int, *, refill: bool, listeners: Sequence[RoundListener]
) -> BatchGenerator:
    """A generator whose texts end at their limits alone."""
    arguments = Request(1).arguments(pair)
    del arguments["max_new_tokens"]
    return BatchGenerator(
        pair.target,
        pair.tokenizer,
        assistant_model=pair.draft,
        speculation_policy=parse_policy(policy).config,
        speculation_listeners=listeners,
        batch_size=batch_size,
        refill=refill,
        **arguments,
    )


class NotedRounds(RoundListener):
    """Collects of each round how many rows were active, how many were in the pass, and what the active ones drafted."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_round(self, record: RoundRecord) -> None:
        """Note a round."""
        active = sum(record.active)
        drafted = sum(record.drafted) / max(active, 1)
        self.rounds.append({"active": active, "pass_rows": record.pass_rows, "drafted_by_row": drafted})


def timed(generate: Callable[[], Any], tokens: int) -> float:
    """Tokens per second of a call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    generate()
    return tokens / (time.perf_counter() - started)


def main(
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")],
    prompts: Annotated[Path, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")],
    output: Annotated[Path, typer.Option(help="JSON file.")],
    policy: Annotated[str, typer.Option(help="As in `hf-dsde bench`.")] = "goodput",
    count: Annotated[int, typer.Option(help="Prompts.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 32,
    shortest: Annotated[int, typer.Option(help="New tokens of the shortest answer.")] = 1,
    longest: Annotated[int, typer.Option(help="New tokens of the longest answer.")] = 256,
    repeats: Annotated[int, typer.Option(help="Runs of each method.")] = 3,
    warmups: Annotated[int, typer.Option(help="Runs of each method before; they record passes.")] = 1,
    device: Annotated[str, typer.Option(help="Where both models run.")] = "cuda",
    seed: Annotated[int, typer.Option(help="Of the answers' lengths.")] = 0,
) -> None:
    """Measure, print and write."""
    models = load_named_pair(pair, torch.bfloat16, device)
    numbers = random.Random(seed)
    texts = Workload("mix", read_prompt_file(prompts)).batch(count, 0)
    limits = [numbers.randint(shortest, longest) for _ in texts]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    rows = datasets.Dataset.from_dict({"messages": conversations, "max_new_tokens": limits})
    noted = NotedRounds()
    refilled = make_generator(models, policy, batch_size, refill=True, listeners=[noted])
    fixed = make_generator(models, policy, batch_size, refill=False, listeners=[])

    def stream(generator: BatchGenerator) -> None:
        for result in generator.stream(rows):
            assert result.error is None, result.error

    def mapped() -> None:
        with_cache = rows.map(fixed, batched=True, batch_size=batch_size, load_from_cache_file=False)
        assert not any(with_cache["generation_error"])

    methods = {"refill": lambda: stream(refilled), "fixed batches": lambda: stream(fixed), "map": mapped}
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    datasets.disable_progress_bars()
    for name, method in list(methods.items()) * warmups:
        console.print(f"{name}: {timed(method, sum(limits)):.0f} tokens/s while warming up", style="dim")
    details = {}
    for _ in range(repeats):
        for name, method in methods.items():
            if name == "refill":
                noted.rounds.clear()
            speeds[name].append(timed(method, sum(limits)))
            if name != "map":
                statistics = (refilled if name == "refill" else fixed).statistics
                details[name] = {**vars(statistics), "idle_share": statistics.idle_share}
    table = Table("method", "tokens/s", "slowest", "fastest", "over fixed batches", title=f"{pair}, {batch_size} rows")
    ratios = {
        name: median(a / b for a, b in zip(found, speeds["fixed batches"], strict=True))
        for name, found in speeds.items()
    }
    for name, found in speeds.items():
        table.add_row(name, *(f"{f(found):.0f}" for f in (median, min, max)), f"{ratios[name]:.3f}")
    console.print(table)
    parts = Table("rounds", "active rows", "tokens drafted per row", title="over the job, refilled")
    step = -(-len(noted.rounds) // 12)
    for start in range(0, len(noted.rounds), step):
        part = noted.rounds[start : start + step]
        cells = (f"{mean(entry[key] for entry in part):.2f}" for key in ("active", "drafted_by_row"))
        parts.add_row(f"{start} to {start + len(part) - 1}", *cells)
    console.print(parts)
    settings = {"pair": pair, "policy": policy, "count": count, "batch_size": batch_size, "limits": limits}
    provenance = collect(device, torch.bfloat16)
    content = {"provenance": provenance, "settings": settings, "speeds": speeds, "ratios": ratios, "details": details}
    content["rounds"] = noted.rounds
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
