"""Write a pair as ordinary model folders, and the prompts of a workload as token ids, for a benchmark elsewhere.

python benchmarks/export_pair.py --pair 8B/eagle3 --output pair --batch 32

OUTPUT/target and OUTPUT/draft are folders that transformers loads; a head's is in the format of the package
speculators, with the target's embedding, which vLLM takes as a draft of the method `eagle3`. OUTPUT/prompts.json holds
lists of token ids: its first N are those that `hf-dsde bench` gives to a batch of N rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde.bench.pairs import load_named_pair
from hf_dsde.bench.workloads import Workload, prompts_of, read_prompt_file
from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.heads.saving import save_head
from hf_dsde.pairs import encode


def export(
    pair: Annotated[str, typer.Option(help="Name of a pair, as `hf-dsde bench` knows it.")],
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    workload: Annotated[str, typer.Option(help="Which prompts.")] = "mix",
    prompts: Annotated[Path | None, typer.Option(help="Prompts of `hf-dsde bench-prompts`.")] = None,
    batch: Annotated[int, typer.Option(help="How many prompts.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the order of prompts.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the weights are made.")] = "cpu",
) -> None:
    """Write the folders."""
    made = load_named_pair(pair, getattr(torch, dtype), device)
    target = output / "target"
    save_model(made.target, made.tokenizer, target)
    if isinstance(made.draft, Eagle3Head):
        save_head(made.draft, output / "draft", target_name=str(target), dtype=made.draft.dtype)
    else:
        save_model(made.draft, made.tokenizer, output / "draft")
    texts = prompts_of(workload) if prompts is None else read_prompt_file(prompts)
    inputs = encode(made.tokenizer, Workload(workload, texts, seed).batch(batch))
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    (output / "prompts.json").write_text(json.dumps([ids[mask].tolist() for ids, mask in rows]), encoding="utf-8")


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model as one of its own, whatever it was made from."""
    for name in ("quantization_config", "layer_draft"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(export)
