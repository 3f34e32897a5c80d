"""Policies made for tests: one that follows a script, one that writes down what it is told."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde.policies import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy

EVERYTHING = frozenset(Signal) - {Signal.TIMINGS, Signal.COSTS, Signal.LOGITS}


class Witness(StoppingPolicy):
    """Asks for everything, and keeps every outcome, step and rearrangement."""

    name = "witness"
    requires = EVERYTHING

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def start(self, batch: BatchInfo) -> None:
        self.batch = batch
        self.outcomes: list[RoundOutcome] = []
        self.indices: list[list[int]] = []

    def draft_lengths(self) -> Tensor:
        return torch.full((self.batch.rows,), self.length)

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def select_rows(self, index: Tensor) -> None:
        self.indices.append(index.tolist())


class Scripted(Witness):
    """A row's length follows from its number, the round and what it has accepted; an unsure token ends the draft."""

    name = "scripted"
    unsure = 0.9

    def start(self, batch: BatchInfo) -> None:
        super().start(batch)
        self.memory = torch.zeros(batch.rows, dtype=torch.int64)
        self.steps: list[tuple[DraftStep, Tensor]] = []

    def draft_lengths(self) -> Tensor:
        return (2 * self.memory + len(self.outcomes)) % 7

    def should_stop(self, step: DraftStep) -> Tensor:
        self.steps.append((step, step.entropy))
        return step.entropy > self.unsure

    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(outcome)
        self.memory = self.memory + outcome.accepted

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self.memory = torch.where(index < 0, 0, self.memory[index.clamp_min(0)])


class Uneven(Witness):
    """Row i always drafts i tokens."""

    name = "uneven"

    def draft_lengths(self) -> Tensor:
        return torch.arange(self.batch.rows)


def scripted_length(row: object, number: int) -> int:
    """The same rule for the slow replay."""
    return (2 * row.memory + number) % 7  # type: ignore[attr-defined]
