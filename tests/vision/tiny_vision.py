"""Tiny random models that look at images, drafts for them, and ragged batches of prompts with images.

As in `tiny_models`, everything is float64 and untied, so that equality with plain decoding is a fair demand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from tiny_models import EOS, PAD, noisy_copy
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde

VOCABULARY = 96
IMAGE, VIDEO, START, END = 90, 91, 92, 93
FIRST_WORD, LAST_WORD = 3, 89
CHANNELS = 3

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_CLIP = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}
_IN_A_GRID: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "initializer_range": 0.3,
}
_DEEP = {**_IN_A_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_GRID_TOKENS = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_TILES = {"image_grid_pinpoints": [[8, 16], [16, 8]]}
_RESAMPLER = {
    "hidden_size": 32,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 8,
    "initializer_range": 0.3,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Family:
    """What a family's configuration needs, and what its processor returns.

    Attributes:
        prefix: Of its classes.
        text: Of its text model's configuration.
        vision: Of the configuration of what looks at images.
        own: Of its own configuration.
        pictures: `plain`, `sizes`, `tiles`, `by row` or `grid`: the form in which images are given.
        tokens: Height and width of images in turn, and how many tokens stand for one.
        token_field: Name of the field that says which token stands for images.
    """

    prefix: str
    text: dict[str, Any]
    vision: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    pictures: str = "plain"
    tokens: dict[tuple[int, int], int] = field(default_factory=lambda: {(8, 8): 4})
    token_field: str = "image_token_index"


_BIG = {(16, 16): 4}
_GRIDS = {(16, 8): 2, (8, 24): 3, (16, 16): 4}
_TILED = {(8, 16): 14, (16, 8): 16}
_BY_ID: dict[str, Any] = {"token_field": "image_token_id"}
_GRID: dict[str, Any] = {**_BY_ID, "pictures": "grid", "tokens": _GRIDS}

FAMILIES: dict[str, Family] = {
    "llava": Family("Llava", {"model_type": "llama"}, _CLIP, {"vision_feature_layer": -1}),
    "qwen2_vl": Family(
        "Qwen2VL",
        _AXES,
        {**_IN_A_GRID, "embed_dim": 16, "hidden_size": 32, "intermediate_size": None, "out_hidden_size": None},
        _GRID_TOKENS,
        **_GRID,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL", _AXES, {**_IN_A_GRID, "window_size": 16, "fullatt_block_indexes": [1]}, _GRID_TOKENS, **_GRID
    ),
    "qwen3_vl": Family("Qwen3VL", {**_AXES, "head_dim": 8}, _DEEP, _GRID_TOKENS, **_GRID),
    "gemma3": Family(
        "Gemma3",
        {**_WINDOWS, "model_type": "gemma3_text", "query_pre_attn_scalar": 8},
        _SIGLIP,
        {"mm_tokens_per_image": 4},
    ),
    "paligemma": Family(
        "PaliGemma",
        {"model_type": "gemma", "head_dim": 8},
        {**_SIGLIP, "projection_dim": 32},
        {"projection_dim": 32},
    ),
    "idefics3": Family(
        "Idefics3", {"model_type": "llama"}, {**_VISION, "image_size": 16}, {}, "by row", _BIG, **_BY_ID
    ),
    "smolvlm": Family("SmolVLM", {"model_type": "llama"}, {**_VISION, "image_size": 16}, {}, "by row", _BIG, **_BY_ID),
    "idefics2": Family(
        "Idefics2",
        {"model_type": "mistral", "head_dim": 8},
        _VISION,
        {"perceiver_config": _RESAMPLER},
        "by row",
        **_BY_ID,
    ),
    "internvl": Family(
        "InternVL",
        {"model_type": "qwen2"},
        {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        {},
        "plain",
        _BIG,
        **_BY_ID,
    ),
    "mistral3": Family(
        "Mistral3",
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {**_VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 16},
        {"spatial_merge_size": 2},
        "sizes",
        {(16, 16): 4, (8, 16): 2},
    ),
    "aya_vision": Family(
        "AyaVision",
        {**_WINDOWS, "model_type": "cohere2"},
        {**_SIGLIP, "image_size": 16},
        {"downsample_factor": 2},
        "plain",
        _BIG,
    ),
    "llava_next": Family(
        "LlavaNext", {"model_type": "llama"}, _CLIP, {"vision_feature_layer": -1, **_TILES}, "tiles", _TILED
    ),
    "llava_onevision": Family("LlavaOnevision", {"model_type": "qwen2"}, _SIGLIP, _TILES, "tiles", _TILED),
    "vipllava": Family("VipLlava", {"model_type": "llama"}, _CLIP, {"vision_feature_layers": [-1, -2]}),
    "qwen3_vl_moe": Family("Qwen3VLMoe", {**_AXES, **_EXPERTS, "head_dim": 8}, _DEEP, _GRID_TOKENS, **_GRID),
}

THREE_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families whose positions have three axes, on which an image is shorter than the tokens that stand for it."""
OFTEN = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "paligemma", "idefics3")
"""One family of each structure; tests that look at all others as well are slow ones."""
AGREEMENT = {"full": 0.0, "half": 0.05}
"""Noise of a draft that looks at the images as well."""


