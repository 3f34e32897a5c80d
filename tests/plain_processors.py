"""The logits processors that `generate` prepares for a call, taken from `generate` itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel


def _hand_back(
    model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList, **prepared: Any
) -> LogitsProcessorList:
    return logits_processor


def plain_processors(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, **options: Any
) -> LogitsProcessorList:
    """Return what a call of `generate` with these arguments would apply to every step's scores."""
    processors: LogitsProcessorList = model.generate(
        input_ids=input_ids, attention_mask=attention_mask, custom_generate=_hand_back, **options
    )
    return processors
