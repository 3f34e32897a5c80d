"""Runs whose conditions change on the way: other tasks, another draft. Does a policy notice, and does it come back?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dsde.policies import StoppingPolicy
from hf_dsde.replay.draws import SequenceQueue
from hf_dsde.replay.pricing import RoundPrices
from hf_dsde.replay.realization import JoinedRealization
from hf_dsde.replay.simulator import Replay, RoundLog
from hf_dsde.replay.trace_tables import TraceTable


@dataclass(frozen=True)
class Phase:
    """A stretch of a run.

    Attributes:
        tokens: It ends with the round in which this many tokens have been emitted in it.
        tasks: New sequences come from these tasks; None takes all. Rows finish the sequences they are at.
        table: Which of the tables is played on. When it differs from the phase before, the draft changes at once, in
            the middle of every row's text; the two tables must hold the same texts.
    """

    tokens: int
    tasks: tuple[str, ...] | None = None
    table: int = 0


@dataclass(frozen=True)
class ScheduledRun:
    """What a policy did in each phase.

    Attributes:
        log: All rounds, with the lengths of all rows.
        begins: The first round of each phase.
    """

    log: RoundLog
    begins: tuple[int, ...]

    def lengths(self, phase: int) -> np.typing.NDArray[np.int64]:
        """Draft lengths of a phase, `[rounds, rows]`, int64."""
        assert self.log.lengths is not None
        ends = (*self.begins[1:], len(self.log.steps))
        return self.log.lengths[self.begins[phase] : ends[phase]]


def play_schedule(
    policy: StoppingPolicy,
    tables: Sequence[TraceTable],
    phases: Sequence[Phase],
    seed: int,
    *,
    rows: int,
    max_draft_length: int = 12,
    fill_to_batch: bool = False,
    prices: RoundPrices | None = None,
) -> ScheduledRun:
    """Play a policy through phases, without a restart between them.

    Args:
        policy: Plays.
        tables: What phases can be played on.
        phases: In order; at least one.
        seed: Of coins, tails and queues.
        rows: Rows of the batch.
        max_draft_length: The most tokens any row drafts in a round.
        fill_to_batch: Whether every row drafts as many tokens as the longest asks for.
        prices: What rounds cost, for policies that ask.

    Raises:
        ValueError: There is no phase, a phase names an unknown task, or a draft changes between different texts.
    """
    if not phases:
        raise ValueError("`phases` is empty, but at least one phase is needed.")
    ground = JoinedRealization(tables, seed, max_draft_length)
    queues = [
        SequenceQueue(ground.starts_in(phase.table, phase.tasks), seed, part) for part, phase in enumerate(phases)
    ]
    replay = Replay(
        policy,
        ground,
        queues[0],
        rows=rows,
        fill_to_batch=fill_to_batch,
        prices=prices,
        record_lengths=True,
    )
    begins, table = [], phases[0].table
    for phase, queue in zip(phases, queues, strict=True):
        begins.append(replay.rounds)
        replay.change_queue(queue, ground.shift(table, phase.table) if phase.table != table else 0)
        table = phase.table
        replay.run(phase.tokens)
    return ScheduledRun(replay.log(), tuple(begins))


def useless_draft(table: TraceTable, seed: int = 0) -> TraceTable:
    """The same texts with a draft that is never right, to be switched to in the middle of a run.

    Its signals at each position are those that the real draft showed at some rejected position of the same task, so
    that a policy which reads them sees what a failing draft looks like.

    Args:
        table: The trace.
        seed: Of which position stands for which.
    """
    columns = dict(table.columns)
    failed = ~columns["draft_agrees"]
    task = table.sequence_tasks[table.position_sequences]
    source = np.arange(table.positions)
    generator = np.random.default_rng(seed)
    for index in range(len(table.tasks)):
        candidates = np.flatnonzero(failed & (task == index))
        if len(candidates):
            here = task == index
            source[here] = generator.choice(candidates, int(here.sum()))
    for name in ("kld", "reverse_kld", "draft_entropy", "draft_top1", "draft_top2", "residual_draft_probability"):
        columns[name] = columns[name][source]
    columns["draft_agrees"] = np.zeros(table.positions, dtype=np.bool_)
    for name in ("draft_probability", "acceptance"):
        columns[name] = np.zeros(table.positions, dtype=np.float32)
    return dataclasses.replace(table, name=f"{table.name} with a useless draft", columns=columns)
