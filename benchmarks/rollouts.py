"""What rollouts take in a training loop: speculation against plain `generate`, weights changing in between.

Every method generates for the same rows, sampled, from a model in training mode, as trainers do it; then the model
takes a step on what it has written. Times are those of the rollouts alone. The first rollout records or compiles, and
is shown apart.

python benchmarks/rollouts.py --target-shape deep-1B --batch 8 --batch 32 --output rollouts.json
python benchmarks/rollouts.py --pair small --device cpu --batch 2 --new-tokens 16 --output rollouts.json

| method | rollouts |
| --- | --- |
| `generate` | plain, over a growing cache |
| `generate_static` | over a static cache, for which transformers compiles the steps on an accelerator |
| `speculation` | as `enable` has it: nothing stays on the device while the model trains |
| `speculation_kept` | with `keep_memory=True`: caches and recorded passes stay |
"""

from __future__ import annotations

import gc
import json
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import hf_dsde
from hf_dsde.bench.baselines import forget_static_cache
from hf_dsde.bench.pairs import EAGLE3, PairRecipe, load_named_pair, make_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import read_prompt_file
from hf_dsde.pairs import SHIPPED_HEAD, Pair, encode, load_packaged_pair

console = Console(width=120)
METHODS = ("generate", "generate_static", "speculation", "speculation_kept")
PHASES = ("prefill", "draft", "verify", "bookkeeping", "policy")
DEEP = "deep-1B"
"""As deep as the packaged target, which shapes must be, and small enough to train."""
PROMPTS = ("Write a story about a lighthouse.", "Explain how tides come about.", "List reasons to learn to swim.")


def arguments_of(method: str, policy: str) -> dict[str, Any]:
    """Arguments of `generate` that make a method, for a model whose draft is known."""
    if method == "generate":
        return {"speculation_policy": None}
    if method == "generate_static":
        return {"speculation_policy": None, "cache_implementation": "static"}
    options = hf_dsde.RuntimeOptions(keep_memory=True if method == "speculation_kept" else None)
    return {"speculation_policy": policy, "speculation_config": hf_dsde.SpeculationConfig(options=options)}


