"""A language model of another tokenizer as drafter: all rows at once, by the tokens that both models have.

The draft's distribution is restricted to the shared tokens and normalised there, by `softmax` over logits in which all
others have none; that is the q that drafts are drawn from and judged by, over the target's ids. So sampled text keeps
the target's law, whatever the draft reads.

What it reads are texts of its own, in its own ids, which the host keeps: a row's prompt as the draft's tokenizer cuts
it, then the target's tokens one by one, some of which are several of the draft's. An accepted draft token is the very
token that was fed, so the cache stays right; of anything else the first pass of the next round feeds what is new.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.costs import BatchCosts
from hf_dsde.decoding.drafter import DraftCall, StagedStep
from hf_dsde.decoding.sequences import SequenceBatch, Texts
from hf_dsde.drafting.drawn_tokens import DraftVocabulary
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.drafting.translation import Translation
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.spans import Span, flat_places
from hf_dsde.utils.transfers import upload

ROOM_AT_ONCE = 256
"""Columns by which the texts' buffer grows."""


class DraftTexts:
    """Texts of rows in a draft's ids, of which the host knows all and the device gets what is new.

    Args:
        rows: How many.
        device: Of the copy that passes read.

    Attributes:
        length_counts: Tokens of each row.
        lengths: The same on the device, `[rows]`, int64.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.length_counts = [0] * rows
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._tokens = torch.zeros(rows, ROOM_AT_ONCE, dtype=torch.long, device=device)

    def append(self, texts: dict[int, list[int]]) -> None:
        """Add tokens to the ends of rows, and let the device know."""
        spans = [Span(row, self.length_counts[row], len(tokens)) for row, tokens in texts.items() if tokens]
        for span in spans:
            self.length_counts[span.row] = span.end
        missing = max(self.length_counts) - self._tokens.shape[1]
        if missing > 0:
            more = -(-missing // ROOM_AT_ONCE) * ROOM_AT_ONCE
            self._tokens = torch.nn.functional.pad(self._tokens, (0, more))
        new = torch.tensor([token for span in spans for token in texts[span.row]], dtype=torch.long)
        flat = upload(torch.cat([*flat_places(spans), new, torch.tensor(self.length_counts)]), self.lengths.device)
        rows, positions, tokens, self.lengths = flat.split([len(new), len(new), len(new), len(self.length_counts)])
        self._tokens.index_put_((rows, positions), tokens)

    def clear(self, rows: Sequence[int]) -> None:
        """Forget the texts of rows; the device hears of it with what comes next."""
        for row in rows:
            self.length_counts[row] = 0

    def tail(self, width: int) -> tuple[Tensor, Tensor]:
        """Return each row's last tokens and their positions, as `SequenceBatch.tail` does."""
        positions = self.lengths[:, None] + torch.arange(-width, 0, device=self.lengths.device)
        return self._tokens.gather(1, positions.clamp_min(0)), positions

    def tokens_at(self, spans: Sequence[Span]) -> Tensor:
        """Return the tokens of some spans, one span after another, `[total_count(spans)]`, int64."""
        rows, positions = upload(torch.stack(flat_places(spans)), self.lengths.device)
        return self._tokens[rows, positions]


class TranslatedDrafter(ModelDrafter):
    """Drafts with a causal language model of another tokenizer, out of the tokens that target and draft share.

    Policies and listeners see the restricted distribution, over the target's ids. So KL(target || draft) charges what
    the target wants outside of the shared tokens at the floor of `signals.kl_divergence`.

    Args:
        model: The draft.
        translation: Between the tokenizers.
    """

    def __init__(self, model: PreTrainedModel, translation: Translation) -> None:
        super().__init__(model)
        self._translation = translation

    @property
    def settings(self) -> Mapping[str, Any]:
        """Which tokens are shared; a job knows the model itself."""
        return {"shared_tokens": self._translation.fingerprint}

    def start(self, call: DraftCall) -> None:
        """Read the prompts, and make a cache for the batch, or take over an earlier call's."""
        rows = range(call.sequences.rows)
        self._own_texts = DraftTexts(len(rows), self.model.device)
        self._read = [0] * len(rows)  # tokens of the target's text that the draft's has
        self._follow(call.sequences, rows)
        super().start(call)

    def _make_vocabulary(self, size: int, last_id: int) -> DraftVocabulary:
        self._tables = tables = self._translation.tables(self._device)
        return DraftVocabulary(size, last_id, tables.shared, tables.target_ids, tables.to_draft)

    def _read_text(self, call: DraftCall) -> Texts:  # noqa: ARG002 - as the host has translated it
        self._inputs = None
        return self._own_texts

    def _make_runner(self, call: DraftCall) -> ModelRunner:
        """As for any draft, with room for texts of more tokens, as far as caches may be ahead of need."""
        ours, theirs = sum(call.sequences.length_counts), sum(self._own_texts.length_counts)
        capacity = call.capacity * max(ours, theirs) // ours
        limit = capacity if call.cache_limit is None else max(call.cache_limit, call.capacity)
        return self._runner_of(call, min(capacity, limit))

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:  # noqa: ARG002
        """Take what the policy wants, as far as the draft's context has room for its own text, and there is one."""
        rows = [row for row, n in enumerate(wanted) if n]
        self._follow(self.call.sequences, rows)
        lengths = self._own_texts.length_counts
        for row in rows:  # what the draft cannot write is no text of its own: then the token before is fed again
            self._cached[row] = min(self._cached[row], max(lengths[row] - 1, 0))
        context = self._context or sys.maxsize
        return [min(n, max(context - length, 0)) if length else 0 for n, length in zip(wanted, lengths, strict=True)]

    def room(self) -> Tensor | None:
        """No limit that the target's text could tell: `allot` knows the draft's."""
        return None

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:  # noqa: ARG002
        """Nothing: what the draft reads next is known when the host has the round's tokens."""
        self._staged = self._prepared = None
        return None

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget the texts of these rows."""
        super().begin_texts(rows)
        self._own_texts.clear(rows)
        for row in rows:
            self._read[row] = 0

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Note how much of each row's cache holds text: a token that only the target has was fed as another."""
        held = []
        for row, matches in enumerate(num_matches):
            tokens = sequences.host_text(row, first=self._read[row])[:matches] if matches else []
            known = [self._translation.same(token) is not None for token in tokens]
            held.append(known.index(False) if False in known else matches)
        super().update_candidate_strategy(sequences, scores, held, drafted)

    def _of_target(self, tokens: Tensor) -> Tensor:
        return self._tables.to_target[tokens]

    def _follow(self, sequences: SequenceBatch, rows: Iterable[int]) -> None:
        """Add what is new in the target's texts of some rows to the draft's."""
        new: dict[int, list[int]] = {}
        for row in rows:
            known, prompt = self._read[row], sequences.prompt_lengths[row]
            tokens = sequences.host_text(row, first=known)
            if tokens:
                self._read[row] = known + len(tokens)
                begun = [] if known else self._translation.of_prompt(tokens[:prompt])
                new[row] = begun + self._translation.of_tokens(tokens if known else tokens[prompt:])
        if new:
            self._own_texts.append(new)
