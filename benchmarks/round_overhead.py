"""Where the time of a round goes: its seconds against those of the recorded passes in it, and the largest kernels.

python benchmarks/round_overhead.py --pair 8B/deep-1B-strong --output benchmarks/results/round_overhead.json
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from hf_dsde import SpeculationWarning, enable
from hf_dsde.bench.methods import Request, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.execution.cuda_graphs import CudaReplay
from hf_dsde.pairs import Pair, encode

console = Console()


@contextmanager
def timed_replays() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Collect an event before and after each replay."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    original = CudaReplay.__call__

    def timed(self: CudaReplay) -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        original(self)
        after.record()
        events.append((before, after))

    CudaReplay.__call__ = timed  # type: ignore[method-assign]
    try:
        yield events
    finally:
        CudaReplay.__call__ = original  # type: ignore[method-assign]


def measure(pair: Pair, texts: list[str], policy: str, request: Request, repeats: int) -> dict[str, Any]:
    """Milliseconds per round, medians over calls."""
    method = parse_policy(policy)
    inputs = encode(pair.tokenizer, texts).to(pair.target.device)
    method(pair, inputs, request)
    calls = []
    for _ in range(repeats):
        with timed_replays() as events:
            answer = method(pair, inputs, request)
        torch.cuda.synchronize()
        assert answer.own is not None
        rounds = len(answer.own.rounds)
        replays = sum(before.elapsed_time(after) for before, after in events) / rounds
        own = answer.own
        parts = {"draft": own.draft_seconds, "verify": own.verify_seconds, "rest": own.bookkeeping_seconds}
        parts = {name: 1000 * seconds / rounds for name, seconds in parts.items()}
        total = sum(parts.values())
        calls.append({**parts, "round": total, "replays": replays, "ratio": total / replays, "rounds": rounds})
    return {name: median(call[name] for call in calls) for name in calls[0]} | {"calls": calls}


def kernels(pair: Pair, texts: list[str], policy: str, request: Request, most: int = 25) -> list[dict[str, Any]]:
    """The kernels of a call that take most time."""
    method = parse_policy(policy)
    inputs = encode(pair.tokenizer, texts).to(pair.target.device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        method(pair, inputs, request)
        torch.cuda.synchronize()
    entries = sorted(profiled.key_averages(), key=lambda entry: -entry.device_time_total)[:most]
    return [{"kernel": e.key[:100], "count": e.count, "milliseconds": e.device_time_total / 1000} for e in entries]


def main(
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")],
    output: Annotated[Path, typer.Option(help="JSON file.")],
    prompts: Annotated[Path, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")],
    workload: Annotated[str, typer.Option(help="Which of the prompts.")] = "mix",
    batch: Annotated[list[int], typer.Option(help="Rows.")] = [1, 8],  # noqa: B006 - typer copies it
    policy: Annotated[list[str], typer.Option(help="As in `hf-dsde bench`.")] = ["static:4"],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    repeats: Annotated[int, typer.Option(help="Calls.")] = 3,
) -> None:
    """Measure, print and write."""
    warnings.simplefilter("ignore", SpeculationWarning)
    models = load_named_pair(pair, torch.bfloat16, "cuda")
    enable(models.target)
    chosen = Workload(workload, read_prompt_file(prompts))
    request = Request(new_tokens)
    results: dict[str, Any] = {"provenance": collect("cuda", torch.bfloat16), "pair": pair, "milliseconds": {}}
    table = Table("policy", "rows", "round", "draft", "verify", "rest", "replays", "ratio", title=f"ms, {pair}")
    for rows in batch:
        texts = list(chosen.batch(rows, 0))
        for name in policy:
            found = measure(models, texts, name, request, repeats)
            results["milliseconds"][f"{name}, {rows} rows"] = found
            columns = ("round", "draft", "verify", "rest", "replays", "ratio")
            table.add_row(name, str(rows), *(f"{found[column]:.2f}" for column in columns))
        results[f"kernels, {rows} rows"] = kernels(models, texts, policy[0], request)
    console.print(table)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
