"""Where the command line finds its models: the packaged pair, or a target and a draft by folder or Hub id.

A draft is either a complete model or a folder of layers that `hf_dsde.load_draft` puts on its target; what lies there
decides which. Nothing here decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde.drafting.layer_draft import DESCRIPTION_NAME, load_draft
from hf_dsde.smollm2 import load_smollm2

SHIPPED_DRAFT = "smollm2-135m-instruct-draft"


@dataclass(frozen=True)
class Pair:
    """A target, a draft for it, and the tokenizer of both, which pads on the left."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def shipped_draft_folder(name: str = SHIPPED_DRAFT) -> Path:
    """The folder of a draft that comes with this package: package data in a wheel, `model_cards/` in a checkout.

    Raises:
        FileNotFoundError: Neither place has a draft of that name.
    """
    package = Path(__file__).parent
    places = [package / "model_cards" / name, package.parent / "model_cards" / name]
    for folder in places:
        if (folder / DESCRIPTION_NAME).is_file():
            return folder
    raise FileNotFoundError(
        f"draft {name!r} is in none of {', '.join(map(str, places))}: reinstall hf-dsde, or train one with "
        "examples/distill_draft.py and pass its folder"
    )


def load_packaged_pair(dtype: torch.dtype, device: torch.device | str) -> Pair:
    """SmolLM2-135M-Instruct, fetched on first use, and the draft that was distilled from it."""
    target, tokenizer = load_smollm2(dtype, device)
    return Pair(target, load_draft(shipped_draft_folder(), target), tokenizer)


def load_pair(
    model: str, draft: str, dtype: torch.dtype, device: torch.device | str, device_map: str | None = None
) -> Pair:
    """Load a target and a draft, each by folder or Hub id.

    Args:
        model: The target.
        draft: A complete model with the target's vocabulary, or what `save_draft` wrote for this target.
        dtype: Of both.
        device: Of both, unless there is a `device_map`.
        device_map: Spreads each of them over devices, as `from_pretrained` does.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        # Padding is masked, so any token serves; the end token is the one that every tokenizer has.
        tokenizer.pad_token = tokenizer.eos_token
    target = _load_model(model, dtype, device, device_map)
    if _is_layer_draft(draft):
        return Pair(target, load_draft(draft, target), tokenizer)
    return Pair(target, _load_model(draft, dtype, device, device_map), tokenizer)


def _load_model(name: str, dtype: torch.dtype, device: torch.device | str, device_map: str | None) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
    if device_map is None:
        # Through the base class: transformers wraps `to` in a way that loses its signature.
        torch.nn.Module.to(model, device)
    return model.eval()


def _is_layer_draft(draft: str) -> bool:
    """Whether a folder or Hub repository holds a draft's layers instead of a complete model."""
    folder = Path(draft).expanduser()
    if folder.is_dir():
        return (folder / DESCRIPTION_NAME).is_file()
    # Imported here: only a repository id needs it, and it brings an HTTP client with it.
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(try_to_load_from_cache(draft, DESCRIPTION_NAME), str):
        return True
    try:
        return file_exists(draft, DESCRIPTION_NAME)
    except OfflineModeIsEnabled:
        return False
