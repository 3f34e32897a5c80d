"""Jobs of a tiny pair that are killed again and again; `test_resume.py` runs this file and looks at what is left.

    python resumed_job.py FOLDER

The pair is made once, and every attempt is a fork of this process: a process of its own, killed as such, without the
price of importing torch. What happened, by scenario, is printed as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
import torch
from forks import exit_code, in_fork
from tiny_pair import tiny_pair
from watched_forward import watch

from hf_dsde.batch import job
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.batch.output import read_results

ROWS = 96
BATCH_SIZE = 3
NEW_TOKENS = 5
PAUSE = 0.01
"""Seconds by which each pass of the target is prolonged in a job that is to be killed, so that no machine is through
before."""
LATEST_KILL = 0.03
PATIENCE = 60.0
"""Seconds that an attempt may take before something is wrong with it."""
OFTEN = 0.0
SELDOM = 1.0
"""Seconds between writes: after every result, and what the package does."""
BAD_ROW = 30
MORE_ROWS = 160
"""Rows of a job that is not over before the second write."""
SCENARIOS = {
    "whole": (".jsonl", ROWS, OFTEN, []),
    "jsonl": (".jsonl", ROWS, OFTEN, [0, 1, 1, 2] * 2),
    "parquet": (".parquet", ROWS, OFTEN, [1, 2, 0]),
    "seldom": (".jsonl", MORE_ROWS, SELDOM, [1]),
}
"""Suffix of the output, rows, seconds between writes, and for each kill how many results come before it at least."""


def prompts(count: int = ROWS) -> list[str]:
    """Short texts, no two alike, and one row without a prompt."""
    rows = ["abcdef"[i % 6] * (i % 5 + 1) + "GhIjKlMnOp"[: i // 6 * 2 % 12] + "Jk" * (i // 36) for i in range(count)]
    if count > BAD_ROW:
        rows[BAD_ROW] = ""
    return rows


def generator(**changes: Any) -> BatchGenerator:
    """Every process makes the same one."""
    pair = tiny_pair(torch.float64)
    settings = {"speculation_policy": "static", "batch_size": BATCH_SIZE, "max_new_tokens": NEW_TOKENS, **changes}
    return BatchGenerator(pair.target, pair.tokenizer, assistant_model=pair.draft, **settings)


def slowly(made: BatchGenerator) -> BatchGenerator:
    """Prolong each pass of the target by `PAUSE`, in this process."""
    watch(made._model, RuntimeError, lambda *_: bool(time.sleep(PAUSE)))
    return made


def rows_on_disk(path: Path) -> int:
    """Results that a killed job has left, merged or not."""
    files = [path] if path.suffix == ".jsonl" else []
    files += path.with_name(f"{path.name}.parts").glob("*.jsonl")
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def is_running(process: int) -> bool:
    """Whether a fork has neither ended nor been waited for."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def kill(process: int, path: Path, results: int, delay: float) -> None:
    """Kill a job when it has written some results, and `delay` seconds later."""
    wanted = rows_on_disk(path) + results
    deadline = time.monotonic() + PATIENCE
    while rows_on_disk(path) < wanted and is_running(process) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def scenario(
    made: BatchGenerator, folder: Path, suffix: str, count: int, write_seconds: float, kills: list[int]
) -> dict[str, Any]:
    """Run a job that is killed some times, and then left alone."""
    job.WRITE_SECONDS = write_seconds
    rows, rng, path = prompts(count), random.Random(0), folder / f"out{suffix}"
    codes, done = [], []
    for results in kills:
        process = in_fork(lambda: slowly(made).run(rows, path))
        kill(process, path, results, rng.uniform(0.0, LATEST_KILL))
        codes.append(exit_code(process))
        done.append(rows_on_disk(path))
    codes.append(exit_code(in_fork(lambda: made.run(rows, path))))
    files = sorted(file.name for file in folder.iterdir())
    results = [result.to_dict() for result in read_results(path)]
    return {"codes": codes, "done": done, "files": files, "results": results}


def main() -> None:
    """See the top of the file."""
    torch.set_num_threads(1)
    made, folder = generator(), Path(sys.argv[1])
    # What a job imports when it needs it, once and not in every fork: `datasets`, and pandas, which pyarrow imports.
    made.identity  # noqa: B018
    pa.Table.from_pylist([{"index": 0}])
    report = {}
    for name, settings in SCENARIOS.items():
        (folder / name).mkdir()
        report[name] = scenario(made, folder / name, *settings)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
