"""Jobs that write outputs and are killed meanwhile; `test_output.py` runs this file and looks at what is left.

    python output_job.py KIND FOLDER SUFFIX SHARDS...

Every job runs in forks of this process, so that each is a process of its own without the price of starting one. `KIND`
is `random` (death after a random time) or `points` (death at the first call of the operating system, then at the
second, and so on: right before the call, right after it, and in the middle of it if it writes). The number of shards is
another one each time the job starts again. What was killed how often is printed as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path

from forks import exit_code, in_fork

from hf_dsde.batch.output import merge, open_output
from hf_dsde.batch.results import END_TOKEN, LENGTH, RowResult, RowStatistics

ROWS = {"random": 24, "points": 6}
JOB = {"policy": "dsde", "settings": {"seed": 3, "temperature": 0.5}}


def expected(index: int) -> RowResult:
    """The result of a row, which depends on its index alone."""
    if index % 7 == 3:
        return RowResult.failed(index, f"Row {index}: “prompt” too long\n")
    tokens = [index * 31 % 97 + i for i in range(index % 5 + 1)]
    text = f'Grüße {index}\u2028\n"{"ß" * (index % 11)}" 🦜'
    reason = END_TOKEN if index % 2 else LENGTH
    return RowResult(index, text, tokens, reason, None, RowStatistics(5, len(tokens), 2, 7, 3, index / 8))


def run_job(path: Path, rows: int, shards: int, rng: random.Random, *, ordered: bool) -> None:
    """Write what is not done, one shard after the other, and merge. What a call has promised is noted in a file."""
    promises = os.open(path.with_suffix(".promises"), os.O_RDWR | os.O_CREAT | os.O_APPEND)
    promised = {int(line) for line in os.pread(promises, 1 << 20, 0).split()}
    for shard in range(shards):
        with open_output(path, job=JOB, shard=shard, shards=shards, ordered=ordered) as output:
            if promised - output.done:
                raise RuntimeError(f"lost: {promised - output.done}")
            left = [i for i in range(rows) if i % shards == shard and i not in output.done]
            rng.shuffle(left)
            while left:
                count = rng.randint(1, 4)
                batch, left = left[:count], left[count:]
                output.write([expected(i) for i in batch])
                note(promises, output.done - promised)
                promised |= output.done
    merge(path)


WRITE = os.write
"""The real one, whatever is patched."""


def note(descriptor: int, indices: set[int]) -> None:
    """Append indices to a file. A torn last number would be a smaller one, hence the fixed width."""
    WRITE(descriptor, "".join(f"{i:08d}\n" for i in sorted(indices)).encode())


def ended(process: int) -> bool:
    """Wait for a fork; whether it came to its end, and was not killed."""
    code = exit_code(process)
    if code not in (0, -signal.SIGALRM, DEATH):
        raise RuntimeError(f"The job failed with {code}.")
    return code == 0


DEATH = 77


def die_at(number: int, moment: str) -> None:
    """Patch the calls that change files so that the process ends at the one of that number, from 0."""
    calls = iter(range(1 << 30))

    def patched(real: Callable, *arguments: object, **options: object) -> object:
        if next(calls) != number:
            return real(*arguments, **options)
        if moment == "after":
            with suppress(OSError):
                real(*arguments, **options)
        elif moment == "within":
            descriptor, content = arguments
            WRITE(descriptor, content[: len(content) * 2 // 3])
        os._exit(DEATH)

    for name in (
        ("write",)
        if moment == "within"
        else ("write", "fsync", "replace", "unlink", "rmdir", "mkdir", "ftruncate", "open")
    ):
        setattr(os, name, partial(patched, getattr(os, name)))


def killed_after(seconds: float, work: Callable[[], None]) -> None:
    """Work until an alarm that nothing handles ends this process.

    The alarm is the process's own: a parent that sleeps and then kills comes too late on a busy machine.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    work()


def killed_at_random(folder: Path, suffix: str, shards: list[int]) -> Iterator[int]:
    """Kill each job after times that are short first and get longer; yields how often it was killed."""
    jobs, longest = {".jsonl": (20, 0.004), ".parquet": (4, 0.01)}[suffix]
    for seed in range(jobs):
        rng = random.Random(seed)
        path = folder / f"job-{seed}{suffix}"
        for attempt, count in enumerate(cycle(shards)):
            work = partial(run_job, path, ROWS["random"], count, random.Random(rng.random()), ordered=seed % 2 == 1)
            seconds = rng.uniform(0, longest) * 1.1**attempt
            if ended(in_fork(partial(killed_after, seconds, work))):
                yield attempt
                break


def killed_at_points(folder: Path, suffix: str, shards: list[int]) -> Iterator[int]:
    """Kill each job once, at every call in turn, and let it finish; yields 1, or 0 once no call was left."""
    for moment in ("before", "within", "after"):
        for number in range(10_000):
            path = folder / f"{moment}-{number}{suffix}"

            def first(path: Path = path, number: int = number, moment: str = moment) -> None:
                die_at(number, moment)
                run_job(path, ROWS["points"], shards[0], random.Random(number), ordered=number % 2 == 1)

            finished = ended(in_fork(first))
            # The second death is at an early call, which is where what was left is cleared away.
            if not finished:

                def second(path: Path = path, number: int = number) -> None:
                    die_at(number % 9, "before")
                    run_job(path, ROWS["points"], shards[-1], random.Random(-number), ordered=number % 2 == 1)

                ended(in_fork(second))
            again = partial(run_job, path, ROWS["points"], shards[0], random.Random(number), ordered=number % 2 == 1)
            if not ended(in_fork(again)):
                raise RuntimeError("The job did not finish although nothing killed it.")
            yield int(not finished)
            if finished:
                break


def main() -> None:
    """See the top of the file."""
    kind, folder, suffix, *shards = sys.argv[1:]
    if suffix == ".parquet":
        # Once, and not in every fork; pyarrow imports pandas when it first makes a table.
        import pandas  # noqa: F401, ICN001

        import hf_dsde.batch.parquet_output  # noqa: F401
    # A killed process leaves what it has told the system, on disk or not; waiting for the disk is for other tests.
    os.fsync = lambda descriptor: None
    kinds = {"random": killed_at_random, "points": killed_at_points}
    kills = list(kinds[kind](Path(folder), suffix, [int(s) for s in shards]))
    sys.stdout.write(json.dumps({"kills": kills, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main()
