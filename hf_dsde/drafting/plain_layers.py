"""Whether the weights of layers are plain numbers, which can be copied, rounded and trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dsde.execution.recording_key import QUANTISERS
from hf_dsde.heads.dense_weights import is_dense

CODES = (torch.int8, torch.uint8, torch.int32)
"""What quantised weights are stored in, where they are buffers."""


def why_not_plain(layers: nn.Module) -> str | None:
    """Say which of some layers holds its weights in another form; None if none does."""
    for name, module in layers.named_modules():
        if type(module).__module__.partition(".")[0] in QUANTISERS:
            return f"{name} is a {type(module).__name__}"
        for own, weight in module.named_parameters(recurse=False):
            if not is_dense(weight):
                return f"{name}.{own} is a {_form(weight)}"
        for own, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in CODES and buffer.dim() > 1:
                return f"{name}.{own} is a {_form(buffer)}"
    return None


def _form(weight: Tensor) -> str:
    return f"tensor of {weight.dtype}" if type(weight) in (Tensor, nn.Parameter) else type(weight).__name__
