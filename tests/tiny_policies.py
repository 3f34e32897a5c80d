"""Policies made for tests: they reach corners that published ones avoid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dsde.policies import BatchInfo, DraftStep, StoppingPolicy


class RandomLengths(StoppingPolicy):
    """Drafts a random number of tokens per row and round, 0 included, and at times stops inside the round."""

    name = "random-lengths"

    def __init__(self, longest: int = 6, *, seed: int = 0, stop_probability: float = 0.0) -> None:
        self._longest = longest
        self._seed = seed
        self._stop_probability = stop_probability

    def start(self, batch: BatchInfo) -> None:
        self._rows = batch.rows
        self._device = batch.device
        self._generator = torch.Generator().manual_seed(self._seed)

    def draft_lengths(self) -> torch.LongTensor:
        lengths = torch.randint(0, self._longest + 1, (self._rows,), generator=self._generator)
        return lengths.to(self._device)

    def should_stop(self, step: DraftStep) -> torch.BoolTensor | None:
        draws = torch.rand(self._rows, generator=self._generator)
        return (draws < self._stop_probability).to(self._device)


class ScriptedLengths(StoppingPolicy):
    """Drafts the given lengths, one list of per-row lengths per round, and repeats the last list for ever."""

    name = "scripted-lengths"

    def __init__(self, rounds: Sequence[Sequence[int]]) -> None:
        self._rounds = rounds

    def start(self, batch: BatchInfo) -> None:
        self._round = 0
        self._device = batch.device

    def draft_lengths(self) -> torch.LongTensor:
        lengths = self._rounds[min(self._round, len(self._rounds) - 1)]
        self._round += 1
        return torch.tensor(lengths, device=self._device)
