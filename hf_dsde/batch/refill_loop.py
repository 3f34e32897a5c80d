"""The decoding loop over more texts than it has rows: a row that has finished is handed the next prompt at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_dsde.batch.admission import Admission, Refilling
from hf_dsde.batch.job_statistics import RowCounter
from hf_dsde.batch.requests import Request
from hf_dsde.batch.results import END_TOKEN, LENGTH, STOP, RowStatistics
from hf_dsde.batch.row_processors import RowProcessors
from hf_dsde.batch.row_stopping import RowStopping
from hf_dsde.decoding.loop import SpeculativeLoop
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.execution.spans import Span
from hf_dsde.execution.torch_modes import lasting


@dataclass(frozen=True)
class FinishedText:
    """A text that has ended.

    Attributes:
        request: What was asked for.
        tokens: Generated tokens, the end token included.
        finish_reason: Why it ended, one of `hf_dsde.batch.results.FINISH_REASONS`.
        statistics: What it cost.
    """

    request: Request
    tokens: list[int]
    finish_reason: str
    statistics: RowStatistics


@dataclass(frozen=True)
class RowSetup:
    """What a row needs when it begins a text, as functions of the request.

    Attributes:
        criteria: Returns stopping criteria beside end tokens and length.
        processors: Returns logits processors; None when one set serves all rows.
    """

    criteria: Callable[[Request], StoppingCriteriaList]
    processors: Callable[[Request], LogitsProcessorList] | None


class RefillLoop(SpeculativeLoop):
    """Generates texts until there are no more requests.

    Args:
        requests: The texts that the rows begin with, one each.
        admission: Where further ones come from.
        setup: What a row needs for another text.
        stopping: Ends rows one by one.
        statistics: Counts rows one by one.
        **parts: As for any loop; `process` is a `RowProcessors` if rows have processors of their own.
    """

    _stopping: RowStopping
    _statistics: RowCounter

    def __init__(
        self, *, requests: Sequence[Request], admission: Admission, setup: RowSetup, stopping: RowStopping, **parts: Any
    ) -> None:
        super().__init__(stopping=stopping, **parts)
        self._lengths.refilled = True
        self._under_way: list[Request | None] = list(requests)
        self._admission = admission
        self._sequences.texts_left = admission.left(len(requests))
        self._setup = setup
        self._ready: list[FinishedText] = []
        self._refilling = Refilling(len(requests))

    def texts(self) -> Iterator[FinishedText]:
        """Yield texts as they finish. Between two of them the models are as they were before.

        Whoever takes them may be in another mode of torch each time.
        """
        with lasting(), self._target.active(), self._drafter.active():
            plan = self._begin()
        while any(plan.active_rows):
            with lasting(), self._target.active(), self._drafter.active():
                while any(plan.active_rows) and not self._ready:
                    plan = self._round(plan)
            yield from self.take_ready()
        self._finish()

    def take_ready(self) -> list[FinishedText]:
        """Return finished texts that nobody has got yet."""
        ready, self._ready = self._ready, []
        return ready

    def unfinished(self) -> list[Request]:
        """Return the requests whose texts are under way, in the order of the input."""
        return sorted((r for r in self._under_way if r is not None), key=lambda request: request.index)

    def _next_plan(self, previous: RoundPlan | None, length_counts: Sequence[int]) -> RoundPlan:
        """As in any loop, after rows that have ended were handed the next prompts."""
        ended = [r for r, text in enumerate(self._under_way) if text and self._stopping.ends[r] is not None]
        if ended:
            self._log.flush()
            self._end_texts(ended)
        free = [row for row, text in enumerate(self._under_way) if text is None]
        if self._refilling.is_due(len(free), len(ended)) and self._admit(free):
            length_counts = self._lengths.first([text is not None for text in self._under_way])
        return super()._next_plan(previous, length_counts)

    def _drop_finished_rows(self, going_on: Sequence[bool]) -> None:
        """Rows leave the passes only when nothing is left that could take their place."""
        if self._admission.exhausted:
            super()._drop_finished_rows(going_on)

    def _end_texts(self, rows: Sequence[int]) -> None:
        """Make finished texts of rows that have ended."""
        sequences = self._sequences
        begin = sequences.prompt_width
        for row in rows:
            request, length = self._under_way[row], self._stopping.ends[row]
            assert request is not None
            assert length is not None
            statistics = self._statistics.end(row, len(request.prompt), length)
            text: list[int] = sequences.host_tokens[row, begin : begin + length].tolist()
            if row in self._stopping.stopped:
                reason = STOP
            else:
                reason = END_TOKEN if text[-1] in self._stopping.end_tokens else LENGTH
            self._ready.append(FinishedText(request, text, reason, statistics))
            self._under_way[row] = None

    def _admit(self, free: Sequence[int]) -> bool:
        """Let free rows begin the next texts; return whether there were any."""
        requests = self._admission.take(len(free))
        self._sequences.texts_left = self._admission.left(self._sequences.rows)
        if not requests:
            return False
        started = time.perf_counter()
        rows = list(free[: len(requests)])
        prompts = [list(request.prompt) for request in requests]
        for row, request in zip(rows, requests, strict=True):
            self._under_way[row] = request
            self._statistics.begin(row)
            self._stopping.begin(row, self._setup.criteria(request))
            if isinstance(self._process, RowProcessors) and self._setup.processors is not None:
                self._process.begin(row, self._setup.processors(request))
        self._ahead.forget()
        self._drafter.begin_texts(rows)
        self._sequences.replace_rows(rows, prompts, [request.max_new_tokens for request in requests])
        spans = [Span(row, 0, len(prompt) - 1) for row, prompt in zip(rows, prompts, strict=True)]
        self._prefill.store(spans)
        taken = set(rows)
        places = [-1 if row in taken else row for row in range(self._sequences.rows)]
        self._lengths.select_rows(places)
        self._clock.restart()
        self._statistics.record_prefill(time.perf_counter() - started)
        return True
