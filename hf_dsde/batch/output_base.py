"""What every format of an output promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from hf_dsde.batch.output_files import OutputPaths, lock
from hf_dsde.batch.results import RowResult


class OutputFile(ABC):
    """Takes the results of one shard. Made by `open_output`; leaving its `with` block closes it.

    Attributes:
        done: Places in the input whose results are on disk, whichever shard and run wrote them.
    """

    def __init__(self, paths: OutputPaths, shard: int, shards: int) -> None:
        self._paths = paths
        self._name = shard_name(shard, shards)
        self._closed = False
        self.done: set[int] = set()
        with ExitStack() as opening:
            opening.callback(paths.remove_empty_folder)
            opening.enter_context(lock(paths.parts / f"{self._name}.lock"))
            for other in paths.part_files(".lock"):
                # Two numbers of shards at a time would mean two processes for one row; merging takes files away.
                if not other.stem.endswith(f"-of-{shards}"):
                    with lock(other):
                        pass
            self._prepare(opening)
            self._open = opening.pop_all()

    @abstractmethod
    def _prepare(self, opening: ExitStack) -> None:
        """Find `done`, clear away what a killed process left, and register with `opening` what is to be closed."""

    @abstractmethod
    def _write(self, results: Sequence[RowResult]) -> None:
        """Take results whose indices are new."""

    @abstractmethod
    def flush(self) -> None:
        """Put on disk what `write` may have kept back; it is in `done` afterwards."""

    def write(self, results: Sequence[RowResult]) -> None:
        """Add results, in any order of their indices.

        In JSON Lines they are on disk when this returns. Parquet collects some first, see `open_output`; `done` tells
        which are on disk, and `flush` puts all of them there.

        Raises:
            ValueError: A row is done already, or the file is closed. Nothing is written.
            OSError: The disk does not take them. Nothing is written.
        """
        if self._closed:
            raise ValueError("The output is closed. Open it again with `open_output`.")
        indices = [result.index for result in results]
        twice = sorted({i for i in indices if i in self.done or self._is_waiting(i)})
        if twice or len(set(indices)) < len(indices):
            raise ValueError(
                f"`results` has rows that were written before or that are in it twice: {twice[:8] or sorted(indices)}. "
                f"Leave out what is in `done`, and write each row once."
            )
        if results:
            self._write(results)

    def close(self) -> None:
        """Flush, and let go of the file. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            with self._open:
                self.flush()

    def __enter__(self) -> OutputFile:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _is_waiting(self, index: int) -> bool:  # noqa: ARG002 - for formats that collect
        return False


def shard_name(shard: int, shards: int) -> str:
    """The name of a shard's files, but for their suffix."""
    return f"shard-{shard}-of-{shards}"
