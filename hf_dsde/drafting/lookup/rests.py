"""Rows whose texts are looked up again: those that keep repeating something, at every look; others less often."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_REST = 7
"""Looks that a row is left out of at most."""
LONGEST_PATIENCE = 1000


class RowRests:
    """Counts of each row the looks in a row that brought no token of its text.

    A few have no consequence, at least the first: a change in the middle of a copied passage makes one. After the next
    the row is left out of 1 look, after another of 3, and after all further ones of 7.

    Args:
        rows: Rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._look = 0
        self._misses = [0] * rows
        self._next = [0] * rows  # the look that a row takes part in again

    def next_look(self) -> None:
        """Begin a look, whoever takes part."""
        self._look += 1

    def over(self, row: int) -> bool:
        """Whether a row takes part."""
        return self._next[row] <= self._look

    def learn(self, row: int, brought: int, patience: float = 1.0) -> None:
        """Take note of what the look has brought a row that took part.

        Args:
            row: Of whose text.
            brought: Tokens of its draft that stand; 0 also where it had none.
            patience: Looks without any that have no consequence.
        """
        if brought:
            self._misses[row] = 0
            return
        self._misses[row] += 1
        beyond = self._misses[row] - int(max(min(patience, LONGEST_PATIENCE), 1.0))
        if beyond > 0:
            self._next[row] = self._look + 1 + min((1 << beyond) - 1, LONGEST_REST)

    def begin(self, rows: Sequence[int]) -> None:
        """Let rows begin other texts."""
        for row in rows:
            self._misses[row] = self._next[row] = 0
