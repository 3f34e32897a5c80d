"""A draft model over a ragged cache of its own: what the cache holds of the rows' texts, and feeding what is missing.

The cache is not rolled back and not kept in step with the target's: the first forward pass of a round feeds the last
tokens of every row, as many as the row that misses most. Feeding a token again writes the same key and
value into the same slot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.decoding.drafter import DraftCall, Drafter
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch, Texts
from hf_dsde.drafting.proposal import Prepared
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_seconds import pass_seconds
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.wrappers import may_depend_on_rows
from hf_dsde.utils.transfers import upload
from hf_dsde.utils.tuning import tuning_of


class CachedModel(Drafter):
    """A drafter with a model, whose passes go on where its cache ends.

    Args:
        model: The draft.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def _make_runner(self, call: DraftCall) -> ModelRunner:
        """Return what runs the draft's passes in a call."""

    def _read_text(self, call: DraftCall) -> Texts:
        """Return what the draft reads of the batch's text; positions are those in it."""
        return call.sequences

    @abstractmethod
    def _text_block(self, width: int) -> RowBlock:
        """Return the last `width` tokens of each row's text as the draft is fed them, right-aligned."""

    @abstractmethod
    def _store_missing(self, rows: Sequence[int]) -> bool:
        """Store all that rows miss but their last tokens, which the next step feeds; return whether there was any."""

    @abstractmethod
    def _held(self, length: int, matches: int, drafted: int) -> int:
        """Return how many tokens of a row's text the cache holds after a round.

        Args:
            length: Tokens that it had before.
            matches: Draft tokens that were accepted.
            drafted: Tokens that were drafted.
        """

    @abstractmethod
    def _fits_first_pass(self, width: int) -> bool:
        """Whether catching up can share the first draft pass."""

    @abstractmethod
    def _staged_width(self) -> int:
        """Return how many tokens of a row can be missing after a proposal, if none were before."""

    def start(self, call: DraftCall) -> None:
        """Make a cache for the batch, or take over an earlier call's."""
        super().start(call)
        self._runner = self._make_runner(call)
        self._runner.cache.limit = call.cache_limit
        self._device = self._runner.device
        self._tuning = tuning_of(self._device)
        self._context = compat.context_length(self.model)
        self._texts = self._read_text(call)
        self._cached = [0] * call.sequences.rows
        self._caught_up: list[int | None] = []
        self._prepared: Prepared | None = None

    @property
    def depends_on_rows(self) -> bool:
        """Whether hooks in the draft may hold something for each row."""
        return may_depend_on_rows(self.model)

    @property
    def cost_owner(self) -> object:
        """The draft."""
        return self.model

    @property
    def conditions(self) -> Hashable:
        """How the draft's passes are run."""
        return self._runner.conditions

    @property
    def cache(self) -> RaggedCache:
        """The draft's keys and values."""
        return self._runner.cache

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording passes of the draft has cost so far."""
        return self._runner.recording_costs

    def active(self) -> AbstractContextManager[None]:
        """Hold the draft's attention setting."""
        return self._runner.active()

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget what the cache holds of these rows, and the pass that was begun for their old texts."""
        self._prepared = None
        for row in rows:
            self._cached[row] = 0

    def finish(self) -> None:
        """Let later calls have the cache."""
        self._runner.finish()

    def room(self) -> Tensor | None:
        """A row can draft until it has filled the draft's context."""
        return None if self._context is None else (self._context - self._texts.lengths).clamp_min(0)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave all other rows out of the draft's passes."""
        self._runner.keep_rows(rows)

    def step_seconds(self, longest: int) -> float:
        """Measure and return the seconds of one forward pass of one token per row."""
        return pass_seconds(self._runner, 1, longest)

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        num_matches: Sequence[int],
        drafted: Sequence[int],
    ) -> None:
        """Note how much of each row's cache holds text."""
        for row, length in enumerate(self._caught_up):
            if length is not None:
                self._cached[row] = self._held(length, num_matches[row], drafted[row])
        self._caught_up = []

    def _catch_up(self, plan: RoundPlan) -> Prepared:
        """Feed what each row misses up to its last token; return what the pass gave of that, or what had begun."""
        lengths = self._texts.length_counts
        missing = [length - cached for length, cached in zip(lengths, self._cached, strict=True)]
        fits = [
            drafts > 0
            or (active and gap <= self._tuning.long_gap and (self._context is None or length <= self._context))
            for drafts, active, gap, length in zip(plan.length_counts, plan.active_rows, missing, lengths, strict=True)
        ]
        self._caught_up = [length if fit else None for length, fit in zip(lengths, fits, strict=True)]
        prepared, self._prepared = self._prepared, None
        rows = [row for row, fit in enumerate(fits) if fit]
        if prepared is not None and max(missing[row] for row in rows) <= prepared.width:
            return prepared
        if not self._fits_first_pass(max(missing[row] for row in rows)):
            self._store_missing([row for row in rows if missing[row] > self._tuning.long_gap])
        width = max(lengths[row] - self._cached[row] for row in rows)
        block = self._text_block(width)
        if not all(fits):
            block = only_rows(block, upload(fits, block.positions.device))
        return Prepared(self._runner.forward(block, max(lengths[row] for row in rows), keep=1), width)


def only_rows(block: RowBlock, rows: Tensor) -> RowBlock:
    """Return a block in which other rows than these, `[rows]`, bool, have no tokens."""
    return replace(block, positions=block.positions.masked_fill(~rows[:, None], -1))
