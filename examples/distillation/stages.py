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


def prepare_prompts(
    work_folder: Path, settings: GenerationSettings, per_task: int, seed: int, accelerator: Accelerator
) -> None:
    """Write the training prompts of a round and the held-out prompts, `per_task` with `seed`, unless they are there."""
    with accelerator.main_process_first():
        prompts = work_folder / f"prompts{settings.suffix}.json"
        if not prompts.exists():
            save_prompts(training_prompts(settings.seed), prompts)
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
    """Let the target write a round of training rows; returns what there is of all rounds, and the time they took."""
    record = work_folder / f"generation{settings.suffix}.json"
    if not record.exists():
        dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
        started = time.monotonic()
        model, tokenizer = load_target(target_name, dtype, accelerator.device)
        generator = TextGenerator(model, tokenizer, settings)
        invented = invent_prompts(generator, work_folder, invent, minutes / 4, accelerator)
        prompts = load_prompts(work_folder / f"prompts{settings.suffix}.json") + load_prompts(invented)
        left = minutes - (time.monotonic() - started) / 60
        jobs = plan_jobs(prompts, tokenizer, settings)
        answers = work_folder / "rows" / f"answers{settings.suffix}"
        generate_shards(generator, jobs, answers, left, accelerator)
        if accelerator.is_main_process:
            counts: dict[str, Any] = dict(describe_rows(work_folder / "rows"))
            counts["continued_share"] = settings.continued_share
            counts["minutes"] = (time.monotonic() - started) / 60
            record.write_text(json.dumps(counts), encoding="utf-8")
        # The compiled decoding holds its cache and its graphs, which training needs the memory of.
        torch.compiler.reset()
        del generator, model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        accelerator.wait_for_everyone()
    counts = json.loads(record.read_text(encoding="utf-8"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in work_folder.glob("generation*.json")]
    counts["minutes"] = sum(each.get("minutes", 0.0) for each in records)
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
