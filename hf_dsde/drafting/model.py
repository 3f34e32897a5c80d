"""A smaller language model as drafter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_dsde.decoding.drafter import DraftCall
from hf_dsde.decoding.sequences import Texts
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.shown_text import shown_text
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
    leaves nothing else, and fed as the draft's last id. Of prompts with images, a draft that takes the same inputs
    reads what the target reads, and any other the text alone.

    Args:
        model: The draft.
    """

    def _make_runner(self, call: DraftCall) -> ModelRunner:
        return self._runner_of(call, call.capacity)

    def _runner_of(self, call: DraftCall, capacity: int) -> ModelRunner:
        options = call.config.options
        return create_runner(
            self.model,
            call.sequences.rows,
            capacity,
            options,
            call.config.runner,
            RECORDED_WIDTHS,
            encoded=call.encoded,
        )

    def _read_text(self, call: DraftCall) -> Texts:
        """Text alone, unless the draft looks at the same images as the target."""
        inputs = call.sequences.inputs
        self._inputs = None if inputs is None else inputs.shown_to(self.model)
        return shown_text(call.sequences) if self._inputs is None else call.sequences

    def read_texts(self, rows: Sequence[int]) -> None:
        """Read prompts with images at once, while all rows are in: they are read together, and only once."""
        if self._inputs is None:
            return
        self._runner.store_prompts(self._inputs)
        for row in rows:
            self._cached[row] = self.call.sequences.prompt_lengths[row] - 1

    def prefill(self, rows: Sequence[int]) -> bool:
        """Store what rows hold that have drafted nothing yet, but for their last tokens."""
        stored = self._store_missing([row for row in rows if not self._cached[row]])
        if stored:
            self._prepared = None  # that pass did not see what is stored now
        return stored

    def _text_block(self, width: int) -> RowBlock:
        tokens, positions = self._texts.tail(width)
        if self._inputs is not None:  # of these prompts, only the last token is text alone
            last = self._texts.lengths - self.call.sequences.generated - 1
            positions = positions.masked_fill(positions < last[:, None], -1)
        return RowBlock(self._vocabulary.embedded(tokens), positions)

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
        self._runner.store(spans, self._vocabulary.embedded(self._texts.tokens_at(spans)))
        for span in spans:
            self._cached[span.row] = span.end
        return True