class TrainingLoop:
    """Rollouts and steps of one model.

    Args:
        pair: The model that is trained, and its draft, which stays as it is.
        texts: Prompts, one for each row.
        new_tokens: Tokens of every answer.
    """

    def __init__(self, pair: Pair, texts: list[str], new_tokens: int) -> None:
        self.pair = pair
        self.inputs = encode(pair.tokenizer, texts).to(pair.target.device)
        self.new_tokens = new_tokens
        pair.target.requires_grad_(True)
        # Steps that change weights in place, and take no memory of their own.
        self.optimizer = torch.optim.SGD(pair.target.parameters(), lr=1e-6)

    def rollout(self, arguments: dict[str, Any]) -> tuple[Any, float]:
        """Generate; return the output and its seconds."""
        target: Any = self.pair.target
        self._wait()
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hf_dsde.SpeculationWarning)
            output = target.generate(
                **self.inputs,
                **arguments,
                max_new_tokens=self.new_tokens,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                return_dict_in_generate=True,
            )
        self._wait()
        return output, time.perf_counter() - begin

    def step(self, sequences: torch.Tensor) -> None:
        """Take a step on what was written, row by row."""
        target: Any = self.pair.target
        self.optimizer.zero_grad(set_to_none=True)
        for row in sequences:
            loss = target(row[None], labels=row[None]).loss
            (loss / len(sequences)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _wait(self) -> None:
        if self.pair.target.device.type == "cuda":
            torch.cuda.synchronize(self.pair.target.device)


def measure(pair: Pair, texts: list[str], method: str, policy: str, new_tokens: int, steps: int) -> dict[str, Any]:
    """Run a training loop; return what its rollouts took."""
    device, torch_memory = pair.target.device, torch.cuda
    loop, arguments = TrainingLoop(pair, texts, new_tokens), arguments_of(method, policy)
    pair.target.train()
    seconds, recorded, accepted, drafted, held, phases = [], [], 0, 0, 0, {}
    for _ in range(steps):
        output, taken = loop.rollout(arguments)
        seconds.append(taken)
        statistics = getattr(output, "speculation_statistics", None)
        if statistics is not None:
            recorded.append(statistics.recorded_passes)
            accepted, drafted = accepted + statistics.accepted, drafted + statistics.drafted
            phases = {name: getattr(statistics, f"{name}_seconds") for name in PHASES} | {
                "rounds": len(statistics.rounds),
                "draft_steps": statistics.draft_steps,
            }
        sequences = output.sequences
        del output, statistics
        if device.type == "cuda":
            held = max(held, torch_memory.memory_allocated(device))
        loop.step(sequences)
    pair.target.eval()
    hf_dsde.release_memory(pair.target)
    hf_dsde.release_memory(pair.draft)
    forget_static_cache(pair)
    gc.collect()
    if device.type == "cuda":
        torch_memory.empty_cache()
    usual = median(seconds[1:])
    return {
        "method": method,
        "rows": len(texts),
        "first_seconds": seconds[0],
        "seconds": seconds[1:],
        "tokens_per_second": len(texts) * new_tokens / usual,
        "acceptance_rate": accepted / drafted if drafted else None,
        "recorded_passes": recorded,
        "last_rollout": phases,
        "bytes_held_between_rollouts": held,
    }


def load(pair: str | None, target_shape: str, dtype: torch.dtype, device: str) -> Pair:
    """The pair of a name, or the packaged one with its head in another shape."""
    if pair is not None:
        return load_named_pair(pair, dtype, device)
    source = load_packaged_pair(torch.float32, "cpu", draft=SHIPPED_HEAD)
    return make_pair(PairRecipe(target_shape, None, EAGLE3), source, dtype, device)


def main(
    output: Annotated[Path, typer.Option(help="JSON file.")],
    pair: Annotated[str | None, typer.Option(help="A pair that `hf-dsde bench` knows, small enough to train.")] = None,
    target_shape: Annotated[str, typer.Option(help="Without a pair: the packaged one and its head, so large.")] = DEEP,
    batch: Annotated[list[int], typer.Option(help="Rows.")] = [8, 32],  # noqa: B006 - typer copies it
    method: Annotated[list[str], typer.Option(help="What is compared.")] = list(METHODS),  # noqa: B006 - likewise
    policy: Annotated[str, typer.Option(help="How many tokens each row drafts.")] = "auto",
    steps: Annotated[int, typer.Option(min=2, help="Rollouts of each method; the first is shown apart.")] = 6,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each row.")] = 256,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")] = None,
    device: Annotated[str, typer.Option(help="Where the models are.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "bfloat16",
) -> None:
    """Measure, print and write."""
    models = load(pair, target_shape, getattr(torch, dtype), device)
    hf_dsde.enable(models.target, assistant_model=models.draft)
    given = PROMPTS if prompts is None else [prompt.text for prompt in read_prompt_file(prompts)]
    table = Table("rows", "method", "first, s", "others, s", "tokens/s", "accepted", "recorded", "held, GB")
    results = []
    for rows in batch:
        texts = [given[row % len(given)] for row in range(rows)]
        for name in method:
            result = measure(models, texts, name, policy, new_tokens, steps)
            results.append(result)
            rate = result["acceptance_rate"]
            table.add_row(
                str(rows),
                name,
                f"{result['first_seconds']:.2f}",
                f"{median(result['seconds']):.2f}",
                f"{result['tokens_per_second']:.0f}",
                "" if rate is None else f"{rate:.2f}",
                " ".join(map(str, result["recorded_passes"])),
                f"{result['bytes_held_between_rollouts'] / 1e9:.1f}",
            )
    console.print(table)
    settings = {"pair": pair or f"{target_shape}/{EAGLE3}", "policy": policy, "new_tokens": new_tokens, "steps": steps}
    report = {"settings": settings, "results": results, "provenance": collect(device, models.target.dtype)}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
