"""What one pass is run on: flat tokens, each with the cache row and the position it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of one pass, row after row, without regard to whether rows are padded to one width.

    A padded block has `rows * width` tokens of which some have a position below 0; a packed one has none of those.
    Tokens of one row are consecutive and their positions ascend; tokens without a position may lie before or behind
    them and be counted with the row, or behind all rows and be counted by none. T is the number of flat tokens, R the
    number of cache rows that take part. All tensors are on one device.

    Attributes:
        tokens: Ids, `[T]`, int64.
        rows: Cache row of each token, `[T]`, int64; any valid row where the position is below 0.
        positions: Position of each token, `[T]`, int64. Below 0 is no token: it writes to the cache's discard slot, and
            its output is finite and means nothing.
        starts: Index in the flat block of each cache row's first token, `[R]`, int32.
        counts: Flat tokens of each cache row, `[R]`, int32; 0 where a row has none.
        max_count: Bound on `counts` that the host knows.
        whole_row: The cache row whose first T tokens these are, if they are and the host knows it.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    starts: Tensor
    counts: Tensor
    max_count: int
    whole_row: int | None = None
