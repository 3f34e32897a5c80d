"""What logits processors and stop strings add to a round, and what drafting is worth with them.

Every setting takes turns with the greedy one, in one process: seconds per round of two drafts (`static:2`) and of none
(`static:0`), and tokens per second of `goodput` over those of `static:0`.

python benchmarks/processor_rounds.py --pair 8B/deep-1B-strong --output benchmarks/results/processor_rounds.json
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import BatchEncoding

from hf_dsde import SpeculationWarning, enable
from hf_dsde.bench.methods import PolicyMethod, pad_token, parse_policy
from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.provenance import collect
from hf_dsde.bench.workloads import Workload, read_prompt_file
from hf_dsde.cli.demo.prompts import DEMO_PROMPTS
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.pairs import Pair, encode, end_tokens

console = Console()
GREEDY, MIN_NEW_TOKENS, STOP_STRINGS = "greedy", "min_new_tokens", "stop strings"
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
NEVER_WRITTEN = ["\x00<never written>", "@@@ no text has this @@@"]
"""Stop strings for which every token is looked at and no text ends."""

SETTINGS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
    MIN_NEW_TOKENS: {},
    "T 0.7, top-p 0.8, top-k 20": SAMPLING,
    "the same with penalty 1.1": {**SAMPLING, "repetition_penalty": 1.1},
    STOP_STRINGS: {"stop_strings": NEVER_WRITTEN},
}
"""Arguments of `generate`, by name, but for what only the pair can say."""


def arguments_of(setting: str, pair: Pair, new_tokens: int) -> dict[str, Any]:
    """The arguments of `generate`. No text ends before it has all its tokens."""
    arguments = {"do_sample": False, "eos_token_id": None, "pad_token_id": pad_token(pair), **SETTINGS[setting]}
    if setting == MIN_NEW_TOKENS:
        ends = end_tokens(pair) or [pair.target.config.vocab_size - 1]
        arguments |= {"min_new_tokens": new_tokens, "eos_token_id": ends}
    if setting == STOP_STRINGS:
        arguments["tokenizer"] = pair.tokenizer
    return arguments | {"max_new_tokens": new_tokens}


def call(pair: Pair, inputs: BatchEncoding, method: PolicyMethod, setting: str, new_tokens: int) -> dict[str, float]:
    """Seconds per round and tokens per second of a call, without its prefill."""
    torch.manual_seed(0)
    target: Any = pair.target
    output = target.generate(
        **inputs,
        **arguments_of(setting, pair, new_tokens),
        assistant_model=pair.draft,
        speculation_policy=method.config,
        return_dict_in_generate=True,
    )
    own: SpeculationStatistics = output.speculation_statistics
    rows = len(inputs["input_ids"])
    assert output.sequences.shape[1] == inputs["input_ids"].shape[1] + new_tokens, "a text ended early"
    seconds = own.draft_seconds + own.verify_seconds + own.bookkeeping_seconds
    rounds = len(own.rounds)
    return {"round_seconds": seconds / rounds, "rounds": rounds, "tokens_per_second": rows * new_tokens / seconds}


def measure(
    pair: Pair, inputs: BatchEncoding, methods: dict[str, PolicyMethod], setting: str, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Every method with a setting and without, in turns; ratios are medians over turns."""
    turns: dict[str, list[dict[str, float]]] = {f"{name}{mark}": [] for name in methods for mark in ("", " greedy")}
    for repeat in range(-1, repeats):
        for name, method in methods.items():
            for mark, chosen in ((" greedy", GREEDY), ("", setting)):
                found = call(pair, inputs, method, chosen, new_tokens)
                if repeat >= 0:  # the first turn records passes
                    turns[name + mark].append(found)
    drafting, plain, best = methods

    def ratio(numerator: str, denominator: str, key: str) -> float:
        return median(a[key] / b[key] for a, b in zip(turns[numerator], turns[denominator], strict=True))

    return {
        "round_seconds": median(turn["round_seconds"] for turn in turns[drafting]),
        "plain_round_seconds": median(turn["round_seconds"] for turn in turns[plain]),
        "round_over_greedy": ratio(drafting, f"{drafting} greedy", "round_seconds"),
        "plain_round_over_greedy": ratio(plain, f"{plain} greedy", "round_seconds"),
        "speedup": ratio(best, plain, "tokens_per_second"),
        "greedy_speedup": ratio(f"{best} greedy", f"{plain} greedy", "tokens_per_second"),
        "turns": turns,
    }


def main(
    pair: Annotated[str, typer.Option(help="A pair that `hf-dsde bench` knows.")],
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result there, as JSON.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, as `hf-dsde bench-prompts` writes them.")] = None,
    batch: Annotated[list[int], typer.Option(help="Rows.")] = [8, 32],  # noqa: B006 - typer copies it
    setting: Annotated[list[str], typer.Option(help="Of those in this file.")] = [*SETTINGS],  # noqa: B006
    policy: Annotated[str, typer.Option(help="Whose speed is compared, as in `hf-dsde bench`.")] = "goodput",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Turns.")] = 3,
    device: Annotated[str, typer.Option(help="Where both models run.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
) -> None:
    """Measure, print and write."""
    warnings.simplefilter("ignore", SpeculationWarning)
    kind = getattr(torch, dtype)
    models = load_named_pair(pair, kind, device)
    enable(models.target)
    methods = {name: parse_policy(name, cost_probe=False) for name in ("static:2", "static:0", policy)}
    chosen = None if prompts is None else Workload("mix", read_prompt_file(prompts))
    asked = [prompt.text for prompt in DEMO_PROMPTS]
    results: dict[str, Any] = {}
    columns = ("ms, 2 drafts", "over greedy", "ms, none", "over greedy", f"{policy} over none", "greedy: so")
    table = Table("setting", "rows", *columns, title=f"rounds, {pair}")
    for rows in batch:
        texts = [asked[i % len(asked)] for i in range(rows)] if chosen is None else list(chosen.batch(rows, 0))
        inputs = encode(models.tokenizer, texts).to(device)
        for name in setting:
            found = results[f"{name}, {rows} rows"] = measure(models, inputs, methods, name, new_tokens, repeats)
            table.add_row(
                name,
                str(rows),
                f"{1e3 * found['round_seconds']:.2f}",
                f"{found['round_over_greedy']:.3f}",
                f"{1e3 * found['plain_round_seconds']:.2f}",
                f"{found['plain_round_over_greedy']:.3f}",
                f"{found['speedup']:.3f}",
                f"{found['greedy_speedup']:.3f}",
            )
            console.print(f"{name}, {rows} rows: {found['round_over_greedy']:.3f}", style="dim")
    console.print(table)
    if output is not None:
        settings = {"pair": pair, "policy": policy, "new_tokens": new_tokens, "repeats": repeats}
        content = {"provenance": collect(device, kind), "settings": settings, "results": results}
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
