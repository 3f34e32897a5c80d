"""Goodput (SmartSpec, arXiv 2406.14066): the length at which the batch is expected to gain most tokens per second."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.cost_table import CostTable
from hf_dsde.policies.registry import register
from hf_dsde.utils.checks import check_choice, check_integer, check_number


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


LEAST_WEIGHT = 1e-6
"""Of a round, where `decay` leaves none."""
PROBED_ROWS = 4
"""Rows that draft in a probe: what a draft has missed while nobody drafted, it has to take in for each of them."""
FIRST_TOKENS = 8
"""Judged tokens that the initial acceptance counts for; and all that is known, while drafting does not pay: what is
thought of the draft then rests on few probes, or on a text that has passed."""


class _State(NamedTuple):
    """What is remembered from round to round."""

    acceptance: Tensor  # scalar, float32: running acceptance probability
    best: Tensor  # scalar, int64: length of the best goodput, as of the last decision
    budget: Tensor  # scalar, float32: time put aside for probes, in plain steps
    probing: Tensor  # scalar, bool: whether a length of 0 is replaced by a probe
    tokens: Tensor  # scalar, float32: judged tokens that the acceptance probability counts for
    lengths: Tensor  # [rows], int64: what is drafted next


class _Arithmetic(NamedTuple):
    """What a round teaches, as a function of tensors; `first_tokens` and knobs of the policy stay as they are."""

    longest: int
    decay: float
    memory_tokens: int
    plain_bonus: float
    probe_share: float
    estimator: str
    first_tokens: Tensor

    def next_state(
        self,
        drafted: Tensor,
        accepted: Tensor,
        active: Tensor,
        times: Tensor,
        resumption: Tensor,
        due: Tensor,
        acceptance: Tensor,
        best: Tensor,
        budget: Tensor,
        probing: Tensor,
        tokens: Tensor,
    ) -> _State:
        """The state after a round.

        Args:
            drafted: As in `RoundOutcome`.
            accepted: As in `RoundOutcome`.
            active: As in `RoundOutcome`.
            times: As in `CostTable`.
            resumption: As in `CostTable`.
            due: Whether the best length is decided on again, scalar, bool.
            acceptance: As in `_State`, of the round before.
            best: Likewise.
            budget: Likewise.
            probing: Likewise.
            tokens: Likewise.
        """
        judged = (torch.minimum(accepted + 1, drafted) if self.estimator == "tested" else drafted).sum()
        gained, longest = accepted.sum(), drafted.max()
        acceptance, tokens = self._followed(acceptance, tokens, judged, gained)
        best = torch.where(due, self.best_length(acceptance, times), best)
        if self.longest == 0:
            return _State(acceptance, best, budget, probing, tokens, best.expand_as(drafted))
        tokens = torch.where(best == 0, self.first_tokens, tokens)
        price = self.probe_price(times, resumption)
        # A plain step gives one token per active row, so this is what the probe's tokens would have taken.
        worth = gained / active.sum().clamp_min(1)
        refund = torch.minimum(worth, price) * probing
        put_aside = self.probe_share * times.take(longest.clamp_max(self.longest))
        budget = torch.minimum(budget + refund + put_aside, 2 * torch.maximum(price, put_aside))
        probing = (best == 0) & (budget >= price) & (price > 0)
        probed = probing & active & (active.cumsum(0) <= PROBED_ROWS)
        return _State(acceptance, best, budget - price * probing, probing, tokens, lengths=best + probed)

    def probe_price(self, times: Tensor, resumption: Tensor) -> Tensor:
        """Plain steps that a probe takes, scalar, float32."""
        return times[min(1, self.longest)] - times[0] + resumption

    def _followed(self, acceptance: Tensor, tokens: Tensor, judged: Tensor, gained: Tensor) -> tuple[Tensor, Tensor]:
        """The acceptance probability after a round, and the judged tokens that it rests on."""
        rate = gained / judged.clamp_min(1)
        if self.memory_tokens:
            # An average of weight 1 - decay per round, once there are tokens enough for it.
            remembered = (judged * (self.decay / max(1 - self.decay, LEAST_WEIGHT))).clamp_min(self.memory_tokens)
            tokens = torch.minimum(tokens, remembered)
            weight = judged / (tokens + judged)
        else:
            weight = (1 - self.decay) * (judged > 0)
        return acceptance + weight * (rate - acceptance), tokens + judged

    def best_length(self, acceptance: Tensor, times: Tensor) -> Tensor:
        """The length of the best goodput, the shortest among equals, scalar, int64."""
        goodput = expected_tokens(acceptance, self.longest) / times
        goodput = torch.cat([goodput[:1] * self.plain_bonus, goodput[1:]])
        return goodput.argmax()


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
    """

    name = "goodput"
    requires = frozenset({Signal.COSTS})

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
    ) -> None:
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self.initial_acceptance = check_number("initial_acceptance", initial_acceptance, 0.0, 1.0)
        self.decay = check_number("decay", decay, 0.0, 1.0)
        self.memory_tokens = check_integer("memory_tokens", memory_tokens, 0)
        self.interval = check_integer("interval", interval, 1)
        self.plain_bonus = check_number("plain_bonus", plain_bonus, 0.0)
        self.probe_share = check_number("probe_share", probe_share, 0.0, 1.0)
        self.estimator = check_choice("estimator", estimator, ("tested", "drafted"))
        self._state: _State | None = None

    @property
    def _known(self) -> _State:
        if self._state is None:
            raise RuntimeError("GoodputPolicy was used before `start(batch)`.")
        return self._state

    @property
    def acceptance(self) -> Tensor:
        """The running acceptance probability, scalar, float32."""
        return self._known.acceptance

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        longest = min(self.num_draft_tokens, batch.max_draft_length)
        self._table = CostTable(batch, longest)
        self._rounds = 0
        arithmetic = _Arithmetic(
            longest=longest,
            decay=self.decay,
            memory_tokens=self.memory_tokens,
            plain_bonus=self.plain_bonus,
            probe_share=self.probe_share,
            estimator=self.estimator,
            first_tokens=torch.full((), float(FIRST_TOKENS), device=batch.device),
        )
        self._due = {due: torch.full((), due, device=batch.device) for due in (False, True)}
        acceptance = torch.full((), self.initial_acceptance, device=batch.device)
        best = arithmetic.best_length(acceptance, self._table.times)
        self._state = _State(
            acceptance=acceptance,
            best=best,
            # An earlier call measured what makes drafting look too dear: one probe shows whether that still holds.
            budget=arithmetic.probe_price(*self._prices) * ((best == 0) & (self.probe_share > 0)),
            probing=torch.zeros((), dtype=torch.bool, device=batch.device),
            tokens=arithmetic.first_tokens,
            lengths=best.repeat(batch.rows),
        )
        self._arithmetic = arithmetic

    def draft_lengths(self) -> Tensor:
        """The same length for every row, shape `[rows]`, int64; in a probe 1 for a few and 0 for the others."""
        return self._known.lengths

    def observe(self, outcome: RoundOutcome) -> None:
        """Follow the acceptance probability, put time aside for probes, and decide on the next length."""
        self._rounds += 1
        self._table.refresh()
        due = self._due[self._rounds % self.interval == 0]
        counts = (outcome.drafted, outcome.accepted, outcome.active)
        self._state = self._arithmetic.next_state(*counts, *self._prices, due, *self._known[:5])

    @property
    def _prices(self) -> tuple[Tensor, Tensor]:
        return self._table.times, self._table.resumption

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch, and a probe with it. `index` is int64, `[places]`."""
        known = self._known
        probed = known.probing & (torch.arange(len(index), device=index.device) < PROBED_ROWS)
        self._state = known._replace(lengths=known.best + probed)
