"""A target's own copy with coarsely rounded weights, as a draft that agrees with it often.

A quantised copy of the target is a known kind of draft: no training, the same tokenizer, high acceptance (QSpec, arXiv
2410.11305, drafts with a low-precision form of the weights it verifies with). Here the rounded weights are stored in
the target's own dtype, so that a pass of the copy costs what a pass of the target costs. It serves to measure
policies on a strong pair, and makes nothing faster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_dsde.drafting.plain_layers import why_not_plain
from hf_dsde.utils.checks import check_integer


def rounded_copy(target: PreTrainedModel, bits: int = 4, group_size: int = 64) -> PreTrainedModel:
    """Copy a causal LM and round the weights of the linear maps inside its decoder layers to nearest.

    Embeddings, head, norms, biases and the routers of expert layers keep their values and share the target's storage;
    stacked expert weights are rounded like any other. See `round_in_groups` for the rule.

    Args:
        target: A decoder-only model with floating-point weights. It is left as it is.
        bits: Bits of a rounded weight, from 2 to 8.
        group_size: Weights along the input dimension that share a scale. Where it does not divide the dimension, the
            last group of each output is smaller.

    Returns:
        The copy, of the target's class, dtype and devices, in evaluation mode. Its parameters are frozen.

    Raises:
        TypeError: No list of decoder layers was found.
        ValueError: `bits` or `group_size` is out of bounds, or the target is quantised already.
    """
    check_integer("bits", bits, 2, 8)
    check_integer("group_size", group_size, 1)
    found = why_not_plain(_decoder_layers(target))
    if found is not None:
        raise ValueError(f"target has quantised layers, which cannot be rounded again: {found}; load it unquantised")
    inputs_last = dict(_linear_weights(_decoder_layers(target)))
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for parameter in target.parameters()
        if parameter not in inputs_last
    }
    # Copying a model would copy every weight; the memo says which ones are there already.
    draft: PreTrainedModel = copy.deepcopy(target, shared)
    draft.requires_grad_(False)
    for weight, last in _linear_weights(_decoder_layers(draft)):
        by_output = weight.data if last else weight.data.transpose(-1, -2)
        rounded = round_in_groups(by_output, bits, group_size)
        weight.data.copy_(rounded if last else rounded.transpose(-1, -2))
    return draft.eval()


def round_in_groups(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """Round weights to nearest on a symmetric grid, one scale per group.

    `scale = max |w| / (2^(bits - 1) - 1)` over a group and `w' = scale * round(w / scale)`: the group's largest weight
    is kept, and so is 0. Both are computed in float32 at least.

    Args:
        weight: Shape `[..., inputs]`, any float dtype.
        bits: At least 2. A weight takes one of `2^bits - 1` values.
        group_size: Neighbours along the inputs that share a scale.

    Returns:
        The shape and dtype of `weight`.
    """
    inputs = weight.shape[-1]
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    # Zeros that fill up the last group change neither its largest weight nor anything else.
    padded = nn.functional.pad(exact, (0, -inputs % group_size))
    groups = padded.unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    # Also where a scale is so small that it has become 0: there is nothing to round to.
    steps = torch.where(scale > 0, groups / scale, 0.0).round()
    return (steps * scale).flatten(-2)[..., :inputs].to(weight.dtype)


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's decoder layers, whatever the architecture calls it."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TypeError(
        f"target is a {type(model).__name__}, which has no list of {count} decoder layers: pass a decoder-only model "
        "of transformers"
    )


def _linear_weights(layers: nn.ModuleList) -> Iterator[tuple[Any, bool]]:
    """Each weight of a linear map, and whether its input dimension comes last (otherwise last but one)."""
    for module in layers.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            yield module.weight, not isinstance(module, Conv1D)
            continue
        for weight in module.parameters(recurse=False):
            # The weights of all experts in one parameter, `[experts, outputs, inputs]` or the other way round.
            if weight.dim() == 3:
                yield weight, not getattr(module, "is_transposed", False)
