"""Results as lines of JSON: how a job keeps them, whatever the format of its output, and how they are joined.

A line counts if it ends with a newline and holds an object with an `index`. Only the last line of a file can fail to,
when its writer was killed within a call of `write`; the next process that has the file to itself cuts it off.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hf_dsde.batch.output_files import MERGED_NAME, UNPACKED_NAME, OutputPaths, lock, replacing, sync_folder
from hf_dsde.batch.results import RowResult


class OutputFile(AbstractContextManager["OutputFile"]):
    """Takes the results of one shard. Made by `open_output`; leaving its `with` block closes it.

    Args:
        paths: The files of the output.
        shard: Which process this is.
        shards: How many there are.

    Attributes:
        done: Places in the input whose results are on disk, whichever shard and run wrote them.
    """

    def __init__(self, paths: OutputPaths, shard: int, shards: int) -> None:
        name = f"shard-{shard}-of-{shards}"
        # Nobody else writes lines to the output then, and users may follow them from the start.
        direct = shards == 1 and not paths.is_table
        self.done: set[int] = set()
        self._length = 0
        self._closed = False
        with ExitStack() as opening:
            opening.callback(paths.remove_empty_folder)
            opening.enter_context(lock(paths.parts / f"{name}.lock"))
            for other in paths.part_files(".lock"):
                # Two numbers of shards at a time would mean two processes for one row; merging takes files away.
                if not other.stem.endswith(f"-of-{shards}"):
                    with lock(other):
                        pass
            self._find_done(paths, paths.output if direct else paths.parts / f"{name}.jsonl", opening)
            self._opened = opening.pop_all()

    def _find_done(self, paths: OutputPaths, own: Path, opening: ExitStack) -> None:
        """Open this shard's file without what a killed process left half written, and see which rows are on disk."""
        new = not own.exists()
        self._file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        opening.callback(os.close, self._file)
        if new:
            sync_folder(own.parent)
        for table in paths.table_files():
            from hf_dsde.batch.parquet_output import read_indices

            self.done.update(read_indices(table))
        for source in paths.line_files():
            for line in read_lines(source):
                self.done.add(line.values["index"])
                if source == own:
                    self._length = line.end
        if os.fstat(self._file).st_size != self._length:
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)

    def write(self, results: Sequence[RowResult]) -> None:
        """Add results, in any order of their indices. They are on disk when this returns.

        Raises:
            ValueError: A row is done already, or the file is closed. Nothing is written.
            OSError: The disk does not take them. Nothing is written.
        """
        if self._closed:
            raise ValueError("The output is closed. Open it again with `open_output`.")
        indices = [result.index for result in results]
        if not self.done.isdisjoint(indices) or len(set(indices)) < len(indices):
            twice = sorted(self.done.intersection(indices))
            raise ValueError(
                f"`results` has rows that were written before or that are in it twice: {twice[:8] or sorted(indices)}. "
                f"Leave out what is in `done`, and write each row once."
            )
        if not results:
            return
        content = memoryview(b"".join(as_line(result.to_dict()) for result in results))
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
        self.done.update(indices)

    def close(self) -> None:
        """Let go of the file. Closing again does nothing."""
        self._closed = True
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Line(NamedTuple):
    """A complete line of a file: what it holds, where it starts, and where the next one does."""

    values: dict[str, Any]
    start: int
    end: int


def as_line(values: dict[str, Any]) -> bytes:
    """The fields of a result as a line of JSON in UTF-8."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"


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


def merge_files(paths: OutputPaths, ordered: bool) -> None:
    """Make the output of all files that hold results; leaves it alone if that is what it is already.

    Lines are copied as they are. Of each, only the index and the place are kept in memory.
    """
    sources = paths.line_files()
    if paths.is_table:
        _merge_table(paths, sources, ordered)
        return
    files, starts, kept = _places(sources, ordered)
    size = paths.output.stat().st_size if paths.output.exists() else -1
    # What has its place in the output already, and nothing else in there.
    if kept == size and not any(sources[number] != paths.output for number in files) and _ascends(starts):
        return
    with replacing(paths.output, paths.parts / MERGED_NAME) as merged:
        merged.writelines(_copied(sources, files, starts))


def _merge_table(paths: OutputPaths, sources: list[Path], ordered: bool) -> None:
    from hf_dsde.batch import parquet_output

    tables = paths.table_files()
    whole = tables == [paths.output] and not sources
    if whole and (not ordered or _ascends(parquet_output.read_indices(paths.output))):
        return
    if tables:
        unpacked = paths.parts / UNPACKED_NAME
        with unpacked.open("wb") as file:
            for table in tables:
                file.writelines(map(as_line, parquet_output.read_rows(table)))
        sources = [unpacked, *sources]
    files, starts, _ = _places(sources, ordered)
    with replacing(paths.output, paths.parts / MERGED_NAME) as merged:
        parquet_output.write_rows(merged, map(json.loads, _copied(sources, files, starts)))


def _places(sources: Sequence[Path], ordered: bool) -> tuple[Sequence[int], Sequence[int], int]:
    """Where the line of each row is, as the number of its file and its start there; and the bytes of the first file's.

    A row that is in two files counts where it comes first.
    """
    indices, files, starts = array("q"), array("q"), array("q")
    seen: set[int] = set()
    in_first = 0
    for number, source in enumerate(sources):
        for line in read_lines(source):
            index = line.values["index"]
            if index in seen:
                continue
            seen.add(index)
            indices.append(index)
            files.append(number)
            starts.append(line.start)
            in_first += 0 if number else line.end - line.start
    if ordered:
        order = sorted(range(len(indices)), key=indices.__getitem__)
        files, starts = (array("q", map(places.__getitem__, order)) for places in (files, starts))
    return files, starts, in_first


def _copied(sources: Sequence[Path], files: Sequence[int], starts: Sequence[int]) -> Iterator[bytes]:
    with ExitStack() as stack:
        opened = [stack.enter_context(source.open("rb")) for source in sources]
        for number, start in zip(files, starts, strict=True):
            opened[number].seek(start)
            yield opened[number].readline()


def _ascends(values: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(values))


def _parse(line: bytes) -> dict[str, Any] | None:
    """What a line holds, or None if it is not complete."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and type(values.get("index")) is int else None
