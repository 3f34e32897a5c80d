"""Logits processors when every row is a text of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_dsde.decoding.processing.state import StateWatch, is_trusted
from hf_dsde.decoding.sampling import CalledProcessors, StagedProcessor, processors_on
from hf_dsde.decoding.sequences import SequenceBatch


class RowProcessors(StagedProcessor):
    """Applies logits processors to every position of a block, as `generate` would to each row alone, without padding.

    Args:
        processors: Those of each row, or one list for all of them.
    """

    def __init__(self, processors: Sequence[LogitsProcessorList]) -> None:
        super().__init__(processors, alone=True)
        self._elsewhere: list[tuple[torch.device, RowProcessors]] = []

    def begin(self, row: int, processors: LogitsProcessorList) -> None:
        """Let a row begin another text, with other processors; not where one list serves all rows."""
        self._chains[row] = list(processors)
        self._renew()
        for device, moved in self._elsewhere:
            moved.begin(row, processors_on(processors, device))

    def on(self, device: torch.device) -> RowProcessors:
        """Return one that works on `device` and follows this one's rows."""
        moved = RowProcessors([processors_on(LogitsProcessorList(chain), device) for chain in self._chains])
        self._elsewhere.append((device, moved))
        return moved

    def _called(self, chains: list[list[LogitsProcessor]]) -> CalledProcessors:
        return _CalledForEachRow(chains)


class _CalledForEachRow(CalledProcessors):
    """Calls each row's processors with that row alone and without padding, once per position."""

    def __init__(self, chains: list[list[LogitsProcessor]]) -> None:
        self._chains = chains
        self._watches: dict[int, StateWatch] = {}

    def renew(self, chains: list[list[LogitsProcessor]]) -> None:
        self._chains = chains

    def __call__(self, scores: Tensor, sequences: SequenceBatch, counts: Sequence[int], offset: int) -> Tensor:
        processed = scores.clone()
        for row, count in enumerate(counts):
            start = sequences.prompt_width - sequences.prompt_lengths[row]
            end = sequences.prompt_width + sequences.generated_counts[row] + offset
            text = sequences.tokens[row : row + 1, start : end + count].to(scores.device)
            for column in range(count):
                step = scores[row : row + 1, column].clone()  # which a processor may write into
                prefix = text[:, : end - start + column]
                for processor in self._chains[row if len(self._chains) > 1 else 0]:
                    step = self._call(processor, prefix, step)
                processed[row, column] = step[0]
        return processed

    def _call(self, processor: LogitsProcessor, prefix: Tensor, step: Tensor) -> Tensor:
        """Call a processor, or have it watched; rows may have the same one, or ones that ask the same function."""
        if is_trusted(processor):
            processed: Tensor = processor(prefix, step)
            return processed
        subject = getattr(processor, "_prefix_allowed_tokens_fn", processor)
        if id(subject) not in self._watches:
            self._watches[id(subject)] = StateWatch(processor)
        return self._watches[id(subject)](processor, prefix, step)
