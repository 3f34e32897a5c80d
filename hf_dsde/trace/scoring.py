"""Both models over finished texts, a chunk of positions at a time.

Neither model generates here: the texts are given, and each position's logits follow from the tokens before it. Prompts
are stored in a ragged cache as in decoding, and the answers run through it in blocks, so that no more than a block of
logits exists at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_dsde.drafting.chain import UNKNOWN_TOKEN_LOGIT
from hf_dsde.execution.model_runner import EagerRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span

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
        draft: The draft, over the same vocabulary but for padding.
        texts: At least one.
        options: How passes are run.

    Yields:
        Chunks on the target's device, ordered by position within a text; texts advance together.
    """
    device = target.device
    prompts = torch.tensor([text.prompt_length for text in texts], device=device)
    lengths = torch.tensor([len(text.tokens) for text in texts], device=device)
    tokens = pad_sequence([text.tokens.to(device) for text in texts], batch_first=True)
    longest = max(text.answer_length for text in texts)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    scorers = [_Scorer(model, tokens, prompts, vocabulary, options) for model in (target, draft)]
    width = max(1, POSITIONS_AT_ONCE // len(texts))
    for first in range(0, longest, width):
        index = torch.arange(first, min(first + width, longest), device=device)
        # The token at a place is decided by the logits after the one before it.
        slots = prompts[:, None] - 1 + index
        real = slots + 1 < lengths[:, None]
        row, column = real.nonzero(as_tuple=True)
        target_logits, draft_logits = (scorer.logits(slots.masked_fill(~real, -1))[row, column] for scorer in scorers)
        behind = tokens[row, slots[row, column] + 1]
        yield ScoredChunk(row, index[column], behind, target_logits, draft_logits)


class _Scorer:
    """One model with the prompts in its cache."""

    def __init__(
        self, model: PreTrainedModel, tokens: Tensor, prompts: Tensor, vocabulary: int, options: RuntimeOptions
    ) -> None:
        self._vocabulary = vocabulary
        last_id = model.config.get_text_config(decoder=True).vocab_size - 1
        # Ids that only the target has are fed as the draft's last one, as in drafting.
        self._tokens = tokens.to(model.device).clamp_max(last_id)
        self._device = tokens.device
        self._runner = EagerRunner(model, tokens.shape[0], tokens.shape[1], options)
        with self._runner.active():
            spans = [Span(row, 0, length - 1) for row, length in enumerate(prompts.tolist())]
            self._runner.store(spans, torch.cat([self._tokens[span.row, : span.count] for span in spans]))

    def logits(self, slots: Tensor) -> Tensor:
        """Feed the tokens in the given slots (below 0: none), `[rows, width]`; `[rows, width, vocabulary]`, float32."""
        slots = slots.to(self._tokens.device)
        block = self._tokens.gather(1, slots.clamp_min(0))
        with self._runner.active():
            logits = self._runner.forward(RowBlock(block, slots), longest=self._tokens.shape[1]).logits.to(self._device)
        missing = self._vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=UNKNOWN_TOKEN_LOGIT)
        return logits[..., : self._vocabulary]
