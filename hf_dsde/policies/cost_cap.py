"""A cap with prices over another policy: no position is drafted that is expected to cost more than it brings."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from torch import Tensor

from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.goodput import GoodputPolicy

NO_LIMIT = 1 << 20
"""Of its own, a cap has no longest draft: the other policy and the loop have one."""


class CostCap(GoodputPolicy):
    """Another policy's lengths `l`, cut off at the depth of the best goodput; 0 is a depth.

    Of depths `k`, the one that maximises

        sum over rows of (1 + a + ... + a^min(l, k)) / T(k)

    where `a` is the probability that a token is accepted and `T` the measured time of a round, as in `GoodputPolicy`,
    whose estimate and probes these are. It differs from that policy in what a depth brings: only rows that the other
    policy lets go so far gain from it, while all wait for the draft steps. The cap of DSDE (arXiv 2509.01083, Eq. 11)
    has the same purpose, and knows no prices.

    Args:
        policy: Whose lengths are cut. Where it stops inside a round, it stops there.
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

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._policy.start(batch)
        self._wishes: list[int] = self._policy.draft_lengths().tolist()
        super().start(batch)

    def _lengths(self) -> list[int]:
        return [min(wish, length) for wish, length in zip(self._wishes, super()._lengths(), strict=True)]

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

    def _expected_tokens(self) -> list[float]:
        """Mean of the rows' expected tokens by depth, from 0 to the longest."""
        stops = Counter(min(wish, self._longest) for wish, on in zip(self._wishes, self._active, strict=True) if on)
        rows = left = stops.total()
        gains = []
        for depth in range(self._longest + 1):
            gains.append(self.acceptance**depth * left / max(rows, 1))
            left -= stops[depth]
        return list(accumulate(gains))
