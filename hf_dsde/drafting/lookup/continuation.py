"""What a text is expected to go on with, by what followed the same tokens elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Continuation:
    """Tokens that may come next.

    Attributes:
        tokens: In their order.
        score: How many of them are expected to stand: the sum over tokens of the probability that all up to it do, by
            the counts that they were chosen by (SuffixDecoding, arXiv 2411.04975, section 3). It is not more than the
            number of tokens.
        match: Tokens at the end of the text that were found elsewhere.
    """

    tokens: Sequence[int] = ()
    score: float = 0.0
    match: int = 0


NOTHING = Continuation()
"""Of a text whose end is nowhere else."""


LONGEST_PROMISE = 1000.0
"""Promised tokens that are remembered: what is older counts ever less."""
LONGEST_CLASS = 5
"""Matches are told apart by the binary digits of their lengths: none, 1, 2 to 3, 4 to 7, 8 to 15, and longer ones."""


def match_class(match: int) -> int:
    """Return the class of the length of a match."""
    return min(match.bit_length(), LONGEST_CLASS)


def most_frequent(followers: list[int]) -> tuple[int, int]:
    """Return the token that is most often among some, the newest of equals, and how often.

    Args:
        followers: At least one token, the newest last.
    """
    newest = followers[-1]
    count = followers.count(newest)
    if 2 * count >= len(followers):
        return newest, count
    counts: dict[int, int] = {}
    for token in reversed(followers):
        counts[token] = counts.get(token, 0) + 1
    best = max(counts, key=counts.__getitem__)  # the first of equals, in the order of the first time
    return best, counts[best]


def faded(promised: float, kept: float) -> tuple[float, float]:
    """Let what was seen count for no more than `LONGEST_PROMISE` promised tokens."""
    share = min(1.0, LONGEST_PROMISE / promised) if promised else 1.0
    return share * promised, share * kept
