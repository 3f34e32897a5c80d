"""A cap with prices over another policy: no position is drafted that is expected to cost more than it brings."""

from __future__ import annotations

from torch import Tensor

from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.goodput import GoodputPolicy

NO_LIMIT = 1 << 20
"""Of its own, a cap has no longest draft: the other policy and the loop have one."""


class CostCap(GoodputPolicy):
    """Another policy, at prices: all rows draft up to the depth of the best goodput, within its longest length.

    Of depths `k` from 0 to the longest length that the policy wants of a row, the one that maximises

        (1 + a + ... + a^k) / T(k)

    where `a` is the probability that a token is accepted and `T` the measured time of a round, as in `GoodputPolicy`,
    whose estimate and probes these are. Rows that want less draft as much: all wait for the draft steps of the longest,
    and a column that nobody fills takes as long. The cap of DSDE (arXiv 2509.01083, Eq. 11) is the mean of the lengths;
    it has the same purpose, and knows no prices.

    Args:
        policy: Says how far rows may draft. Where it stops inside a round, it stops there.
    """

    def __init__(self, policy: StoppingPolicy) -> None:
        super().__init__(NO_LIMIT)
        self._policy = policy

    @property
    def name(self) -> str:  # type: ignore[override] # of an instance, since it is another's
        """The other policy's."""
        return self._policy.name

    @property
    def requires(self) -> frozenset[Signal]:  # type: ignore[override] # the other's may change when a batch starts
        """The other policy's signals, and the costs."""
        return self._policy.requires | {Signal.COSTS}

    @property
    def stops_inside_round(self) -> bool:
        """Whether the other policy does."""
        return self._policy.stops_inside_round

    @property
    def may_lag(self) -> bool:
        """While both may."""
        return self._policy.may_lag and super().may_lag

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._policy.start(batch)
        self._wishes: list[int] = self._policy.draft_lengths().tolist()
        super().start(batch)

    def should_stop(self, step: DraftStep) -> Tensor | None:
        """The other policy's answer, shape `[rows]`, bool, or None."""
        return self._policy.should_stop(step)

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the other policy learn, then find the cap of what it wants next."""
        self._policy.observe(outcome)
        self._wishes = self._policy.draft_lengths().tolist()
        super().observe(outcome)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._policy.select_rows(index)
        self._wishes = self._policy.draft_lengths().tolist()
        super().select_rows(index)

    def _best_length(self) -> int:
        """The depth of the best goodput, the shortest among equals."""
        longest = max((wish for wish, on in zip(self._wishes, self._active, strict=True) if on), default=0)
        return self._best_within(min(longest, self._longest))
