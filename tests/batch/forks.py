"""Work in forks of a process. Imports no torch, as one of the scripts that need this does without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def in_fork(work: Callable[[], object]) -> int:
    """Start some work in a fork of this process; the fork ends with it."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a fork must not return into the parent's code
            sys.stderr.write(f"{error!r}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return process


def exit_code(process: int) -> int:
    """Wait for a fork; what it ended with, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
