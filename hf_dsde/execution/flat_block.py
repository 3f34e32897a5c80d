"""A block of tokens that are only stored, without padding between the rows that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_dsde.execution.spans import Span, flat_places
from hf_dsde.kernels.block import Block
from hf_dsde.utils.transfers import upload


def flat_block(spans: Sequence[Span], tokens: Tensor, states: Tensor | None, size: int, cache_rows: int) -> Block:
    """Return a block of `size` tokens, those of the spans first, on their device.

    Args:
        spans: Where they belong, at least one, each in another row.
        tokens: Of all spans, one span after another, `[sum of counts]`, int64.
        states: What a draft head reads beside them, `[sum of counts, H]`; None for other models.
        size: At least the sum of counts.
        cache_rows: Rows of the cache.
    """
    rows, positions = flat_places(spans)
    padding = size - len(tokens)
    places = torch.stack([pad(rows, (0, padding), value=spans[0].row), pad(positions, (0, padding), value=-1)])
    starts, counts = [0] * cache_rows, [0] * cache_rows
    first = 0
    for span in spans:
        starts[span.row], counts[span.row] = first, span.count
        first += span.count
    rows, positions = upload(places, tokens.device)
    begins = upload(torch.tensor([starts, counts], dtype=torch.int32), tokens.device)
    return Block(
        tokens=pad(tokens, (0, padding)),
        rows=rows,
        positions=positions,
        starts=begins[0],
        counts=begins[1],
        max_count=max(span.count for span in spans),
        whole_row=spans[0].row if len(spans) == 1 and spans[0].start == 0 else None,
        states=None if states is None else pad(states, (0, 0, 0, padding)),
    )