def families(*others: str) -> list[Any]:
    """Return all families but `others` as parameters of a test; those that bring no structure of their own are slow."""
    found = [family for family in FAMILIES if family not in others]
    return [family if family in OFTEN else pytest.param(family, marks=pytest.mark.slow) for family in found]


def tiny_vlm(family: str, *, seed: int = 0, attention: str | None = None, **text: Any) -> PreTrainedModel:
    """Return a random model of a family, in evaluation, float64, which ends its text only where a call says so.

    Args:
        family: Which.
        seed: Of the weights.
        attention: The implementation that it is set to; None for the usual one.
        **text: Changes of its text model's configuration.
    """
    made = FAMILIES[family]
    vision = {name: value for name, value in made.vision.items() if value is not None}
    config = getattr(transformers, f"{made.prefix}Config")(
        text_config={**_TEXT, **made.text, **text},
        vision_config=vision,
        tie_word_embeddings=False,
        **{made.token_field: IMAGE},
        **made.own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, f"{made.prefix}ForConditionalGeneration")(config)
        for weight in model.parameters():
            if weight.dim() == 1 or not weight.any():  # norms, and projections that are meant to be trained
                weight.data += 0.1 * torch.randn_like(weight)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    if attention is not None or family == "qwen3_vl_moe":
        model.set_attn_implementation(attention or "sdpa")
    if family == "qwen3_vl_moe":
        model.set_experts_implementation("eager")  # the usual one knows no float64
    return model.to(torch.float64).eval()


@functools.cache
def vision_pair(family: str, agreement: str = "half") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return an enabled target and a draft that looks at the images as well."""
    target = hf_dsde.enable(tiny_vlm(family))
    return target, noisy_copy(target, AGREEMENT[agreement])


def text_draft(target: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """Return a causal language model with the text layers of a target, and some noise."""
    text = target.config.get_text_config(decoder=True)
    kind = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}.get(text.model_type)
    if kind is not None:
        shape = {name: value for name, value in _TEXT.items() if hasattr(text, name)}
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        text = transformers.AutoConfig.for_model(kind, **shape, head_dim=8)
    with torch.random.fork_rng(devices=[]):
        draft: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(text)
    draft = draft.to(torch.float64).eval()
    inner: Any = target.model
    own: Any = draft
    own.model.load_state_dict((getattr(inner, "language_model", None) or inner.text_model).state_dict())
    own.lm_head.load_state_dict(target.lm_head.state_dict())
    return noisy_copy(draft, noise)


def image_batch(family: str, prompts: Sequence[Sequence[int]], *, seed: int = 0) -> dict[str, Tensor]:
    """Return left-padded prompts as a processor would.

    Args:
        family: Of the model.
        prompts: For each row, words in front of each image and after the last one: `[3, 2]` is three words, an image
            and two words, and `[4]` four words.
        seed: Of words and images.
    """
    generator = torch.Generator().manual_seed(seed)
    made = FAMILIES[family]
    per_row = [len(prompt) - 1 for prompt in prompts]
    kinds = list(made.tokens)
    sizes = [kinds[index % len(kinds)] for index in range(sum(per_row))]
    counts = iter([made.tokens[size] for size in sizes])
    rows: list[list[int]] = []
    for first, *rest in prompts:
        row = _words(first, generator)
        for words in rest:
            row += [START, *[IMAGE] * next(counts), END, *_words(words, generator)]
        rows.append(row)
    width = max(map(len, rows))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    types = (input_ids == IMAGE).long()
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if family in THREE_AXES:
        inputs["mm_token_type_ids"] = types
    if family in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = types if family == "gemma3" else torch.zeros_like(types)
    return {**inputs, **(_pictures(made.pictures, sizes, per_row, generator) if sizes else {})}


def _words(count: int, generator: torch.Generator) -> list[int]:
    words: list[int] = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator).tolist()
    return words


def _pictures(
    form: str, sizes: Sequence[tuple[int, int]], per_row: Sequence[int], generator: torch.Generator
) -> dict[str, Tensor]:
    """What a processor returns of images."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    height, width = (max(side) for side in zip(*sizes, strict=True))
    if form == "grid":
        patches = [(high // 4, wide // 4) for high, wide in sizes]
        pixels = noise(sum(high * wide for high, wide in patches), CHANNELS * 2 * 4 * 4)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *grid] for grid in patches])}
    if form == "tiles":
        return {"pixel_values": noise(len(sizes), 3, CHANNELS, 8, 8), "image_sizes": torch.tensor(sizes)}
    if form == "sizes":
        return {"pixel_values": noise(len(sizes), CHANNELS, height, width), "image_sizes": torch.tensor(sizes)}
    if form == "by row":
        pixels = torch.zeros(len(per_row), max(per_row), CHANNELS, height, width, dtype=torch.float64)
        for row, count in enumerate(per_row):
            pixels[row, :count] = noise(count, CHANNELS, height, width)
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(*pixels.shape[:2], height, width).long()}
    return {"pixel_values": noise(len(sizes), CHANNELS, height, width)}
