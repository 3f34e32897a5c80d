"""A smaller language model as drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dsde.decoding.drafter import DraftCall
from hf_dsde.drafting.chain import UNKNOWN_TOKEN_LOGIT, ChainDrafter
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span

RECORDED_WIDTHS = (1, 2, 8, 32, 64)
"""A draft is fed one token per row, two after a proposal, and more only when rounds without drafts came before it: any
number, which must not be another pass to record."""


class ModelDrafter(ChainDrafter):
    """Drafts with a causal language model over the target's vocabulary.

    Ids that only the draft has are never proposed; ids that only the target has are proposed when a logits processor
    leaves nothing else, and fed as the draft's last id.

    Args:
        model: The draft.
    """

    def _make_runner(self, call: DraftCall) -> ModelRunner:
        return self._runner_of(call, call.capacity)

    def _runner_of(self, call: DraftCall, capacity: int) -> ModelRunner:
        options = call.config.options
        return create_runner(self.model, call.sequences.rows, capacity, options, call.config.runner, RECORDED_WIDTHS)

    def prefill(self, rows: Sequence[int]) -> bool:
        """Store what rows hold that have drafted nothing yet, but for their last tokens."""
        stored = self._store_missing([row for row in rows if not self._cached[row]])
        if stored:
            self._prepared = None  # that pass did not see what is stored now
        return stored

    def _text_block(self, width: int) -> RowBlock:
        tokens, positions = self._texts.tail(width)
        return RowBlock(self._clamp_to_vocabulary(tokens), positions)

    def _drafted_block(self, tokens: Tensor, places: Tensor, before: PassOutput) -> RowBlock:  # noqa: ARG002
        return RowBlock(tokens, places)

    def _held(self, length: int, matches: int, drafted: int) -> int:
        """What was caught up, and the draft tokens that were accepted; the last one was proposed but never fed."""
        return length + min(matches, max(drafted - 1, 0))

    def _fits_first_pass(self, width: int) -> bool:
        tokens = len(self._runner.live_rows) * self._runner.padded_width(width)
        return width <= RECORDED_WIDTHS[-1] and tokens <= self._tuning.wide_pass_tokens

    def _staged_width(self) -> int:
        return 2

    def _store_missing(self, rows: Sequence[int]) -> bool:
        lengths = self._texts.length_counts
        spans = []
        for row in rows:
            end = lengths[row] - 1
            end = end if self._context is None else min(end, self._context)
            spans.append(Span(row, self._cached[row], end - self._cached[row]))
        spans = [span for span in spans if span.count > 0]
        if not spans:
            return False
        self._runner.store(spans, self._clamp_to_vocabulary(self._texts.tokens_at(spans)))
        for span in spans:
            self._cached[span.row] = span.end
        return True

    def _align(self, logits: Tensor) -> Tensor:
        """Cut ids that only the draft has as well."""
        missing = self._vocabulary_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=UNKNOWN_TOKEN_LOGIT)
        return logits[..., : self._vocabulary_size]
