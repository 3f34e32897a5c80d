"""An EAGLE-3 head in the width of an inflated target: the same guesses, at the cost of a large model's head.

The target's features are the small one's with zeros in the added channels (`hf_dsde.bench.inflate`), and so are the
head's states. Its layer is inflated as a decoder layer is; what reads two or three streams side by side has each of
them at the start of a stream's place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_dsde.bench.inflate import WeightMaker, check_room, checked_rotary, give, large_config
from hf_dsde.bench.shapes import Shape
from hf_dsde.heads.eagle3 import Eagle3Head


def inflate_head(head: Eagle3Head, target: LlamaForCausalLM, *, seed: int = 0) -> Eagle3Head:
    """Embed a head of a small target in the width of the inflated one.

    Args:
        head: Of Llama layers without biases. It is left as it is.
        target: What `inflate` has made of the head's target. The large head has its width, heads, MLP, dtype and
            device, and shares its embedding.
        seed: Of the random weights.

    Returns:
        The large head in evaluation mode, its parameters frozen, with the small one's draft vocabulary.

    Raises:
        TypeError: The head's layers are not those of Llama.
        ValueError: The target is too small for the head, the head has parameters that are not carried over (biases), or
            its rotary frequencies are not among those of the large one.
    """
    if head.config.model_type != "llama":
        raise TypeError(f"`head` has layers of type {head.config.model_type!r}, but those of 'llama' are needed.")
    small = Shape.of(head)
    large = replace(Shape.of(target), layers=small.layers)
    check_room(small, large)
    inflated = _without_weights(head, small, large)
    weight: Any = target.lm_head.weight
    inflated.rotary_emb = checked_rotary(head.rotary_emb, inflated.config, large.head_dim // small.head_dim).to(
        weight.device
    )
    inflated.draft_ids = None if head.draft_ids is None else head.draft_ids.to(weight.device)
    _fill(inflated, head, WeightMaker(small, large, head.config.initializer_range, seed, weight.dtype, weight.device))
    inflated.config.dtype = weight.dtype
    inflated.share_with(target)
    inflated.requires_grad_(False)
    evaluating: Eagle3Head = inflated.train(False)
    return evaluating


def _without_weights(head: Eagle3Head, small: Shape, large: Shape) -> Eagle3Head:
    """The large head on the meta device, after checking that it has a place for each of the small one's parameters."""
    config = large_config(head.config, small, large)
    with torch.device("meta"):
        inflated = Eagle3Head(config, replace(head.settings, feature_size=large.hidden))
    known = {name for name, _ in inflated.named_parameters()}
    unknown = [name for name, _ in head.named_parameters() if name not in known]
    if unknown:
        raise ValueError(f"`head` has {len(unknown)} parameters that are not carried over, such as {unknown[0]}.")
    return inflated


def _fill(inflated: Any, head: Any, maker: WeightMaker) -> None:
    """Give every module of the large head its weight, but for the embedding."""
    for large, small in zip(inflated.layers, head.layers, strict=True):
        for name, weight in maker.layer(small).items():
            give(large.get_submodule(name), weight)
    give(inflated.layers[0].hidden_norm, maker.norm(head.layers[0].hidden_norm.weight))
    give(inflated.norm, maker.norm(head.norm.weight))
    give(inflated.lm_head, maker.reading(head.lm_head.weight, None, len(head.lm_head.weight)))
    join = maker.reading(head.fc.weight, None, maker.large.hidden)
    join[maker.small.hidden :] = 0
    give(inflated.fc, join)
    if head.settings.fc_norm:
        for large, small in zip(inflated.fc_norm, head.fc_norm, strict=True):
            give(large, maker.norm(small.weight))
    if head.settings.norm_before_fc:
        parts: tuple[Tensor, ...] = head.input_norm.weight.split(maker.small.hidden)
        give(inflated.input_norm, torch.cat([maker.norm(part) for part in parts]))
