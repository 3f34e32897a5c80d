"""How the launches that compute low-rank adapters are divided among programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_dsde.kernels.reference import LowRank

MOST_TOKENS = 1024
"""What the kernels take. With more, arithmetic takes longer than launches do, and the vendor's library is quick."""
READ = 512
"""Bytes of a row of A that a program of the first kernel reads at once."""
BLOCK_RANK = 16
"""Rows of A that a program of the first kernel has."""
BLOCK_N = {32: 64, MOST_TOKENS: 128}
"""Bound on the tokens, ascending -> columns of the result that a program of the second kernel has. Each program reads
all partial sums of its tokens, so that where those are many, programs are few."""
WIDEST = 64
"""Ranks that the second kernel multiplies at once."""
MOST_SPLITS = {16: 16, 64: 8, 256: 4, MOST_TOKENS: 2}
"""Bound on the tokens, ascending -> parts that the inner dimension is divided into at most. So many that the first
kernel takes less time than the products which it runs beside, and few, since the second one, which runs alone, reads
all sums that they leave."""
AT_ONCE = 4096
"""Partial sums that a program of the second kernel reads at once."""
DOWN_WARPS, UP_WARPS, STAGES = 4, 8, 3


class Turn(NamedTuple):
    """Adapters that one launch of each kernel adds, at most one of each module.

    Attributes:
        places: Of their modules.
        terms: The adapters, in the order of `places`.
        dtype: Of what comes of it.
    """

    places: list[int]
    terms: list[LowRank]
    dtype: torch.dtype


@dataclass(frozen=True)
class LowRankPlan:
    """The shape of both launches. All but `steps` and `splits` are powers of two.

    Attributes:
        block_m: Tokens per program.
        block_n: Columns of the result per program of the second kernel.
        block_k: Elements of a row of A that are read at once.
        steps: Reads of a program of the first kernel.
        splits: Parts of the inner dimension, each of which leaves sums of its own.
        block_r: Ranks that are multiplied at once.
        together: Parts whose sums are read at once.
    """

    block_m: int
    block_n: int
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
    # Two reads are under way at once anyway.
    steps = max(STAGES - 1, -(-reads // _bounded(MOST_SPLITS, tokens)))
    splits = -(-reads // steps)
    block_m = 16 if tokens <= 16 else 32
    block_r = min(WIDEST, max(16, _power_of_two(rank)))
    together = min(_power_of_two(splits), AT_ONCE // (block_m * block_r))
    return LowRankPlan(block_m, _bounded(BLOCK_N, tokens), block_k, steps, splits, block_r, together)


def plan_turn(tokens: int, terms: Sequence[LowRank]) -> LowRankPlan:
    """Choose the shape of both launches for one adapter of each module."""
    down = terms[0].down
    return plan_low_rank(tokens, down.shape[1], max(len(term.down) for term in terms), down.element_size())


def turns_of(adapters: Sequence[Sequence[LowRank]], dtype: torch.dtype, *, gated: bool) -> list[Turn]:
    """Divide adapters among launches.

    A result to which a module's last adapter is added is of the adapters' dtype if there was one in front of that.
    What a launch computes is of one dtype, but for the factors of a gated product.

    Args:
        adapters: Of each module, at least one, in the order in which they are added; all of one dtype.
        dtype: Of the modules' results.
        gated: Whether the last launch takes all modules in any case.

    Returns:
        The launches, one after another.
    """
    own, turns = adapters[0][0].up.dtype, []
    for turn in range(max(map(len, adapters)) - 1):
        places = [place for place, each in enumerate(adapters) if turn + 1 < len(each)]
        turns.append(Turn(places, [adapters[place][turn] for place in places], own))
    kinds = [dtype if gated or len(each) == 1 else own for each in adapters]
    for kind in dict.fromkeys(kinds):
        places = [place for place, each in enumerate(kinds) if each == kind]
        turns.append(Turn(places, [adapters[place][-1] for place in places], dtype))
    return turns


def _bounded(table: dict[int, int], tokens: int) -> int:
    return next(value for bound, value in table.items() if tokens <= bound)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
