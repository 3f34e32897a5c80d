"""Models whose exits are worth something, and the same ones cut off after a layer, by transformers alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from tiny_calls import endless_model
from torch import Tensor
from transformers import PreTrainedModel

LAYERS = 4
WINDOWED = {"layer_types": ("sliding_attention", "full_attention") * (LAYERS // 2)}
CHANGES: dict[str, dict[str, Any]] = {"gemma2": WINDOWED, "gemma3": WINDOWED, "gpt_oss": WINDOWED}


def deep_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random target of four layers, none of which says what the last one does."""
    return endless_model(family, **{"num_hidden_layers": LAYERS, **CHANGES.get(family, {}), **changes})


@functools.cache
def settled_model(after: int = 2, rest: float = 0.02, **changes: Any) -> PreTrainedModel:
    """A target that has all but made up its mind after a layer: the later ones add `rest` of what they would."""
    model = copy.deepcopy(deep_model(**changes))
    for layer in model.model.layers[after:]:
        layer.self_attn.o_proj.weight.data *= rest
        layer.mlp.down_proj.weight.data *= rest
    return model


@functools.cache
def cut_off(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """A copy of a model that has its first layers only."""
    shorter = copy.deepcopy(model)
    shorter.model.layers = torch.nn.ModuleList(list(shorter.model.layers)[:layer])
    shorter.config.num_hidden_layers = layer
    if getattr(shorter.config, "layer_types", None):
        shorter.config.layer_types = shorter.config.layer_types[:layer]
    return shorter


@torch.no_grad()
def logits_of(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Logits after every token of a text, `[length, vocabulary]`, without a cache."""
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def continued(model: PreTrainedModel, text: list[int], count: int) -> list[int]:
    """The best tokens after a text, one after another, without a cache."""
    for _ in range(count):
        text = [*text, int(logits_of(model, text)[-1].argmax())]
    return text[len(text) - count :]
