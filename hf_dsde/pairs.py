"""A target, a draft and the tokenizer of both: where they are found, and what a call with them needs.

A pair is the packaged one, or a target and a draft by folder or Hub id. A draft is a complete model, layers that
`hf_dsde.load_draft` puts on its target, or a head that `hf_dsde.load_head` loads for it; what lies there decides which.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dsde.drafting.layer_draft import DESCRIPTION_NAME, load_draft
from hf_dsde.heads import load_head
from hf_dsde.heads.checkpoint import CONFIG_NAME, WEIGHT_FILES, weight_names
from hf_dsde.heads.formats import describes_head
from hf_dsde.measurement.statistics import SpeculationWarning
from hf_dsde.smollm2 import load_smollm2

if TYPE_CHECKING:
    from hf_dsde.config import SpeculationConfig
    from hf_dsde.policies import StoppingPolicy

SHIPPED_DRAFT = "smollm2-135m-instruct-draft"
"""Four layers distilled from the packaged target."""
SHIPPED_HEAD = "smollm2-135m-instruct-eagle3"
"""An EAGLE-3 head of the packaged target."""


@dataclass(frozen=True)
class Pair:
    """A target, a draft for it, and the tokenizer of both, which pads on the left."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def shipped_draft_folder(name: str = SHIPPED_DRAFT) -> Path:
    """The folder of a draft or head that comes with this package: package data in a wheel, else `model_cards/`.

    Raises:
        FileNotFoundError: Neither place has a draft of that name.
    """
    package = Path(__file__).parent
    places = [package / "model_cards" / name, package.parent / "model_cards" / name]
    for folder in places:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"draft {name!r} is in none of {', '.join(map(str, places))}: reinstall hf-dsde, or train one with "
        "examples/distill_draft.py and pass its folder"
    )


def load_packaged_pair(dtype: torch.dtype, device: torch.device | str, draft: str = SHIPPED_HEAD) -> Pair:
    """SmolLM2-135M-Instruct, fetched on first use, and a draft that was trained for it.

    Args:
        dtype: Of both.
        device: Of both.
        draft: `SHIPPED_HEAD` or `SHIPPED_DRAFT`.
    """
    target, tokenizer = load_smollm2(dtype, device)
    load = load_draft if draft == SHIPPED_DRAFT else load_head
    return Pair(target, load(shipped_draft_folder(draft), target), tokenizer)


def load_pair(
    model: str, draft: str, dtype: torch.dtype, device: torch.device | str, device_map: str | None = None
) -> Pair:
    """Load a target and a draft, each by folder or Hub id.

    Args:
        model: The target.
        draft: A complete model with the target's vocabulary, what `save_draft` wrote for this target, or a head of it
            in a format that `load_head` reads.
        dtype: Of both.
        device: Of both, unless there is a `device_map`.
        device_map: Spreads each of them over devices, as `from_pretrained` does.
    """
    target, tokenizer = load_target(model, dtype, device, device_map)
    return Pair(target, load_assistant(draft, target, dtype, device, device_map), tokenizer)


def load_assistant(
    draft: str, target: PreTrainedModel, dtype: torch.dtype, device: torch.device | str, device_map: str | None = None
) -> PreTrainedModel:
    """Load a draft by folder or Hub id for a target that is there.

    Args:
        draft: As for `load_pair`.
        target: The target.
        dtype: Of a complete model; layers and heads take the target's.
        device: Likewise.
        device_map: Likewise.
    """
    if _holds(draft, DESCRIPTION_NAME):
        return load_draft(draft, target)
    if _is_head(draft):
        return load_head(draft, target)
    return _load_model(draft, dtype, device, device_map)


