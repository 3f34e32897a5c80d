"""What one pass is run on: flat tokens, each with the cache row, the position and the slot it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The tokens of one pass, row after row, without regard to whether rows are padded to one width.

    A padded block has `rows * width` tokens of which some have a position below 0; a packed one has none of those.
    Tokens of one row are consecutive; tokens without a position may lie before or after them and be counted with the
    row, or after all rows and be counted by none. T is the number of flat tokens, R the number of cache rows that take
    part. All tensors are on one device.

    A row's tokens are a chain, whose positions ascend and are its slots, or a tree: then the i-th of them lies in slot
    `base + i`, where base is the position of the first, and comes after its ancestors. A token sees all slots below
    the base and, of the block, its ancestors and itself; of a sliding window, those with a position in it.

    Attributes:
        tokens: Ids, `[T]`, int64.
        rows: Cache row of each token, `[T]`, int64; any valid row where the position is below 0.
        positions: Position of each token, `[T]`, int64. Below 0 is no token: it writes to the cache's discard slot, and
            its output is finite and means nothing.
        starts: Index in the flat block of each cache row's first token, `[R]`, int32.
        counts: Flat tokens of each cache row, `[R]`, int32; 0 where a row has none.
        max_count: Bound on `counts` that the host knows.
        slots: Slot of each token's key and value, `[T]`, int64, below 0 where the position is; the positions of a
            chain.
        ancestors: For each token of a tree, a bit for every token of its row that it sees, itself included: bit i for
            the i-th that has a position, `[T]`, int64. None for chains.
        whole_row: The cache row whose first T tokens these are, if they are and the host knows it.
        states: What a draft head reads beside each token, `[T, H]`, of its dtype; None for other models.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    starts: Tensor
    counts: Tensor
    max_count: int
    slots: Tensor = None  # type: ignore[assignment] # set below
    ancestors: Tensor | None = None
    whole_row: int | None = None
    states: Tensor | None = None

    def __post_init__(self) -> None:
        """Let a chain's slots be its positions."""
        if self.slots is None:
            object.__setattr__(self, "slots", self.positions)

    def place(self, rows: Tensor) -> None:
        """Write into a padded block of `max_count` columns which cache rows its rows are, `[T / max_count]`, int64."""
        width = self.max_count
        self.rows.copy_(rows.repeat_interleave(width))
        first = torch.arange(0, len(rows) * width, width, dtype=torch.int32, device=rows.device)
        self.starts.zero_().index_copy_(0, rows, first)
        self.counts.zero_().index_fill_(0, rows, width)

    def copy_(self, other: Block) -> None:
        """Take over what another block of this shape holds."""
        for name in ("tokens", "rows", "positions", "starts", "counts"):
            getattr(self, name).copy_(getattr(other, name))
        if self.ancestors is not None and other.ancestors is not None:
            self.slots.copy_(other.slots)
            self.ancestors.copy_(other.ancestors)
        if self.states is not None and other.states is not None:
            self.states.copy_(other.states)
