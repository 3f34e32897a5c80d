"""Tiny random vision-language models, text drafts for them, and ragged batches of prompts with images.

As in `tiny_models`, everything is float64 and untied, so that equality with plain decoding is a fair demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tiny_models import EOS, PAD, noisy_copy
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 96
IMAGE, VIDEO, START, END = 90, 91, 92, 93
FIRST_WORD, LAST_WORD = 3, 89

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
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_GRID = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        "Llava",
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        {"vision_feature_layer": -1},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": _ROPE},
        {**_QWEN_VISION, "embed_dim": 16, "hidden_size": 32, "initializer_range": 0.3},
        _GRID,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _ROPE},
        {
            **_QWEN_VISION,
            "hidden_size": 16,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        _GRID,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": _ROPE, "head_dim": 8},
        {
            **_QWEN_VISION,
            "hidden_size": 16,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.3,
        },
        _GRID,
    ),
    "gemma3": (
        "Gemma3",
        {**_WINDOWS, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8},
        {**_VISION, "model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4},
    ),
    "paligemma": (
        "PaliGemma",
        {"model_type": "gemma", "head_dim": 8},
        {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
        {"projection_dim": 32},
    ),
    "idefics3": ("Idefics3", {"model_type": "llama"}, {**_VISION, "image_size": 16}, {}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, {**_VISION, "image_size": 16}, {}),
    "internvl": (
        "InternVL",
        {"model_type": "qwen2"},
        {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        {},
    ),
}
"""Family -> prefix of its classes, and what its text, its vision and its own configuration need."""

THREE_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose positions have three axes and do not count the tokens of an image."""
OLD_NAMES = ("llava", "gemma3", "paligemma")


def tiny_vlm(family: str, *, seed: int = 0, text: dict[str, Any] | None = None) -> PreTrainedModel:
    """Return a random model of a family, in evaluation, float64."""
    prefix, of_text, of_vision, own = FAMILIES[family]
    image = {"image_token_index" if family in OLD_NAMES else "image_token_id": IMAGE}
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**_TEXT, **of_text, **(text or {})},
        vision_config=dict(of_vision),
        tie_word_embeddings=False,
        **image,
        **own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    return model.to(torch.float64).eval()


def text_draft(target: PreTrainedModel, noise: float = 0.05) -> PreTrainedModel:
    """Return a causal language model with the text layers of a target, where it has such a class, and some noise."""
    text = target.config.get_text_config(decoder=True)
    kind = text.model_type.removesuffix("_text").replace("_5_", "_").replace("_vl", "")
    if kind in ("qwen2", "qwen3"):
        shape = {name: value for name, value in _TEXT.items() if hasattr(text, name)}
        config = transformers.AutoConfig.for_model(kind, **shape, head_dim=8)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    else:
        config = text
    with torch.random.fork_rng(devices=[]):
        draft: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    draft = draft.to(torch.float64).eval()
    inner: Any = target.model
    inner = getattr(inner, "language_model", None) or inner.text_model
    draft.model.load_state_dict(inner.state_dict())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    return noisy_copy(draft, noise)


def image_batch(
    family: str,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    sides: Sequence[tuple[int, int]] = ((4, 2), (2, 6), (4, 4)),
) -> dict[str, Tensor]:
    """Return left-padded prompts as a processor would.

    Args:
        family: Of the model.
        prompts: For each row, words in front of each image and after the last one: `[3, 2]` is three words, an image
            and two words, and `[4]` four words.
        seed: Of words and images.
        sides: Patches of the images, in turn, where they may differ in size.
    """
    generator = torch.Generator().manual_seed(seed)
    grids = [sides[index % len(sides)] for index in range(sum(len(prompt) - 1 for prompt in prompts))]
    counts = iter([h * w // 4 for h, w in grids] if family in THREE_AXES else [4] * len(grids))
    rows: list[list[int]] = []
    for first, *rest in prompts:
        row = _words(first, generator)
        for words in rest:
            row += [START, *[IMAGE] * next(counts), END, *_words(words, generator)]
        rows.append(row)
    width = max(map(len, rows))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    return {**inputs, **_pictures(family, grids, [len(prompt) - 1 for prompt in prompts], input_ids, mask, generator)}


def _words(count: int, generator: torch.Generator) -> list[int]:
    words: list[int] = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator).tolist()
    return words


def _pictures(
    family: str,
    grids: Sequence[tuple[int, int]],
    per_row: Sequence[int],
    input_ids: Tensor,
    mask: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """What a processor returns beside the tokens."""
    types = (input_ids == IMAGE).long()
    extra: dict[str, Tensor] = {}
    if family in THREE_AXES:
        extra["mm_token_type_ids"] = types
    if family == "gemma3":
        extra["token_type_ids"] = types
    if family == "paligemma":
        extra["token_type_ids"] = torch.zeros_like(types)
    if not grids:
        return extra
    double = {"dtype": torch.float64, "generator": generator}
    if family in THREE_AXES:
        extra["pixel_values"] = torch.randn(sum(h * w for h, w in grids), 3 * 2 * 4 * 4, **double)
        extra["image_grid_thw"] = torch.tensor([[1, h, w] for h, w in grids])
    elif family in ("idefics3", "smolvlm"):
        pixels = torch.zeros(len(per_row), max(per_row), 3, 16, 16, dtype=torch.float64)
        for row, count in enumerate(per_row):
            pixels[row, :count] = torch.randn(count, 3, 16, 16, **double)
        extra["pixel_values"] = pixels
        extra["pixel_attention_mask"] = torch.ones(*pixels.shape[:2], 16, 16, dtype=torch.long)
    else:
        side = 16 if family == "internvl" else 8
        extra["pixel_values"] = torch.randn(len(grids), 3, side, side, **double)
    return extra
