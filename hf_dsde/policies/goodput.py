"""Goodput (SmartSpec, arXiv 2406.14066): the length at which a batch is expected to gain most tokens per second.

As published, that is the batch's mean. A batch whose rows all have to end takes as long as its slowest row, for which
a draft may be too long that is right for the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.cost_table import CostTable
from hf_dsde.policies.host_rows import HostRows
from hf_dsde.policies.registry import register
from hf_dsde.utils.checks import check_choice, check_integer, check_number


def expected_tokens(acceptance: float, longest: int) -> list[float]:
    """Tokens a row gains per round by draft length, the bonus token included.

    `(1 - a^(k+1)) / (1 - a) = 1 + a + ... + a^k`, with every token accepted with the same probability independently
    (Leviathan et al., arXiv 2211.17192, Eq. 1).

    Args:
        acceptance: Acceptance probability of a token, in [0, 1].
        longest: The longest draft length.

    Returns:
        For lengths 0 .. longest.
    """
    return list(accumulate(acceptance**depth for depth in range(longest + 1)))


LEAST_WEIGHT = 1e-6
"""Of a round, where `decay` leaves none."""
PROBED_ROWS = 4
"""Rows that draft in a probe: what a draft has missed while nobody drafted, it has to take in for each of them."""
FIRST_TOKENS = 8
"""Judged tokens that the initial acceptance counts for; and all that is known, while drafting does not pay: what is
thought of the draft then rests on few probes, or on a text that has passed."""


ROW_PRIOR = 16.0
"""Judged tokens that the batch's acceptance counts for in that of a row."""
ROW_TOKENS = 64.0
"""Judged tokens of a row that are remembered: what is older counts ever less."""


