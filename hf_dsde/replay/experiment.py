"""A grid of replays: every policy in every cell, on one process or several.

What a policy does not know cannot change what it does: one that requires no costs is played once per trace,
temperature, batch size and seed, and its log is priced under every setting.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hf_dsde.measurement import provenance
from hf_dsde.replay import references
from hf_dsde.replay.draws import SequenceQueue
from hf_dsde.replay.pricing import CostSetting
from hf_dsde.replay.realization import Realization
from hf_dsde.replay.results import Cell, PolicyScore
from hf_dsde.replay.simulator import PRICED, Replay, RoundLog
from hf_dsde.replay.specs import PolicySpec
from hf_dsde.replay.trace_tables import TraceTable
from hf_dsde.utils.checks import check_integer

TOKENS_PER_ROW = 300
"""A run emits at least this many tokens per row, so that large batches get beyond their first sequences."""


@dataclass(frozen=True)
class ReplayGrid:
    """What is compared.

    Attributes:
        traces: Folders of recorded traces.
        policies: What plays.
        costs: Settings, by which every run is judged.
        batches: Numbers of rows.
        temperatures: 0, 1 or both.
        seeds: How many; they are 0, 1, ...
        tokens: A run ends with the round in which this many have been emitted, or 300 per row if that is more.
        tasks: Play only these tasks; None plays all.
        max_draft_length: The most tokens any row drafts in a round.
    """

    traces: tuple[Path, ...]
    policies: tuple[PolicySpec, ...]
    costs: tuple[CostSetting, ...]
    batches: tuple[int, ...] = (1, 8, 32)
    temperatures: tuple[int, ...] = (0, 1)
    seeds: int = 3
    tokens: int = 20_000
    tasks: tuple[str, ...] | None = None
    max_draft_length: int = 12

    def __post_init__(self) -> None:
        """Check numbers and names."""
        for rows in self.batches:
            check_integer("batches", rows, 1)
        check_integer("seeds", self.seeds, 1)
        check_integer("tokens", self.tokens, 1)
        check_integer("max_draft_length", self.max_draft_length, 1)
        for what, names in (
            ("policies", [spec.name for spec in self.policies]),
            ("costs", [setting.name for setting in self.costs]),
            ("traces", [folder.resolve().name for folder in self.traces]),
        ):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"`{what}` holds {twice[0]!r} twice, so that results could not be told apart.")

    def tokens_for(self, rows: int) -> int:
        """Tokens of a run of that many rows."""
        return max(self.tokens, TOKENS_PER_ROW * rows)

    def check(self) -> None:
        """Make sure that everything named exists, before hours are spent on a part of it.

        Raises:
            ValueError: A policy, a temperature or a task does not exist, or an argument is refused.
            TypeError: A policy has no such argument.
            FileNotFoundError: There is no trace.
        """
        for spec in self.policies:
            spec.create()
        for folder in self.traces:
            for temperature in self.temperatures:
                _table(str(folder), temperature, self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON holds them."""
        return {
            "traces": [str(folder) for folder in self.traces],
            "policies": [spec.to_dict() for spec in self.policies],
            "costs": [setting.to_dict() for setting in self.costs],
            "batches": list(self.batches),
            "temperatures": list(self.temperatures),
            "seeds": self.seeds,
            "tokens": self.tokens,
            "tasks": None if self.tasks is None else list(self.tasks),
            "max_draft_length": self.max_draft_length,
        }


@dataclass(frozen=True)
class ReplayResult:
    """All cells of a grid."""

    grid: ReplayGrid
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        """Results and provenance in types that `json.dumps` takes."""
        return {
            "provenance": provenance.collect("cpu"),
            "grid": self.grid.to_dict(),
            "cells": [cell.to_dict() for cell in self.cells],
        }


@dataclass(frozen=True)
class _Job:
    """One run, or the references of its cells when there is no policy."""

    grid: ReplayGrid = field(repr=False)
    trace: Path
    temperature: int
    seed: int
    rows: int
    policy: PolicySpec | None


@dataclass(frozen=True)
class _Speeds:
    """One seed of a cell's references."""

    static: list[float]
    oracle: float
    fractional: dict[float, float]


def run_grid(grid: ReplayGrid, jobs: int = 1, on_done: Callable[[int, int], None] | None = None) -> ReplayResult:
    """Play everything.

    Args:
        grid: What.
        jobs: Processes.
        on_done: Told how many runs are done, and of how many.

    Raises:
        ValueError, TypeError, FileNotFoundError: See `ReplayGrid.check`.
    """
    check_integer("jobs", jobs, 1)
    grid.check()
    todo = list(_jobs(grid))
    done: dict[Any, Any] = {}
    for job, outcome in zip(todo, _outcomes(todo, jobs), strict=True):
        done[_key(job)] = outcome
        if on_done is not None:
            on_done(len(done), len(todo))
    return ReplayResult(grid, tuple(_cells(grid, done)))


