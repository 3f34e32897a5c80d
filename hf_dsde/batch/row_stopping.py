"""Where each row of a batch ends when every row is a text of its own: as `generate` would end its prompt alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import EosTokenCriteria, StoppingCriteriaList

from hf_dsde.sequences import SequenceBatch
from hf_dsde.stopping import StepScores, Stopping


class RowStopping(Stopping):
    """Ends rows one by one.

    Args:
        end_tokens: Tokens that end a text.
        sequences: The batch.
        criteria: Further criteria of each row. They are shown that row alone, without padding, step by step.

    Attributes:
        end_tokens: As given.
        stopped: Rows that a criterion ended, and neither an end token nor the limit.
    """

    def __init__(
        self, end_tokens: Sequence[int], sequences: SequenceBatch, criteria: Sequence[StoppingCriteriaList]
    ) -> None:
        ends = StoppingCriteriaList()
        if end_tokens:
            ends.append(EosTokenCriteria(torch.tensor(list(end_tokens), device=sequences.device)))
        super().__init__(ends, sequences)
        self.pads_ended_rows = True
        self.end_tokens = frozenset(end_tokens)
        self._row_criteria = list(criteria)
        self._decided = [0] * sequences.rows
        self.stopped: set[int] = set()

    def begin(self, row: int, criteria: StoppingCriteriaList) -> None:
        """Let a row begin another text."""
        self.ends[row] = None
        self._row_criteria[row] = criteria
        self._decided[row] = 0
        self.stopped.discard(row)

    def advance(self, ended: list[bool], scores: StepScores) -> None:  # noqa: ARG002 - nobody asked to collect scores
        """As for any batch: take note of a round, after its tokens were appended."""
        for row, ends_here in enumerate(ended):
            if self.ends[row] is not None:
                continue
            count = self._sequences.generated_counts[row]
            stop = self._first_stop(row, count)
            if stop is not None:
                self.ends[row] = stop
                if stop < count or not ends_here:
                    self.stopped.add(row)
            elif ends_here:
                self.ends[row] = count

    def _first_stop(self, row: int, count: int) -> int | None:
        """Return the first undecided step of a row at which a criterion ends it, None if there is none yet."""
        criteria, sequences = self._row_criteria[row], self._sequences
        first, self._decided[row] = self._decided[row] + 1, count
        if criteria:
            start = sequences.prompt_width - sequences.prompt_lengths[row]
            for step in range(first, count + 1):
                text = sequences.tokens[row : row + 1, start : sequences.prompt_width + step]
                if bool(criteria(text, None).all()):
                    return step
        return None
