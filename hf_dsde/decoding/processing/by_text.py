"""Logits processors that look at the tokens of the text."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers.generation import logits_process

from hf_dsde import compat
from hf_dsde.decoding.processing.block_function import BlockFunction, ScoreFunction, stands_for
from hf_dsde.decoding.processing.block_text import BlockText
from hf_dsde.decoding.processing.by_length import FORBIDDEN
from hf_dsde.utils.transfers import upload

NO_TOKEN = 1 << 40
"""An id that no vocabulary has."""


def penalised(scores: Tensor, penalty: float) -> Tensor:
    """Return `score * penalty` where a score is below 0, and else `score / penalty`.

    The first is the smaller one below 0 and the larger one above if the penalty is at least 1, and vice versa.
    """
    choose = torch.minimum if penalty >= 1 else torch.maximum
    return choose(scores * penalty, scores / penalty)


def marked(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return which tokens occur among some.

    Args:
        tokens: `[rows, width, n]`, int64; changed. Ids from `vocabulary` on, which an embedding may have more of than
            the head has scores, count for nothing.
        vocabulary: Tokens that have a score.

    Returns:
        `[rows, width, vocabulary]`, bool.
    """
    rows, width, _ = tokens.shape
    found = torch.zeros(rows, width, vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return found.scatter_(2, tokens.clamp_max_(vocabulary), True)[:, :, :vocabulary]


def _for_rows(by_prompt: Tensor, rows: int) -> Tensor:
    """Repeat what is known of each prompt for the rows that follow from it, which are neighbours."""
    several = rows // len(by_prompt)
    return by_prompt if several == 1 else by_prompt.repeat_interleave(several, 0)


@stands_for(logits_process.RepetitionPenaltyLogitsProcessor)
class RepetitionPenalty(BlockFunction):
    """Lowers the scores of all tokens that the text has, but for so many at its beginning."""

    reads_tokens = True

    _ignored: Tensor | int

    def _make_rows(self, device: torch.device) -> None:
        given = [processor.prompt_ignore_length for processor in self._processors]
        if isinstance(given[0], Tensor):
            self._ignored = torch.cat([lengths.to(device) for lengths in given])[:, None]
        else:
            self._ignored = given[0] or 0

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        vocabulary = scores.shape[2]
        hidden = text.places >= text.ends[:, :, None]
        begins = self._ignored if text.begins is None else text.begins + self._ignored
        if isinstance(begins, Tensor):
            hidden |= (text.places < begins)[:, None]
        elif begins:
            hidden |= text.places < begins
        tokens = text.tokens[:, None].masked_fill(hidden, vocabulary)
        return torch.where(marked(tokens, vocabulary), penalised(scores, self._processors[0].penalty), scores)


@stands_for(logits_process.NoRepeatNGramLogitsProcessor)
class NoRepeatedNGrams(BlockFunction):
    """Forbids the token that would complete an n-gram that the text has."""

    reads_tokens = True

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        size, vocabulary = self._processors[0].ngram_size, scores.shape[2]
        if text.bound < size:
            return scores
        windows = text.tokens.unfold(1, size, 1)
        others = text.places[size - 1 :] >= text.ends[:, :, None]
        if size > 1:
            others |= (windows[:, None, :, :-1] != text.suffix(size - 1)[:, :, None]).any(3)
        if text.begins is not None:
            others |= (text.places[: 1 - size or None] < text.begins)[:, None]
        completing = windows[:, None, :, -1].masked_fill(others, vocabulary)
        return scores.masked_fill(marked(completing, vocabulary), FORBIDDEN)


@stands_for(logits_process.EncoderNoRepeatNGramLogitsProcessor)
class NoNGramsOfThePrompt(BlockFunction):
    """Forbids the token that would complete an n-gram that the prompt has."""

    reads_tokens = True
    differs_by_row = True

    def _make_rows(self, device: torch.device) -> None:
        by_row = [
            [[*begin, last] for begin, lasts in known.items() for last in lasts]
            for processor in self._processors
            for known in processor.generated_ngrams
        ]
        size, most = self._processors[0].ngram_size, max(1, *map(len, by_row))
        nothing = [[NO_TOKEN] * size]
        filled = [ngrams + nothing * (most - len(ngrams)) for ngrams in by_row]
        flat = [token for ngrams in filled for ngram in ngrams for token in ngram]
        self._ngrams = upload(flat, device).view(len(by_row), most, size)

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        rows, _, vocabulary = scores.shape
        ngrams = _for_rows(self._ngrams, rows)[:, None]
        size = ngrams.shape[3]
        if text.bound < size - 1:
            return scores
        others = (text.lengths < size - 1)[:, :, None]
        if size > 1:
            others = others | (ngrams[..., :-1] != text.suffix(size - 1)[:, :, None]).any(3)
        completing = ngrams[..., -1].masked_fill(others, vocabulary)
        return scores.masked_fill(marked(completing, vocabulary), FORBIDDEN)


@stands_for(logits_process.EncoderRepetitionPenaltyLogitsProcessor)
class PromptPenalty(ScoreFunction):
    """Raises the scores of the prompt's tokens."""

    differs_by_row = True

    def _make_rows(self, device: torch.device) -> None:
        prompts = [processor.encoder_input_ids.to(device) for processor in self._processors]
        longest = max(prompt.shape[1] for prompt in prompts)
        # A token that is there twice gets the same score twice.
        filled = [torch.cat([prompt, prompt[:, :1].expand(-1, longest - prompt.shape[1])], 1) for prompt in prompts]
        self._prompts = torch.cat(filled)[:, None]

    def _process(self, scores: Tensor) -> Tensor:
        prompts, rows = self._prompts, len(scores)
        if len(prompts) < rows and compat.prompt_penalty_repeats_rows():
            prompts = _for_rows(prompts, rows)
        prompts = prompts.expand(-1, scores.shape[1], -1)
        changed = penalised(scores[: len(prompts)].gather(2, prompts), self._processors[0].penalty)
        return scores.scatter(2, prompts, changed)


@stands_for(logits_process.SequenceBiasLogitsProcessor, logits_process.NoBadWordsLogitsProcessor)
class SequenceBias(BlockFunction):
    """Adds to the score of a sequence's last token where the text ends in all its other ones."""

    reads_tokens = True

    def _make(self, device: torch.device, vocabulary: int) -> None:
        own = copy.copy(self._processors[0])  # which takes note of the vocabulary of its first call
        own._prepare_bias_variables(torch.empty(1, vocabulary, device=device))  # and refuses tokens that have no score
        self._single: Tensor = own.length_1_bias
        by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for sequence, bias in own.sequence_bias.items():
            if len(sequence) > 1:
                by_length.setdefault(len(sequence) - 1, []).append((sequence, bias))
        self._longer = [
            (
                torch.tensor([sequence[:-1] for sequence, _ in group], device=device),
                torch.tensor([sequence[-1] for sequence, _ in group], device=device),
                torch.tensor([bias for _, bias in group], dtype=torch.float, device=device),
            )
            for group in by_length.values()
        ]
        self._spare = compat.bias_spares_tokens()

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        single = self._single.to(scores.dtype)
        if not self._longer:
            return scores + single
        bias = single.expand_as(scores).clone()
        for begins, lasts, biases in self._longer:
            size = begins.shape[1]
            if text.bound < size:
                continue
            others = (text.suffix(size)[:, :, None] != begins).any(3)
            others |= (text.lengths < size + self._spare)[:, :, None]
            bias.index_add_(2, lasts, biases.to(scores.dtype).masked_fill(others, 0.0))
        return scores + bias
