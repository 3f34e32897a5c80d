"""Which request is next, and whether the caches have room for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_dsde.batch.requests import RejectedRow, Request
from hf_dsde.drafting.head import prompt_state_bytes, ring_bytes
from hf_dsde.execution.graph_runner import CAPACITY_STEP
from hf_dsde.execution.memory import cache_bytes, free_bytes
from hf_dsde.heads.head import DraftHead
from hf_dsde.integration.heads import is_head

USED_SHARE = 0.8
"""Of the free memory of a device, for caches; passes need room of their own."""


@dataclass(frozen=True)
class CacheBudget:
    """Memory that the caches of both models may take, per device, with what a head keeps of its target's states.

    Attributes:
        models: Target and draft.
        limits: Bytes for the caches on each model's device, one entry per model; None for no limit. Models on one
            device share one limit.
        granularity: Slots come in multiples of this, as runners allocate them.
        longest_draft: Tokens that are drafted at most.
    """

    models: tuple[PreTrainedModel, ...]
    limits: tuple[int | None, ...]
    granularity: int = CAPACITY_STEP
    longest_draft: int = 0

    @classmethod
    def of(cls, models: Sequence[PreTrainedModel], given: int | None, longest_draft: int = 0) -> CacheBudget:
        """Return the given bytes per device, or a share of what is free on each.

        Args:
            models: Target and draft.
            given: Bytes; None to ask the devices, of which only CUDA ones answer.
            longest_draft: Tokens that are drafted at most.
        """
        limits = []
        for model in models:
            free = free_bytes(model.device)
            limits.append(given if given is not None else None if free is None else int(free * USED_SHARE))
        return cls(tuple(models), tuple(limits), longest_draft=longest_draft)

    def slot_bytes(self, place: int) -> int:
        """Bytes of one token of one row, of all models on the device of model number `place`.

        They are those of its keys and values and, where the draft is a head, of its states in the target and the head:
        of new tokens these are not kept, but how much of a row is prompt is not known here.
        """
        device = self.models[place].device
        states = (
            prompt_state_bytes(head, self.models[0]) if (head := self._head) is not None else [0] * len(self.models)
        )
        models = zip(self.models, states, strict=True)
        return sum(cache_bytes(model, 1, 1) + added for model, added in models if model.device == device)

    def row_bytes(self, place: int) -> int:
        """Bytes of one row whatever its length, on the device of model number `place`: what a head keeps of states."""
        if (head := self._head) is None or head.device != self.models[place].device:
            return 0
        return ring_bytes(head, self.longest_draft)

    @property
    def _head(self) -> DraftHead | None:
        draft = self.models[-1]
        return draft if is_head(draft) else None

    def slots(self, rows: int) -> int | None:
        """Tokens that each of some rows may have in the caches; None for any number."""
        bounds = [
            # Each row has a slot for what is no token.
            (limit // rows - self.row_bytes(place)) // self.slot_bytes(place) - 1
            for place, limit in enumerate(self.limits)
            if limit is not None
        ]
        if not bounds:
            return None
        return max(min(bounds), 0) // self.granularity * self.granularity

    def rows(self, slots: int, most: int) -> int:
        """The largest number of rows, at most `most`, that may have `slots` tokens each; 0 if not one may."""
        for rows in range(most, 0, -1):
            room = self.slots(rows)
            if room is None or room >= slots:
                return rows
        return 0


class Admission:
    """Hands out requests in order, those first that come back.

    Args:
        source: Requests, and rows that are none.
        scratch: Slots that a row needs beside its prompt and its new tokens.
        at_hand: Whether nobody has to wait for the source, so that it may be asked for more than are wanted yet.

    Attributes:
        rejected: Rows that were none, to be taken away by whoever hands out results.
        deferred: Requests that need more slots than were allowed when their turn came.
        slots: Tokens that a row may have in the caches; None for any number.
        exhausted: Whether the source has ended and nothing has come back.
    """

    def __init__(self, source: Iterable[Request | RejectedRow], scratch: int, *, at_hand: bool = False) -> None:
        self._source: Iterator[Request | RejectedRow] = iter(source)
        self._returned: deque[Request] = deque()
        self._at_hand = at_hand
        self._ended = False
        self._scratch = scratch
        self.rejected: list[RejectedRow] = []
        self.deferred: list[Request] = []
        self.slots: int | None = None

    @property
    def exhausted(self) -> bool:
        """Whether `take` will return nothing."""
        return self._ended and not self._returned

    def need(self, request: Request) -> int:
        """Slots that a request takes in a row of the caches."""
        return len(request.prompt) + request.max_new_tokens + self._scratch

    def take(self, count: int) -> list[Request]:
        """Return the next requests that fit, `count` of them or what is left. Waits for the source."""
        taken: list[Request] = []
        while len(taken) < count:
            request = self._next()
            if request is None:
                break
            if self.slots is not None and self.need(request) > self.slots:
                self.deferred.append(request)
            else:
                taken.append(request)
        return taken

    def left(self, most: int) -> float:
        """Return how many requests are left, up to `most`; any number where it would take waiting to know."""
        while self._at_hand and len(self._returned) < most and (request := self._fetch()) is not None:
            self._returned.append(request)
        return len(self._returned) if self._at_hand or self._ended else math.inf

    def give_back(self, requests: Sequence[Request]) -> None:
        """Put requests in front, in their order."""
        self._returned.extendleft(reversed(requests))

    def _next(self) -> Request | None:
        return self._returned.popleft() if self._returned else self._fetch()

    def _fetch(self) -> Request | None:
        for item in self._source:
            if isinstance(item, RejectedRow):
                self.rejected.append(item)
            else:
                return item
        self._ended = True
        return None


class Refilling:
    """Says when free rows begin the next texts: a pass has to store the prompts, and all other rows wait for it.

    Such a pass takes about as long as a round, however few prompts it is for. Where n texts end in a round, it is best
    made for `sqrt(2 * n * rows)` at a time: by then free rows have lost by waiting what the pass takes, and the sum of
    both is least (Harris, "How many parts to make at once", 1913). They never lose more than that.

    Args:
        rows: Rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._rounds = 0
        self._ended = 0
        self._lost = 0.0  # rounds of the whole batch, since rows were refilled

    def is_due(self, free: int, ended: int) -> bool:
        """Take note of a round, and say whether rows are refilled after it.

        Args:
            free: Rows without a text.
            ended: Rows whose text ended in this round.
        """
        self._rounds += 1
        self._ended += ended
        self._lost += free / self._rows
        running_out = free == self._rows or self._lost >= 1
        due = free > 0 and (running_out or free**2 >= 2 * self._rows * self._ended / self._rounds)
        if due:
            self._lost = 0.0
        return due
