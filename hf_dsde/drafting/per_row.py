"""Any `CandidateGenerator` of transformers, or of a user, as a drafter: one for each row, asked in turn.

Such generators know one sequence. So each row has one of its own, over its own text without padding. What they propose
is taken as it is and verified by drawing the target's own tokens, which is exact for any source.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import cast

from torch import LongTensor, Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, Drafter
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch

LENGTH_ATTRIBUTES = ("num_assistant_tokens", "num_output_tokens")
"""Attributes by which generators of transformers are told how much to propose."""


class PerRowDrafter(Drafter):
    """Asks a generator per row. A row that sat out of a round gets a new one, since they count on seeing every token.

    Args:
        make: Returns a generator for a text, given its tokens, `[1, length]`, int64, on the device of the sequences.
        owner: What measured costs belong to: a generator, a model.
    """

    def __init__(self, make: Callable[[Tensor], CandidateGenerator], owner: object) -> None:
        self._make = make
        self._owner = owner

    @property
    def cost_owner(self) -> object:
        """What was named as the owner."""
        return self._owner

    @property
    def conditions(self) -> Hashable:
        """That rows are asked one by one."""
        return type(self).__name__

    def start(self, call: DraftCall) -> None:
        """Forget the generators of an earlier call."""
        super().start(call)
        self._generators: list[CandidateGenerator | None] = [None] * call.sequences.rows
        self._asked: list[int] = []

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,
        plan: RoundPlan,
        monitor: DraftMonitor,  # noqa: ARG002
    ) -> CandidateBatch:
        """Ask the generators of the rows that may draft."""
        self._asked = [row for row, most in enumerate(plan.length_counts) if most]
        drafts = [self._draft(sequences, row, most) if most else [] for row, most in enumerate(plan.length_counts)]
        return CandidateBatch.of_lists(drafts, sequences.device)

    def _draft(self, sequences: SequenceBatch, row: int, most: int) -> list[int]:
        text = sequences.row_tokens(row)
        generator = self._generators[row]
        if generator is None:
            self._generators[row] = generator = self._make(text)
        for name in LENGTH_ATTRIBUTES:
            if hasattr(generator, name):
                setattr(generator, name, most)
        candidates, _ = generator.get_candidates(cast("LongTensor", text))
        tokens: list[int] = candidates[0, text.shape[1] :][:most].tolist()
        return tokens

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Tell each generator that was asked how much of its proposal stands; the others have missed a round."""
        for row, generator in enumerate(self._generators):
            if row not in self._asked:
                self._generators[row] = None
            elif generator is not None and drafted[row]:
                seen = scores[row : row + 1, : drafted[row] + 1]
                text = cast("LongTensor", sequences.row_tokens(row))
                generator.update_candidate_strategy(text, seen, num_matches[row])
        self._asked = []

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget the generators of texts that are over."""
        for row in rows:
            self._generators[row] = None

    def finish(self) -> None:
        """Let go of all generators."""
        self._generators = []
