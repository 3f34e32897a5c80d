"""What policies are compared with: the best fixed length, the best mixture of two, and an oracle.

None of them is a policy. They are chosen after the fact, from the runs and prices themselves, and are computed without
policy objects.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_dsde.replay.draws import SequenceQueue
from hf_dsde.replay.pricing import RoundPrices
from hf_dsde.replay.realization import Realization
from hf_dsde.replay.simulator import RoundLog
from hf_dsde.replay.trace_tables import Integers

FRACTIONS = 8
"""A fractional budget is tried in steps of one over this."""
ORACLE_ITERATIONS = 8
ORACLE_TOLERANCE = 1e-4
"""Dinkelbach's iteration ends when the speed has changed by less than this fraction."""


@dataclass(frozen=True)
class Run:
    """Where every row stood in every round, and what it drafted.

    Attributes:
        places: Positions, `[rounds, rows]`, int64.
        drafted: Tokens, `[rounds, rows]`, int64.
        accepted: Tokens, likewise.
        emitted: Tokens, likewise.
    """

    places: Integers
    drafted: Integers
    accepted: Integers
    emitted: Integers

    @classmethod
    def of(cls, realization: Realization, places: Integers, drafted: Integers) -> Run:
        """The run in which rows drafted so much at these places."""
        accepted = np.minimum(drafted, realization.run[places])
        return cls(places, drafted, accepted, np.minimum(accepted + 1, realization.remaining[places]))

    @property
    def log(self) -> RoundLog:
        """The same as a replay tells it."""
        sums = (values.sum(1) for values in (self.drafted, self.accepted, self.emitted))
        return RoundLog(self.places.shape[1], self.drafted.max(1), *sums)


