"""The stages that come before training, and what both examples share about a run."""

from __future__ import annotations

import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from distillation.generate import (
    GenerationSettings,
    TextGenerator,
    describe_rows,
    generate_shards,
    invent_prompts,
    plan_jobs,
)
from distillation.prompts import held_out_prompts, load_prompts, save_prompts, training_prompts
from hf_dsde.smollm2 import PACKAGE, VERSION, load_smollm2

logger = logging.getLogger(__name__)

PACKAGED = "smollm2"
PACKAGED_DESCRIPTION = f"SmolLM2-135M-Instruct, Q4_1, from {PACKAGE}=={VERSION}"


def load_target(name: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The packaged target, or any causal LM that transformers finds under `name`."""
    if name == PACKAGED:
        return load_smollm2(dtype=dtype, device=device)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    torch.nn.Module.to(model, device)
    return model.eval(), tokenizer


def prepare_prompts(work_folder: Path, per_task: int, seed: int, accelerator: Accelerator) -> None:
    """Write the training and the held-out prompts, unless they are there."""
    with accelerator.main_process_first():
        if not (work_folder / "prompts.json").exists():
            save_prompts(training_prompts(seed), work_folder / "prompts.json")
        if not (work_folder / "held_out.json").exists():
            save_prompts(held_out_prompts(seed, per_task), work_folder / "held_out.json")


def generate_text(
    target_name: str,
    work_folder: Path,
    settings: GenerationSettings,
    invent: int,
    minutes: float,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Let the target write the training rows; returns what there is of them, and the time it took."""
    record = work_folder / "generation.json"
    if not record.exists():
        dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
        started = time.monotonic()
        model, tokenizer = load_target(target_name, dtype, accelerator.device)
        generator = TextGenerator(model, tokenizer, settings)
        invented = invent_prompts(generator, work_folder, invent, minutes / 4, accelerator)
        prompts = load_prompts(work_folder / "prompts.json") + load_prompts(invented)
        left = minutes - (time.monotonic() - started) / 60
        jobs = plan_jobs(prompts, tokenizer, settings)
        generate_shards(generator, jobs, work_folder / "rows" / "answers", left, accelerator)
        if accelerator.is_main_process:
            counts: dict[str, Any] = dict(describe_rows(work_folder / "rows"))
            counts["minutes"] = (time.monotonic() - started) / 60
            record.write_text(json.dumps(counts), encoding="utf-8")
        # The compiled decoding holds its cache and its graphs, which training needs the memory of.
        torch.compiler.reset()
        del generator, model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        accelerator.wait_for_everyone()
    counts = json.loads(record.read_text(encoding="utf-8"))
    logger.info("generated: %s", counts)
    return counts


def versions(accelerator: Accelerator) -> dict[str, str]:
    """What a reader needs to know to compare a result with another."""
    device = accelerator.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "processes": str(accelerator.num_processes),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
