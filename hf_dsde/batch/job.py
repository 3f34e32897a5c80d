"""A job over a data set: its rows dealt to processes, its results kept on disk, and gone on with where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_dsde.batch.data_sets import read_only_what_counts
from hf_dsde.batch.input_rows import STANDARD_INPUT, input_identity, read_rows
from hf_dsde.batch.job_statistics import JobStatistics
from hf_dsde.batch.output import merge, open_output, remove_output
from hf_dsde.batch.output_lines import OutputFile
from hf_dsde.batch.progress import JobProgress
from hf_dsde.batch.results import RowResult

if TYPE_CHECKING:
    from accelerate import PartialState

WRITE_SECONDS = 1.0
"""Results are put on disk this often at the most: each time the disk has to confirm."""
LONGEST_WAIT = timedelta(days=30)
"""Processes wait this long for each other at the end of a job: their shares take different times."""


@dataclass(frozen=True)
class JobReport:
    """What a run of a job did, in this process.

    Attributes:
        output: Where the results are, complete.
        rows: Rows that this run finished, errors included.
        skipped: Rows of this process that were done before.
        seconds: How long it took, waiting for other processes excluded.
        statistics: Counts of this run.
    """

    output: Path
    rows: int
    skipped: int
    seconds: float
    statistics: JobStatistics

    @property
    def tokens_per_second(self) -> float:
        """New tokens of finished texts per second of this run; nan if it took no time."""
        return self.statistics.new_tokens / self.seconds if self.seconds else float("nan")


class InputRows:
    """The rows of a job with their places, and how the job knows them again.

    Args:
        source: A `datasets.Dataset` or `IterableDataset`, a sequence or other iterable of rows, or the path of a file.
        column: The column that holds the prompts, if one was named.
        paths: Whether a text is the path of a file, and not a sequence of rows.

    Raises:
        ValueError: A data set has no column that can hold prompts.
    """

    def __init__(self, source: Any, column: str | None, *, paths: bool = True) -> None:
        self._path = Path(source) if paths and isinstance(source, (str, os.PathLike)) else None
        self._source = source
        self._column = column
        self._rows = read_only_what_counts(source, column)

    @property
    def count(self) -> int | None:
        """How many there are; None if only reading would tell."""
        if self._path is not None or not hasattr(self._source, "__len__"):
            return None
        return len(self._source)

    @property
    def are_at_hand(self) -> bool:
        """Whether reading a row takes no time to speak of, and waits for nobody."""
        if self._path is not None:
            return str(self._path) != STANDARD_INPUT
        return isinstance(self._source, Sequence) or hasattr(self._source, "select_columns")

    @property
    def _has_places(self) -> bool:
        """Whether `source[i]` is row i, rather than what has the label or the key i."""
        numbered = isinstance(self._source, Sequence) or hasattr(self._source, "select_columns")
        return hasattr(self._source, "__getitem__") and (numbered or not hasattr(self._source, "__iter__"))

    @property
    def identity(self) -> dict[str, Any]:
        """Something that changes with the rows: a hash of a file, the fingerprint of a data set, a hash of a list.

        Other iterables can be read only once, and are known by their type alone.
        """
        if self._path is not None:
            return {"file": input_identity(self._path)}
        fingerprint = getattr(self._source, "_fingerprint", None)
        if fingerprint is not None:
            return {"dataset": fingerprint}
        if isinstance(self._source, Sequence):
            from datasets.fingerprint import Hasher

            return {"rows": len(self._source), "hash": Hasher.hash(list(self._source))}
        return {"type": type(self._source).__qualname__}

    def share(self, shard: int, shards: int, done: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Yield every `shards`-th row from number `shard` on, with its place, unless it is done."""
        if self.count is not None and self._has_places:
            for index in range(shard, self.count, shards):
                if index not in done:
                    yield index, self._rows[index]
            return
        rows = self._rows if self._path is None else read_rows(self._path, self._column)
        for index, row in enumerate(rows):
            if index % shards == shard and index not in done:
                yield index, row


def run_job(
    rows: InputRows,
    generate: Callable[[Iterable[tuple[int, Any]]], tuple[Iterator[RowResult], JobStatistics]],
    output: str | os.PathLike[str],
    *,
    identity: dict[str, Any],
    ordered: bool,
    overwrite: bool,
    progress: bool | None,
) -> JobReport:
    """Run what is left of a job, in one process or in the share of each that Accelerate launched.

    Args:
        rows: The input.
        generate: Gives the results of rows with their places, and counts them.
        output: Path of the results.
        identity: All that decides a result, but for the input.
        ordered: Whether the results are sorted by their place in the input.
        overwrite: Whether to start over.
        progress: Whether to show a bar; None shows it where somebody can see it.
    """
    state = process_state()
    shard, shards = (0, 1) if state is None else (state.process_index, state.num_processes)
    wait = (lambda: None) if state is None else state.wait_for_everyone
    if overwrite and shards > 1:
        if shard == 0:
            remove_output(output)
        wait()
    job = {"generator": identity, "input": rows.identity}
    overwrite = overwrite and shards == 1
    started = time.perf_counter()
    with open_output(output, job=job, shard=shard, shards=shards, ordered=ordered, overwrite=overwrite) as file:
        count = rows.count
        mine = None if count is None else len(range(shard, count, shards))
        skipped = len(file.done) if count is None else sum(i in file.done for i in range(shard, count, shards))
        results, statistics = generate(rows.share(shard, shards, frozenset(file.done)))
        with JobProgress(statistics, mine, skipped, progress if shard == 0 else False) as bar:
            written = _write(results, file, bar)
    seconds = time.perf_counter() - started
    wait()
    if shard == 0:
        merge(output)
    wait()
    return JobReport(Path(output), written, skipped, seconds, statistics)


def process_state() -> PartialState | None:
    """Return what Accelerate knows of this process and its siblings; None when there is one process.

    Raises:
        RuntimeError: Several processes were launched, but what was made of Accelerate's state before knows of one.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched == 1:
        return None
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # Who made the state first has set how long its processes wait. Without a device that has collectives of its own,
    # Accelerate finds the other processes only if it is told to use the CPU.
    made_before = bool(PartialState._shared_state)
    collectives = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not collectives
    state = PartialState() if made_before else PartialState(cpu=cpu, timeout=LONGEST_WAIT)
    if state.num_processes != launched:
        raise RuntimeError(
            f"WORLD_SIZE is {launched}, but Accelerate's state knows of {state.num_processes} processes, so that each "
            "would do the whole job. Make no PartialState or Accelerator before the job, or on a CPU make it with "
            "cpu=True."
        )
    return state


def _write(results: Iterator[RowResult], file: OutputFile, bar: JobProgress) -> int:
    """Put results on disk as they come, some at a time; return how many there were."""
    waiting: list[RowResult] = []
    written, last = 0, time.perf_counter()
    try:
        for result in results:
            waiting.append(result)
            written += 1
            bar.advance(1)
            if time.perf_counter() - last >= WRITE_SECONDS:
                file.write(waiting)
                waiting.clear()
                last = time.perf_counter()
    finally:
        file.write(waiting)
    return written
