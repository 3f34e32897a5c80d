"""Record traces of the packaged target with two drafts: the distilled one, and the target's own copy in 4 bits.

    python examples/record_traces.py --output benchmarks/traces

A trace has no texts in it, only scalars per position, so that it can be kept beside the code and replayed by anybody.
The prompts are those of `examples/distill_draft.py`'s evaluation, and word problems of the templates that the draft was
trained on. Needs `pip install 'hf-dsde[distill]'`.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from distillation.prompts import CODE, MATH, MATH_WORDINGS, NEWS, _math_prompts, held_out_prompts
from rich.console import Console

from hf_dsde.cli.trace import summary_table
from hf_dsde.drafting.layer_draft import load_draft
from hf_dsde.drafting.rounded_copy import rounded_copy
from hf_dsde.pairs import SHIPPED_DRAFT, Pair, shipped_draft_folder
from hf_dsde.smollm2 import PACKAGE, VERSION, load_smollm2
from hf_dsde.trace import Prompt, load_trace, record_trace, summarise

logger = logging.getLogger(__name__)

SEEN_MATH = "gsm"
TARGET_NAME = f"SmolLM2-135M-Instruct, Q4_1, from {PACKAGE}=={VERSION}"
BITS, GROUP_SIZE = 4, 64
MANTISSA_BITS = 11


def trace_prompts(seed: int, per_task: int) -> list[Prompt]:
    """Prompts of four tasks, `per_task` each, in a fixed order.

    Code, news and `math` are held out from distillation; `gsm` has new numbers and names in templates that the draft
    was trained on. Each task's come shortest first, since prompts that are answered together should be of one length.
    """
    rng = random.Random(seed + 1)
    # Only the bare question, as the held-out problems are worded.
    seen = list(_math_prompts(rng, held_out=False, per_template=2, wordings=MATH_WORDINGS[:1]))
    rng.shuffle(seen)
    held_out = held_out_prompts(seed, per_task)
    by_task = {task: [p.text for p in held_out if p.task == task] for task in (CODE, NEWS, MATH)}
    by_task[SEEN_MATH] = [p.text for p in seen[:per_task]]
    return [Prompt(task, text) for task in (CODE, NEWS, SEEN_MATH, MATH) for text in sorted(by_task[task], key=len)]


def main(
    *,
    output: Annotated[Path, typer.Option(help="Folder of the traces.")],
    prompts_per_task: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of every answer.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 32,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens drafted per round.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the choice of prompts, and of the sampling.")] = 0,
    only: Annotated[str | None, typer.Option(help="Record this trace only, by its folder's name.")] = None,
) -> None:
    """Record both traces in float32."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    target, tokenizer = load_smollm2(torch.float32)
    prompts = trace_prompts(seed, prompts_per_task)
    drafts = {
        "smollm2-distilled": (lambda: load_draft(shipped_draft_folder(), target), SHIPPED_DRAFT),
        "smollm2-4bit": (
            lambda: rounded_copy(target, BITS, GROUP_SIZE),
            f"the target, layers rounded to {BITS} bits in groups of {GROUP_SIZE}",
        ),
    }
    for name, (make_draft, draft_name) in drafts.items():
        if only not in (None, name):
            continue
        record_trace(
            Pair(target, make_draft(), tokenizer),
            prompts,
            output / name,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            draft_length=draft_length,
            seed=seed,
            tokens=False,
            mantissa_bits=MANTISSA_BITS,
            names={"target": TARGET_NAME, "draft": draft_name},
            on_batch=lambda count: logger.info("%s: %d more answers", name, count),  # noqa: B023
        )
        Console(width=120).print(summary_table(summarise(load_trace(output / name))))


if __name__ == "__main__":
    typer.run(main)
