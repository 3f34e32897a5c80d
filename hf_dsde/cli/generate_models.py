"""The models of `hf-dsde generate`, and the device of each process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde import pairs
from hf_dsde.cli.options import named_pair, usage_errors
from hf_dsde.integration.drafters import NAMED_DRAFTERS

if TYPE_CHECKING:
    from accelerate import PartialState


@dataclass(frozen=True)
class Models:
    """A target, its tokenizer, and what drafts for it: a model, or the name of a drafter that needs none."""

    target: PreTrainedModel
    draft: PreTrainedModel | str
    tokenizer: PreTrainedTokenizerBase


def own_device(device: str, state: PartialState | None) -> torch.device:
    """The device asked for; of several GPUs that Accelerate shares out, this process's own."""
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise typer.BadParameter(f"--device {device!r} is none; give cpu, cuda or cuda:NUMBER") from error
    if state is not None and asked.type == "cuda" and asked.index is None:
        return torch.device("cuda", state.local_process_index)
    return asked


def load_models(
    model: str | None,
    draft: str | None,
    dtype: torch.dtype,
    device: torch.device,
    device_map: str | None,
    state: PartialState | None,
) -> Models:
    """What was named, on one device or spread over several; the packaged target and draft when none is named."""
    named = draft in NAMED_DRAFTERS
    if not named and (model is None) != (draft is None):
        missing, other = ("--model", "--assistant-model") if model is None else ("--assistant-model", "--model")
        raise typer.BadParameter(f"{missing} is missing; {other} needs it, since a draft belongs to its target")
    if device_map is not None and state is not None:
        raise typer.BadParameter(
            "--device-map spreads one copy of the models over devices, and each process needs its own; drop it"
        )
    if device_map is not None and (model is None or draft is None):
        raise typer.BadParameter("--device-map needs --model and --assistant-model; the packaged pair fits one device")
    with usage_errors((OSError,)):
        if draft is not None and named:
            target, tokenizer = pairs.load_target(model, dtype, device, device_map)
            return Models(target, draft, tokenizer)
        if model is None or draft is None or device_map is None:
            pair = named_pair(model, draft, dtype, device)
        else:
            pair = pairs.load_pair(model, draft, dtype, device, device_map)
    return Models(pair.target, pair.draft, pair.tokenizer)
