"""What a runner is given: a line of tokens for every row of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dsde.kernels.block import Block
from hf_dsde.utils.transfers import upload

WIDEST_TREE = 64
"""Tokens of a row whose ancestors a mask of 64 bits can name."""


@dataclass(frozen=True)
class RowBlock:
    """Tokens of the rows of a batch, each row's in a line of its own: chains, or, with `ancestors`, trees.

    What slots and ancestors mean is said in `Block`. All tensors are `[rows, width]`, int64, unless said otherwise.

    Attributes:
        tokens: Ids; anything where `positions` is below 0.
        positions: Position of each token in its row; below 0 where there is no token.
        slots: Where keys and values of trees go; below 0 where there is no token. None for chains, whose slots are
            their positions.
        ancestors: Which tokens of its row each token of a tree sees, as bits; None for chains.
        counts: Tokens of each row, which are then in its first columns, `[rows]`; None if nobody knows.
        size: Run the pass packed, if the runner can: the tokens of all rows one after another, without the padding
            between them. So many tokens have room in it, at least the sum of `counts`. None to run it padded.
        states: What a draft head reads beside each token, `[rows, width, H]`, floating point, anything finite where
            there is no token; None for other models.
        exit_layer: The layer after which the pass ends, counted from 1: what it gives is what final norm and head make
            of its states, without hidden states, and later layers store nothing. The model is one that
            `early_exit.why_no_exits` has nothing against. None for all layers.

    Raises:
        ValueError: If a tree has no slots, or too many tokens.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor | None = None
    ancestors: Tensor | None = None
    counts: Tensor | None = None
    size: int | None = None
    states: Tensor | None = None
    exit_layer: int | None = None

    def __post_init__(self) -> None:
        """Refuse half a tree."""
        if (self.slots is None) != (self.ancestors is None):
            given, missing = ("ancestors", "slots") if self.slots is None else ("slots", "ancestors")
            raise ValueError(f"{given}: given without `{missing}`. A tree needs both, a chain neither.")
        if self.is_tree and self.width > WIDEST_TREE:
            raise ValueError(
                f"ancestors: a row has {self.width} columns, but a mask names {WIDEST_TREE}. Make the tree smaller."
            )

    @property
    def width(self) -> int:
        """Columns."""
        return self.tokens.shape[1]

    @property
    def is_tree(self) -> bool:
        """Whether rows hold trees."""
        return self.ancestors is not None

    def map(self, function: Callable[[Tensor], Tensor]) -> RowBlock:
        """Return a block with what `function` makes of each tensor that has an entry for each column."""
        optional = (self.slots, self.ancestors, self.states)
        slots, ancestors, states = (None if tensor is None else function(tensor) for tensor in optional)
        tokens, positions = function(self.tokens), function(self.positions)
        return RowBlock(tokens, positions, slots, ancestors, self.counts, self.size, states, self.exit_layer)

    @property
    def _is_host_chain(self) -> bool:
        return self.tokens.device.type == "cpu" and not self.is_tree and self.states is None

    def on(self, device: torch.device) -> RowBlock:
        """Return the block on a device; a chain of the host's gets there in one transfer."""
        if self.tokens.device == device:
            return self
        if not self._is_host_chain:
            return self.map(lambda tensor: tensor.to(device))
        tokens, positions = upload(torch.stack([self.tokens, self.positions]), device)
        return replace(self, tokens=tokens, positions=positions)

    def packed_on(self, device: torch.device) -> tuple[Block, Tensor]:
        """Return what `packed` does, on a device; a chain of the host's is packed there, and brought in one transfer.

        To pack it on a device takes two dozen launches, one after another, which the target waits for.
        """
        if self.tokens.device == device or not self._is_host_chain:
            return self.on(device).packed()
        block, places = self.packed()
        parts = [block.tokens, block.rows, block.positions, block.starts, block.counts, places.flatten()]
        joined = upload(torch.cat([part.long() for part in parts]), device)
        tokens, rows, positions, starts, counts, there = joined.split([len(part) for part in parts])
        return Block(tokens, rows, positions, starts.int(), counts.int(), block.max_count), there.view(places.shape)

    def packed(self) -> tuple[Block, Tensor]:
        """Pack the block into its `size`, without asking the device for anything; `counts` have to be known.

        Returns:
            The packed block; the index of the token in each column of this one, `[rows, width]`, int64, any index where
            the row has no such column.
        """
        assert self.counts is not None
        assert self.size is not None
        counts = self.counts.to(self.tokens.device)
        ends = counts.cumsum(0)
        starts = ends - counts
        place = torch.arange(self.size, device=self.tokens.device)
        rows = torch.searchsorted(ends, place, right=True).clamp_max(len(counts) - 1)
        columns = (place - starts[rows]).clamp_max(self.width - 1)
        unused = place >= ends[-1]
        positions = self.positions[rows, columns].masked_fill(unused, -1)
        block = Block(
            tokens=self.tokens[rows, columns],
            rows=rows,
            positions=positions,
            starts=starts.int(),
            counts=counts.int(),
            max_count=self.width,
            slots=positions if self.slots is None else self.slots[rows, columns].masked_fill(unused, -1),
            ancestors=None if self.ancestors is None else self.ancestors[rows, columns],
            states=None if self.states is None else self.states[rows, columns],
        )
        return block, (starts[:, None] + torch.arange(self.width, device=rows.device)).clamp_max(self.size - 1)


def next_row_count(rows: int, fine: int) -> int:
    """Return the rows of a pass when `rows` are left: a power of two, or above `fine` also three halves of one."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power > fine and rows <= power * 3 // 4 else power