def _jobs(grid: ReplayGrid) -> Iterator[_Job]:
    for trace in grid.traces:
        for temperature in grid.temperatures:
            for seed in range(grid.seeds):
                for rows in grid.batches:
                    for spec in (*grid.policies, None):
                        yield _Job(grid, trace, temperature, seed, rows, spec)


def _key(job: _Job) -> tuple[Any, ...]:
    return job.trace, job.temperature, job.seed, job.rows, None if job.policy is None else job.policy.name


def _outcomes(todo: Sequence[_Job], jobs: int) -> Iterator[Any]:
    if jobs == 1:
        with one_thread():
            yield from map(_work, todo)
        return
    # Forking a process that has run torch can deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(_work, todo)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: tensors of a few hundred numbers gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _work(job: _Job) -> Any:
    grid = job.grid
    realization = _realization(str(job.trace), job.temperature, grid.tasks, job.seed, grid.max_draft_length)
    if job.policy is None:
        return _reference_speeds(grid, realization, job)
    return play_priced(job.policy, realization, job.seed, grid.costs, rows=job.rows, tokens=grid.tokens_for(job.rows))


@lru_cache(maxsize=4)
def _table(folder: str, temperature: int, tasks: tuple[str, ...] | None) -> TraceTable:
    return TraceTable.load(folder, temperature, tasks)


@lru_cache(maxsize=2)
def _realization(
    folder: str, temperature: int, tasks: tuple[str, ...] | None, seed: int, max_draft_length: int
) -> Realization:
    return Realization(_table(folder, temperature, tasks), seed, max_draft_length)


def play_priced(
    spec: PolicySpec, realization: Realization, seed: int, costs: Sequence[CostSetting], *, rows: int, tokens: int
) -> list[tuple[float, RoundLog]]:
    """Play a policy and judge it under several costs.

    Args:
        spec: The policy.
        realization: What it plays on.
        seed: Of the order of the sequences.
        costs: Settings. A policy that requires costs or timings is played once under each of them.
        rows: Rows of the batch.
        tokens: The run ends with the round in which this many have been emitted.

    Returns:
        Speed and log under each setting.
    """
    log: RoundLog | None = None
    scored = []
    for setting in costs:
        prices = setting.prices(rows, realization.max_draft_length)
        policy = spec.create()
        if log is None or policy.requires & PRICED:
            replay = Replay(
                policy,
                realization,
                SequenceQueue(realization.sequence_starts(), seed),
                rows=rows,
                fill_to_batch=spec.fill_to_batch,
                prices=prices,
            )
            replay.run(tokens)
            log = replay.log()
        scored.append((log.speed(prices), log))
    return scored


def _reference_speeds(grid: ReplayGrid, realization: Realization, job: _Job) -> list[_Speeds]:
    rows, seed, tokens, most = job.rows, job.seed, grid.tokens_for(job.rows), grid.max_draft_length
    static = [references.static_log(realization, seed, k, rows=rows, tokens=tokens) for k in range(most + 1)]
    fractional: dict[float, RoundLog] = {}
    if rows > 1 and any(setting.packed for setting in grid.costs):
        fractional = {
            budget: references.fractional_log(realization, seed, budget, rows=rows, tokens=tokens)
            for budget in references.fractional_budgets(most)
        }
    speeds = []
    for setting in grid.costs:
        prices = setting.prices(rows, most)
        speeds.append(
            _Speeds(
                static=[log.speed(prices) for log in static],
                oracle=references.oracle_log(realization, seed, prices, rows=rows, tokens=tokens).speed(prices),
                fractional={b: log.speed(prices) for b, log in fractional.items()} if setting.packed else {},
            )
        )
    return speeds


def _cells(grid: ReplayGrid, done: dict[Any, Any]) -> Iterator[Cell]:
    seeds = range(grid.seeds)
    for trace in grid.traces:
        for temperature in grid.temperatures:
            for index, setting in enumerate(grid.costs):
                for rows in grid.batches:
                    speeds: list[_Speeds] = [done[trace, temperature, seed, rows, None][index] for seed in seeds]
                    yield Cell(
                        trace=trace.resolve().name,
                        temperature=temperature,
                        rows=rows,
                        costs=setting,
                        static=tuple(zip(*(s.static for s in speeds), strict=True)),
                        oracle=tuple(s.oracle for s in speeds),
                        fractional={b: tuple(s.fractional[b] for s in speeds) for b in speeds[0].fractional},
                        policies=tuple(
                            _score(
                                spec.name, [done[trace, temperature, seed, rows, spec.name][index] for seed in seeds]
                            )
                            for spec in grid.policies
                        ),
                    )


def _score(name: str, runs: Sequence[tuple[float, RoundLog]]) -> PolicyScore:
    logs = [log for _, log in runs]
    return PolicyScore(
        name=name,
        speeds=tuple(speed for speed, _ in runs),
        drafted=sum(int(log.drafted.sum()) for log in logs),
        accepted=sum(int(log.accepted.sum()) for log in logs),
        emitted=sum(int(log.emitted.sum()) for log in logs),
        row_rounds=sum(len(log.steps) * log.rows for log in logs),
    )
