"""Scores and logits of each step, collected as rounds bring them, for an output that wants them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class StepRecorder:
    """Collects vectors over the vocabulary per row and hands them out per step, as `output_scores` wants them.

    Rows reach a step in different rounds. Steps that a row never reached hold zeros.
    """

    def __init__(self, rows: int) -> None:
        self._rows: list[list[Tensor]] = [[] for _ in range(rows)]
        self._assembled: list[Tensor] = []

    def add(self, block: Tensor, counts: list[int]) -> None:
        """Keep the first `counts` columns of each row of `block`, `[rows, width, vocabulary]`."""
        for row, count in enumerate(counts):
            self._rows[row].extend(block[row, :count].clone().unbind(0))

    def steps(self, count: int) -> tuple[Tensor, ...]:
        """Return the first `count` steps, each `[rows, vocabulary]`, float32.

        Ask only for steps that every row has reached or will never reach: they are assembled once.
        """
        filler = torch.zeros_like(next(row[0] for row in self._rows if row))
        for step in range(len(self._assembled), count):
            vectors = [row[step] if step < len(row) else filler for row in self._rows]
            self._assembled.append(torch.stack(vectors))
        return tuple(self._assembled[:count])


@dataclass(frozen=True)
class Recording:
    """What is collected per step for the output."""

    scores: StepRecorder | None = None
    logits: StepRecorder | None = None

    def add(self, scores: Tensor, logits: Tensor, emitted: list[int]) -> None:
        """Keep a round's columns of emitted tokens; both tensors are `[rows, width, vocabulary]`, float32."""
        if self.scores is not None:
            self.scores.add(scores, emitted)
        if self.logits is not None:
            self.logits.add(logits, emitted)

    def scores_until(self, step: int) -> tuple[Tensor, ...] | None:
        """Return the scores of the first `step` steps; None when none are collected."""
        return None if self.scores is None else self.scores.steps(step)