def load_target(
    model: str | None, dtype: torch.dtype, device: torch.device | str, device_map: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target, for which something drafts that is no model, and its tokenizer.

    Args:
        model: Folder or Hub id; None for the packaged target.
        dtype: As for `load_pair`.
        device: As for `load_pair`.
        device_map: As for `load_pair`; of no meaning for the packaged target.
    """
    if model is None:
        return load_smollm2(dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        # Padding is masked, so any token serves; the end token is the one that every tokenizer has.
        tokenizer.pad_token = tokenizer.eos_token
    return _load_model(model, dtype, device, device_map), tokenizer


def _load_model(name: str, dtype: torch.dtype, device: torch.device | str, device_map: str | None) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
    if device_map is None:
        # Through the base class: transformers wraps `to` in a way that loses its signature.
        torch.nn.Module.to(model, device)
    return model.eval()


def _is_head(draft: str) -> bool:
    """Whether a folder or Hub repository holds a head instead of a complete model."""
    if not _holds(draft, CONFIG_NAME):
        return False
    config = json.loads(_file(draft, CONFIG_NAME).read_text(encoding="utf-8"))
    return describes_head(config, lambda: _weight_names(draft))


def _weight_names(draft: str) -> list[str]:
    held = next((name for name in WEIGHT_FILES if _holds(draft, name)), None)
    return [] if held is None else weight_names(_file(draft, held))


def _file(draft: str, name: str) -> Path:
    """The path of a file that a folder or Hub repository holds."""
    folder = Path(draft).expanduser()
    return folder / name if folder.is_dir() else _fetched(draft, name)


def _fetched(repository: str, name: str) -> Path:
    # Imported here: only a repository id needs it, and it brings an HTTP client with it.
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, name))


def _holds(draft: str, name: str) -> bool:
    """Whether a folder or Hub repository holds a file."""
    folder = Path(draft).expanduser()
    if folder.is_dir():
        return (folder / name).is_file()
    # Imported here: only a repository id needs it, and it brings an HTTP client with it.
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(try_to_load_from_cache(draft, name), str):
        return True
    try:
        return file_exists(draft, name)
    except OfflineModeIsEnabled:
        return False


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> BatchEncoding:
    """Requests as one batch: through the tokenizer's chat template if it has one, padded on the left."""
    if tokenizer.chat_template is None:
        return tokenizer(list(texts), padding=True, return_tensors="pt")
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(  # type: ignore[return-value] # its annotation ignores return_dict
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )


def end_tokens(pair: Pair) -> list[int]:
    """Ids that end an answer of the target."""
    config = pair.target.generation_config
    ends = None if config is None else config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


def answer_lengths(sequences: Tensor, prompt_width: int, end_tokens: Sequence[int]) -> Tensor:
    """Generated tokens of each row, its first end token included.

    Args:
        sequences: What `generate` returned, shape `[rows, prompt_width + any]`, int64.
        prompt_width: Columns of the prompts.
        end_tokens: Ids that end an answer.

    Returns:
        Shape `[rows]`, int64.
    """
    answers = sequences[:, prompt_width:]
    ended = torch.isin(answers, torch.tensor(list(end_tokens), dtype=torch.long, device=answers.device))
    before = ended.long().cumsum(-1) - ended.long()
    return (before == 0).sum(-1)


def generate_once(
    pair: Pair, inputs: BatchEncoding, speculation: SpeculationConfig | StoppingPolicy | None, **arguments: Any
) -> tuple[Any, float]:
    """Call `generate` on an enabled target; return its output object and how many seconds it took.

    Args:
        pair: Target and draft.
        inputs: The batch.
        speculation: How to speculate; None for plain `generate`.
        arguments: Further arguments of `generate`.
    """
    if speculation is not None:
        arguments |= {"assistant_model": pair.draft, "speculation_policy": speculation}
    # What has `generate` is a mixin, which the models' common base class does not name.
    target = cast("GenerationMixin", pair.target)
    _synchronize(pair.target.device)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        # The result says whether speculation lost, in a place where it is not overlooked.
        warnings.simplefilter("ignore", SpeculationWarning)
        output = target.generate(**inputs, return_dict_in_generate=True, **arguments)
    _synchronize(pair.target.device)
    return output, time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    """Wait for queued work, without which a GPU's times would be those of the queueing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
