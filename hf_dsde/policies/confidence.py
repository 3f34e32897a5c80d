"""Transformers' `assistant_confidence_threshold` kept per row: stop after a token that the draft was unsure of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState, append_newest
from hf_dsde.utils.checks import check_flag, check_integer, check_number

MINIMUM_SAMPLES = 6
"""Transformers moves the threshold once it has seen more than five samples."""
MISSED_MATCH_COST = 3
"""Cost of stopping before a token that would have matched, in costs of drafting one that does not match."""


@dataclass
class _State(RowState):
    threshold: Tensor  # [rows], float32
    confidence: Tensor  # [rows, history], float32, newest last
    matched: Tensor  # [rows, history], bool
    filled: Tensor  # [rows], int64: how many of the last entries are real


@register("confidence")
class ConfidencePolicy(StoppingPolicy):
    """Stop after the first token whose draft probability lies below a threshold, which each row adapts to its text.

    The unsure token itself is still verified: stopping *after* a token keeps the output's law, dropping it would not.

    Args:
        threshold: The first threshold, in [0, 1]; 0 never stops.
        num_draft_tokens: The most tokens a row drafts in a round.
        adapt: Whether a row's threshold follows what was accepted.
        history: How many of a row's newest samples the adaptation looks at. Transformers keeps all of a call.
    """

    name = "confidence"

    def __init__(
        self, threshold: float = 0.4, num_draft_tokens: int = 20, adapt: bool = True, history: int = 512
    ) -> None:
        self.threshold = check_number("threshold", threshold, 0.0, 1.0)
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self.adapt = check_flag("adapt", adapt)
        self.history = check_integer(
            "history", history, MINIMUM_SAMPLES, way_out="Pass `adapt=False` for a fixed threshold."
        )
        self.requires = frozenset({Signal.CONFIDENCE}) if adapt else frozenset()
        self._state: _State | None = None
        self._length = 0

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("ConfidencePolicy was used before `start(batch)`.")
        return self._state

    @property
    def thresholds(self) -> Tensor:
        """Each row's current threshold, shape `[rows]`, float32."""
        return self._rows.threshold

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._length = min(self.num_draft_tokens, batch.max_draft_length)
        self._state = self._initial(batch.rows, batch.device)
        self._fresh = self._initial(1, batch.device)

    def _initial(self, rows: int, device: torch.device) -> _State:
        return _State(
            threshold=torch.full((rows,), self.threshold, dtype=torch.float32, device=device),
            confidence=torch.zeros(rows, self.history, dtype=torch.float32, device=device),
            matched=torch.zeros(rows, self.history, dtype=torch.bool, device=device),
            filled=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def draft_lengths(self) -> Tensor:
        """The most tokens of a round, shape `[rows]`, int64; most rounds stop earlier."""
        return torch.full_like(self._rows.filled, self._length)

    def should_stop(self, step: DraftStep) -> Tensor:
        """Rows whose newest token has a lower draft probability than their threshold, shape `[rows]`, bool."""
        return step.confidence < self._rows.threshold

    def observe(self, outcome: RoundOutcome) -> None:
        """Remember every token up to and including the first mismatch, and move the thresholds."""
        if not self.adapt:
            return
        if outcome.confidence is None:
            raise ValueError("ConfidencePolicy needs `outcome.confidence`, which the loop left out: it is `requires`d.")
        state = self._rows
        learning = outcome.active & (outcome.drafted > 0)
        seen = torch.minimum(outcome.drafted, outcome.accepted + 1) * learning
        position = torch.arange(outcome.confidence.shape[1], device=seen.device)
        matched = position < outcome.accepted.unsqueeze(-1)
        confidence = append_newest(state.confidence, outcome.confidence.float(), seen)
        labels = append_newest(state.matched, matched, seen)
        filled = (state.filled + seen).clamp_max(self.history)
        best, informed = _least_cost_threshold(confidence, labels, filled)
        threshold = torch.where(learning & informed, best, state.threshold)
        self._state = _State(threshold, confidence, labels, filled)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)


def _least_cost_threshold(confidence: Tensor, matched: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence that separates matches from mismatches at the least `fpr + 3 fnr`, the strictest among equals.

    That is transformers' rule (`AssistedCandidateGenerator.update_candidate_strategy`): costs of 25 % and 75 % for a
    token drafted and rejected and for one not drafted though it would have matched. Costs are compared after
    multiplication with both class sizes, as integers, so that equal costs are equal.

    Args:
        confidence: Samples, shape `[rows, history]`, float32, the last `filled` of each row real.
        matched: Whether the target agreed, shape `[rows, history]`, bool.
        filled: Shape `[rows]`, int64.

    Returns:
        Thresholds, shape `[rows]`, float32, and which rows have enough samples of both classes, shape `[rows]`, bool.
    """
    window = confidence.shape[1]
    real = torch.arange(window - 1, -1, -1, device=filled.device) < filled.unsqueeze(-1)
    ordered, order = confidence.masked_fill(~real, -torch.inf).sort(dim=1, descending=True)
    hits = (matched & real).gather(1, order)
    misses = (~matched & real).gather(1, order)
    matches, mismatches = hits.sum(1), misses.sum(1)
    # Samples of equal confidence fall on the same side of any threshold: only the last of them is a point of the curve.
    is_point = torch.ones_like(hits)
    is_point[:, :-1] = ordered[:, :-1] != ordered[:, 1:]
    missed = matches.unsqueeze(-1) - hits.cumsum(1)
    cost = misses.cumsum(1) * matches.unsqueeze(-1) + MISSED_MATCH_COST * missed * mismatches.unsqueeze(-1)
    cost = cost.masked_fill(~is_point | ordered.isneginf(), torch.iinfo(torch.int64).max)
    cheapest = cost == cost.amin(1, keepdim=True)
    best = ordered.masked_fill(~cheapest, -torch.inf).amax(1)
    informed = (filled >= MINIMUM_SAMPLES) & (matches > 0) & (mismatches > 0)
    return best, informed
