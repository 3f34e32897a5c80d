"""Rows whose texts are looked up again: those that keep repeating something, in every round; others less often."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_REST = 7
"""Rounds that a row is left out for at most."""


class RowRests:
    """Counts of each row the looks in a row that brought no token of its text.

    The first one costs nothing: a change in the middle of a copied passage makes one. After the second the row is left
    out for 1 round, after the next for 3, and after all further ones for 7.

    Args:
        rows: Rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._round = 0
        self._misses = [0] * rows
        self._next = [0] * rows  # the round that a row is looked up again in

    def next_round(self) -> None:
        """Let a round pass."""
        self._round += 1

    def over(self, row: int) -> bool:
        """Whether a row is looked up in this round."""
        return self._next[row] <= self._round

    def learn(self, row: int, brought: int) -> None:
        """Take note of what the look of this round has brought.

        Args:
            row: Of whose text.
            brought: Tokens of its draft that stand; 0 also where it had none.
        """
        if brought:
            self._misses[row] = 0
            return
        self._misses[row] += 1
        self._next[row] = self._round + 1 + min((1 << (self._misses[row] - 1)) - 1, LONGEST_REST)

    def begin(self, rows: Sequence[int]) -> None:
        """Let rows begin other texts."""
        for row in rows:
            self._misses[row] = self._next[row] = 0
