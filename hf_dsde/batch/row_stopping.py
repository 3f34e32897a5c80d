"""Where each row of a batch ends when every row is a text of its own: as `generate` would end its prompt alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import EosTokenCriteria, StoppingCriteriaList

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stop_strings import without_stop_strings
from hf_dsde.decoding.stopping import StepScores, Stopping


class RowStopping(Stopping):
    """Ends rows one by one.

    Args:
        end_tokens: Tokens that end a text.
        sequences: The batch.
        criteria: Further criteria of each row. They are shown that row alone, without padding, step by step; stop
            strings on the host, for all rows together.

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
        parted = [without_stop_strings(of_row) for of_row in criteria]
        self._strings = [strings for strings, _ in parted]
        self._row_criteria = [others for _, others in parted]
        self.stopped: set[int] = set()

    def begin(self, row: int, criteria: StoppingCriteriaList) -> None:
        """Let a row begin another text."""
        self.ends[row] = None
        self._strings[row], self._row_criteria[row] = without_stop_strings(criteria)
        self._judged[row] = 0
        self.stopped.discard(row)

    def advance(self, ended: list[bool], scores: StepScores) -> None:  # noqa: ARG002 - nobody asked to collect scores
        """As for any batch: take note of a round, after its tokens were appended."""
        judged = list(self._judged)
        stops = self._stop_string_ends()
        for row, ends_here in enumerate(ended):
            if self.ends[row] is not None:
                continue
            count = self._sequences.generated_counts[row]
            stop = stops.get(row)
            if self._row_criteria[row]:
                stop = self._first_stop(row, judged[row] + 1, count if stop is None else stop) or stop
            if stop is not None:
                self.ends[row] = stop
                if stop < count or not ends_here:
                    self.stopped.add(row)
            elif ends_here:
                self.ends[row] = count

    def _first_stop(self, row: int, first: int, last: int) -> int | None:
        """Return the first of some steps of a row at which a criterion ends it that is no stop string, or None."""
        for step in range(first, last + 1):
            text = self._sequences.tokens[row : row + 1, self._shown_from(row) : self._sequences.prompt_width + step]
            if bool(self._row_criteria[row](text, None).all()):
                return step
        return None

    def _shown_from(self, row: int) -> int:
        return self._sequences.prompt_width - self._sequences.prompt_lengths[row]
