"""Prompts with images in `generate`: which models may have them, what is refused, and what becomes of the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution.prompt_inputs import PromptInputs

IMAGE_ARGUMENTS = frozenset(
    {
        "pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_sizes", "batch_num_images",
        "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "token_type_ids", "mm_token_type_ids",
        "vision_feature_layer", "vision_feature_select_strategy", "mm_encoder_outputs",
    }
)  # fmt: skip
"""What a processor returns of images, and what `generate` makes of it: only the first pass reads any of this."""


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


def refusal(
    model: PreTrainedModel, input_ids: Tensor | None, model_kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Say what of a call with images cannot be decoded with a draft, and why; None if all of it can.

    Args:
        model: The target.
        input_ids: Prompts, `[rows, width]`; None if they are not known yet.
        model_kwargs: Arguments of the call.
    """
    inputs = given_inputs(model_kwargs)
    if not inputs:
        return None
    if not compat.takes_images(model):
        return ", ".join(sorted(inputs)), "only text prompts can be decoded with a draft here."
    kind = model.config.model_type
    if kind not in compat.IMAGE_MODEL_TYPES:
        known = ", ".join(sorted(compat.IMAGE_MODEL_TYPES))
        return (
            f"{', '.join(sorted(inputs))} of a model of type '{kind}'",
            f"its later passes may have to see the images as well. Models of these types look at them once: {known}.",
        )
    ends = [] if input_ids is None else stand_ins(model, input_ids[:, -1]).nonzero()[:, 0].tolist()
    if ends:
        return (
            f"input_ids whose rows {ends} end in an image",
            "a text is continued from its last token. Let text follow the image, as chat templates do.",
        )
    return None


def counts_positions(input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether positions are simply counted: from a row's start on, or, after images, from the prompt's end on."""
    positions: Tensor | None = model_kwargs.get("position_ids")
    if positions is None:
        return True
    if given_inputs(model_kwargs):
        axes = positions[-3:, :, -1] if positions.dim() == 3 else positions[None, :, -1]
        return bool((axes == axes[:1]).all())
    mask = compat.prompt_mask(input_ids, model_kwargs).to(input_ids.device).bool()
    counted = mask.long().cumsum(dim=1) - 1
    return positions.shape[-2:] == counted.shape and bool((positions == counted)[..., mask].all())


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
    return PromptInputs(input_ids, mask, arguments, model.config, stand_ins(model, input_ids), given)


def stand_ins(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Return which tokens stand for parts of images, `[...]`, bool."""
    tokens = sorted(compat.stand_in_tokens(model.config))
    return torch.isin(input_ids, torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device))
