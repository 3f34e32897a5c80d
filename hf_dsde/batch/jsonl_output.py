"""Results as JSON Lines: one line each, appended.

A line counts if it ends with a newline and holds an object with an `index`. Only the last line of a file can fail to,
when its writer was killed within a call of `write`; the next process that has the file to itself cuts it off.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from hf_dsde.batch.output_base import OutputFile
from hf_dsde.batch.output_files import MERGED_NAME, OutputPaths, replacing, sync_folder
from hf_dsde.batch.results import RowResult

SUFFIX = ".jsonl"
"""Of the files of single shards."""


class Line(NamedTuple):
    """A complete line of a file: what it holds, where it starts, and where the next one does."""

    values: dict[str, Any]
    start: int
    end: int


class JsonlOutput(OutputFile):
    """Appends lines to the output, or with several shards to a file of this one."""

    def __init__(self, paths: OutputPaths, shard: int, shards: int) -> None:
        self._length = 0
        # Nobody else writes then, and users may follow the file from the start.
        self._direct = shards == 1
        super().__init__(paths, shard, shards)

    def _prepare(self, opening: ExitStack) -> None:
        own = self._paths.output if self._direct else self._paths.parts / f"{self._name}{SUFFIX}"
        new = not own.exists()
        self._file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        opening.callback(os.close, self._file)
        if new:
            sync_folder(own.parent)
        for source in {own, *self._paths.sources(SUFFIX)}:
            end = 0
            for line in read_lines(source):
                self.done.add(line.values["index"])
                end = line.end
            if source == own:
                self._length = end
        if os.fstat(self._file).st_size != self._length:
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)

    def _write(self, results: Sequence[RowResult]) -> None:
        lines = "".join(json.dumps(r.to_dict(), ensure_ascii=False, allow_nan=False) + "\n" for r in results)
        content = memoryview(lines.encode("utf-8"))
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
        except BaseException:
            # Half a line in front of the next one would spoil both.
            os.ftruncate(self._file, self._length)
            raise
        self._length += len(content)
        self.done.update(result.index for result in results)

    def flush(self) -> None:
        """Nothing to do: `write` keeps nothing back."""


def read_lines(path: Path) -> Iterator[Line]:
    """The complete lines of a file; a last one that is not complete is left out.

    Raises:
        ValueError: A line that is not the last one holds no result.
    """
    end, broken = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if broken:
                raise ValueError(
                    f"Line {broken} of {str(path)!r} is no result, although lines follow it: the file was changed by "
                    f"something else or is damaged. Remove that line to have its row done again, or start over with "
                    f"`overwrite`."
                )
            values = _parse(line)
            if values is None:
                broken = number
            else:
                yield Line(values, end, end + len(line))
                end += len(line)


def read_file(path: Path) -> Iterator[RowResult]:
    """The results in a file."""
    for line in read_lines(path):
        yield RowResult.from_dict(line.values)


def merge_files(paths: OutputPaths, ordered: bool) -> None:
    """Make the output of all files that hold lines; leaves it alone if that is what it is already.

    Lines are copied as they are. Of each, only the index and the place are kept in memory.
    """
    sources = paths.sources(SUFFIX)
    indices, files, starts = array("q"), array("q"), array("q")
    seen: set[int] = set()
    stays = 0
    for number, source in enumerate(sources):
        for line in read_lines(source):
            index = line.values["index"]
            if index in seen:
                continue
            seen.add(index)
            indices.append(index)
            files.append(number)
            starts.append(line.start)
            stays += line.end - line.start if source == paths.output else 0
    order: Sequence[int] = range(len(indices))
    if ordered:
        order = sorted(order, key=indices.__getitem__)
    has_all = all(sources[number] == paths.output for number in files)
    size = paths.output.stat().st_size if paths.output.exists() else -1
    if has_all and stays == size and all(place == entry for place, entry in enumerate(order)):
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(source.open("rb")) for source in sources]
        merged = stack.enter_context(replacing(paths.output, paths.parts / MERGED_NAME))
        for entry in order:
            file = opened[files[entry]]
            file.seek(starts[entry])
            merged.write(file.readline())


def _parse(line: bytes) -> dict[str, Any] | None:
    """What a line holds, or None if it is not complete."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and type(values.get("index")) is int else None
