"""Goodput (SmartSpec, arXiv 2406.14066): the length at which the batch is expected to gain most tokens per second."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde.argument_checks import check_choice, check_integer, check_number
from hf_dsde.policies.base import BatchInfo, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.cost_table import CostTable
from hf_dsde.policies.registry import register


def expected_tokens(acceptance: Tensor, longest: int) -> Tensor:
    """Tokens a row gains per round by draft length, the bonus token included.

    `(1 - a^(k+1)) / (1 - a) = 1 + a + ... + a^k`, with every token accepted with the same probability independently
    (Leviathan et al., arXiv 2211.17192, Eq. 1).

    Args:
        acceptance: Acceptance probability of a token, scalar tensor, float32, in [0, 1].
        longest: The longest draft length.

    Returns:
        For lengths 0 .. longest, shape `[longest + 1]`, float32.
    """
    exponents = torch.arange(longest + 1, device=acceptance.device, dtype=acceptance.dtype)
    return torch.pow(acceptance, exponents).cumsum(0)


@register("goodput")
class GoodputPolicy(StoppingPolicy):
    """All rows draft the length with the best ratio of expected tokens to measured time; 0 is a length.

    The acceptance probability is one number for the whole batch, followed by an exponential average. While the best
    length is 0 nothing can be learnt, and as published that is for ever: here a small share of the time goes into
    drafting one token nevertheless, and a probe that pays for itself costs nothing of that share.

    Args:
        num_draft_tokens: The longest draft.
        initial_acceptance: Acceptance probability to begin with. Published code: 0.7.
        decay: Weight of the past in the average, per round in which somebody drafted. Published code: 0.85.
        interval: Rounds between decisions. Published code: 20.
        plain_bonus: Factor on the goodput of length 0; above 1, drafting has to win by a margin. Published code: 1.1.
        probe_share: Share of the time spent on drafts that are expected to lose, to notice when they no longer do.
            Published code: 0.
        estimator: "tested" counts accepted tokens over those that were judged, the first rejected one included, which
            is unbiased if all tokens are alike. "drafted" counts them over all drafted ones, as the published code
            does; it takes the tokens behind a rejection for rejected, and the more of them there are the lower it gets.
    """

    name = "goodput"
    requires = frozenset({Signal.COSTS})

    def __init__(
        self,
        num_draft_tokens: int = 12,
        *,
        initial_acceptance: float = 0.7,
        decay: float = 0.85,
        interval: int = 1,
        plain_bonus: float = 1.0,
        probe_share: float = 0.01,
        estimator: str = "tested",
    ) -> None:
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self.initial_acceptance = check_number("initial_acceptance", initial_acceptance, 0.0, 1.0)
        self.decay = check_number("decay", decay, 0.0, 1.0)
        self.interval = check_integer("interval", interval, 1)
        self.plain_bonus = check_number("plain_bonus", plain_bonus, 0.0)
        self.probe_share = check_number("probe_share", probe_share, 0.0, 1.0)
        self.estimator = check_choice("estimator", estimator, ("tested", "drafted"))
        self._rows = 0

    @property
    def acceptance(self) -> Tensor:
        """The running acceptance probability, scalar, float32."""
        self._check_started()
        return self._acceptance

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._longest = min(self.num_draft_tokens, batch.max_draft_length)
        self._table = CostTable(batch, self._longest)
        self._rows = batch.rows
        self._rounds = 0
        self._acceptance = torch.full((), self.initial_acceptance, device=batch.device)
        self._budget = torch.zeros((), device=batch.device)
        self._probing = torch.zeros((), dtype=torch.bool, device=batch.device)
        self._best = self._best_length()
        self._length = self._best

    def draft_lengths(self) -> Tensor:
        """The same length for every row, shape `[rows]`, int64."""
        self._check_started()
        return self._length.expand(self._rows)

    def observe(self, outcome: RoundOutcome) -> None:
        """Follow the acceptance probability, put time aside for probes, and decide on the next length."""
        drafted = outcome.drafted.sum()
        accepted = outcome.accepted.sum()
        judged = torch.minimum(outcome.accepted + 1, outcome.drafted).sum()
        total = judged if self.estimator == "tested" else drafted
        followed = self.decay * self._acceptance + (1 - self.decay) * accepted / total.clamp_min(1)
        self._acceptance = torch.where(drafted > 0, followed, self._acceptance)
        self._rounds += 1
        self._table.refresh()
        if self._rounds % self.interval == 0:
            self._best = self._best_length()
        self._account(outcome)

    def _best_length(self) -> Tensor:
        """The length of the best goodput, the shortest among equals, scalar, int64."""
        goodput = expected_tokens(self._acceptance, self._longest) / self._table.times
        goodput = torch.cat([goodput[:1] * self.plain_bonus, goodput[1:]])
        return goodput.argmax()

    def _account(self, outcome: RoundOutcome) -> None:
        """Decide whether a length of 0 becomes a probe of 1, paid from time put aside."""
        if self._longest == 0:
            self._length = self._best
            return
        price = self._table.times[1] - self._table.times[0]
        # A plain step gives one token per active row, so this is what the probe's tokens would have taken.
        worth = outcome.accepted.sum() / outcome.active.sum().clamp_min(1)
        refund = torch.where(self._probing, torch.minimum(worth, price), 0.0)
        width = outcome.drafted.max().clamp_max(self._longest)
        put_aside = self.probe_share * self._table.times.take(width)
        self._budget = torch.minimum(self._budget + refund + put_aside, 2 * price.clamp_min(put_aside))
        self._probing = (self._best == 0) & (self._budget >= price) & (price > 0)
        self._budget = self._budget - torch.where(self._probing, price, 0.0)
        self._length = torch.where(self._probing, 1, self._best)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; nothing is kept per row. `index` is int64, `[places]`."""
        self._rows = len(index)

    def _check_started(self) -> None:
        if self._rows == 0:
            raise RuntimeError("GoodputPolicy was used before `start(batch)`.")
