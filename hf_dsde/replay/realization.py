"""What would happen at every place of a trace under one seed: how far a draft is accepted, and what it shows.

For each position a draft could start from, the run of accepted tokens and the signals of a whole block are laid out
beforehand. A round of a replay is then a few look-ups, and the one rule that a replay must not break is kept in one
place: what stands after a rejected token comes from real drafts that had gone astray (`Tails`), never from the
committed text, whose values there belong to the next round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dsde.replay.draws import Stream, per_position
from hf_dsde.replay.trace_tables import DIRECT_COLUMNS, Flags, Floats, Integers, Tails, TraceTable

ENOUGH_TAILS = 50
"""Tails are taken from blocks that are alike when there are at least this many of them."""


class Realization:
    """One table under one seed.

    Args:
        table: The trace.
        seed: Of coins and tails.
        max_draft_length: Positions of a block.

    Attributes:
        run: Draft tokens that would be accepted in a row from each position on, up to the end of the sequence,
            `[positions]`, int64.
        remaining: Tokens from each position to the end of its sequence, itself included, `[positions]`, int64.
        next_entropy: Target's entropy at each position, `[positions]`, float32, nats.
        next_probability: Target's probability of each committed token, `[positions]`, float32.
        task: Index of each position's task, `[positions]`, int64.
    """

    def __init__(self, table: TraceTable, seed: int, max_draft_length: int) -> None:
        self.table = table
        self.max_draft_length = max_draft_length
        self._seed = seed
        ends = np.repeat(table.starts + table.lengths, table.lengths)
        self.remaining: Integers = ends - np.arange(table.positions)
        self.run: Integers = accepted_runs(self._accepts(), ends)
        self.next_entropy = torch.from_numpy(table.columns["target_entropy"])
        self.next_probability = torch.from_numpy(table.columns["target_probability"])
        self.task: Integers = table.sequence_tasks[table.position_sequences]
        self._blocks: dict[str, Tensor] = {}
        self._off_path: Integers | None = None
        self._tail: Integers | None = None

    def sequence_starts(self, tasks: Sequence[str] | None = None) -> Integers:
        """Where the sequences of some tasks, or of all, begin."""
        return self.table.starts[self.table.sequences_of(tasks)]

    def block(self, signal: str) -> Tensor:
        """A signal of whole blocks: entry `[i, j]` is what token j of a draft from position i shows.

        Args:
            signal: "kld", "reverse_kld", "entropy", "confidence", "acceptance", or "top_probabilities" (whose last
                dimension are the two largest).

        Returns:
            Shape `[positions, max_draft_length]`, float32.
        """
        if signal not in self._blocks:
            if signal == "top_probabilities":
                self._blocks[signal] = torch.stack([self.block("top1"), self.block("top2")], dim=-1)
            else:
                self._blocks[signal] = torch.from_numpy(self._lay_out(signal))
        return self._blocks[signal]

    def _accepts(self) -> Flags:
        """Whether a draft token at each position would be the committed one.

        For sampled text this couples in reverse: the committed token a was drawn from the target, and is the draft's
        accepted token with probability min(1, q(a) / p(a)), which sums to `sum_x min(p(x), q(x))` over a.
        """
        columns = self.table.columns
        if not self.table.has_sampled_text:
            agrees: Flags = columns["draft_agrees"]
            return agrees
        coins = per_position(self.table, self._seed, Stream.COINS)
        accepts: Flags = coins * columns["target_probability"] < columns["draft_probability"]
        return accepts

    def _lay_out(self, signal: str) -> Floats:
        depth = np.arange(self.max_draft_length)
        off_path, tail = self._behind_rejections()
        place = np.minimum(np.arange(self.table.positions)[:, None] + depth, self.table.positions - 1)
        block: Floats = self._shown(signal)[place]
        if signal == "confidence" and self.table.has_sampled_text:
            at_rejection = depth == self.run[:, None]
            block[at_rejection] = self.table.columns["residual_draft_probability"][place[at_rejection]]
        behind = depth >= off_path[:, None]
        rows, columns = np.nonzero(behind)
        block[behind] = self._continued(signal)[tail[rows], columns - off_path[rows]]
        return block

    def _shown(self, signal: str) -> Floats:
        """What a draft token at each committed position shows while its block is on the committed text."""
        columns = self.table.columns
        if signal in DIRECT_COLUMNS:
            shown: Floats = columns[DIRECT_COLUMNS[signal]]
            return shown
        if signal == "confidence":
            return columns["draft_probability" if self.table.has_sampled_text else "draft_top1"]
        if signal == "acceptance":
            return columns["acceptance"] if self.table.has_sampled_text else columns["draft_agrees"].astype(np.float32)
        raise ValueError(
            f"`signal` is {signal!r}, but a block has: {', '.join([*DIRECT_COLUMNS, 'confidence', 'acceptance'])} and "
            "'top_probabilities'."
        )

    def _behind_rejections(self) -> tuple[Integers, Integers]:
        """Where a block from each position leaves the committed text, and the tail that follows; both `[positions]`.

        A block leaves it after its first rejected token, or after the end of the sequence. The tail hangs on the
        rejected token's place, so that every draft that fails there goes the same wrong way.
        """
        if self._off_path is None or self._tail is None:
            self._off_path = first_off_path(self.run, self.remaining)
            rejected = self._off_path - 1
            draws = per_position(self.table, self._seed, Stream.TAILS)[np.arange(self.table.positions) + rejected]
            self._tail = chosen_tails(
                self.table.tails, self.task, rejected, self.max_draft_length, draws, self.table.name
            )
        return self._off_path, self._tail

    def _continued(self, signal: str) -> Floats:
        """All tails at the length of a block."""
        return continued_tails(self.table.tails, signal, self.max_draft_length)


class JoinedRealization:
    """Several tables under one seed, one after another, for runs whose texts or draft change on the way.

    Args:
        tables: At least one, all of one temperature.
        seed: Of coins and tails.
        max_draft_length: Positions of a block.

    Attributes:
        offsets: Where each table's positions begin, `[tables]`.
        run, remaining, next_entropy, next_probability: Those of all tables, one after another.
    """

    def __init__(self, tables: Sequence[TraceTable], seed: int, max_draft_length: int) -> None:
        self.parts = [Realization(table, seed, max_draft_length) for table in tables]
        self.max_draft_length = max_draft_length
        self.offsets = np.cumsum([0, *(table.positions for table in tables[:-1])])
        self.run = np.concatenate([part.run for part in self.parts])
        self.remaining = np.concatenate([part.remaining for part in self.parts])
        self.next_entropy = torch.cat([part.next_entropy for part in self.parts])
        self.next_probability = torch.cat([part.next_probability for part in self.parts])
        self._blocks: dict[str, Tensor] = {}

    def block(self, signal: str) -> Tensor:
        """A signal of whole blocks; see `Realization.block`."""
        if signal not in self._blocks:
            self._blocks[signal] = torch.cat([part.block(signal) for part in self.parts])
        return self._blocks[signal]

    def starts_in(self, part: int, tasks: Sequence[str] | None = None) -> Integers:
        """Where the sequences of one of the tables begin."""
        return self.parts[part].sequence_starts(tasks) + self.offsets[part]

    def shift(self, before: int, after: int) -> int:
        """What to add to a position of table `before` to stand at the same place of table `after`.

        Raises:
            ValueError: The two do not hold the same texts.
        """
        old, new = self.parts[before].table, self.parts[after].table
        alike = old.tasks == new.tasks and all(
            np.array_equal(getattr(old, name), getattr(new, name))
            for name in ("sequence_tasks", "sequence_names", "lengths")
        )
        if not alike:
            raise ValueError(
                f"The draft cannot change from trace {old.name!r} to {new.name!r} in the middle of a text: their "
                "sequences differ. Record both over the same answers."
            )
        return int(self.offsets[after] - self.offsets[before])


def accepted_runs(accepts: Flags, ends: Integers) -> Integers:
    """Accepted tokens in a row from each position on, not beyond its sequence.

    Args:
        accepts: Whether a draft token would be accepted, `[positions]`.
        ends: One after the last position of each position's sequence, `[positions]`.

    Returns:
        Shape `[positions]`, int64.
    """
    place = np.arange(len(accepts))
    next_rejection = np.minimum.accumulate(np.where(accepts, len(accepts), place)[::-1])[::-1]
    runs: Integers = np.minimum(next_rejection, ends) - place
    return runs


def first_off_path(run: Integers, remaining: Integers) -> Integers:
    """Index inside a block of the first token whose prefix is not the committed text, `[positions]`, int64.

    The rejected token itself still has that prefix. No position after the sequence's end has it.
    """
    return np.minimum(run + 1, remaining)


def chosen_tails(
    tails: Tails, tasks: Integers, rejected: Integers, limit: int, draws: NDArray[np.float64], trace: str
) -> Integers:
    """A tail for each position, from a block that failed as a block from there does.

    How far a draft comes says something about what follows: blocks that fail at once show larger divergences after
    the rejection than those that fail late. So the blocks to choose from are those of the same task that were rejected
    at the same offset; where these are fewer than `ENOUGH_TAILS`, those of the task rejected there or earlier, which
    are no shorter; and where these are too few, those of all tasks.

    Args:
        tails: To choose from.
        tasks: Task of each position, `[positions]`.
        rejected: Offset of the rejected token in a block from each position, `[positions]`.
        limit: The most tokens of a block. Beyond the offsets at which recorded blocks can be rejected, a tail of the
            length that is left is taken.
        draws: Uniform numbers that decide, `[positions]`.
        trace: Name for the error.

    Returns:
        Indices into `tails`, `[positions]`, int64.

    Raises:
        ValueError: There are no tails.
    """
    if not tails.longest:
        raise ValueError(
            f"No drafted block of trace {trace!r} has a rejected token with positions after it, so it cannot be said "
            "what a draft shows there: record more rounds, or longer blocks."
        )
    chosen = np.zeros(len(tasks), dtype=np.int64)
    left = np.where(rejected < tails.longest, tails.longest - rejected, limit - rejected - 1)
    wanted = np.clip(left, 1, tails.longest)
    for task in np.unique(tasks):
        for length in np.unique(wanted[tasks == task]):
            at = (tasks == task) & (wanted == length)
            pool = _alike(tails, task, length)
            chosen[at] = pool[(draws[at] * len(pool)).astype(np.int64)]
    return chosen


def _alike(tails: Tails, task: int, length: int) -> Integers:
    own = tails.tasks == task
    same = np.flatnonzero(own & (tails.lengths == length))
    if len(same) >= ENOUGH_TAILS:
        return same
    no_shorter = np.flatnonzero(own & (tails.lengths >= length))
    return no_shorter if len(no_shorter) >= ENOUGH_TAILS else np.flatnonzero(tails.lengths >= length)


def continued_tails(tails: Tails, signal: str, length: int) -> Floats:
    """A signal of every tail, continued to a length.

    Where a tail ends, the last positions of another one follow, and of a third if need be: a draft that has been astray
    for long goes on as drafts do that have been astray for long. Which one follows is fixed per trace.

    Args:
        tails: The tails.
        signal: Which signal.
        length: Positions wanted.

    Returns:
        Shape `[tails, length]`, float32.
    """
    values, longest = tails.signals[signal], tails.longest
    full = np.flatnonzero(tails.lengths == longest)
    generator = np.random.default_rng(Stream.CONTINUATIONS)
    continued = np.full((len(values), length), np.nan, dtype=np.float32)
    filled = np.minimum(tails.lengths, length)
    own = np.arange(length) < filled[:, None]
    continued[:, : min(longest, length)] = values[:, :length]
    while not own.all():
        # The same generator state for every signal: all signals of a position come from the same draft.
        follower = generator.choice(full, len(values))
        missing = np.minimum(length - filled, longest)
        rows, places = np.nonzero(~own & (np.arange(length) < (filled + missing)[:, None]))
        continued[rows, places] = values[follower[rows], longest - missing[rows] + places - filled[rows]]
        filled = filled + missing
        own = np.arange(length) < filled[:, None]
    return continued