@dataclass
class _Rows(HostRows):
    judged: NDArray[np.float64]  # [rows]: draft tokens of late, the first rejected one of a round included
    accepted: NDArray[np.float64]  # [rows]: those that stand

    @classmethod
    def new(cls, rows: int) -> _Rows:
        """Rows of which nothing is known."""
        return cls(np.zeros(rows), np.zeros(rows))

    def add(self, judged: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Count a round."""
        past = np.minimum(1.0, ROW_TOKENS / np.maximum(self.judged, 1.0))
        self.judged = past * self.judged + judged
        self.accepted = past * self.accepted + accepted

    def acceptances(self, batch: float) -> NDArray[np.float64]:
        """Each row's acceptance, `[rows]`, as if it had judged tokens of the batch's before."""
        return (self.accepted + ROW_PRIOR * batch) / (self.judged + ROW_PRIOR)


@register("goodput")
class GoodputPolicy(StoppingPolicy):
    """All rows draft the length with the best ratio of expected tokens to measured time; 0 is a length.

    The acceptance probability is one number for the whole batch, followed by an exponential average. While the best
    length is 0 nothing can be learnt, and as published that is for ever: here a small share of the time goes into
    drafting one token in a few rows nevertheless, and a probe that pays for itself costs nothing of that share.

    Args:
        num_draft_tokens: The longest draft.
        initial_acceptance: Acceptance probability to begin with. Published code: 0.7.
        decay: Weight of the past in the average, per round in which somebody drafted, once as much has been judged as
            that takes. Published code: 0.85, from the first round on.
        memory_tokens: Judged tokens that the past counts for in any case, if there have been as many: where a round
            brings few, as one row's does, it weighs less than `1 - decay`. Published code: 0, which also leaves out
            that the initial acceptance counts for 8 tokens only.
        interval: Rounds between decisions. Published code: 20.
        plain_bonus: Factor on the goodput of length 0; above 1, drafting has to win by a margin. Published code: 1.1.
        probe_share: Share of the time spent on drafts that are expected to lose, to notice when they no longer do.
            Published code: 0.
        estimator: "tested" counts accepted tokens over those that were judged, the first rejected one included, which
            is unbiased if all tokens are alike. "drafted" counts them over all drafted ones, as the published code
            does; it takes the tokens after a rejection for rejected, and the more of them there are the lower it gets.
        acceptance_of: Whose tokens per second count. "slowest_row": of the row whose last drafts stood least often,
            `(accepted_r + 16 a) / (judged_r + 16)` over its last 64 judged tokens, with the batch's `a`; the others end
            before it. "batch": of all rows together, as in the published code. So it is in any case where other texts
            take the places of those that end.
    """

    name = "goodput"
    requires = frozenset({Signal.COSTS})
    acceptance: float
    """The running acceptance probability, once a batch has started."""

    def __init__(
        self,
        num_draft_tokens: int = 12,
        *,
        initial_acceptance: float = 0.7,
        decay: float = 0.85,
        memory_tokens: int = 20,
        interval: int = 1,
        plain_bonus: float = 1.0,
        probe_share: float = 0.01,
        estimator: str = "tested",
        acceptance_of: str = "slowest_row",
    ) -> None:
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self.initial_acceptance = check_number("initial_acceptance", initial_acceptance, 0.0, 1.0)
        self.decay = check_number("decay", decay, 0.0, 1.0)
        self.memory_tokens = check_integer("memory_tokens", memory_tokens, 0)
        self.interval = check_integer("interval", interval, 1)
        self.plain_bonus = check_number("plain_bonus", plain_bonus, 0.0)
        self.probe_share = check_number("probe_share", probe_share, 0.0, 1.0)
        self.estimator = check_choice("estimator", estimator, ("tested", "drafted"))
        self.acceptance_of = check_choice("acceptance_of", acceptance_of, ("slowest_row", "batch"))
        self._active: list[bool] = []  # still generating, as of the last round

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._device = batch.device
        self._longest = min(self.num_draft_tokens, batch.max_draft_length)
        self._table = CostTable(batch, self._longest)
        self._rounds = 0
        self._active = [True] * batch.rows
        self._by_row = self.acceptance_of == "slowest_row" and batch.rows > 1 and not batch.refilled
        self._rows = _Rows.new(batch.rows)
        self.acceptance = self.initial_acceptance
        self._judged = float(FIRST_TOKENS)  # tokens that the acceptance rests on
        self._best = self._best_length()  # as of the last decision
        self._probing = False  # whether the next round is a probe
        # An earlier call measured what makes drafting look too dear: one probe shows whether that still holds.
        put_aside = self._probe_price if self.probe_share > 0 else 0.0
        self._budget = put_aside if self._best == 0 else 0.0  # time for probes, in plain steps

    @property
    def may_lag(self) -> bool:
        """While it drafts; probes and plain rounds between them are asked for one by one."""
        return self._best > 0

    def draft_lengths(self) -> Tensor:
        """The same length for every row, shape `[rows]`, int64; in a probe 1 for a few and 0 for the others."""
        return torch.tensor(self._lengths(), device=self._device)

    def _lengths(self) -> list[int]:
        if not self._active:
            raise RuntimeError("GoodputPolicy was used before `start(batch)`.")
        if not self._probing:
            return [self._best] * len(self._active)
        places = accumulate(self._active)  # of each row among those that go on, from 1
        return [int(on and place <= PROBED_ROWS) for on, place in zip(self._active, places, strict=True)]

    def observe(self, outcome: RoundOutcome) -> None:
        """Follow the acceptance probability, put time aside for probes, and decide on the next length."""
        self._rounds += 1
        self._table.refresh()
        drafted: list[int] = outcome.drafted.tolist()
        accepted: list[int] = outcome.accepted.tolist()
        self._active = outcome.active.tolist()
        self._follow(drafted, accepted)
        if self._rounds % self.interval == 0:
            self._best = self._best_length()
        if self._longest > 0:
            if self._best == 0:
                self._judged = float(FIRST_TOKENS)
                self._rows = _Rows.new(len(self._active))
            self._decide_on_probe(max(drafted), sum(accepted))

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch, and a probe with it. `index` is int64, `[places]`."""
        self._active = [place < 0 or self._active[place] for place in index.tolist()]
        self._rows = self._rows.select_rows(index.numpy(force=True), _Rows.new(1))

    def _follow(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        tested = self.estimator == "tested"
        judged_of_rows = [min(a + 1, d) if tested else d for a, d in zip(accepted, drafted, strict=True)]
        judged = sum(judged_of_rows)
        if judged == 0:
            return
        self._rows.add(np.array(judged_of_rows), np.array(accepted))
        if self.memory_tokens:
            # An average of weight 1 - decay per round, once there are tokens enough for it.
            remembered = max(judged * (self.decay / max(1 - self.decay, LEAST_WEIGHT)), self.memory_tokens)
            self._judged = min(self._judged, remembered)
            weight = judged / (self._judged + judged)
        else:
            weight = 1 - self.decay
        self.acceptance += weight * (sum(accepted) / judged - self.acceptance)
        self._judged += judged

    def _best_length(self) -> int:
        """The length of the best goodput, the shortest among equals."""
        return self._best_within(self._longest)

    def _best_within(self, longest: int) -> int:
        tokens = expected_tokens(self._decisive_acceptance(), longest)
        goodput = [gain / time for gain, time in zip(tokens, self._table.times(longest), strict=False)]
        goodput[0] *= self.plain_bonus
        return goodput.index(max(goodput))

    def _decisive_acceptance(self) -> float:
        """The acceptance of the slowest row that goes on, or the batch's."""
        if not self._by_row or not any(self._active):
            return self.acceptance
        return float(self._rows.acceptances(self.acceptance)[self._active].min())

    def _decide_on_probe(self, longest_draft: int, accepted: int) -> None:
        price = self._probe_price
        # A plain step gives one token per active row, so this is what the probe's tokens would have taken.
        worth = accepted / max(sum(self._active), 1)
        refund = min(worth, price) if self._probing else 0.0
        put_aside = self.probe_share * self._table.time(longest_draft)
        budget = min(self._budget + refund + put_aside, 2 * max(put_aside, price))
        self._probing = self._best == 0 and budget >= price > 0
        self._budget = budget - price if self._probing else budget

    @property
    def _probe_price(self) -> float:
        """Plain steps that a probe takes."""
        return self._table.time(1) - self._table.time(0) + self._table.resumption
