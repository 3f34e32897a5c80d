"""How fast prompts are stored, against what the same model's products allow.

The bound is the model's own body over 8192 tokens in 64 rows of one length, without head, cache or padding.

python benchmarks/prefill.py --pair 8B/deep-1B-strong --prompts prompts.jsonl --output prefill.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.spans import Span
from hf_dsde.pairs import encode

console = Console()
BOUND = (64, 128)
"""Rows and tokens per row of the pass that is the bound."""


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds of some calls, after two that warm up."""
    taken = []
    for number in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        if number >= 2:
            taken.append(begin.elapsed_time(end) / 1000)
    return taken


def stored(model: PreTrainedModel, prompts: list[Tensor], repeats: int) -> list[float]:
    """Seconds that storing prompts takes, all but their last tokens, as a call does it."""
    runner = create_runner(model, len(prompts), max(map(len, prompts)) + 256, RuntimeOptions())
    spans = [Span(row, 0, len(prompt) - 1) for row, prompt in enumerate(prompts)]
    tokens = torch.cat([prompt[:-1] for prompt in prompts])
    with runner.active(), torch.no_grad():
        taken = seconds_of(lambda: runner.store(spans, tokens), model.device, repeats)
    runner.finish()
    return taken


def main(
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")],
    prompts: Annotated[Path, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")],
    output: Annotated[Path, typer.Option(help="JSON file.")],
    batch: Annotated[list[int], typer.Option(help="Rows.")] = [1, 8, 32, 64, 128, 256],  # noqa: B006 - typer copies it
    repeats: Annotated[int, typer.Option(help="Timed passes.")] = 5,
) -> None:
    """Measure, print and write."""
    models = load_named_pair(pair, torch.bfloat16, "cuda")
    workload = Workload("mix", read_prompt_file(prompts))
    results: dict[str, Any] = {"provenance": collect("cuda", torch.bfloat16), "pair": pair, "models": {}}
    table = Table("model", "rows", "tokens", "ms", "tokens/s", "of the bound", title=f"prompts of mix, {pair}")
    for name, model in (("target", models.target), ("draft", models.draft)):
        body: Any = model.get_decoder()
        block = torch.randint(3, model.config.vocab_size, BOUND, device=model.device)
        with torch.no_grad():
            bound = seconds_of(lambda body=body, block=block: body(input_ids=block, use_cache=False), model.device, 5)
        limit = block.numel() / median(bound)
        table.add_row(name, "bound", str(block.numel()), f"{1000 * median(bound):.1f}", f"{limit:.0f}", "1.00")
        entry: dict[str, Any] = {"bound_seconds": bound, "bound_tokens": block.numel(), "rows": {}}
        for rows in batch:
            inputs = encode(models.tokenizer, list(workload.batch(rows, 0))).to(model.device)
            texts = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
            taken = stored(model, texts, repeats)
            tokens = sum(len(text) - 1 for text in texts)
            speed = tokens / median(taken)
            entry["rows"][rows] = {"tokens": tokens, "seconds": taken}
            cells = (f"{1000 * median(taken):.1f}", f"{speed:.0f}", f"{speed / limit:.2f}")
            table.add_row(name, str(rows), str(tokens), *cells)
        results["models"][name] = entry
    console.print(table)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
