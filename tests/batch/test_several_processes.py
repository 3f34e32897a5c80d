"""One job in several processes: each does its share, one joins them, and one that dies costs only its last texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate_job import ROWS
from resumed_job import BAD_ROW, generator, prompts

from hf_dsde.batch import job
from hf_dsde.batch.output import read_results

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills forks")
SCRIPT = Path(__file__).with_name("accelerate_job.py")
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
"""Without MPI, `--cpu` starts one process, whatever their number; `--multi_gpu` starts them through torchrun."""
SETTINGS = ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The folder of all jobs, and what their processes ended with."""
    folder = tmp_path_factory.mktemp("jobs")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    with (
        subprocess.Popen([sys.executable, *LAUNCH, *SETTINGS, str(SCRIPT), str(folder)], **pipes) as launched,
        subprocess.Popen([sys.executable, str(SCRIPT), str(folder)], **pipes) as forked,
    ):
        report, complaints = forked.communicate(timeout=300)
        _, complaints_of_launch = launched.communicate(timeout=300)
    assert forked.returncode == 0, complaints
    return SimpleNamespace(
        folder=folder, codes=json.loads(report), launched=launched.returncode, complaints=complaints_of_launch
    )


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, list[int] | None, str]]:
    """What one process without any launcher gives."""
    return contents(generator().stream(prompts(ROWS), ordered=True))


def contents(results) -> list[tuple[int, list[int] | None, str]]:
    return [(result.index, result.token_ids, result.finish_reason) for result in results]


def reports(folder: Path, name: str) -> list[dict[str, int]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-report-*.json"))]


@pytest.mark.slow
def test_processes_of_accelerate_launch_write_one_output_together(outcome, alone):
    assert outcome.launched == 0, outcome.complaints
    assert contents(read_results(outcome.folder / "launched.jsonl")) == alone
    assert [report["rows"] for report in reports(outcome.folder, "launched")] == [ROWS // 2, ROWS // 2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("one.jsonl", 1), ("two.parquet", 2)])
def test_the_output_does_not_depend_on_how_many_processes_wrote_it(outcome, alone, name, processes):
    path = outcome.folder / name
    assert outcome.codes[path.stem] == [0] * processes
    assert contents(read_results(path)) == alone
    done = reports(outcome.folder, path.stem)
    assert [report["rows"] for report in done] == [ROWS // processes] * processes
    assert sum(report["texts"] for report in done) == ROWS - 1  # without the bad row


@pytest.mark.slow
@pytest.mark.parametrize(("name", "again"), [("killed", 2), ("fewer", 1)])
def test_a_job_that_lost_a_process_is_finished_by_another_launch_of_any_size(outcome, alone, name, again):
    codes = outcome.codes[name]
    assert -9 in codes["first"]
    assert 0 not in codes["first"]
    assert 0 < codes["left"] < ROWS
    assert codes["second"] == [0] * again
    assert contents(read_results(outcome.folder / f"{name}.jsonl")) == alone
    done = reports(outcome.folder, name)
    assert sum(report["rows"] for report in done) == ROWS - codes["left"]
    assert sum(report["skipped"] for report in done) == codes["left"]


@pytest.mark.slow
def test_nothing_but_outputs_is_left(outcome):
    files = {file.name for file in outcome.folder.iterdir() if "report" not in file.name}
    outputs = {"launched.jsonl", "one.jsonl", "two.parquet", "killed.jsonl", "fewer.jsonl"}
    assert files == outputs | {f"{output}.job.json" for output in outputs}


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert job.process_state() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert job.process_state() is None


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    class KnowsItselfOnly:
        _shared_state: dict[str, Any] = {"num_processes": 1}  # noqa: RUF012 - as Accelerate has it
        num_processes = 1

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.PartialState", KnowsItselfOnly)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2, .* knows of 1 processes.*cpu=True"):
        job.process_state()


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", [list, iter], ids=["indexed", "read once"])
def test_shares_are_disjoint_and_leave_out_what_is_done(shards, kind):
    rows = prompts(20)
    done = {0, 3, 4, 19, BAD_ROW}
    shares = [dict(job.InputRows(kind(rows), None).share(shard, shards, done)) for shard in range(shards)]
    assert sum(map(len, shares)) == 16
    joined = {index: row for share in shares for index, row in share.items()}
    assert joined == {index: row for index, row in enumerate(rows) if index not in done}
    assert all(index % shards == shard for shard, share in enumerate(shares) for index in share)
