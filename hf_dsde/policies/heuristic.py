"""The rule of transformers' `num_assistant_tokens_schedule="heuristic"`, kept per row: 2 up, 1 down."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, RoundOutcome, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import select_rows
from hf_dsde.utils.checks import check_integer


@register("heuristic")
class HeuristicPolicy(StoppingPolicy):
    """Two tokens more after a fully accepted draft, one fewer otherwise, never fewer than one.

    Transformers lets the length grow without bound; here it stops at the loop's longest draft, since a length that
    cannot be drafted would only delay the way back down.

    Args:
        initial_length: The first round's length. Transformers starts from `num_assistant_tokens`, 20 by default.
    """

    name = "heuristic"

    def __init__(self, initial_length: int = 5) -> None:
        self.initial_length = check_integer("initial_length", initial_length, 1)
        self._lengths: Tensor | None = None
        self._ceiling = 0

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._ceiling = batch.max_draft_length
        self._fresh = torch.full((1,), min(self.initial_length, self._ceiling), device=batch.device)
        self._lengths = self._fresh.repeat(batch.rows)

    def draft_lengths(self) -> Tensor:
        """Each row's current length, shape `[rows]`, int64."""
        if self._lengths is None:
            raise RuntimeError("HeuristicPolicy was asked for lengths before `start(batch)`.")
        return self._lengths

    def observe(self, outcome: RoundOutcome) -> None:
        """Move each row that drafted in this round by the rule."""
        lengths = self.draft_lengths()
        # The loop may have drafted more than this row asked for; tokens beyond its wish are not held against it.
        full = outcome.accepted >= torch.minimum(outcome.drafted, lengths)
        moved = torch.where(full, lengths + 2, (lengths - 1).clamp_min(1)).clamp_max(self._ceiling)
        learning = outcome.active & (outcome.drafted > 0)
        self._lengths = torch.where(learning, moved, lengths)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._lengths = select_rows(self.draft_lengths(), index, self._fresh)
