"""A block whose rows have different numbers of tokens, with the tokens of all rows behind each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_STEP = 8
"""Packed blocks hold a multiple of this many tokens."""
STEPS_PER_DOUBLING = 16
"""Sizes of packed blocks between one power of two and the next: at most 1 token in 17 is padding."""


def packed_bucket(tokens: int) -> int:
    """Return the smallest size of packed block that holds `tokens`."""
    step = max(SMALLEST_STEP, (1 << (max(tokens, 1).bit_length() - 1)) // STEPS_PER_DOUBLING)
    return -(-tokens // step) * step


@dataclass(frozen=True)
class PackedTokens:
    """A packed block and the way back to its padded form.

    Attributes:
        tokens: `[size]`, int64. Behind the last row's tokens: anything.
        rows: Row of each token, `[size]`, int64.
        positions: `[size]`, int64; -1 behind the last row's tokens.
        starts: Index of each row's first token, `[rows]`, int32.
        counts: Tokens of each row, `[rows]`, int32.
        unpacked: Index of the token in each column of the padded block, `[rows, width]`, int64; any index where the row
            has no such column.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    starts: Tensor
    counts: Tensor
    unpacked: Tensor

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor, counts: Tensor, size: int) -> PackedTokens:
        """Pack a padded block, without asking the device for anything.

        Args:
            tokens: `[rows, width]`, int64, with each row's tokens in its first columns.
            positions: `[rows, width]`, int64.
            counts: Tokens of each row, `[rows]`, int64, 0 to width.
            size: Tokens that the packed block has room for, at least the sum of `counts`.
        """
        ends = counts.cumsum(0)
        starts = ends - counts
        place = torch.arange(size, device=tokens.device)
        rows = torch.searchsorted(ends, place, right=True).clamp_max(len(counts) - 1)
        columns = (place - starts[rows]).clamp_max(tokens.shape[1] - 1)
        behind = place >= ends[-1]
        width = torch.arange(tokens.shape[1], device=tokens.device)
        return cls(
            tokens=tokens[rows, columns],
            rows=rows,
            positions=positions[rows, columns].masked_fill(behind, -1),
            starts=starts.int(),
            counts=counts.int(),
            unpacked=(starts[:, None] + width).clamp_max(size - 1),
        )
