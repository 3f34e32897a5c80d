"""How much the rows draft next: the policy's wish, within what they can use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import LiveCosts
from hf_dsde.decoding.draft_monitor import DraftMonitor, Expect
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.outcome import Fetched, FinishedRound, fetched_outcome, numbers_of, outcome_of
from hf_dsde.decoding.plan import RoundPlan, usable_lengths
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.streams import overlaps
from hf_dsde.execution.torch_modes import without_autocast
from hf_dsde.measurement.rounds import RoundListener
from hf_dsde.policies.base import (
    DRAFT_SIGNALS,
    BatchInfo,
    DraftStep,
    PhaseTimes,
    RoundOutcome,
    Signal,
    StoppingPolicy,
)
from hf_dsde.utils.transfers import upload

HOST = torch.device("cpu")


@dataclass(frozen=True)
class PendingLengths:
    """The next round's lengths, as far as the device alone knows them.

    Attributes:
        plan: Of the round that is over.
        vectors: Tokens that each row has a use for, `[rows]`, int64; how many of them the policy may ask for, likewise;
            then what the policy wants, if it has answered.
        outcome: What the policy learns from; None if it learns nothing.
        signals: What the host needs of that.
        unjudged: Rows of whose drafts it learns nothing, as in `CandidateBatch`.
    """

    plan: RoundPlan
    vectors: Sequence[Tensor]
    outcome: RoundOutcome | None = None
    signals: Sequence[Tensor] = ()
    unjudged: Sequence[bool] = ()


class DraftLengths:
    """Asks the policy, and counts the seconds that it takes on the host.

    A policy computes on the host, where its answer is needed and what it learns from arrives anyway: its dozens of
    operations on a few numbers each take a GPU longer to launch than to run. Beside a GPU, one whose answer may lag
    (`StoppingPolicy.may_lag`) learns from a round during the next one's pass of the target; while any other learns,
    the device has the draft's passes only. One that stops inside rounds is asked where the drafts are, and one that
    looks at whole distributions stays with them; their seconds on a CUDA device are those to launch the work.

    Args:
        policy: Decides.
        drafter: Has signals for the policy, and limits of its own.
        sequences: The batch.
        vocabulary_size: Of the target.
        config: Has limits as well.
        listeners: Have signals computed, too.

    Attributes:
        refilled: Whether other texts take the places of those that end.
    """

    refilled = False

    def __init__(
        self,
        policy: StoppingPolicy,
        drafter: Drafter,
        sequences: SequenceBatch,
        vocabulary_size: int,
        config: SpeculationConfig,
        listeners: Sequence[RoundListener],
    ) -> None:
        self._policy = policy
        self._listeners = listeners
        self._seconds = 0.0
        self._drafter = drafter
        self._sequences = sequences
        self._vocabulary_size = vocabulary_size
        self._config = config
        self._costs: LiveCosts | None = None
        self._wish: Sequence[int] = ()  # the policy's, of the next round
        self._unlearnt: RoundOutcome | None = None  # of the last round, if the policy has not learnt from it yet

    @property
    def requires(self) -> frozenset[Signal]:
        """Signals that policy, drafter or a listener ask for; the policy's may change when it starts."""
        own = self._policy.requires | self._drafter.requires
        return own.union(*(listener.requires for listener in self._listeners))

    def start(self, costs: LiveCosts | None) -> None:
        """Let the policy begin.

        Raises:
            ValueError: If it or a listener needs to know distributions that the drafter does not have.
        """
        policy, provided = self._policy, self._drafter.provides
        self._costs = costs
        looks_at_logits = Signal.LOGITS in policy.requires
        self._device = self._sequences.device if policy.stops_inside_round or looks_at_logits else HOST
        self._learns_on_host = self._device == HOST and not looks_at_logits
        self._beside = self._learns_on_host and not policy.stops_inside_round and overlaps(self._sequences.device)
        batch = BatchInfo(
            rows=self._sequences.rows,
            device=self._device,
            vocabulary_size=self._vocabulary_size,
            max_draft_length=self._config.max_draft_length,
            max_new_tokens=self._sequences.max_new_tokens,
            costs=costs if Signal.COSTS in policy.requires else None,
            provided=provided,
            asynchronous=overlaps(self._sequences.device),
            refilled=self.refilled,
        )
        with without_autocast(batch.device):
            policy.start(batch)
        asked = [(f"speculation_policy={policy.name!r}", policy.requires, policy.stops_inside_round)]
        asked += [(f"speculation_listeners: {type(each).__name__}", each.requires, False) for each in self._listeners]
        for who, requires, each_token in asked:
            missing = sorted(signal.value for signal in requires & DRAFT_SIGNALS - provided)
            if missing or (each_token and not provided):
                msg = (
                    f"{who} looks at the distributions that tokens are drafted from "
                    f"({', '.join(missing) or 'after each token'}), and {type(self._drafter).__name__} has none. Use a "
                    "draft model, or do without: the policies 'static', 'goodput' and 'auto' do."
                )
                raise ValueError(msg)

    def first(self, active: Sequence[bool]) -> list[int]:
        """Return the lengths of a round that follows none, or other texts.

        Args:
            active: Rows that take part.
        """
        with self._timed():
            self._wish = self._policy.draft_lengths().tolist()
        return self._allotted(active, *torch.stack(self._limits()).tolist())

    def after(self, done: FinishedRound, times: PhaseTimes | None) -> PendingLengths:
        """Return what the device can tell of the next round's lengths; the host has the last word in `settle`.

        Args:
            done: The round that is over on the device. The policy learns from it, unless it overtook its wish.
            times: Seconds of the round before.
        """
        limits, plan, unjudged = self._limits(), done.plan, done.candidates.unjudged
        if plan.deferred is not None:
            return PendingLengths(plan, limits)
        with self._timed():
            outcome = outcome_of(done, self.requires, times)
            if self._learns_on_host:
                return PendingLengths(plan, limits, outcome, [*numbers_of(outcome).values()], unjudged)
            self._policy.observe(outcome)
            return PendingLengths(plan, [*limits, self._policy.draft_lengths()], outcome)

    def settle(self, pending: PendingLengths, fetched: Fetched) -> list[int]:
        """Return the lengths of the next round.

        Args:
            pending: What `after` has returned.
            fetched: What the host has been told of it and of the round.
        """
        most, room, *answer = fetched.lengths
        if answer:
            (self._wish,) = answer
        elif pending.outcome is not None:
            lags, active = self._lags, pending.plan.active_rows
            self._unlearnt = fetched_outcome(pending.outcome, active, pending.unjudged, fetched)
            if not lags:
                self.learn()
        return self._allotted(fetched.going_on, most, room)

    def learn(self) -> None:
        """Let the policy learn from a round that it has not learnt from, and answer again."""
        outcome, self._unlearnt = self._unlearnt, None
        if outcome is not None:
            with self._timed():
                self._policy.observe(outcome)
                self._wish = self._policy.draft_lengths().tolist()

    @property
    def foreseen(self) -> int | None:
        """The longest draft of the next round as far as it is the policy's to say, if its answer is there already."""
        return min(max(self._wish), self._config.max_draft_length) if self._lags else None

    @property
    def _lags(self) -> bool:
        """Whether the next round goes by an answer that the policy has given before this round is over."""
        return self._beside and self._policy.may_lag

    def monitor(self, expect: Expect) -> DraftMonitor:
        """Return what a drafter asks in one round."""
        should_stop = self._should_stop if self._policy.stops_inside_round else None
        return DraftMonitor(should_stop, self.requires, self._device, expect)

    def select_rows(self, places: Sequence[int]) -> None:
        """Rearrange the batch; -1 is a new sequence."""
        self.learn()
        with self._timed():
            self._policy.select_rows(upload(places, self._device))

    def take_seconds(self) -> float:
        """Return the policy's seconds since the last call: computing signals, its answers, its learning."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _should_stop(self, step: DraftStep) -> Tensor | None:
        with self._timed():
            return self._policy.should_stop(step)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what happens inside as the policy's. Autocast, which is for models, does not reach its arithmetic."""
        started = time.perf_counter()
        try:
            with without_autocast(self._sequences.device):
                yield
        finally:
            self._seconds += time.perf_counter() - started

    def _limits(self) -> list[Tensor]:
        """Draft tokens that each row has a use for, and those that the policy may ask for, each `[rows]`, int64."""
        # The bonus token is one of those that a row may emit.
        most, room = (self._sequences.remaining - 1).clamp_min(0), self._drafter.room()
        return [most, most if room is None else torch.minimum(most, room)]

    def _allotted(self, active: Sequence[bool], most: Sequence[int], room: Sequence[int]) -> list[int]:
        longest = self._config.max_draft_length
        wanted = usable_lengths(self._wish, active, room, longest, fill=self._config.fill_to_batch)
        bounds = usable_lengths(most, active, most, longest, fill=False)
        return self._drafter.allot(wanted, bounds, None if self._costs is None else self._costs.current)
