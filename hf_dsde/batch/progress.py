"""One bar for a job: rows done, tokens per second, acceptance and draft length. Quiet where nobody watches."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager

from tqdm.auto import tqdm
from tqdm.std import tqdm as terminal_tqdm

from hf_dsde.batch.job_statistics import JobStatistics


class JobProgress(AbstractContextManager["JobProgress"]):
    """Shows how far a job is, in a terminal or a notebook.

    Args:
        statistics: What the job counts.
        total: Rows of the job; None if that is not known.
        done: Rows that were done before.
        shown: Whether to show the bar; None shows it where somebody can see it move.
    """

    def __init__(self, statistics: JobStatistics, total: int | None, done: int, shown: bool | None) -> None:
        self._statistics = statistics
        self._started = time.perf_counter()
        if shown is None:
            shown = sys.stderr.isatty() or not issubclass(tqdm, terminal_tqdm)
        self._bar = tqdm(total=total, initial=done, unit="row", disable=not shown, dynamic_ncols=True)

    def advance(self, rows: int) -> None:
        """Note that rows were finished."""
        if self._bar.disable:
            return
        statistics = self._statistics
        seconds = time.perf_counter() - self._started
        self._bar.set_postfix(
            {
                "tokens/s": f"{statistics.new_tokens / seconds:.0f}",
                "accepted": f"{statistics.acceptance_rate:.0%}" if statistics.drafted else "-",
                "draft": f"{statistics.mean_draft_length:.1f}" if statistics.row_rounds else "-",
            },
            refresh=False,
        )
        self._bar.update(rows)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
