"""From logits to the distribution that is sampled: logits processors over a block of positions, and the draw.

Plain `generate` calls its processors once per step with the whole batch at one length. Here rows are at different
lengths and several positions are decided at once. Processors that look at the scores alone run over everything in one
call. All others get, for every length that occurs, the call that plain `generate` would have made: all rows, in order,
in the layout of `SequenceBatch.prefix`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from hf_dsde.sequences import SequenceBatch

SCORES_ONLY = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
"""Processors whose result for a row depends on that row's scores alone. Subclasses are not assumed to."""

STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
"""Processors that remember their last call, and so cannot be asked about several positions at once."""


def ignores_history(processor: LogitsProcessor) -> bool:
    """Whether the processor looks at scores alone."""
    return type(processor) in SCORES_ONLY


def processors_on(processors: LogitsProcessorList, device: torch.device) -> LogitsProcessorList:
    """Return the processors with their tensors and generators on `device`; the given ones are left as they are."""
    moved = []
    for processor in processors:
        clone = copy.copy(processor)
        vars(clone).update({name: _moved(value, device) for name, value in vars(processor).items()})
        moved.append(clone)
    return LogitsProcessorList(moved)


def _moved(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor in it on `device`, built-in containers searched."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, torch.Generator) and value.device != device:
        return torch.Generator(device)  # a watermark's, which is seeded before every use
    if type(value) in (list, tuple):
        return type(value)(_moved(entry, device) for entry in value)
    if type(value) is dict:
        return {key: _moved(entry, device) for key, entry in value.items()}
    return value


class ScoreProcessor(Protocol):
    """Makes of logits the scores that a token is chosen by, for every position of a block."""

    @property
    def needs_history(self) -> bool:
        """Whether it looks at the tokens."""

    def on(self, device: torch.device) -> ScoreProcessor:
        """Return one that works on `device`."""

    def __call__(self, logits: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int = 0) -> Tensor:
        """Process a block, as `BlockProcessor` does."""


class BlockProcessor:
    """Applies logits processors to every position of a block.

    Args:
        processors: As `generate` prepared them.
    """

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        self._processors = LogitsProcessorList(processors)
        self._stages = [(alone, list(group)) for alone, group in groupby(self._processors, key=ignores_history)]

    def on(self, device: torch.device) -> BlockProcessor:
        """Return one whose processors have their tensors and generators on `device`."""
        return BlockProcessor(processors_on(self._processors, device))

    @property
    def needs_history(self) -> bool:
        """Whether any processor looks at the tokens."""
        return any(not alone for alone, _ in self._stages)

    def __call__(self, logits: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int = 0) -> Tensor:
        """Process a block.

        Args:
            logits: `[rows, width, vocabulary]`, float32. Column j of a row decides the token behind its text and
                `offset + j` draft tokens, which have been written behind the text.
            sequences: The text.
            counts: Columns of each row that matter; the rest comes back as anything.
            offset: Draft tokens in front of the block's first column.

        Returns:
            Scores, `[rows, width, vocabulary]`, float32. `logits` is not changed.
        """
        scores = logits
        for alone, processors in self._stages:
            if alone:
                scores = _process_scores(scores, processors)
            else:
                scores = _process_with_history(scores, processors, sequences, counts, offset)
        return scores


def _process_scores(scores: Tensor, processors: list[LogitsProcessor]) -> Tensor:
    flat = scores.reshape(-1, scores.shape[-1])
    no_tokens = torch.empty(len(flat), 0, dtype=torch.long, device=flat.device)
    for processor in processors:
        flat = processor(no_tokens, flat)
    return flat.view(scores.shape)


def _process_with_history(
    scores: Tensor,
    processors: list[LogitsProcessor],
    sequences: SequenceBatch,
    counts: Sequence[int],
    offset: int,
) -> Tensor:
    """Call the processors once per prefix length that occurs among the columns that matter."""
    processed = scores.clone()
    starts = [generated + offset for generated in sequences.generated_counts]
    lengths = {start + column for start, count in zip(starts, counts, strict=True) for column in range(count)}
    for length in sorted(lengths):
        columns = [length - start for start in starts]
        matters = [0 <= column < count for column, count in zip(columns, counts, strict=True)]
        holds = torch.tensor(matters, device=scores.device)
        column = torch.tensor([c if m else 0 for c, m in zip(columns, matters, strict=True)], device=scores.device)
        rows = torch.arange(len(column), device=scores.device)
        step = scores[rows, column]
        prefix = sequences.prefix(length, holds.to(sequences.device)).to(scores.device)
        for processor in processors:
            step = _sparing_other_rows(processor, matters)(prefix, step)
        processed[rows[holds], column[holds]] = step[holds]
    return processed


def _sparing_other_rows(processor: LogitsProcessor, matters: list[bool]) -> LogitsProcessor:
    """Keep a constraint from being asked about rows whose result nobody reads.

    A trie of allowed texts knows no prefix but those of its texts, and transformers raises when it allows nothing. The
    constraint is asked row by row, in order.
    """
    if type(processor) is not logits_process.PrefixConstrainedLogitsProcessor:
        return processor
    ask, rows = processor._prefix_allowed_tokens_fn, iter(matters)

    def allowed(batch_id: int, text: Tensor) -> list[int]:
        return ask(batch_id, text) if next(rows) else [0]

    sparing = copy.copy(processor)
    sparing._prefix_allowed_tokens_fn = allowed
    return sparing


def choose(scores: Tensor, do_sample: bool) -> tuple[Tensor, Tensor | None]:
    """Choose a token per row, as plain `generate` does.

    Args:
        scores: Processed scores, `[rows, vocabulary]`, float32.
        do_sample: Draw from softmax(scores) if True, take the best otherwise.

    Returns:
        Tokens, `[rows]`, int64, and the distribution they were drawn from, `[rows, vocabulary]`, float32; None for
        greedy choices.
    """
    if not do_sample:
        return scores.argmax(dim=-1), None
    probs = scores.softmax(dim=-1)
    return torch.multinomial(probs, num_samples=1)[:, 0], probs
