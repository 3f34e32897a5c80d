"""Where the files of an output are, who may touch them, and how one replaces another so that a kill harms neither."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

SUFFIXES = (".jsonl", ".ndjson", ".parquet")
MERGED_NAME = "merged.tmp"
UNPACKED_NAME = "unpacked.tmp"
MERGE_LOCK = "merge.lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system without locks says. Working without is better than not working."""
_OUR_FILES = re.compile(r"shard-\d+-of-\d+(-\d+)?\.(jsonl|parquet|lock|tmp)|merged\.tmp|unpacked\.tmp|merge\.lock")


@dataclass(frozen=True)
class OutputPaths:
    """Where the files of an output are."""

    output: Path

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> OutputPaths:
        """The files of the output at `path`; a ValueError if its suffix names no format."""
        output = Path(path)
        if output.suffix not in SUFFIXES:
            raise ValueError(
                f"`path` is {str(path)!r}, but a file name that ends in one of {', '.join(SUFFIXES)} is needed; the "
                f"suffix decides the format. Rename the output."
            )
        return cls(output)

    @property
    def job(self) -> Path:
        """What job the results belong to."""
        return self.output.with_name(self.output.name + ".job.json")

    @property
    def parts(self) -> Path:
        """Folder of everything that is not in the output yet."""
        return self.output.with_name(self.output.name + ".parts")

    def part_files(self, suffix: str) -> list[Path]:
        """Files in the folder of parts that are of this kind, shard by shard and in the order of their numbers."""
        if not self.parts.is_dir():
            return []
        files = [f for f in self.parts.iterdir() if f.suffix == suffix and _OUR_FILES.fullmatch(f.name)]
        return sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])

    @property
    def is_table(self) -> bool:
        """Whether the output is Parquet and not lines."""
        return self.output.suffix == ".parquet"

    def line_files(self) -> list[Path]:
        """Every file with lines in it, the output first if it has some."""
        files = [*([] if self.is_table else [self.output]), *self.part_files(".jsonl")]
        return [file for file in files if file.exists() and file.stat().st_size > 0]

    def table_files(self) -> list[Path]:
        """Every file with results as Parquet: the output, and parts of jobs from before all parts were lines."""
        there = self.is_table and self.output.exists() and self.output.stat().st_size > 0
        return [self.output] * there + self.part_files(".parquet")

    def remove_parts(self) -> None:
        """Remove what this package has put into the folder of parts, except locks, which their holders remove."""
        for suffix in (".jsonl", ".parquet", ".tmp"):
            for file in self.part_files(suffix):
                file.unlink(missing_ok=True)

    def remove_empty_folder(self) -> None:
        """Remove the folder of parts unless something is in it."""
        with suppress(OSError):
            self.parts.rmdir()


@contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which gets its name when all of it is on disk.

    Args:
        path: The name; what has it so far is replaced.
        temporary: Where it is written, on the same file system.
    """
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)  # noqa: PTH105 - the one that says what it does
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk, as `fsync` puts the content of a file there."""
    if os.name == "nt":  # Folders cannot be opened there.
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock file, and remove it afterwards. The system lets go of it when a process dies.

    Raises:
        RuntimeError: Somebody else holds it.
    """
    held = FileLock(path, thread_local=False)
    while not held.is_locked:
        # A shard that closes removes the folder if it is empty, which may be just now.
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # More than one try, as who held the file before may remove it between our opening and our locking.
            held.acquire(timeout=0.02, poll_interval=0.005)
        except FileNotFoundError:
            continue
        except Timeout:
            raise RuntimeError(
                f"{str(path)!r} is locked: the output is open or being merged, here or in another process. Close it "
                f"or wait for it, or choose another path."
            ) from None
        except OSError as failure:
            if failure.errno not in _NO_LOCKS:
                raise
            break
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        held.release()


@contextmanager
def all_locks(paths: OutputPaths) -> Iterator[None]:
    """Hold the locks of everybody who has the output open, hence fail if somebody has."""
    with ExitStack() as stack:
        stack.callback(paths.remove_empty_folder)
        for path in paths.part_files(".lock"):
            stack.enter_context(lock(path))
        yield
