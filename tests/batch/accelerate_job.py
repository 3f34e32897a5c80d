"""A job of a tiny pair in several processes; `test_several_processes.py` runs this file and looks at what is left.

    accelerate launch ... accelerate_job.py FOLDER       one process of a launch: runs its share of a job
    python accelerate_job.py FOLDER                      kills processes of such jobs, and launches them again

The second starts processes as a launcher does, but as forks, which spares importing torch for each, and prints what
they ended with as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from forks import exit_code, in_fork
from resumed_job import OFTEN, generator, is_running, prompts, rows_on_disk, slowly

from hf_dsde.batch import job
from hf_dsde.batch.generator import BatchGenerator

ROWS = 48
PATIENCE = 60.0
"""Seconds that processes may take before something is wrong with them."""


def run(made: BatchGenerator, path: Path) -> None:
    """Run this process's share, and tell what it was in a file beside the output."""
    report = made.run(prompts(ROWS), path, ordered=True)
    what = {"rows": report.rows, "skipped": report.skipped, "texts": report.statistics.texts}
    path.with_name(f"{path.stem}-report-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(what))


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(work: Callable[[], None], processes: int) -> list[int]:
    """Start processes that find each other as those of `torchrun` do."""
    port = free_port()

    def begin(rank: int) -> None:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(processes),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(processes),
        }
        work()

    return [in_fork(partial(begin, rank)) for rank in range(processes)]


def killed_once(made: BatchGenerator, path: Path, victim: int, again: int) -> dict[str, object]:
    """Kill one of two processes in the middle, then the other as a launcher would, and run the job again."""
    processes = launch(lambda: run(slowly(made), path), 2)
    deadline = time.monotonic() + PATIENCE
    while rows_on_disk(path) < 4 and all(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(processes[victim], signal.SIGKILL)
    time.sleep(0.1)
    os.kill(processes[1 - victim], signal.SIGTERM)
    first = [exit_code(process) for process in processes]
    left = rows_on_disk(path)
    second = [exit_code(process) for process in launch(lambda: run(made, path), again)]
    return {"first": first, "left": left, "second": second}


def main() -> None:
    """See the top of the file."""
    torch.set_num_threads(1)
    made, folder = generator(), Path(sys.argv[1])
    job.WRITE_SECONDS = OFTEN
    if "RANK" in os.environ:
        run(made, folder / "launched.jsonl")
        return
    # What a job imports when it needs it, once and not in every fork.
    import accelerate  # noqa: F401

    made.identity  # noqa: B018
    report = {
        "one": [exit_code(in_fork(lambda: run(made, folder / "one.jsonl")))],
        "two": [exit_code(process) for process in launch(lambda: run(made, folder / "two.parquet"), 2)],
        "killed": killed_once(made, folder / "killed.jsonl", 0, 2),
        "fewer": killed_once(made, folder / "fewer.jsonl", 1, 1),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
