"""Runs of consecutive tokens of some rows, which is what is stored when texts are read, and their division into passes.

The tokens of several spans lie one after another in a flat tensor, in the order of the spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one row.

    Attributes:
        row: Row of the batch.
        start: Position of the first token.
        count: Number of tokens.
    """

    row: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count


def total_count(spans: Sequence[Span]) -> int:
    """Return the number of tokens of all spans."""
    return sum(span.count for span in spans)


def flat_places(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Return row and position of every token of the spans, each `[total_count(spans)]`, int64, on the CPU."""
    # numpy repeats in this thread; torch wakes others for a handful of rows, which can take milliseconds.
    entries = np.array([(span.row, span.start, span.count) for span in spans], dtype=np.int64).reshape(-1, 3)
    rows, starts, counts = entries.T
    shifts = starts - (counts.cumsum() - counts)
    positions = np.arange(counts.sum()) + shifts.repeat(counts)
    return torch.from_numpy(rows.repeat(counts)), torch.from_numpy(positions)


def portions(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """Divide spans among as few passes of at most `most` tokens as will do, of about the same size, in order."""
    total = total_count(spans)
    size = -(-total // max(1, -(-total // most)))
    passes: list[list[Span]] = []
    room = 0
    for span in spans:
        done = 0
        while done < span.count:
            if room == 0:
                passes.append([])
                room = size
            count = min(room, span.count - done)
            passes[-1].append(Span(span.row, span.start + done, count))
            done += count
            room -= count
    return passes


def similar_counts(counts: Sequence[int], worth: int) -> list[list[int]]:
    """Divide spans into groups, each of which is padded to its longest.

    Args:
        counts: Tokens of each span.
        worth: Columns of padding that a further group has to save.

    Returns:
        Indices of the spans of each group, ascending.
    """

    def divided(group: list[int]) -> list[list[int]]:
        savings = [(counts[group[0]] - counts[index]) * (len(group) - place) for place, index in enumerate(group)]
        best = max(range(len(group)), key=savings.__getitem__)
        if savings[best] < worth:
            return [sorted(group)]
        return [*divided(group[:best]), *divided(group[best:])]

    return divided(sorted(range(len(counts)), key=lambda index: -counts[index]))
