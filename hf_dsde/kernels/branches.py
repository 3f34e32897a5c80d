"""Kernels that run side by side in a recorded pass.

Queries, keys and values are products of the same input, and those of keys and values are too small to occupy a device:
one after another, each starts when the one in front has drained. What low-rank adapters make of that input first needs
none of these products either. Recorded in streams of their own, all of them become branches of the graph that the
device runs at once. Weights stay where the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

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
    if len(products) == 1 or not _branching(x):
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


@contextmanager
def branch(x: Tensor) -> Iterator[Callable[[], None]]:
    """Record what is launched inside as a branch, beside what is launched afterwards.

    What is read and written inside has to exist before, and to be kept until the branch is joined: memory that is let
    go of in between would be that of something beside it.

    Args:
        x: `[T, H]`. There is no branch where `side_by_side` makes none of so many tokens.

    Yields:
        What joins the branch. To be called once, before what it has written is read.
    """
    if not _branching(x):
        yield lambda: None
        return
    current, stream = torch.cuda.current_stream(x.device), _streams(x.device)[-1]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield partial(current.wait_stream, stream)


def _branching(x: Tensor) -> bool:
    """Whether a pass with few tokens is being recorded."""
    few = len(x) <= tuning_of(x.device).branch_tokens
    return few and x.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Two for `side_by_side`, which may be called while a branch is open, and one for `branch`."""
    return tuple(torch.cuda.Stream(device) for _ in range(3))
