"""Everything random in a replay. All of it hangs on a seed and a place in the text, none of it on what a policy does.

So two policies at the same seed meet the same coins, the same rejected drafts and the same order of sequences, and
their difference is a paired one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hf_dsde.replay.trace_tables import Integers, TraceTable


class Stream(IntEnum):
    """Uses of a seed that must not repeat each other's numbers."""

    COINS = 0
    TAILS = 1
    QUEUE = 2
    CONTINUATIONS = 3


def per_position(table: TraceTable, seed: int, stream: Stream) -> NDArray[np.float64]:
    """A uniform number in [0, 1) for each position of a table, the same whatever else the table holds.

    Args:
        table: Its sequences are known by task and number, so that two traces of the same texts, or a trace and a part
            of it, get the same numbers.
        seed: At least 0.
        stream: What the numbers are for.

    Returns:
        Shape `[positions]`, float64.
    """
    numbers = np.empty(table.positions)
    for task, name, start, length in zip(
        table.sequence_tasks, table.sequence_names, table.starts, table.lengths, strict=True
    ):
        key = zlib.crc32(table.tasks[task].encode())
        generator = np.random.default_rng([seed, stream, key, int(name)])
        numbers[start : start + length] = generator.random(length)
    return numbers


class SequenceQueue:
    """An endless queue: every sequence once in random order, then all of them again in another order.

    Args:
        starts: Where the sequences begin in the flat arrays, `[sequences]`.
        seed: At least 0.
        part: Tells the queues of one run apart.
    """

    def __init__(self, starts: Integers | Sequence[int], seed: int, part: int = 0) -> None:
        self._starts = np.asarray(starts, dtype=np.int64)
        if not len(self._starts):
            raise ValueError("`starts` is empty, but at least one sequence is needed to fill a batch.")
        self._generator = np.random.default_rng([seed, Stream.QUEUE, part])
        self._waiting = self._starts[:0]

    def take(self, count: int) -> Integers:
        """The beginnings of the next sequences, `[count]`, int64."""
        while len(self._waiting) < count:
            self._waiting = np.concatenate([self._waiting, self._generator.permutation(self._starts)])
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken
