"""Putting texts into a runner's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.spans import Span


def store_texts(runner: ModelRunner, texts: Tensor, counts: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
    """Store the first `counts` tokens of each row of `texts`, `[rows, longest]`; return their hidden states."""
    spans = [Span(row, 0, int(count)) for row, count in enumerate(counts)]
    return runner.store(spans, torch.cat([texts[span.row, : span.count] for span in spans]))


def prompts_of(batch: SequenceBatch) -> Tensor:
    """The prompts without padding in front, `[rows, longest]`, filled up with zeros."""
    spans = [Span(row, 0, length) for row, length in enumerate(batch.prompt_lengths)]
    texts = batch.tokens_at(spans).split(batch.prompt_lengths)
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
