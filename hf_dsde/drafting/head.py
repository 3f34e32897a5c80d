"""A draft head as drafter: a few layers that read the target's hidden states beside its tokens.

A head reads pairs. The pair of the token at position q is that token and the state of position q - 1: the target's
hidden states there, brought to the head's width, or, while it drafts, the state that the head gave with the token
itself. The pair lies in slot q - 1 of the head's cache, and is turned by that position; so slot and position are the
same, and no slot is left out. A text's first token has no pair.

The target's states of the last positions of each row are kept in a ring, position p in place p % size. All columns of a
verified block are written there, whether they stand or not: of a rejected one, nothing is read before the position has
been verified again. What a draft has written into the head's cache holds its own states, so the first pass of the next
round feeds these pairs again, with the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.drawn_tokens import DraftVocabulary
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span, flat_places
from hf_dsde.heads.head import DraftHead
from hf_dsde.utils.transfers import upload

RECORDED_WIDTHS = (1, 2, 4, 6, 8, 16, 32, 64)
"""A head is fed one pair per row, and after a proposal as many as the target has verified."""
CHEAPER_TOKENS = 16
"""Tokens of a head's first pass that take as long as one of a draft model's: a head has few layers, and of all tokens
but the last one of a row, the last layer computes keys and values alone."""
SMALLEST_RING = 64
"""Positions whose states are kept, at least."""
PROJECTED_AT_ONCE = 4096
"""Tokens of prompts whose hidden states are joined at a time: they are copied for that."""
PROMPT_COPIES = 3
"""Times that the states of prompts lie in memory while the head stores their pairs: all, the pairs', and those with a
place for what is no token."""


class HeadDrafter(ChainDrafter):
    """Drafts with a head of EAGLE's kind (Li et al., arXiv 2401.15077, 2503.01840).

    The head's logits are over its draft vocabulary; in the target's, all other tokens have probability 0. So
    KL(target || draft) charges the target's probability outside of the draft vocabulary at the floor of
    `signals.kl_divergence`, like any token that the draft thinks impossible: where the target wants such a token, the
    draft is rejected, and a large divergence says so.

    Args:
        head: In evaluation, made for the target.
    """

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self._head = head

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Those that the head was trained on."""
        return self._head.feature_layers

    def _make_runner(self, call: DraftCall) -> ModelRunner:
        options = call.config.options
        return create_runner(
            self.model, call.sequences.rows, call.capacity, options, call.config.runner, RECORDED_WIDTHS
        )

    def start(self, call: DraftCall) -> None:
        """Make a cache and a ring of states for the batch."""
        super().start(call)
        self._longest = call.config.max_draft_length
        self._size = ring_size(self._longest)
        size = self.model.config.hidden_size
        self._ring = torch.zeros(call.sequences.rows, self._size, size, dtype=self.model.dtype, device=self._device)
        self._rows = torch.arange(call.sequences.rows, device=self._device)[:, None]
        self._proposed = 0

    def finish(self) -> None:
        """Let later calls have the cache, and let go of all states."""
        super().finish()
        self._ring = torch.empty(0)
        self._prepared = None

    def room(self) -> Tensor | None:
        """A row can draft until it has filled the head's context, if it has two tokens: the first alone is no pair."""
        lengths = self.call.sequences.lengths
        room = super().room()
        if room is None:
            room = torch.full_like(lengths, self._longest)
        return room.masked_fill(lengths < 2, 0)

    def read_states(self, spans: Sequence[Span], hidden: tuple[Tensor, ...]) -> None:
        """Store the pairs of prompts, but for the last of each, which the first draft step feeds."""
        parts = zip(*(layer.split(PROJECTED_AT_ONCE) for layer in hidden), strict=True)
        states = torch.cat([self._states(part) for part in parts])
        firsts = torch.tensor([0, *(span.count for span in spans)]).cumsum(0).tolist()
        kept, pairs, chosen = [], [], []
        for span, first in zip(spans, firsts, strict=False):
            count = min(span.count, self._size)
            kept.append((Span(span.row, span.end - count, count), first + span.count - count))
            pairs.append(Span(span.row, span.start, max(span.count - 1, 0)))
            chosen.append(torch.arange(first, first + pairs[-1].count))
            self._cached[span.row] = span.end
        rows, positions = flat_places([span for span, _ in kept])
        places = torch.cat([torch.arange(first, first + span.count) for span, first in kept])
        rows, positions, places = upload(torch.stack([rows, positions, places]), self._device)
        self._ring[rows, positions % self._size] = states[places]
        self._store_pairs(pairs, states[upload(torch.cat(chosen), self._device)])

    def accept(self, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        """Put the states of a round into the ring."""
        states = self._states(hidden)
        ends = self.call.sequences.lengths.to(self._device)[:, None]
        positions = ends + torch.arange(-1, states.shape[1] - 1, device=self._device)
        self._ring[self._rows, positions % self._size] = states

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
    ) -> CandidateBatch:
        """Draft up to `plan.width` tokens, one forward pass each."""
        candidates = super().get_candidates(sequences, plan, monitor)
        self._proposed = candidates.width
        return candidates

    def sit_out(self) -> None:
        """Draft nothing in this round, and go on reading, beside what the host does.

        A pass of a head takes less time than storing what it would miss, and running a pass of its own over the rest.
        """
        lengths, prepared = self._texts.length_counts, self._prepared
        read = 0 if prepared is None else prepared.width
        pairs = zip(lengths, self._cached, strict=True)
        self._caught_up = [length if length - cached <= read else None for length, cached in pairs]
        self._choice = self._prepared = None  # no chain begins
        self._proposed = 0

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Note how much of each row's cache holds text, and store what the ring would lose in the next round."""
        super().update_candidate_strategy(sequences, scores, num_matches, drafted)
        live, ends = self._runner.live_rows, self._storable()
        missing = max((ends[row] - self._cached[row] for row in live), default=0)
        if missing + self._longest + 2 > self._size and self._store_missing(live):
            self._prepared = None  # that pass did not see what is stored now

    def _text_block(self, width: int) -> RowBlock:
        tokens, positions = self.call.sequences.tail(width)
        positions = positions.to(self._device) - 1
        states = self._ring[self._rows, positions % self._size]
        return RowBlock(self._vocabulary.embedded(tokens), positions, states=states)

    def _drafted_block(self, tokens: Tensor, places: Tensor, before: PassOutput) -> RowBlock:
        return RowBlock(tokens, places - 1, states=before.hidden[0])

    def _held(self, length: int, matches: int, drafted: int) -> int:  # noqa: ARG002
        """What was fed with the target's states."""
        return length

    def _fits_first_pass(self, width: int) -> bool:
        """As far as proposals reach, and where a further pass costs more than padding."""
        tokens = len(self._runner.live_rows) * self._runner.padded_width(width)
        return width <= self._staged_width() or tokens <= CHEAPER_TOKENS * self._tuning.wide_pass_tokens

    def _staged_width(self) -> int:
        return self._proposed + 1

    def _storable(self) -> list[int]:
        """Tokens of each row that may be stored: all but the last, as far as the head's context reaches."""
        lengths = self.call.sequences.length_counts
        most = max(lengths) if self._context is None else self._context
        return [min(length - 1, most) for length in lengths]

    def _store_missing(self, rows: Sequence[int]) -> bool:
        first = [max(self._cached[row], 1) for row in rows]
        ends = self._storable()
        pairs = [Span(row, a - 1, ends[row] - a) for row, a in zip(rows, first, strict=True) if ends[row] > a]
        if not pairs:
            return False
        places, positions = upload(torch.stack(flat_places(pairs)), self._device)
        self._store_pairs(pairs, self._ring[places, positions % self._size])
        for span in pairs:
            self._cached[span.row] = span.end + 1
        return True

    def _store_pairs(self, pairs: Sequence[Span], states: Tensor) -> None:
        """Store pairs in their slots; `states` are those of the positions with the same number."""
        tokens = [Span(span.row, span.start + 1, span.count) for span in pairs]
        self._runner.store(pairs, self._vocabulary.embedded(self.call.sequences.tokens_at(tokens)), states)

    def _states(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states, brought to the head's width, `[..., H]`, of its dtype."""
        states: Tensor = self._head.project([layer.to(self._device) for layer in hidden])
        return states.to(self._ring.dtype)

    def _make_vocabulary(self, size: int, last_id: int) -> DraftVocabulary:
        return DraftVocabulary(size, last_id, size, self._head.draft_ids)


def ring_size(longest: int) -> int:
    """Return how many positions' states are kept of each row, where at most `longest` tokens are drafted."""
    # What a round reads and what the target's pass after it writes must be different places.
    return max(SMALLEST_RING, 2 * (longest + 1))


def ring_bytes(head: DraftHead, longest: int) -> int:
    """Return the bytes of the states that are kept of each row, where at most `longest` tokens are drafted."""
    return ring_size(longest) * head.config.hidden_size * head.dtype.itemsize


def prompt_state_bytes(head: DraftHead, target: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes that a prompt's token takes while prompts are read: the target's states, and the head's."""
    features = len(head.feature_layers) * target.config.get_text_config(decoder=True).hidden_size
    return features * target.dtype.itemsize, PROMPT_COPIES * head.config.hidden_size * head.dtype.itemsize
