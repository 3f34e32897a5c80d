"""Draft lengths that keep a pass under the device's knee, beyond which a further token is no longer nearly free.

The criterion is SSSD's `I_knee / batch` (arXiv 2411.05894) and PAPI's limit on requests times tokens per request
(arXiv 2502.15470): a pass of few tokens waits for the weights, whatever it computes, one of many for the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.costs import CostCurve, LiveCosts
from hf_dsde.policies.base import BatchInfo, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState
from hf_dsde.utils.checks import check_integer, check_number


@dataclass
class _State(RowState):
    active: Tensor  # [rows], bool: still generating, as of the last round


@register("token_budget")
class TokenBudgetPolicy(StoppingPolicy):
    """Every row drafts as many tokens as keep `rows (length + 1)` at or under the knee, up to `num_draft_tokens`.

    Args:
        knee_tokens: Tokens in a pass, of all rows together, up to which it costs about what a pass of one token per row
            does. `knee_from_rates` estimates it. None finds it in the measured costs, and follows them.
        num_draft_tokens: The most tokens a row drafts in a round. The budget says what is cheap, not what is accepted.
        slack: What counts as "about": measured passes may take longer than a plain step by this fraction. It has no
            effect when `knee_tokens` is given.
    """

    name = "token_budget"

    def __init__(self, knee_tokens: float | None = None, num_draft_tokens: int = 5, slack: float = 0.2) -> None:
        self.knee_tokens = None
        if knee_tokens is not None:
            self.knee_tokens = check_number("knee_tokens", knee_tokens, 0.0, open_minimum=True)
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self.slack = check_number("slack", slack, 0.0)
        self.requires = frozenset({Signal.COSTS}) if knee_tokens is None else frozenset()
        self._state: _State | None = None
        self._costs: LiveCosts | None = None
        self._version = -1
        self._most = self._measured_length = 0

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("TokenBudgetPolicy was used before `start(batch)`.")
        return self._state

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        if self.knee_tokens is None and batch.costs is None:
            raise ValueError(
                "`batch.costs` is None, but without `knee_tokens` the knee is found in them: the loop provides them to "
                "policies that require `Signal.COSTS`. Pass `knee_tokens`, from `knee_from_rates` for instance."
            )
        self._most = min(self.num_draft_tokens, batch.max_draft_length)
        self._costs = batch.costs if self.knee_tokens is None else None
        self._version = -1
        self._state = _State(active=torch.ones(batch.rows, dtype=torch.bool, device=batch.device))
        self._fresh = _State(active=torch.ones(1, dtype=torch.bool, device=batch.device))

    def draft_lengths(self) -> Tensor:
        """The longest draft within the budget, shape `[rows]`, int64, the same for all rows."""
        active = self._rows.active
        if self._costs is not None:
            return torch.full_like(active, self._length_by_costs(self._costs), dtype=torch.int64)
        assert self.knee_tokens is not None
        # Rounding the knee down first changes nothing, as rows are whole, and keeps the division exact.
        knee = min(int(self.knee_tokens), torch.iinfo(torch.int64).max)
        budget = knee // active.sum().clamp_min(1)
        return (budget - 1).clamp(0, self._most).expand_as(active)

    def _length_by_costs(self, costs: LiveCosts) -> int:
        """`floor(knee / rows) - 1` with a knee of the widest cheap pass times the rows in it."""
        if costs.version != self._version:
            self._version = costs.version
            self._measured_length = widest_cheap_pass(costs.current.verify, self.slack, self._most + 1) - 1
        return self._measured_length

    def observe(self, outcome: RoundOutcome) -> None:
        """Take note of which rows have finished."""
        self._state = _State(active=outcome.active)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)


def widest_cheap_pass(verify: CostCurve, slack: float, widest: int) -> int:
    """The most columns per row at which a pass costs at most `1 + slack` times a plain step, from 1 to `widest`."""
    limit = (1 + slack) * verify.at(1)
    return max(width for width in range(1, max(widest, 1) + 1) if width == 1 or verify.at(width) <= limit)


def knee_from_rates(flops_per_second: float, bytes_per_second: float, bytes_per_parameter: float = 2.0) -> float:
    """Tokens in a pass at which arithmetic takes as long as reading the weights (the ridge of a roofline).

    A pass of N tokens makes 2 N floating-point operations with each parameter, a multiplication and an addition for
    each token, and reads the parameter once: `2 N / flops_per_second = bytes_per_parameter / bytes_per_second`, so
    `N = flops_per_second bytes_per_parameter / (2 bytes_per_second)`. An H100 (SXM; 989 TFLOP/s in bfloat16 without
    sparsity, 3.35 TB/s) has its knee at 295 tokens. Peak rates are not reached, and attention and the cache are left
    out: measured costs know better.

    Args:
        flops_per_second: Peak rate of the arithmetic in the dtype of the matrix products.
        bytes_per_second: Peak rate of the device's memory.
        bytes_per_parameter: 2 for bfloat16, 0.5 for weights of 4 bits, and so on.

    Returns:
        Tokens, not rounded.
    """
    check_number("flops_per_second", flops_per_second, 0.0, open_minimum=True)
    check_number("bytes_per_second", bytes_per_second, 0.0, open_minimum=True)
    check_number("bytes_per_parameter", bytes_per_parameter, 0.0, open_minimum=True)
    return flops_per_second * bytes_per_parameter / (2 * bytes_per_second)
