"""Runs requests through a pair of models, refilling rows, within a budget of memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hf_dsde.batch.admission import Admission, CacheBudget
from hf_dsde.batch.job_statistics import JobStatistics, RowCounter
from hf_dsde.batch.preparation import Preparation
from hf_dsde.batch.refill_loop import FinishedText, RefillLoop, RowSetup
from hf_dsde.batch.requests import RejectedRow, Request
from hf_dsde.batch.row_processors import RowProcessors
from hf_dsde.batch.row_stopping import RowStopping
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.create_runner import release_memory
from hf_dsde.execution.torch_modes import lasting
from hf_dsde.integration.drafters import model_drafter, model_of
from hf_dsde.integration.generation import Speculation
from hf_dsde.integration.loop_builder import build_loop

HEADROOM = 1.5
"""Caches begin with this many times the slots that the first requests need: later ones may be longer."""


class BatchSizeWarning(UserWarning):
    """The batch was made smaller, since memory ran out."""


@dataclass
class BatchEngine:
    """Generates the texts of requests.

    Attributes:
        model: The target.
        draft: The draft, or a drafter.
        speculation: Policy and configuration.
        preparation: Everything else about generation.
        batch_size: Rows of the batch. It is halved when memory runs out, and stays so.
        budget: Memory for the caches.
        refill: Whether a row that has finished begins the next text at once, or waits for the whole batch.
        at_hand: Whether nobody has to wait for the requests.
        statistics: What was done so far.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | Drafter
    speculation: Speculation
    preparation: Preparation
    batch_size: int
    budget: CacheBudget
    refill: bool = True
    at_hand: bool = False
    statistics: JobStatistics = field(default_factory=JobStatistics)

    def texts(self, source: Iterable[Request | RejectedRow]) -> Iterator[FinishedText | RejectedRow]:
        """Yield a finished text, or why there is none, for every row of the source, as they finish."""
        admission = Admission(source, self.speculation.config.max_draft_length, at_hand=self.at_hand)
        while True:
            admission.slots = self.budget.slots(self.batch_size)
            yield from self._batch(admission, admission.take(self.batch_size))
            yield from self._take_rejected(admission)
            if admission.exhausted:
                if not admission.deferred:
                    return
                yield from self._deferred(admission)

    def _deferred(self, admission: Admission) -> Iterator[FinishedText | RejectedRow]:
        """Generate texts that need more slots than rows of a whole batch have, in smaller batches."""
        waiting, admission.deferred = sorted(admission.deferred, key=admission.need), []
        while waiting:
            rows = self.budget.rows(admission.need(waiting[0]), self.batch_size)
            if rows == 0:
                for request in waiting:
                    yield self._reject(request.index, self._too_long(admission, request))
                return
            admission.slots = self.budget.slots(rows)
            admission.give_back(waiting)
            waiting = []
            yield from self._batch(admission, admission.take(rows))
            waiting, admission.deferred = admission.deferred, []

    def _too_long(self, admission: Admission, request: Request) -> str:
        return (
            f"a prompt of {len(request.prompt)} tokens with {request.max_new_tokens} new ones takes "
            f"{admission.need(request)} slots of the caches, and one row can have {self.budget.slots(1)}. Lower "
            "max_new_tokens, or raise the cache budget."
        )

    def _batch(self, admission: Admission, requests: Sequence[Request]) -> Iterator[FinishedText | RejectedRow]:
        """Generate texts that begin in rows of their own, and those that follow in the same rows."""
        if not requests:
            return
        loop = None
        self.statistics.batch_sizes.append(len(requests))
        try:
            with lasting():
                loop = self._loop(admission, requests)
            for text in loop.texts():
                self.statistics.add_text(text.statistics)
                yield text
                yield from self._take_rejected(admission)
        except torch.OutOfMemoryError as failure:
            ready = [] if loop is None else loop.take_ready()
            unfinished = list(requests) if loop is None else loop.unfinished()
            reason = str(failure).partition("\n")[0]
        else:
            return
        # Outside of the handler, since the exception holds on to every frame of the loop, and so to its tensors.
        loop = None
        for text in ready:
            self.statistics.add_text(text.statistics)
            yield text
        yield from self._make_smaller(admission, unfinished, len(requests), reason)

    def _make_smaller(
        self, admission: Admission, unfinished: Sequence[Request], rows: int, reason: str
    ) -> Iterator[RejectedRow]:
        """Halve the batch after memory ran out; texts that were under way begin again."""
        for model in models_of(self.model, self.draft):
            release_memory(model)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if rows == 1:
            for request in unfinished:
                yield self._reject(request.index, f"memory ran out with one row in the batch: {reason}")
            return
        self.batch_size = max(rows // 2, 1)
        warnings.warn(
            f"Memory ran out with {rows} rows, so the batch has {self.batch_size} from now on; {len(unfinished)} texts "
            f"begin again. A batch_size of {self.batch_size} avoids this. ({reason})",
            BatchSizeWarning,
            stacklevel=2,
        )
        admission.give_back(unfinished)

    def _take_rejected(self, admission: Admission) -> list[RejectedRow]:
        rejected, admission.rejected = admission.rejected, []
        self.statistics.failed += len(rejected)
        return rejected

    def _reject(self, index: int, error: str) -> RejectedRow:
        self.statistics.failed += 1
        return RejectedRow(index, error)

    def _loop(self, admission: Admission, requests: Sequence[Request]) -> RefillLoop:
        config = self.speculation.config
        config = config.replace(options=config.options.replace(cost_probe=False))
        sequences = _sequences(requests, config.max_draft_length + 1, self.model.device)
        needed = max(map(admission.need, requests))
        capacity = int(needed * HEADROOM) if self.refill else needed
        if admission.slots is not None:
            capacity = min(capacity, max(admission.slots, needed))
        preparation = self.preparation
        if preparation.processors is None:
            process = RowProcessors([preparation.processors_for(request) for request in requests])
        else:
            process = RowProcessors([preparation.processors])
        return build_loop(
            RefillLoop,
            self.model,
            self.draft if isinstance(self.draft, Drafter) else model_drafter(self.draft),
            sequences,
            capacity=capacity,
            cache_limit=admission.slots,
            more_texts=self.refill and not admission.exhausted,
            requests=requests,
            admission=admission if self.refill else Admission([], 0, at_hand=True),
            setup=RowSetup(
                preparation.criteria_for, preparation.processors_for if preparation.processors is None else None
            ),
            policy=self.speculation.policy,
            listeners=self.speculation.listeners,
            process=process,
            stopping=RowStopping(preparation.end_tokens, sequences, list(map(preparation.criteria_for, requests))),
            statistics=RowCounter(len(requests), self.statistics),
            do_sample=preparation.do_sample,
            config=config,
        )


def models_of(target: PreTrainedModel, draft: PreTrainedModel | Drafter) -> list[PreTrainedModel]:
    """The models that keep caches: there is one only where a drafter looks at texts alone."""
    drafting = model_of(draft)
    return [target] if drafting is None else [target, drafting]


def _sequences(requests: Sequence[Request], scratch: int, device: torch.device) -> SequenceBatch:
    """Put prompts into a batch, padded in front."""
    width = max(len(request.prompt) for request in requests)
    padding = [width - len(request.prompt) for request in requests]
    tokens = [[0] * empty + list(request.prompt) for empty, request in zip(padding, requests, strict=True)]
    mask = [[0] * empty + [1] * (width - empty) for empty in padding]
    sequences = SequenceBatch(
        torch.tensor(tokens, device=device),
        torch.tensor(mask, device=device),
        max_new_tokens=max(request.max_new_tokens for request in requests),
        scratch=scratch,
        pad_token=None,
    )
    sequences.limits = torch.tensor([request.max_new_tokens for request in requests], device=device)
    return sequences
