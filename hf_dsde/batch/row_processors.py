"""Logits processors that look at the text, when every row is a text of its own and has processors of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dsde.sampling import processors_on
from hf_dsde.sequences import SequenceBatch


class RowProcessors:
    """Calls each row's processors with that row alone and without padding, once per position: as `generate` would.

    Args:
        processors: Those of each row.
    """

    needs_history = True

    def __init__(self, processors: Sequence[LogitsProcessorList]) -> None:
        self._by_row = list(processors)
        self._elsewhere: list[tuple[torch.device, RowProcessors]] = []

    def begin(self, row: int, processors: LogitsProcessorList) -> None:
        """Let a row begin another text, with other processors."""
        self._by_row[row] = processors
        for device, moved in self._elsewhere:
            moved.begin(row, processors_on(processors, device))

    def on(self, device: torch.device) -> RowProcessors:
        """Return one that works on `device` and follows this one's rows."""
        moved = RowProcessors([processors_on(processors, device) for processors in self._by_row])
        self._elsewhere.append((device, moved))
        return moved

    def __call__(self, logits: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int = 0) -> Tensor:
        """Process a block; arguments and result as in `hf_dsde.sampling.BlockProcessor`."""
        scores = logits.clone()
        for row, count in enumerate(counts):
            start = sequences.prompt_width - sequences.prompt_lengths[row]
            end = sequences.prompt_width + sequences.generated_counts[row] + offset
            text = sequences.tokens[row : row + 1, start : end + count].to(logits.device)
            for column in range(count):
                step = logits[row : row + 1, column]
                for processor in self._by_row[row]:
                    step = processor(text[:, : end - start + column], step)
                scores[row, column] = step[0]
        return scores
