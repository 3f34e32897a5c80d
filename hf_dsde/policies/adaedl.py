"""AdaEDL (arXiv 2410.18351): stop after a token whose acceptance, bounded from the draft's entropy, looks too unlikely.

The chance of acceptance is `1 - TV(p, q)`. Pinsker's inequality bounds the distance by the divergence,
`TV <= sqrt(KL(q || p) / 2)`, and the divergence is taken to grow with the draft's own entropy H, all that is known of
the two while drafting: `acceptance >= 1 - sqrt(gamma H)`. Drafting ends below a threshold lambda, which follows the
share of drafts that is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState
from hf_dsde.utils.checks import check_choice, check_integer, check_number

TARGET_RATE = 0.9
"""alpha: the acceptance rate that the threshold is steered towards."""
RATE_DECAY = 0.5
"""beta1: weight of the past in the acceptance rate's moving average."""
THRESHOLD_DECAY = 0.9
"""beta2: weight of the past in the threshold."""
THRESHOLD_STEP = 0.01
"""epsilon: how far a round would move the threshold, were it not for beta2."""
END_CONDITIONS = ("not_full", "full")
SCOPES = ("row", "batch")


@dataclass
class _State(RowState):
    threshold: Tensor  # [rows], float32: lambda
    acceptance_rate: Tensor  # [rows], float32: AR, moving average of accepted / drafted


@register("adaedl")
class AdaEDLPolicy(StoppingPolicy):
    """Stop after the first token with `1 - sqrt(gamma H(q)) < lambda`, which each row adapts to its acceptance rate.

    The rule looks at the draft's distribution only, not at the token drawn from it, and the token is verified.

    Args:
        gamma: Factor of the entropy, at least 0; 0 takes acceptance for certain. 0.2 in the paper, 0.1 in DSDE's public
            code.
        threshold: The first lambda, in [0, 1].
        num_draft_tokens: The most tokens a row drafts in a round; 7 in DSDE's experiments.
        end_condition: When a row whose acceptance rate exceeds its target lowers lambda: "not_full", in rounds that
            ended before `num_draft_tokens` (as in Draft & Verify, whose rule this is), or "full", in rounds in which
            `num_draft_tokens` were drafted and all were accepted (as in DSDE's public code).
        scope: "row", each row stops for itself, or "batch", all rows stop as soon as one that still drafts does.
    """

    name = "adaedl"

    def __init__(
        self,
        gamma: float = 0.2,
        threshold: float = 0.5,
        num_draft_tokens: int = 7,
        end_condition: str = "not_full",
        scope: str = "row",
    ) -> None:
        self.gamma = check_number("gamma", gamma, 0.0)
        self.threshold = check_number("threshold", threshold, 0.0, 1.0)
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self.end_condition = check_choice("end_condition", end_condition, END_CONDITIONS)
        self.scope = check_choice("scope", scope, SCOPES)
        self._state: _State | None = None
        self._length = 0

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("AdaEDLPolicy was used before `start(batch)`.")
        return self._state

    @property
    def thresholds(self) -> Tensor:
        """Each row's lambda, shape `[rows]`, float32; not kept within [0, 1]."""
        return self._rows.threshold

    @property
    def acceptance_rates(self) -> Tensor:
        """Each row's moving average of accepted / drafted, shape `[rows]`, float32; 0 before the first round."""
        return self._rows.acceptance_rate

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._length = min(self.num_draft_tokens, batch.max_draft_length)
        self._state = self._initial(batch.rows, batch.device)
        self._fresh = self._initial(1, batch.device)

    def _initial(self, rows: int, device: torch.device) -> _State:
        return _State(
            threshold=torch.full((rows,), self.threshold, dtype=torch.float32, device=device),
            acceptance_rate=torch.zeros(rows, dtype=torch.float32, device=device),
        )

    def draft_lengths(self) -> Tensor:
        """The most tokens of a round, shape `[rows]`, int64; most rounds stop earlier."""
        return torch.full_like(self._rows.threshold, self._length, dtype=torch.int64)

    def should_stop(self, step: DraftStep) -> Tensor:
        """Rows that stop after their newest token, shape `[rows]`, bool: the same for all in scope "batch"."""
        stops = self._bounds(step) < self._rows.threshold
        if self.scope == "row":
            return stops
        return (stops & step.drafting).any().expand_as(stops)

    def _bounds(self, step: DraftStep) -> Tensor:
        """Lower bound of the newest tokens' chance of acceptance, `1 - sqrt(gamma H)`, shape `[rows]`, float32."""
        return 1 - (self.gamma * step.entropy).sqrt()

    def observe(self, outcome: RoundOutcome) -> None:
        """Update the acceptance rates, and move the thresholds of the rows that are above or below its target."""
        state = self._rows
        rate = self._next_rate(outcome)
        # lambda <- beta2 lambda + (1 - beta2)(lambda + epsilon direction), with both lambdas taken together.
        threshold = state.threshold + (1 - THRESHOLD_DECAY) * THRESHOLD_STEP * self._direction(rate, outcome)
        learning = outcome.active & (outcome.drafted > 0)
        self._state = _State(
            threshold=torch.where(learning, threshold, state.threshold),
            acceptance_rate=torch.where(learning, rate, state.acceptance_rate),
        )

    def _next_rate(self, outcome: RoundOutcome) -> Tensor:
        newest = outcome.accepted / outcome.drafted.clamp_min(1)
        return RATE_DECAY * self._rows.acceptance_rate + (1 - RATE_DECAY) * newest

    def _direction(self, rate: Tensor, outcome: RoundOutcome) -> Tensor:
        """1 where the threshold rises, -1 where it falls, 0 where it stays; shape `[rows]`, int64."""
        falls = (rate > TARGET_RATE) & self._may_fall(outcome)
        return (rate < TARGET_RATE).long() - falls.long()

    def _may_fall(self, outcome: RoundOutcome) -> Tensor:
        if self.end_condition == "full":
            return outcome.accepted >= self._length
        return outcome.drafted < self._length

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)
