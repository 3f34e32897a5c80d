"""Attention of flat tokens by torch's own kernels, which want rows of one length: a fallback for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_dsde.kernels.block import Block
from hf_dsde.kernels.reference import ragged_attention, visible_to

MOST_PADDING = 8
"""Places of padded rows for each token, beyond which keys are rather copied for each token: prompts of many rows."""


def padded_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block: Block,
    scaling: float,
    window: int | None,
    reach: int,
) -> Tensor:
    """Attention as `hf_dsde.kernels.reference.ragged_attention` describes it, without a copy of keys for each token.

    Rows are padded to the widest, and query heads that share a key-value head are rows of one matrix. Nothing waits for
    the device, so that it can be recorded.

    Args:
        q: `[T, Hq, D]`.
        keys: `[R or more, Hkv, S, D]`.
        values: `[R or more, Hkv, S, Dv]`.
        block: Tokens with positions have to be counted by their row; others need not be.
        scaling: Factor of the scores.
        window: Tokens that a query sees, itself included; None for all up to its own.
        reach: Bound on the largest slot + 1, known to the host.

    Returns:
        `[T, Hq * Dv]`, of the dtype of `q`.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads, reach = len(block.starts), keys.shape[1], min(reach, keys.shape[2])
    if not tokens:
        return q.new_empty(0, heads * values.shape[-1])
    width = max(1, block.max_count)
    if rows * width > MOST_PADDING * tokens:
        return ragged_attention(q, keys, values, block, scaling, window, reach)
    place = block.starts.long()[:, None] + torch.arange(width, device=q.device)
    place = place.clamp(max=tokens - 1)  # after a row's own tokens come others', whose results are not looked at
    visible = visible_to(block, torch.arange(tokens, device=q.device), rows, reach, window)
    group = heads // kv_heads
    padded = q[place].view(rows, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(
        padded.reshape(rows, kv_heads, group * width, dim),
        keys[:rows, :, :reach],
        values[:rows, :, :reach],
        attn_mask=visible[place].repeat(1, group, 1)[:, None],
        scale=scaling,
    )
    by_token = mixed.view(rows, kv_heads, group, width, -1).permute(0, 3, 1, 2, 4).reshape(rows, width, heads, -1)
    own = torch.arange(tokens, device=q.device) - block.starts.long()[block.rows]
    found = by_token[block.rows, own.clamp(0, width - 1)]
    nothing = values[block.rows, :, 0].repeat_interleave(group, dim=1)
    return torch.where((block.positions < 0)[:, None, None], nothing, found).flatten(1)
