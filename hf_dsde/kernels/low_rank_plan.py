"""How the launches that compute low-rank adapters are divided among programs."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 1024
"""What the kernels take. With more, arithmetic takes longer than launches do, and the vendor's library is quick."""
READ = 512
"""Bytes of a row of A that a program of the first kernel reads at once."""
BLOCK_RANK = 16
"""Rows of A that a program of the first kernel has."""
BLOCK_N = 64
"""Columns of the result that a program of the second kernel has."""
WIDEST = 64
"""Ranks that the second kernel multiplies at once."""
MOST_SPLITS = {64: 16, 256: 4, MOST_TOKENS: 1}
"""Bound on the tokens, ascending -> parts that the inner dimension is divided into at most."""
AT_ONCE = 4096
"""Partial sums that a program of the second kernel reads at once."""
WARPS, STAGES = 4, 3


@dataclass(frozen=True)
class LowRankPlan:
    """The shape of both launches. All but `steps` and `splits` are powers of two.

    Attributes:
        block_m: Tokens per program.
        block_k: Elements of a row of A that are read at once.
        steps: Reads of a program of the first kernel.
        splits: Parts of the inner dimension, each of which leaves sums of its own.
        block_r: Ranks that are multiplied at once.
        together: Parts whose sums are read at once.
    """

    block_m: int
    block_k: int
    steps: int
    splits: int
    block_r: int
    together: int


def plan_low_rank(tokens: int, width: int, rank: int, element_size: int) -> LowRankPlan:
    """Choose the shape of both launches.

    Args:
        tokens: Tokens of the input, at least one.
        width: Elements of a token.
        rank: The largest of the adapters.
        element_size: Bytes per element of A.
    """
    block_k = READ // element_size
    reads = -(-width // block_k)
    # Programs of few tokens are few. Those of many tokens suffice, and what they leave has to be read again. Two reads
    # are under way at once anyway.
    most = next(parts for bound, parts in MOST_SPLITS.items() if tokens <= bound)
    steps = max(STAGES - 1, -(-reads // most))
    splits = -(-reads // steps)
    block_m = 16 if tokens <= 16 else 32
    block_r = min(WIDEST, max(16, _power_of_two(rank)))
    together = min(_power_of_two(splits), AT_ONCE // (block_m * block_r))
    return LowRankPlan(block_m, block_k, steps, splits, block_r, together)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
