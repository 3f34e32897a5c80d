"""Thousands of prompts of very different lengths through refilled rows, on a CPU with tiny models.

Says which share of row-rounds was idle with refill and without, whether every text is the one that its prompt gives
alone, and how much memory the process had while it ran.

python benchmarks/refill_exactness.py --output benchmarks/results/refill_exactness.json
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_dsde import BatchGenerator
from hf_dsde.measurement.provenance import collect

VOCABULARY = 512
SAMPLED_EVERY = 5
"""Texts between two looks at the memory."""

console = Console()


def tiny_pair(seed: int, noise: float) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A random target without an end token, and a draft that is the target with noise on its weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    for own, other in zip(draft.parameters(), target.parameters(), strict=True):
        own.data.copy_(other.data + noise * other.data.std(correction=0) * torch.randn_like(other))
    return target, draft


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0")  # noqa: S106


def run(generator: BatchGenerator, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Generate from all rows; return what it took, and the texts."""
    process = psutil.Process()
    memory, texts = [], {}
    started = time.perf_counter()
    for number, result in enumerate(tqdm(generator.stream(rows), total=len(rows), disable=None)):
        texts[result.index] = result.token_ids
        if number % SAMPLED_EVERY == 0:
            memory.append(process.memory_info().rss / 1e6)
    statistics = generator.statistics
    quarter = max(len(memory) // 4, 1)
    return {
        "texts": texts,
        "seconds": time.perf_counter() - started,
        "idle_share": statistics.idle_share,
        "rounds": statistics.rounds,
        "acceptance_rate": statistics.acceptance_rate,
        "block_efficiency": statistics.block_efficiency,
        "memory_mb": {
            "second_quarter_max": max(memory[quarter : 2 * quarter]),
            "last_quarter_max": max(memory[-quarter:]),
            "every_5_texts": [round(value, 1) for value in memory],
        },
    }


def differing(target: LlamaForCausalLM, rows: list[dict[str, Any]], texts: dict[int, list[int]]) -> list[int]:
    """Return the rows whose text is not the one that `generate` gives for their prompt alone."""
    different = []
    for index, row in enumerate(tqdm(rows, disable=None)):
        prompt = torch.tensor([row["input_ids"]])
        alone = target.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=row["max_new_tokens"],
            do_sample=False,
        )
        if alone[0, prompt.shape[1] :].tolist() != texts[index]:
            different.append(index)
    return different


def main(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    prompts: Annotated[int, typer.Option(help="How many.")] = 2000,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt; all lengths are equally likely.")] = 1500,
    most_new_tokens: Annotated[int, typer.Option(help="Of an answer; all lengths are equally likely.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Rows.")] = 16,
    policy: Annotated[str, typer.Option(help="Decides how much is drafted.")] = "dsde",
    noise: Annotated[float, typer.Option(help="Of the draft's weights, in standard deviations.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Of models and prompts.")] = 0,
) -> None:
    """Run, compare, print and write."""
    target, draft = tiny_pair(seed, noise)
    numbers = random.Random(seed)
    rows = [
        {
            "input_ids": [numbers.randrange(1, VOCABULARY) for _ in range(numbers.randint(1, longest))],
            "max_new_tokens": numbers.randint(1, most_new_tokens),
        }
        for _ in range(prompts)
    ]
    results: dict[str, Any] = {}
    for name, refill in (("with refill", True), ("without", False)):
        generator = BatchGenerator(
            target,
            tokenizer(),
            assistant_model=draft,
            speculation_policy=policy,
            batch_size=batch_size,
            refill=refill,
            do_sample=False,
        )
        results[name] = run(generator, rows)
    different = differing(target, rows, results["with refill"]["texts"])
    same = results["with refill"].pop("texts") == results["without"].pop("texts")
    table = Table("", "idle row-rounds", "rounds", "seconds", "MB, second quarter", "MB, last quarter")
    for name, found in results.items():
        memory = found["memory_mb"]
        table.add_row(
            name,
            f"{found['idle_share']:.1%}",
            str(found["rounds"]),
            f"{found['seconds']:.0f}",
            f"{memory['second_quarter_max']:.0f}",
            f"{memory['last_quarter_max']:.0f}",
        )
    console.print(table)
    console.print(f"{len(different)} of {prompts} texts differ from those of their prompts alone")
    console.print(f"texts with and without refill are {'the same' if same else 'different'}")
    settings = {"prompts": prompts, "batch_size": batch_size, "policy": policy, "noise": noise, "seed": seed}
    content = {"provenance": collect("cpu"), "settings": settings, "different": different, "same": same, **results}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
