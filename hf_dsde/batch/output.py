"""One output file for a job that may be killed at any time, run again, and shared out among processes.

Beside an output `out.jsonl` (or `out.parquet`) lie `out.jsonl.job.json`, which says what job the results belong to, and
while the job runs the folder `out.jsonl.parts`: files of single processes, their locks, and what is not finished.
`merge` makes one file of everything and removes the folder. A row counts as done if the output or a file in the folder
has it, whoever wrote it; so a job goes on where it stopped, also with another number of processes. Results are lines
of JSON while they come in; a Parquet output is made of them in the end.

Nothing is removed before what replaces it is on disk. A kill in between leaves rows in two files, and both `done` and
`merge` count a row once. `output_files.py` knows names and locks, this module jobs, `output_lines.py` and
`parquet_output.py` know formats.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from hf_dsde.batch.output_files import MERGE_LOCK, OutputPaths, all_locks, lock, replacing
from hf_dsde.batch.output_lines import OutputFile, merge_files, read_lines
from hf_dsde.batch.results import RowResult
from hf_dsde.utils.checks import check_flag, check_integer

JOB_FORMAT = "hf-dsde-batch-output"
JOB_VERSION = 1
"""Raised whenever the files beside an output change their meaning."""
_SHOWN_DIFFERENCES = 8
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def open_output(
    path: str | os.PathLike[str],
    *,
    job: Mapping[str, Any],
    shard: int = 0,
    shards: int = 1,
    ordered: bool = False,
    overwrite: bool = False,
) -> OutputFile:
    """Open the output of a job, new or to go on with it.

    One shard of JSON Lines appends to the output itself. Everything else goes to files beside it until `merge`, which
    one process calls when all shards are closed.

    Args:
        path: The output; `.jsonl` and `.ndjson` mean JSON Lines, `.parquet` Parquet. Its folder is made if need be.
        job: All settings and the input, in types that JSON has. Results of different jobs never share an output, so
            leave out what does not change results, such as the number of shards.
        shard: Which of the processes this is, from 0.
        shards: How many processes share the job. It may differ from an earlier run's.
        ordered: Whether `merge` sorts by `index`; otherwise the results of a shard stay in the order of writing.
        overwrite: Start over instead of going on. With several shards call `remove_output` before they start.

    Raises:
        TypeError: An argument has the wrong type, or JSON cannot hold the `job`.
        ValueError: An argument is not accepted, or the output belongs to another job, whose differences are named.
        FileExistsError: There is a file at `path` that belongs to no job.
        RuntimeError: Another process writes this shard, or the job with another number of shards.
    """
    paths = OutputPaths.of(path)
    check_integer("shards", shards, 1)
    check_integer("shard", shard, 0, shards - 1)
    description = _as_json(job)
    check_flag("ordered", ordered)
    if check_flag("overwrite", overwrite):
        if shards > 1:
            raise ValueError(
                f"`overwrite` is True with `shards`={shards}, but each shard would remove what the others wrote. Call "
                f"`remove_output` in one process before the shards start."
            )
        remove_output(path)
    _settle_job(paths, f"shard-{shard}-of-{shards}", description, ordered)
    return OutputFile(paths, shard, shards)


def merge(path: str | os.PathLike[str]) -> None:
    """Make the one output of everything that the shards have written, sorted if they were opened with `ordered`.

    For one process to call when all shards are closed, with one shard too. Calling it again changes nothing, nor does
    it matter where an earlier call was killed. Texts are copied piece by piece, so memory is needed for indices only.

    Raises:
        FileNotFoundError: There is no job at `path`.
        RuntimeError: A shard is still being written.
    """
    paths = OutputPaths.of(path)
    ordered = bool(_read_job(paths)["ordered"])
    with all_locks(paths), lock(paths.parts / MERGE_LOCK):
        merge_files(paths, ordered)
        paths.remove_parts()


def remove_output(path: str | os.PathLike[str]) -> None:
    """Remove an output, finished or not, with all that lies beside it. Nothing to remove is fine.

    Raises:
        RuntimeError: A shard is still being written.
    """
    paths = OutputPaths.of(path)
    with all_locks(paths):
        paths.output.unlink(missing_ok=True)
        paths.remove_parts()
        # Last, since without it nobody would know what a remaining file belongs to.
        paths.job.unlink(missing_ok=True)


def read_results(path: str | os.PathLike[str]) -> Iterator[RowResult]:
    """The results in an output, one by one, in the order of the file.

    The last line of JSON Lines is left out while it is not complete. Results that `merge` has not brought to the output
    yet are not seen.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Something in it is no result.
    """
    paths = OutputPaths.of(path)
    if not paths.output.exists():
        hint = " There are unfinished parts beside it; call `merge` first." if paths.parts.is_dir() else ""
        raise FileNotFoundError(f"`path` is {str(path)!r}, but there is no such file.{hint}")
    return map(RowResult.from_dict, _rows(paths))


def _rows(paths: OutputPaths) -> Iterator[dict[str, Any]]:
    if not paths.is_table:
        return (line.values for line in read_lines(paths.output))
    # Only jobs that end as Parquet import pyarrow.
    from hf_dsde.batch.parquet_output import read_rows

    return read_rows(paths.output)


def _as_json(job: Mapping[str, Any]) -> Any:
    """The job as it will be read back."""
    if not isinstance(job, Mapping):
        raise TypeError(f"`job` is {job!r}, but a mapping of names to settings is needed.")
    try:
        return json.loads(json.dumps(dict(job), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"`job` is {job!r}, but types that JSON has are needed, and no nan: {error}") from error


def _settle_job(paths: OutputPaths, name: str, job: Any, ordered: bool) -> None:
    """Write down what job the output belongs to, or make sure that it is this one."""
    if paths.job.exists():
        there = _read_job(paths)
        different = list(_differences(there["job"], job))
        if different:
            more = f", and {len(different) - _SHOWN_DIFFERENCES} more" if len(different) > _SHOWN_DIFFERENCES else ""
            raise ValueError(
                f"`path` is {str(paths.output)!r}, which holds results of another `job`. It differs in "
                f"{'; '.join(different[:_SHOWN_DIFFERENCES])}{more}. Choose another path, repeat the settings of that "
                f"job to go on with it, or start over with `overwrite`."
            )
        if there["ordered"] == ordered:
            return
    else:
        strange = next(iter(paths.table_files() + paths.line_files()), None)
        if strange is not None:
            raise FileExistsError(
                f"`path` is {str(paths.output)!r}, but {str(strange)!r} exists without {paths.job.name!r}, so it is "
                f"not known to belong to this job. Choose another path, or replace it with `overwrite`."
            )
    paths.parts.mkdir(parents=True, exist_ok=True)
    # Other shards may do this at the same time, with the same content.
    with replacing(paths.job, paths.parts / f"{name}.tmp") as file:
        content = {"format": JOB_FORMAT, "version": JOB_VERSION, "ordered": ordered, "job": job}
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def _read_job(paths: OutputPaths) -> dict[str, Any]:
    try:
        content = json.loads(paths.job.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"`path` is {str(paths.output)!r}, but {str(paths.job)!r} does not exist, so no job has written there. "
            f"Use the path that `open_output` was given."
        ) from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (JOB_FORMAT, JOB_VERSION):
        raise ValueError(
            f"{str(paths.job)!r} is no description of a job of version {JOB_VERSION}. Choose another path, or start "
            f"over with `overwrite`."
        )
    return content


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Each field whose values differ, by its dotted name."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            inner = f"{name}.{key}" if name else key
            if key not in here:
                yield f"`{inner}`: {_SHORT.repr(there[key])} there, none here"
            elif key not in there:
                yield f"`{inner}`: none there, {_SHORT.repr(here[key])} here"
            else:
                yield from _differences(there[key], here[key], inner)
    elif there != here or isinstance(there, bool) != isinstance(here, bool):
        yield f"`{name}`: {_SHORT.repr(there)} there, {_SHORT.repr(here)} here"