def walked_run(realization: Realization, seed: int, lengths: Integers, *, rows: int, tokens: int) -> Run:
    """The run of a rule in which a row's length depends on its own place alone, such as a fixed length.

    No row depends on another, so every sequence is walked through once, and the batch is put together from these walks
    as rows become free.

    Args:
        realization: What is played on.
        seed: Of the order of the sequences.
        lengths: Draft length at each position, `[positions]`, int64, at least 0.
        rows: Rows of the batch.
        tokens: The run ends with the round in which this many have been emitted.
    """
    gains = np.minimum(np.minimum(lengths, realization.run) + 1, realization.remaining)
    starts = realization.sequence_starts()
    walks = {int(start): walk for start, walk in zip(starts, _walks(gains, starts, realization), strict=True)}
    queue = SequenceQueue(starts, seed)
    most = -(-tokens // rows)
    places = np.empty((most, rows), dtype=np.int64)
    # Rows that become free after the same round are refilled in row order, as in a replay.
    free = [(0, row) for row in range(rows)]
    while free:
        begin, row = heapq.heappop(free)
        walk = walks[int(queue.take(1)[0])][: most - begin]
        end = begin + len(walk)
        places[begin:end, row] = walk
        if end < most:
            heapq.heappush(free, (end, row))
    rounds = int(np.searchsorted(gains[places].sum(1).cumsum(), tokens)) + 1
    return Run.of(realization, places[:rounds], lengths[places[:rounds]])


def _walks(gains: Integers, starts: Integers, realization: Realization) -> list[Integers]:
    """The positions at which the rounds of each sequence begin, when a round gains `gains[position]` tokens."""
    ends = starts + realization.remaining[starts]
    places, visited = starts, []
    while (places < ends).any():
        visited.append(np.where(places < ends, places, -1))
        places = np.where(places < ends, places + gains[np.minimum(places, len(gains) - 1)], places)
    return [column[column >= 0] for column in np.stack(visited, axis=1)]


def lockstep_run(
    realization: Realization, seed: int, lengths: Callable[[Integers], Integers], *, rows: int, tokens: int
) -> Run:
    """The run of a rule that looks at all rows at once.

    Args:
        realization: What is played on.
        seed: Of the order of the sequences.
        lengths: Draft lengths, `[rows]`, from the rows' positions, `[rows]`.
        rows: Rows of the batch.
        tokens: The run ends with the round in which this many have been emitted.
    """
    queue = SequenceQueue(realization.sequence_starts(), seed)
    places = queue.take(rows)
    visited, drafts = [], []
    while tokens > 0:
        drafted = lengths(places)
        visited.append(places)
        drafts.append(drafted)
        remaining = realization.remaining[places]
        emitted = np.minimum(np.minimum(drafted, realization.run[places]) + 1, remaining)
        tokens -= int(emitted.sum())
        ended = emitted == remaining
        places = places + emitted
        if ended.any():
            places[ended] = queue.take(int(ended.sum()))
    return Run.of(realization, np.array(visited), np.array(drafts))


def static_log(realization: Realization, seed: int, length: int, *, rows: int, tokens: int) -> RoundLog:
    """The run of a fixed draft length."""
    lengths = np.full(len(realization.run), length)
    return walked_run(realization, seed, lengths, rows=rows, tokens=tokens).log


def fractional_log(realization: Realization, seed: int, budget: float, *, rows: int, tokens: int) -> RoundLog:
    """The run of a budget of tokens per row and round that need not be whole.

    A subset of the rows, another one in each round, drafts one token more than the others: the best that can be done
    with a fraction without knowing anything. It pays where each token of a pass is paid for.

    Args:
        realization: What is played on.
        seed: Of the order of the sequences.
        budget: Mean draft length, at least 0; rounded to what the rows can share.
        rows: Rows of the batch.
        tokens: The run ends with the round in which this many have been emitted.
    """
    whole, extra = divmod(round(budget * rows), rows)
    row, first = np.arange(rows), 0

    def lengths(_places: Integers) -> Integers:
        nonlocal first
        chosen = (row - first) % rows < extra
        first += extra
        return whole + chosen.astype(np.int64)

    return lockstep_run(realization, seed, lengths, rows=rows, tokens=tokens).log


def fractional_budgets(max_draft_length: int) -> list[float]:
    """Budgets to try, in eighths of a token."""
    return [step / FRACTIONS for step in range(max_draft_length * FRACTIONS + 1)]


def oracle_log(realization: Realization, seed: int, prices: RoundPrices, *, rows: int, tokens: int) -> RoundLog:
    """The run of one who knows how far every draft will be accepted.

    In each round it takes the lengths of the largest value minus time, the value of a token being the time that the
    oracle itself needs for one. That price is found by Dinkelbach's iteration (Management Science 13, 1967): play, take
    the price that came out, play again. Since a row that is done makes room for another sequence, a token of a slow
    task may be worth more than one of a fast task; the better of one price for all and a price per task is taken.

    It looks one round ahead only, so it is no strict upper bound.

    Args:
        realization: What is played on.
        seed: Of the order of the sequences.
        prices: What rounds cost.
        rows: Rows of the batch.
        tokens: The run ends with the round in which this many have been emitted.
    """
    oracle = _Oracle(realization, seed, prices, rows, tokens)
    tasks = len(realization.table.tasks)
    logs: list[RoundLog] = []
    values = np.full(tasks, 1.0 / rows)
    for by_task in (False, True) if tasks > 1 else (False,):
        previous = np.inf
        for _ in range(ORACLE_ITERATIONS):
            run = oracle.play(values)
            logs.append(run.log)
            speed = logs[-1].speed(prices)
            values = oracle.values(run, by_task=by_task)
            if abs(speed - previous) < ORACLE_TOLERANCE * speed:
                break
            previous = speed
    return max(logs, key=lambda log: log.speed(prices))


class _Oracle:
    """Plays by the worth of tokens, and tells what they turned out to cost."""

    def __init__(self, realization: Realization, seed: int, prices: RoundPrices, rows: int, tokens: int) -> None:
        self._realization, self._seed, self._prices = realization, seed, prices
        self._rows, self._tokens = rows, tokens
        # Drafts that bring a token: where a run reaches the end, its last token would have come without a draft.
        self._useful = np.minimum(realization.run, realization.remaining - 1)
        self._depths = np.arange(realization.max_draft_length + 1)
        self._uniform = prices.rounds(self._depths, rows * self._depths)

    def play(self, values: NDArray[np.float64]) -> Run:
        """A run in which a token of each task is worth `values[task]` plain steps."""
        worth = values[self._realization.task]
        if self._rows == 1:
            gains = worth[:, None] * np.minimum(self._useful[:, None], self._depths)
            lengths = (gains - self._uniform).argmax(1)
            return walked_run(self._realization, self._seed, lengths, rows=1, tokens=self._tokens)
        choose = self._packed_lengths if self._prices.packed else self._padded_lengths
        return lockstep_run(
            self._realization,
            self._seed,
            lambda places: choose(self._useful[places], worth[places]),
            rows=self._rows,
            tokens=self._tokens,
        )

    def values(self, run: Run, *, by_task: bool) -> NDArray[np.float64]:
        """Time per token in a run, in plain steps of the whole batch, `[tasks]`."""
        log = run.log
        times = self._prices.rounds(log.steps, log.drafted)
        overall = times.sum() / log.emitted.sum()
        tasks = len(self._realization.table.tasks)
        if not by_task:
            return np.full(tasks, overall)
        task = self._realization.task[run.places].ravel()
        spent = np.bincount(task, np.repeat(times, self._rows), tasks) / self._rows
        gained = np.bincount(task, run.emitted.ravel(), tasks)
        return np.where(gained > 0, spent / np.maximum(gained, 1), overall)

    def _padded_lengths(self, useful: Integers, worth: NDArray[np.float64]) -> Integers:
        """One length for all rows."""
        gains = worth @ np.minimum(useful[:, None], self._depths)
        return np.full(len(useful), (gains - self._uniform).argmax())

    def _packed_lengths(self, useful: Integers, worth: NDArray[np.float64]) -> Integers:
        """A length per row: for each number of draft steps, the most valuable tokens that the pass is worth."""
        order = np.argsort(-worth, kind="stable")
        best, chosen = -np.inf, np.zeros(len(useful), dtype=np.int64)
        for steps in self._depths:
            counts = np.minimum(useful, steps)[order]
            behind = np.append(0, counts.cumsum())
            totals = np.arange(behind[-1] + 1)
            gained = np.interp(totals, behind, np.append(0.0, (counts * worth[order]).cumsum()))
            net = gained - self._prices.draft[steps] - self._prices.verify[totals]
            if net.max() > best:
                best = net.max()
                chosen[order] = np.clip(int(net.argmax()) - behind[:-1], 0, counts)
        return chosen
