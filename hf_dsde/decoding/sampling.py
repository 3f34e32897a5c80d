"""From logits to the distribution that is sampled: logits processors over a block of positions, and the draw.

Plain `generate` calls its processors once per step with the whole batch at one length. Here rows are at different
lengths and several positions are decided at once. For the processors of transformers, functions over whole blocks stand
(`hf_dsde.decoding.processing`), which work on the device alone. All others get, for every length that occurs, the call
that plain `generate` would have made: all rows, in order, in the layout of `SequenceBatch.prefix`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from hf_dsde.decoding.processing.block_function import BlockFunction, function_class
from hf_dsde.decoding.processing.block_text import BlockText
from hf_dsde.decoding.processing.functions import block_functions
from hf_dsde.decoding.processing.scores_alone import ScoresAlone, scores_alone
from hf_dsde.decoding.processing.state import StateWatch
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import draw


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
        """Whether it looks at tokens, so that draft tokens must be written after the text before it is called."""

    @property
    def needs_counts(self) -> bool:
        """Whether it must know on the host which columns matter."""

    @property
    def changes_nothing(self) -> bool:
        """Whether scores are the logits as they are."""

    @property
    def of_scores_alone(self) -> ScoresAlone | None:
        """What it makes of logits if that depends on nothing else, and can be recorded; None otherwise."""

    def on(self, device: torch.device) -> ScoreProcessor:
        """Return one that works on `device`."""

    def __call__(self, logits: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int = 0) -> Tensor:
        """Process a block, as `BlockProcessor` does."""


class CalledProcessors(ABC):
    """Logits processors in a row for which no block functions stand: they are called position by position."""

    @abstractmethod
    def renew(self, chains: list[list[LogitsProcessor]]) -> None:
        """Take over the processors of rows of which some have begun another text."""

    @abstractmethod
    def __call__(self, scores: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int) -> Tensor:
        """Process a block, as `BlockProcessor` does."""


Stage = BlockFunction | CalledProcessors


class StagedProcessor(ABC):
    """Logits processors in their order, some over whole blocks and some called position by position.

    Args:
        chains: The processors of all rows, or those of each row.
        alone: Whether a text begins at its first real token, or where the padding in front of it does.
    """

    def __init__(self, chains: Sequence[Sequence[LogitsProcessor]], *, alone: bool) -> None:
        self._chains = [list(chain) for chain in chains]
        self._alone = alone
        self._kinds: list[type[LogitsProcessor]] | None = None
        self._stages: list[tuple[Stage, list[int]]] = []
        self._of_scores: tuple[ScoresAlone | None] | None = None  # once somebody has asked
        self._renew()

    @abstractmethod
    def _called(self, chains: list[list[LogitsProcessor]]) -> CalledProcessors:
        """Return what calls processors: those of all rows, or those of each row."""

    def _renew(self) -> None:
        """Put the processors that the rows have by now into the stages, which are made when classes are others."""
        self._of_scores = None
        by_row = [list(map(type, chain)) for chain in self._chains]
        alike = all(kinds == by_row[0] for kinds in by_row)
        if alike and by_row[0] == self._kinds:
            for stage, places in self._stages:
                stage.renew(self._at(places))
        else:  # unlike ones cannot be put side by side
            self._kinds = by_row[0] if alike else None
            self._stages = self._made() if alike else [(self._called(self._chains), [])]

    def _made(self) -> list[tuple[Stage, list[int]]]:
        stages: list[tuple[Stage, list[int]]] = []
        chain = self._chains[0]
        for known, group in groupby(range(len(chain)), key=lambda place: function_class(chain[place]) is not None):
            places = list(group)
            if known:
                stages += block_functions(self._at(places), places)
            else:
                stages.append((self._called(self._at(places)), places))
        return stages

    def _at(self, places: list[int]) -> list[list[LogitsProcessor]]:
        """Return the processors at some places of each chain."""
        return [[chain[place] for place in places] for chain in self._chains]

    @property
    def needs_history(self) -> bool:
        """Whether any processor looks at tokens."""
        return any(not isinstance(stage, BlockFunction) or stage.reads_tokens for stage, _ in self._stages)

    @property
    def needs_counts(self) -> bool:
        """Whether any processor is called position by position."""
        return any(not isinstance(stage, BlockFunction) for stage, _ in self._stages)

    @property
    def changes_nothing(self) -> bool:
        """Whether there is no processor."""
        return not any(self._chains)

    @property
    def of_scores_alone(self) -> ScoresAlone | None:
        """What it makes of logits if that depends on nothing else, alike in all rows, and can be recorded."""
        if self._of_scores is None:
            self._of_scores = (scores_alone(self._chains),)
        return self._of_scores[0]

    def __call__(self, logits: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int = 0) -> Tensor:
        """Process a block.

        Args:
            logits: `[rows, width, vocabulary]`, float32. Column j of a row decides the token that follows its text and
                `offset + j` draft tokens, which have been written after the text.
            sequences: The text.
            counts: Columns of each row that matter; the rest comes back as anything. Not looked at unless
                `needs_counts`.
            offset: Draft tokens in front of the block's first column.

        Returns:
            Scores, `[rows, width, vocabulary]`, float32. `logits` is not changed.

        Raises:
            RemembersCallsError: A processor's answers depend on the calls before.
        """
        scores = logits
        text = BlockText(sequences, logits.shape[1], offset, logits.device, alone=self._alone)
        for stage, _ in self._stages:
            if isinstance(stage, BlockFunction):
                scores = stage(scores, text)
            else:
                scores = stage(scores, sequences, counts, offset)
        return scores


class BlockProcessor(StagedProcessor):
    """Applies logits processors to every position of a block, as `generate` would to the batch.

    Args:
        processors: As `generate` prepared them.
    """

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        super().__init__([list(processors)], alone=False)

    def on(self, device: torch.device) -> BlockProcessor:
        """Return one whose processors have their tensors and generators on `device`."""
        return BlockProcessor(processors_on(LogitsProcessorList(self._chains[0]), device))

    def _called(self, chains: list[list[LogitsProcessor]]) -> CalledProcessors:
        return _CalledForTheBatch(chains[0])


class _CalledForTheBatch(CalledProcessors):
    """Calls processors once per prefix length that occurs among the columns that matter."""

    def __init__(self, processors: list[LogitsProcessor]) -> None:
        self._processors = [(processor, StateWatch(processor)) for processor in processors]

    def renew(self, chains: list[list[LogitsProcessor]]) -> None:
        raise NotImplementedError  # a batch keeps its processors

    def __call__(self, scores: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int) -> Tensor:
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
            for processor, watch in self._processors:
                step = watch(partial(_sparing_other_rows, processor, matters), prefix, step)
            processed[rows[holds], column[holds]] = step[holds]
        return processed


def _sparing_other_rows(processor: LogitsProcessor, matters: list[bool], text: Tensor, scores: Tensor) -> Tensor:
    """Call a processor; keep a constraint from being asked about rows whose result nobody reads.

    A trie of allowed texts knows no prefix but those of its texts, and transformers raises when it allows nothing. The
    constraint is asked row by row, in order.
    """
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        ask, rows = processor._prefix_allowed_tokens_fn, iter(matters)

        def allowed(batch_id: int, prefix: Tensor) -> list[int]:
            return ask(batch_id, prefix) if next(rows) else [0]

        processor = copy.copy(processor)
        processor._prefix_allowed_tokens_fn = allowed
    processed: Tensor = processor(text, scores)
    return processed


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
    return draw(probs), probs
