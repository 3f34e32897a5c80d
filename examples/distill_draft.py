"""Train a draft of a few layers for a target of your own.

    python examples/distill_draft.py --work-folder work --output my-draft
    python examples/distill_draft.py --target path/to/model --layers 0,1,14,15 --work-folder work --output my-draft

The target answers prompts; the draft, made of some of the target's layers, learns to predict the same distribution on
these answers; held-out prompts then show how many of its tokens are accepted. Each stage leaves its result in the work
folder and is skipped if it is there, training goes on from its last checkpoint: after an interruption, or where a job
may only run for so long (`--stop-after-minutes`), give the same command again.

Needs `pip install 'hf-dsde[distill]'` for the prompts. `accelerate launch` spreads it over GPUs.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from distillation.evaluate import EvaluationSettings, evaluate
from distillation.generate import GenerationSettings, read_shards
from distillation.prompts import load_prompts
from distillation.stages import (
    PACKAGED,
    PACKAGED_DESCRIPTION,
    generate_text,
    load_target,
    prepare_prompts,
    versions,
)
from distillation.train import DistillationLoss, Progress, TrainingSettings, train
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde.drafting.layer_draft import initialise_draft, load_draft, save_draft

logger = logging.getLogger(__name__)


def train_draft(
    target_name: str,
    layers: list[int],
    work_folder: Path,
    settings: TrainingSettings,
    accelerator: Accelerator,
    stop_at: float,
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase, Progress]:
    """Build the draft and train it; returns it with its float32 target, the tokenizer and how far it came."""
    target, tokenizer = load_target(target_name, torch.float32, accelerator.device)
    draft = initialise_draft(target, layers)
    teacher = target
    if accelerator.device.type == "cuda":
        teacher, _ = load_target(target_name, torch.bfloat16, accelerator.device)
    teacher.requires_grad_(False)
    rows = read_shards(work_folder / "rows")
    on_gpu = accelerator.device.type == "cuda"
    loss = DistillationLoss(draft, teacher, settings.chunk_tokens, settings.hard_weight, compiled=on_gpu)
    progress = train(draft, loss, rows, settings, work_folder / "checkpoint.pt", accelerator, stop_at)
    return draft, target, tokenizer, progress


def show(results: list[dict[str, Any]], candidates: int) -> None:
    """Print the result table."""
    calls = f"tokens/call, K={candidates}"
    table = Table("task", "temperature", "prompts", "positions", "greedy agreement", "overlap", calls)
    for line in results:
        table.add_row(
            line["task"], f"{line['temperature']:g}", str(line["prompts"]), str(line["positions"]),
            f"{line['greedy_agreement']:.3f}", f"{line['overlap']:.3f}", f"{line['tokens_per_call']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main(
    *,
    work_folder: Annotated[Path, typer.Option(help="Prompts, generated rows and checkpoint are kept here.")],
    output: Annotated[Path, typer.Option(help="Where the trained draft goes.")],
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target, or the packaged one.")] = PACKAGED,
    layers: Annotated[str, typer.Option(help="Target layers to start from.")] = "0,1,28,29",
    generate_minutes: Annotated[float, typer.Option(help="Longest time for generating text.")] = 10.0,
    train_minutes: Annotated[float, typer.Option(help="Planned training time; the learning rate ends there.")] = 15.0,
    train_steps: Annotated[int | None, typer.Option(help="Planned steps, instead of a time.")] = None,
    stop_after_minutes: Annotated[float, typer.Option(help="Stop training then, with a checkpoint.")] = math.inf,
    invent: Annotated[int, typer.Option(help="Messages, and articles, that the target invents.")] = 6144,
    batch_size: Annotated[int, typer.Option(help="Rows generated at a time.")] = 1024,
    prompt_tokens: Annotated[int, typer.Option(help="Longest training prompt.")] = 384,
    row_tokens: Annotated[int, typer.Option(help="Longest training row, prompt included.")] = 768,
    continued_share: Annotated[float, typer.Option(help="Share of answers that go on past their end.")] = 0.0,
    generation_round: Annotated[int, typer.Option(help="Rows of a later round are added to those there.")] = 0,
    tokens_per_batch: Annotated[int, typer.Option(help="Positions per training step.")] = 49_152,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1.5e-3,
    evaluation_prompts: Annotated[int, typer.Option(help="Held-out prompts per task.")] = 100,
    evaluation_tokens: Annotated[int, typer.Option(help="Longest held-out answer.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Generate the target's text, train a draft on it, measure the draft, save it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stop_at = time.monotonic() + 60 * stop_after_minutes
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    work_folder.mkdir(parents=True, exist_ok=True)
    generation = GenerationSettings(
        batch_size, prompt_tokens, row_tokens, continued_share=continued_share, seed=seed + generation_round,
        round=generation_round,
    )  # fmt: skip
    prepare_prompts(work_folder, generation, evaluation_prompts, seed, accelerator)
    counts = generate_text(target, work_folder, generation, invent, generate_minutes, accelerator)
    training = TrainingSettings(
        learning_rate=learning_rate, minutes=train_minutes, steps=train_steps, tokens_per_batch=tokens_per_batch,
        chunk_tokens=min(8_192, tokens_per_batch), seed=seed,
    )  # fmt: skip
    indices = [int(index) for index in layers.split(",")]
    draft, teacher, tokenizer, progress = train_draft(target, indices, work_folder, training, accelerator, stop_at)
    logger.info("training: %s", progress)
    if progress.share(training) < 1:
        logger.warning("stopped at %.0f %% of the plan: give the command again", 100 * progress.share(training))
        return
    if not accelerator.is_main_process:
        return
    save_draft(draft, output, target_name=PACKAGED_DESCRIPTION if target == PACKAGED else target)
    # What is measured is the file, rounded to float16, not the float32 draft in memory.
    draft = load_draft(output, teacher)
    evaluation = EvaluationSettings(answer_tokens=evaluation_tokens, seed=seed)
    results = evaluate(draft, teacher, tokenizer, load_prompts(work_folder / "held_out.json"), evaluation)
    record = {
        "acceptance": results,
        "candidates": evaluation.candidates,
        "generation": counts,
        "training": vars(progress),
        "versions": versions(accelerator),
    }
    (output / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    show(results, evaluation.candidates)


if __name__ == "__main__":
    typer.run(main)
