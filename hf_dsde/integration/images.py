"""Prompts with images in `generate`: which models may have them, what is refused, and what becomes of the arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution.prompt_inputs import PromptInputs

IMAGE_ARGUMENTS = frozenset(
    {
        "pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_sizes", "image_grid_thw",
        "video_grid_thw", "second_per_grid_ts", "token_type_ids", "mm_token_type_ids", "vision_feature_layer",
        "vision_feature_select_strategy", "mm_encoder_outputs",
    }
)  # fmt: skip
"""What a processor returns of images beside tokens, and what `generate` makes of it, which the first pass alone reads."""


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that say something: a call with text alone carries an empty mapping of encoded images."""
    return {
        name: value
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, Mapping) and not value)
    }


def given_inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some arguments that say something about images."""
    return {name: value for name, value in given(arguments).items() if name in IMAGE_ARGUMENTS}


def why_not_read(model: PreTrainedModel, arguments: Iterable[str]) -> str | None:
    """Say why a model's prompts cannot have these arguments here; None if they can."""
    if not set(arguments) <= IMAGE_ARGUMENTS or not compat.takes_images(model):
        return "only text prompts can be decoded with a draft here. "
    kind = model.config.model_type
    if kind not in compat.IMAGE_MODEL_TYPES:
        return (
            f"models of type '{kind}' may look at images in later passes too, and known not to are "
            f"{sorted(compat.IMAGE_MODEL_TYPES)}. Pass text alone. "
        )
    return None


def prompt_inputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    mask: Tensor,
    model_kwargs: dict[str, Any],
    given: Mapping[str, Any] | None,
) -> PromptInputs | None:
    """Return the prompts with what they bring along; None if they are tokens alone.

    Args:
        model: The target.
        input_ids: Left-padded, `[rows, width]`, int64.
        mask: Of the prompts.
        model_kwargs: What `generate` has prepared.
        given: What it was given of that; None if nobody knows.
    """
    if not given_inputs(model_kwargs):
        return None
    prepared = ("use_cache", "logits_to_keep", "return_dict", *compat.CACHE_ARGUMENTS)
    arguments = {name: value for name, value in model_kwargs.items() if name not in prepared}
    return PromptInputs(input_ids, mask, arguments, stand_ins(model, input_ids), given)


def stand_ins(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Return which tokens stand for parts of images, `[rows, width]`, bool."""
    tokens = sorted(compat.stand_in_tokens(model.config))
    return torch.isin(input_ids, torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device))
