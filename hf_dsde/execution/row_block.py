"""What a runner is given: a line of tokens for every row of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dsde.kernels.block import Block

SMALLEST_STEP = 8
"""Packed blocks hold a multiple of this many tokens."""
STEPS_PER_DOUBLING = 16
"""Sizes of packed blocks between one power of two and the next: at most 1 token in 17 is padding."""
ROOMY_STEPS = 4
"""The same of packed passes that are recorded while there is none that is larger: at most 1 token in 5 is padding."""
MOST_PADDED = 2
"""A pass with up to so many times the tokens may take the place of one that is not recorded."""
LEAST_VARYING_WIDTH = 5
"""Narrower padded passes are the common ones, and as fast as they can be."""
Shape = tuple[Any, ...]
"""What tells recorded passes apart, apart from the bound on lengths; its kind first."""
PACKED_WIDTHS = (4, 8, 16, 32, 64)
"""Bounds on a row's tokens that packed passes are recorded for."""
LEAST_CHARGE = 32
"""Tokens that a larger pass is charged with at least: it also has wider bounds."""
RECORDING_CHARGE = 8192
"""Tokens in all that passes in a missing one's place may be charged with before it is recorded: to record a pass of an
8B model takes as long as to compute some 7000 tokens (H200)."""
WIDEST_TREE = 64
"""Tokens of a row whose ancestors a mask of 64 bits can name."""


def packed_bucket(tokens: int, steps: int = STEPS_PER_DOUBLING) -> int:
    """Return the smallest size of packed block that holds `tokens`, of `steps` sizes in each doubling."""
    step = max(SMALLEST_STEP, (1 << (max(tokens, 1).bit_length() - 1)) // steps)
    return -(-tokens // step) * step


def roomy(shape: Shape) -> Shape:
    """Return the shape that is recorded where no larger pass is: of packed ones, one of fewer sizes."""
    kind, size, *others = shape
    return (kind, packed_bucket(size, ROOMY_STEPS), *others) if kind == "packed" else shape


def larger_shapes(shape: Shape, widths: Sequence[int], free_tokens: int) -> Iterator[tuple[Shape, int]]:
    """Yield shapes of passes that give the same of a block that is filled up, the smallest first, and what they cost.

    Lengths that differ from round to round would have a pass recorded for each.

    Args:
        shape: `("packed", tokens, bound on a row's, ...)` or `("padded", rows, columns, kept columns, ...)`.
        widths: Columns that padded passes have.
        free_tokens: Tokens up to which padding costs nothing.

    Yields:
        A shape, and the tokens that it is charged with: of packed passes its padding, at least `LEAST_CHARGE`. Padded
        ones are padded further only where that is free.
    """
    kind, first, second, *others = shape
    if kind == "packed":
        size = first
        while size <= MOST_PADDED * first:
            for width in PACKED_WIDTHS:
                if width >= second and (size, width) != (first, second):
                    yield (kind, size, width, *others), max(size - first, LEAST_CHARGE)
            size = packed_bucket(size + 1)
    elif kind == "padded" and others[0] == second >= LEAST_VARYING_WIDTH:
        for width in widths:
            if second < width <= free_tokens / first:
                yield (kind, first, width, width, *others[1:]), 0


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
