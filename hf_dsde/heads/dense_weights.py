"""The numbers of an embedding or a vocabulary product, in whatever form a model holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ROWS_AT_ONCE = 1024
"""Rows of an identity matrix that a product is asked about at once."""


def is_dense(weight: Any) -> bool:
    """Whether a weight is plain numbers of two bytes or more: no tensor class of a quantiser's, no codes."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.element_size() > 1


def table_dtype(target: PreTrainedModel) -> torch.dtype:
    """The dtype of a target's embedding, or, where that is quantised, of what the target computes."""
    weight: Any = target.get_input_embeddings().weight
    return weight.dtype if is_dense(weight) else target.dtype


@torch.no_grad()
def dense_weight(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight of an embedding or a linear map without bias, `[V, H]`; that of the module itself where it is plain.

    Of a quantised one, the module is asked: for every token, or what it makes of an identity matrix. That holds for any
    quantiser, and is exact where weights alone are quantised.

    Args:
        module: An embedding, or a module that maps `[..., H]` to `[..., V]`.
        dtype: What a quantised module is asked in.
    """
    weight = getattr(module, "weight", None)
    if weight is not None and is_dense(weight):
        return weight.detach()
    device = next(tensor.device for tensor in (*module.parameters(), *module.buffers()))
    if isinstance(module, nn.Embedding):
        return module(torch.arange(module.num_embeddings, device=device)).detach().to(dtype)
    columns = []
    for first in range(0, module.in_features, ROWS_AT_ONCE):
        rows = range(first, min(first + ROWS_AT_ONCE, module.in_features))
        unit = torch.zeros(len(rows), module.in_features, dtype=dtype, device=device)
        unit[range(len(rows)), rows] = 1
        columns.append(module(unit).to(dtype).T)
    return torch.cat(columns, dim=1)
