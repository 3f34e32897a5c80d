"""Train an EAGLE-3 head for a target of your own.

    python examples/train_head.py --work-folder .work/head --output my-head
    python examples/train_head.py --target path/to/model --draft-vocabulary 16384 --work-folder work --output my-head

The target answers prompts; the head, one decoder layer that reads the target's hidden states, learns on these answers
what the target says next, several tokens deep (Li et al., arXiv 2503.01840); held-out prompts then show how many of its
tokens are accepted. Each stage leaves its result in the work folder and is skipped if it is there, training goes on
from its last checkpoint: after an interruption, or where a job may only run for so long (`--stop-after-minutes`), give
the same command again. `--start-from` begins a training with a saved head and its draft vocabulary;
`--generation-round 1` first adds rows to those of an earlier run, from other prompts.

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
from distillation.evaluate_heads import measure_head
from distillation.generate import GenerationSettings, read_shards
from distillation.heads import (
    HeadLoss,
    HeadLossSettings,
    HeadShape,
    keep_draft_vocabulary,
    new_head,
    prepare_draft_vocabulary,
)
from distillation.prompts import load_prompts
from distillation.stages import (
    PACKAGED,
    PACKAGED_DESCRIPTION,
    generate_text,
    load_target,
    prepare_prompts,
    versions,
)
from distillation.train import Progress, TrainingSettings, train
from distillation.unrolled import draft_token_ids
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_dsde.heads import load_head, save_head
from hf_dsde.heads.eagle3 import Eagle3Head

logger = logging.getLogger(__name__)

DRAFT_VOCABULARY = 8_192


def build_head(
    target: PreTrainedModel,
    work_folder: Path,
    start_from: Path | None,
    draft_vocabulary: int | None,
    shape: HeadShape,
    train_product: bool | None,
) -> Eagle3Head:
    """The head to train, in the target's dtype: a saved one, or a new one with a vocabulary from the generated text."""
    if start_from is None:
        draft_ids = prepare_draft_vocabulary(target, work_folder, draft_vocabulary or DRAFT_VOCABULARY)
        return new_head(target, draft_ids, shape, train_product=train_product is not False)
    head = load_head(start_from, target)
    if not isinstance(head, Eagle3Head):
        raise TypeError(
            f"--start-from {str(start_from)!r} holds an {type(head).__name__}; give the folder of an EAGLE-3 head"
        )
    head.embed_tokens.requires_grad_(False)
    check_start(head, start_from, draft_vocabulary, shape, train_product)
    keep_draft_vocabulary(work_folder, draft_token_ids(head).tolist())
    return head


def check_start(
    head: Eagle3Head, start_from: Path, draft_vocabulary: int | None, shape: HeadShape, train_product: bool | None
) -> None:
    """Refuse options that a saved head contradicts.

    Raises:
        ValueError: An option is given, and is not how the head is.
    """
    has = {
        "draft-vocabulary": (draft_vocabulary, head.settings.draft_vocab_size),
        "train-product": (train_product, not head.shares("lm_head")),
        "intermediate-size": (shape.intermediate_size, head.config.intermediate_size),
        "attention-heads": (shape.attention_heads, head.config.num_attention_heads),
        "key-value-heads": (shape.key_value_heads, head.config.num_key_value_heads),
    }
    for name, (given, held) in has.items():
        if given is not None and given != held:
            raise ValueError(
                f"--{name}: {given} is given, and the head in --start-from {str(start_from)!r} has {held}; "
                "leave it out, or train a new head"
            )


def train_head(
    head: Eagle3Head,
    target: PreTrainedModel,
    target_name: str,
    work_folder: Path,
    training: TrainingSettings,
    loss_settings: HeadLossSettings,
    accelerator: Accelerator,
    stop_at: float,
    compiled: bool,
) -> Progress:
    """Train the head in place; returns how far it came."""
    on_gpu = accelerator.device.type == "cuda"
    teacher = target
    if on_gpu:
        teacher, _ = load_target(target_name, torch.bfloat16, accelerator.device)
    teacher.requires_grad_(False)
    loss = HeadLoss(head, teacher, loss_settings, compile_loss=on_gpu, compile_head=on_gpu and compiled)
    rows = read_shards(work_folder / "rows")
    return train(head, loss, rows, training, work_folder / "head_checkpoint.pt", accelerator, stop_at)


def show(results: list[dict[str, Any]], shown: tuple[int, ...] = (1, 2, 3, 4, 5, 7)) -> None:
    """Print the result table."""
    per_call = [f"K={count}" for count in shown]
    columns = ["task", "temperature", "positions", "coverage", *per_call, "accepted by depth", "overlap by depth"]
    table = Table(*columns, title="tokens per target call with K draft tokens")
    for line in results:
        table.add_row(
            line["task"], f"{line['temperature']:g}", str(line["positions"]), f"{line['coverage']:.4f}",
            *(f"{line['tokens_per_call'][count - 1]:.2f}" for count in shown),
            *(" ".join(f"{share:.2f}" for share in line[name]) for name in ("accepted", "overlap")),
        )  # fmt: skip
    Console(width=180).print(table)


