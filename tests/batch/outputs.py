"""Writing outputs of jobs and looking at them, for the tests of outputs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from output_job import JOB, expected

from hf_dsde.batch.output import open_output, read_results

FORMATS = [".jsonl", ".parquet"]


def indices(path: Path) -> list[int]:
    return [result.index for result in read_results(path)]


def write(path: Path, which: Iterable[int], **options: Any) -> None:
    with open_output(path, job=JOB, **options) as output:
        output.write([expected(i) for i in which])


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())
