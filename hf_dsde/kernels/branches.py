"""Products of one input that run side by side in a recorded pass.

Queries, keys and values are products of the same input, and those of keys and values are too small to occupy a device:
one after another, each starts when the one in front has drained. Recorded in streams of their own, they become branches
of the graph that the device runs at once. Weights stay where the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from hf_dsde.utils.tuning import tuning_of


def side_by_side(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    """Return what each product makes of `x`.

    Args:
        products: Linear modules, say; each is called once.
        x: `[T, H]`. Branches are only made while a CUDA graph is captured, and of few tokens: with more,
            every product occupies the device by itself.
    """
    few = len(x) <= tuning_of(x.device).branch_tokens
    if len(products) == 1 or not few or not torch.cuda.is_current_stream_capturing():
        return [product(x) for product in products]
    current = torch.cuda.current_stream(x.device)
    first, *others = products
    branches = _streams(x.device)[: len(others)]
    results = []
    for stream, product in zip(branches, others, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(product(x))
    results.insert(0, first(x))
    for stream in branches:
        current.wait_stream(stream)
    return results


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