def main(
    *,
    work_folder: Annotated[Path, typer.Option(help="Prompts, generated rows and checkpoint are kept here.")],
    output: Annotated[Path, typer.Option(help="Where the trained head goes.")],
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target, or the packaged one.")] = PACKAGED,
    start_from: Annotated[Path | None, typer.Option(help="Begin with a saved head and its vocabulary.")] = None,
    draft_vocabulary: Annotated[
        int | None, typer.Option(help=f"Tokens that the head can guess; {DRAFT_VOCABULARY} for a new head.")
    ] = None,
    train_product: Annotated[
        bool | None, typer.Option(help="Train the vocabulary product, as for a new head, or keep the target's.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Of the head's layer; the target's if left out.")
    ] = None,
    attention_heads: Annotated[int | None, typer.Option(help="Of the head's layer; the target's if left out.")] = None,
    key_value_heads: Annotated[int | None, typer.Option(help="Of the head's layer; the target's if left out.")] = None,
    generate_minutes: Annotated[float, typer.Option(help="Longest time for generating text.")] = 5.0,
    train_minutes: Annotated[float, typer.Option(help="Planned training time; the learning rate ends there.")] = 12.0,
    train_steps: Annotated[int | None, typer.Option(help="Planned steps, instead of a time.")] = None,
    stop_after_minutes: Annotated[float, typer.Option(help="Stop training then, with a checkpoint.")] = math.inf,
    invent: Annotated[int, typer.Option(help="Messages, and articles, that the target invents.")] = 6144,
    batch_size: Annotated[int, typer.Option(help="Rows generated at a time.")] = 1024,
    prompt_tokens: Annotated[int, typer.Option(help="Longest training prompt.")] = 384,
    row_tokens: Annotated[int, typer.Option(help="Longest training row, prompt included.")] = 768,
    continued_share: Annotated[float, typer.Option(help="Share of answers that go on past their end.")] = 0.25,
    generation_round: Annotated[int, typer.Option(help="Rows of a later round are added to those there.")] = 0,
    tokens_per_batch: Annotated[int, typer.Option(help="Positions per training step.")] = 32_768,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1.5e-3,
    prompt_weight: Annotated[float, typer.Option(help="Of a prompt's positions, against 1 for an answer's.")] = 0.3,
    unrolled_steps: Annotated[int, typer.Option(help="How deep the chains are that the head is trained on.")] = 5,
    step_decay: Annotated[float, typer.Option(help="Weight of a step of a chain against the one before.")] = 0.9,
    hard_weight: Annotated[float, typer.Option(help="Of the target's most likely token, added to its law.")] = 0.5,
    compile_head: Annotated[bool, typer.Option(help="Compile the head's steps on a GPU; takes minutes.")] = False,
    shared_weights: Annotated[
        bool, typer.Option(help="Save the target's embedding, too: speculators needs it.")
    ] = False,
    evaluation_prompts: Annotated[int, typer.Option(help="Held-out prompts per task.")] = 100,
    evaluation_tokens: Annotated[int, typer.Option(help="Longest held-out answer.")] = 200,
    continued_evaluation: Annotated[
        int, typer.Option(help="Tokens of held-out answers that go on past their end; 0 leaves them out.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Generate the target's text, train a head on it, measure the head, save it."""
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
        prompt_weight=prompt_weight, seed=seed,
    )  # fmt: skip
    chunk = min(HeadLossSettings.chunk_tokens, tokens_per_batch)
    losses = HeadLossSettings(unrolled_steps, step_decay, hard_weight, chunk_tokens=chunk)
    model, tokenizer = load_target(target, torch.float32, accelerator.device)
    torch.manual_seed(seed)
    shape = HeadShape(intermediate_size, attention_heads, key_value_heads)
    with accelerator.main_process_first():
        head = build_head(model, work_folder, start_from, draft_vocabulary, shape, train_product)
    progress = train_head(head, model, target, work_folder, training, losses, accelerator, stop_at, compile_head)
    logger.info("training: %s", progress)
    if not accelerator.is_main_process:
        return
    finished = progress.share(training) >= 1
    folder = output if finished else work_folder / "unfinished_head"
    target_name = PACKAGED_DESCRIPTION if target == PACKAGED else target
    save_head(head, folder, target_name=target_name, dtype=torch.float16, shared_weights=shared_weights)
    if not finished:
        percent = 100 * progress.share(training)
        logger.warning("stopped at %.0f %% of the plan, with a head in %s: give the command again", percent, folder)
        return
    # What is measured is the file, rounded to float16, not the float32 head in memory.
    saved = load_head(output, model)
    evaluation = EvaluationSettings(
        candidates=7, answer_tokens=evaluation_tokens, continued_tokens=continued_evaluation, seed=seed
    )
    held_out = load_prompts(work_folder / "held_out.json")
    results = evaluate(saved, model, tokenizer, held_out, evaluation, measure_head)
    record = {
        "acceptance": results,
        "draft_vocabulary": saved.settings.draft_vocab_size,
        "loss": vars(losses),
        "generation": counts,
        "training": vars(progress),
        "versions": versions(accelerator),
    }
    (output / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    show(results)


if __name__ == "__main__":
    typer.run(main)
