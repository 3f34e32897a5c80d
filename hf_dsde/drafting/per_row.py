"""Any `CandidateGenerator` of transformers, or of a user, as a drafter: one for each row, asked in turn.

Such generators know one sequence. So each row has one of its own, over its own text without padding. What they propose
is taken as it is and verified by drawing the target's own tokens, which is exact for any source.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils.generic import ModelOutput

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, Drafter
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.execution.spans import Span

LENGTH_ATTRIBUTES = ("num_assistant_tokens", "num_output_tokens")
"""Attributes by which generators of transformers are told how much to propose."""


class PerRowDrafter(Drafter):
    """Asks a generator per row. A row that sat out of a round gets a new one, since they count on seeing every token.

    Args:
        make: Returns a generator for a text, given its tokens, `[1, length]`, int64, on the device of the sequences.
        owner: What measured costs belong to: a generator, a model.
        hidden_layers: Layers of the target whose hidden states the generators read, at most one.
        least_states: Tokens whose hidden states have to be known before a generator is asked.
    """

    def __init__(
        self,
        make: Callable[[Tensor], CandidateGenerator],
        owner: object,
        hidden_layers: tuple[int, ...] = (),
        least_states: int = 0,
    ) -> None:
        self._make = make
        self._least_states = least_states
        self._owner = owner
        self._hidden_layers = hidden_layers

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What was named."""
        return self._hidden_layers

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
        rows = call.sequences.rows
        self._generators: list[CandidateGenerator | None] = [None] * rows
        self._asked: list[int] = []
        self._states: list[list[Tensor]] = [[] for _ in range(rows)]
        self._round_states: Tensor | None = None

    def read_states(self, spans: Sequence[Span], hidden: tuple[Tensor, ...]) -> None:
        """Keep the hidden states of texts."""
        for span, states in zip(spans, hidden[0].split([span.count for span in spans]), strict=True):
            self._states[span.row] = [states]

    def accept(self, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        """Keep the hidden states of a round until the host knows what stands."""
        self._round_states = hidden[0]

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
        if sum(map(len, self._states[row])) < self._least_states:
            return []
        text = cast("LongTensor", sequences.row_tokens(row))
        generator = self._generators[row]
        states = self._states[row][-1:] if generator is not None else self._states[row]
        if generator is None:
            self._generators[row] = generator = self._make(text)
        for name in LENGTH_ATTRIBUTES:
            if hasattr(generator, name):
                setattr(generator, name, most)
        candidates, _ = generator.get_candidates(text, **self._model_outputs(text, states))
        tokens: list[int] = candidates[0, text.shape[1] :][:most].tolist()
        return tokens

    def _model_outputs(self, text: Tensor, states: list[Tensor]) -> dict[str, Any]:
        """What transformers shows a generator that reads the target's hidden states; nothing if none does."""
        if not self._hidden_layers:
            return {}
        known = torch.cat(states)[None]
        positions = torch.arange(text.shape[1], device=text.device)[None]
        return {
            "model_kwargs": {"position_ids": positions, "attention_mask": torch.ones_like(positions)},
            "model_outputs": ModelOutput(hidden_states=(known,)),
            "is_first_iteration": False,
            "n_last_matches": known.shape[1] - 1,
        }

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Tell each generator that was asked how much of its proposal stands; the others have missed a round."""
        for row, generator in enumerate(self._generators):
            if self._round_states is not None:
                self._states[row].append(self._round_states[row, : num_matches[row] + 1].clone())
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
            self._states[row] = []

    def finish(self) -> None:
        """Let go of all generators, and of what they were shown."""
        self._generators, self._states, self._round_states = [], [], None
