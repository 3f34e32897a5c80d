"""The models of `hf-dsde generate`, and the device of each process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde import pairs
from hf_dsde.cli.options import named_pair, usage_errors
from hf_dsde.integration.drafters import EARLY_EXIT, NAMED_DRAFTERS

if TYPE_CHECKING:
    from accelerate import PartialState


@dataclass(frozen=True)
class Models:
    """A target, its tokenizer, and what drafts for it: a model, the name of a drafter that needs none, or both."""

    target: PreTrainedModel
    draft: PreTrainedModel | str | list[PreTrainedModel | str]
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
    drafts: list[str] | None,
    dtype: torch.dtype,
    device: torch.device,
    device_map: str | None,
    state: PartialState | None,
) -> Models:
    """What was named, on one device or spread over several; the packaged target and draft when none is named.

    A drafter out of texts is named for any target, and so are the target's own layers; one model or head, alone or
    beside texts, drafts for its own target.
    """
    texts = [draft for draft in drafts or [] if draft in NAMED_DRAFTERS and draft != EARLY_EXIT]
    others = [draft for draft in drafts or [] if draft not in texts]
    if max(len(texts), len(others)) > 1:
        raise typer.BadParameter(
            f"--draft {' --draft '.join(drafts or [])} names more than one of a kind; two draft together if one is of "
            f"{', '.join(sorted({*NAMED_DRAFTERS} - {EARLY_EXIT}))} and the other is a folder, a Hub id or {EARLY_EXIT}"
        )
    draft = others[0] if others else None
    alone = draft == EARLY_EXIT or (bool(texts) and draft is None)
    if not alone and (model is None) != (draft is None):
        missing, other = ("--model", "--assistant-model") if model is None else ("--assistant-model", "--model")
        raise typer.BadParameter(f"{missing} is missing; {other} needs it, since a draft belongs to its target")
    if device_map is not None and state is not None:
        raise typer.BadParameter(
            "--device-map spreads one copy of the models over devices, and each process needs its own; drop it"
        )
    if device_map is not None and (model is None or not drafts):
        raise typer.BadParameter("--device-map needs --model and --assistant-model; the packaged pair fits one device")
    with usage_errors((OSError,)):
        if alone:
            target, tokenizer = pairs.load_target(model, dtype, device, device_map)
            named = [*texts, *others]
            return Models(target, named[0] if len(named) == 1 else [*named], tokenizer)
        if model is None or draft is None or device_map is None:
            pair = named_pair(model, draft, dtype, device)
        else:
            pair = pairs.load_pair(model, draft, dtype, device, device_map)
    return Models(pair.target, [texts[0], pair.draft] if texts else pair.draft, pair.tokenizer)
