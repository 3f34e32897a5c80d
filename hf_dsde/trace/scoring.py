"""Both models over finished texts, a chunk of positions at a time.

Neither model generates here: the texts are given, and each position's logits follow from the tokens before it. Prompts
are stored in a ragged cache as in decoding, and the answers run through it in blocks, so that no more than a block of
logits exists at once.

A head is fed the target's states all along, as in the first step of a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span
from hf_dsde.heads.head import DraftHead
from hf_dsde.integration.heads import is_head
from hf_dsde.signals import over_vocabulary

POSITIONS_AT_ONCE = 128
"""Positions, over all rows, whose logits exist at the same time: 25 MB of them per model at 49,152 tokens."""


@dataclass(frozen=True)
class Text:
    """A prompt and its answer.

    Attributes:
        tokens: Both, without padding, shape `[length]`, int64.
        prompt_length: Tokens of the prompt, at least 1.
    """

    tokens: Tensor
    prompt_length: int

    @property
    def answer_length(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class ScoredChunk:
    """Some positions of some answers.

    Attributes:
        row: Which text, shape `[positions]`, int64.
        position: Index of the token within the answer, shape `[positions]`, int64.
        tokens: The token that stands there, shape `[positions]`, int64.
        target_logits: The target's raw logits, shape `[positions, vocabulary]`, float32.
        draft_logits: The draft's, over the target's vocabulary.
    """

    row: Tensor
    position: Tensor
    tokens: Tensor
    target_logits: Tensor
    draft_logits: Tensor


def score_answers(
    target: PreTrainedModel, draft: PreTrainedModel, texts: Sequence[Text], options: RuntimeOptions
) -> Iterator[ScoredChunk]:
    """Run both models over the texts; every position of every answer comes exactly once.

    Args:
        target: The target.
        draft: The draft, over the same vocabulary but for padding, or a head of the target. A head knows nothing of
            what comes after a prompt of one token, and gets a logit of 0 for all tokens there.
        texts: At least one.
        options: How passes are run.

    Yields:
        Chunks on the target's device, ordered by position within a text; texts advance together.
    """
    options = options.replace(packed_weights=False)  # texts take a few wide passes
    device = target.device
    prompts = torch.tensor([text.prompt_length for text in texts], device=device)
    lengths = torch.tensor([len(text.tokens) for text in texts], device=device)
    tokens = pad_sequence([text.tokens.to(device) for text in texts], batch_first=True)
    longest = max(text.answer_length for text in texts)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    layers = draft.feature_layers if is_head(draft) else ()
    of_target = _Scorer(target, tokens, prompts, vocabulary, options, layers)
    of_draft: _Scorer | _HeadScorer
    if is_head(draft):
        of_draft = _HeadScorer(draft, tokens, prompts, vocabulary, options, of_target.prompt_states)
    else:
        of_draft = _Scorer(draft, tokens, prompts, vocabulary, options)
    width = max(1, POSITIONS_AT_ONCE // len(texts))
    for first in range(0, longest, width):
        index = torch.arange(first, min(first + width, longest), device=device)
        # The token at a place is decided by the logits after the one before it.
        slots = prompts[:, None] - 1 + index
        real = slots + 1 < lengths[:, None]
        row, column = real.nonzero(as_tuple=True)
        slots = slots.masked_fill(~real, -1)
        scored = of_target.feed(slots)
        target_logits = scored.logits[row, column]
        draft_logits = of_draft.feed(slots, scored.hidden).logits[row, column]
        decided = tokens[row, slots[row, column] + 1]
        yield ScoredChunk(row, index[column], decided, target_logits, draft_logits)


class _Scorer:
    """A model with the prompts in its cache.

    Attributes:
        prompt_states: The states of all prompts but for their last tokens, one prompt after another, `[tokens, H]` for
            each of `hidden_layers`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        prompts: Tensor,
        vocabulary: int,
        options: RuntimeOptions,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        self._vocabulary = vocabulary
        last_id = model.config.get_text_config(decoder=True).vocab_size - 1
        # Ids that only the target has are fed as the draft's last one, as in drafting.
        self._tokens = tokens.to(model.device).clamp_max(last_id)
        self._device = tokens.device
        self._runner = EagerRunner(model, tokens.shape[0], tokens.shape[1], options, hidden_layers=hidden_layers)
        with self._runner.active():
            spans = [Span(row, 0, length - 1) for row, length in enumerate(prompts.tolist())]
            stored = torch.cat([self._tokens[span.row, : span.count] for span in spans])
            self.prompt_states = self._runner.store(spans, stored)

    def feed(self, slots: Tensor, hidden: tuple[Tensor, ...] = ()) -> PassOutput:  # noqa: ARG002 - as of a head
        """Feed the tokens in the given slots (below 0: none), `[rows, width]`.

        Returns:
            Logits, `[rows, width, vocabulary]`, float32, on the tokens' device, and states of `hidden_layers`.
        """
        slots = slots.to(self._tokens.device)
        block = self._tokens.gather(1, slots.clamp_min(0))
        with self._runner.active():
            output = self._runner.forward(RowBlock(block, slots), longest=self._tokens.shape[1])
        logits = output.logits.to(self._device)
        return output._replace(logits=over_vocabulary(logits[..., : self._vocabulary], None, self._vocabulary))


class _HeadScorer:
    """A head with the pairs of the prompts in its cache: of a token, and of the target's state before it."""

    def __init__(
        self,
        head: DraftHead,
        tokens: Tensor,
        prompts: Tensor,
        vocabulary: int,
        options: RuntimeOptions,
        prompt_states: tuple[Tensor, ...],
    ) -> None:
        self._head, self._vocabulary = head, vocabulary
        self._tokens, self._device = tokens.to(head.device), tokens.device
        self._runner = EagerRunner(head, tokens.shape[0], tokens.shape[1], options)
        stored = [length - 1 for length in prompts.tolist()]
        parts = self._states(prompt_states).split(stored)
        # Of the token that is fed next in each row.
        self._before = torch.stack([part[-1] if len(part) else part.new_zeros(part.shape[-1]) for part in parts])
        spans = [Span(row, 0, max(count - 1, 0)) for row, count in enumerate(stored)]
        with self._runner.active():
            self._runner.store(
                spans,
                torch.cat([self._tokens[span.row, 1 : 1 + span.count] for span in spans]),
                torch.cat([part[:-1] for part in parts]),
            )

    def feed(self, slots: Tensor, hidden: tuple[Tensor, ...]) -> PassOutput:
        """Feed the tokens in the given slots, with the target's states of these slots; as in `_Scorer`."""
        slots = slots.to(self._tokens.device)
        block = self._tokens.gather(1, slots.clamp_min(0))
        states = torch.cat([self._before[:, None], self._states(hidden)], dim=1)
        self._before = states[:, -1]
        # The pair of a token lies in the slot before the token's own; a text's first token has no pair.
        given = RowBlock(block, (slots - 1).clamp_min(-1), states=states[:, :-1])
        with self._runner.active():
            logits = self._runner.forward(given, longest=self._tokens.shape[1]).logits
        logits = over_vocabulary(logits, self._head.draft_ids, self._vocabulary).masked_fill((slots == 0)[..., None], 0)
        return PassOutput(logits.to(self._device))

    def _states(self, hidden: tuple[Tensor, ...]) -> Tensor:
        return self._head.project([layer.to(self._head.device) for layer in hidden])
