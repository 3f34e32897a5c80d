"""Logits processors that look at how long the text is."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import logits_process

from hf_dsde import compat
from hf_dsde.decoding.processing.block_function import BlockFunction, stands_for, token_mask
from hf_dsde.decoding.processing.block_text import BlockText

FORBIDDEN = float("-inf")


class _ForbidsWhile(BlockFunction):
    """Forbids some tokens, as long as the text has not reached a length or only where it has it."""

    differs_by_row = True

    _tokens: Tensor
    _limit: Tensor

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        forbids = self._holds(text.lengths)[:, :, None] & self._tokens
        return scores.masked_fill(forbids, FORBIDDEN)

    def _holds(self, lengths: Tensor) -> Tensor:
        return lengths < self._limit


@stands_for(logits_process.MinLengthLogitsProcessor)
class MinLength(_ForbidsWhile):
    """No end before the text has a length."""

    def _make(self, device: torch.device, vocabulary: int) -> None:
        self._tokens = token_mask(self._processors[0].eos_token_id, device, vocabulary)

    def _make_rows(self, device: torch.device) -> None:
        self._limit = self._column([processor.min_length for processor in self._processors], device)


@stands_for(logits_process.MinNewTokensLengthLogitsProcessor)
class MinNewTokens(MinLength):
    """No end before so many tokens follow the prompt."""

    def _make_rows(self, device: torch.device) -> None:
        limits = [processor.prompt_length_to_skip + processor.min_new_tokens for processor in self._processors]
        self._limit = self._column(limits, device)


@stands_for(logits_process.SuppressTokensAtBeginLogitsProcessor)
class SuppressAtBegin(_ForbidsWhile):
    """Forbids tokens as the first after the prompt."""

    def _make(self, device: torch.device, vocabulary: int) -> None:
        self._tokens = token_mask(self._processors[0].begin_suppress_tokens, device, vocabulary)

    def _make_rows(self, device: torch.device) -> None:
        self._limit = self._column([processor.begin_index for processor in self._processors], device)

    def _holds(self, lengths: Tensor) -> Tensor:
        return lengths == self._limit


class _Forces(BlockFunction):
    """Leaves only some tokens where the text has a length."""

    _at: Tensor
    _tokens: Tensor

    def _make(self, device: torch.device, vocabulary: int) -> None:
        allowed = token_mask(self._forced_tokens(), device, vocabulary)
        self._forced = torch.full((vocabulary,), FORBIDDEN, device=device).masked_fill_(allowed, 0.0)

    def _forced_tokens(self) -> Tensor:
        raise NotImplementedError

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        return torch.where((text.lengths == self._at)[:, :, None], self._forced.to(scores.dtype), scores)


@stands_for(logits_process.ForcedBOSTokenLogitsProcessor)
class ForcedBeginning(_Forces):
    """The second token of a text is given."""

    def _forced_tokens(self) -> Tensor:
        return torch.tensor([self._processors[0].bos_token_id])

    def _make_rows(self, device: torch.device) -> None:
        self._at = self._column([1], device)


@stands_for(logits_process.ForcedEOSTokenLogitsProcessor)
class ForcedEnd(_Forces):
    """The last token that the limit allows ends the text."""

    differs_by_row = True

    def _forced_tokens(self) -> Tensor:
        tokens: Tensor = self._processors[0].eos_token_id
        return tokens

    def _make_rows(self, device: torch.device) -> None:
        self._at = self._column([processor.max_length - 1 for processor in self._processors], device)


@stands_for(logits_process.ExponentialDecayLengthPenalty)
class ExponentialDecay(BlockFunction):
    """Raises the end's score by `|score| * (factor^n - 1)`, n tokens after the start."""

    differs_by_row = True

    def _make(self, device: torch.device, vocabulary: int) -> None:  # noqa: ARG002
        self._tokens = self._processors[0].eos_token_id.to(device).reshape(-1)
        self._factor = torch.tensor(float(self._processors[0].regulation_factor), dtype=torch.float64).to(device)
        self._spares_infinities = compat.decay_spares_infinities()

    def _make_rows(self, device: torch.device) -> None:
        self._starts = self._column([processor.regulation_start for processor in self._processors], device)

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        ends = scores.index_select(2, self._tokens)
        after = (text.lengths - self._starts).clamp_min_(0)
        penalty = ends.abs() * (self._factor.pow(after) - 1).to(scores.dtype)[:, :, None]
        if self._spares_infinities:
            penalty = penalty.masked_fill_(ends.isfinite().logical_not_(), 0.0)
        else:
            penalty = penalty.masked_fill_((after == 0)[:, :, None], 0.0)
        return scores.index_copy(2, self._tokens, ends + penalty)
