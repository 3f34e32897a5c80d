"""How much the rows draft next: the policy's wish, within what they can use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import LiveCosts
from hf_dsde.decoding.draft_monitor import DraftMonitor, Expect
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.outcome import FinishedRound, outcome_of
from hf_dsde.decoding.plan import usable_lengths
from hf_dsde.decoding.sequences import SequenceBatch
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


class DraftLengths:
    """Asks the policy, and counts the seconds that it takes on the host.

    On a CUDA device these are the seconds to launch its work, not those the device needs for it.

    Args:
        policy: Decides.
        drafter: Has signals for the policy, and limits of its own.
        sequences: The batch.
        vocabulary_size: Of the target.
        config: Has limits as well.
        listeners: Have signals computed, too.
    """

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

    @property
    def requires(self) -> frozenset[Signal]:
        """Signals that the policy or a listener asks for; the policy's may change when it starts."""
        return self._policy.requires.union(*(listener.requires for listener in self._listeners))

    def start(self, costs: LiveCosts | None) -> None:
        """Let the policy begin.

        Raises:
            ValueError: If it or a listener needs to know distributions that the drafter does not have.
        """
        policy, provided = self._policy, self._drafter.provides
        batch = BatchInfo(
            rows=self._sequences.rows,
            device=self._sequences.device,
            vocabulary_size=self._vocabulary_size,
            max_draft_length=self._config.max_draft_length,
            max_new_tokens=self._sequences.max_new_tokens,
            costs=costs if Signal.COSTS in policy.requires else None,
            provided=provided,
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

    def first(self, active: Tensor) -> Tensor:
        """Return the lengths of a round that follows none, or other texts: `[rows]`, int64.

        Args:
            active: Rows that take part, `[rows]`, bool.
        """
        with self._timed():
            lengths = self._policy.draft_lengths()
        return self._bounded(lengths, active)

    def after(
        self, done: FinishedRound, times: PhaseTimes | None, active: Tensor
    ) -> tuple[Tensor, RoundOutcome | None]:
        """Return the lengths of the next round, and what the policy has learnt from this one.

        After a round that overtook the policy's wish, that is the wish again, and nothing.

        Args:
            done: The round that is over on the device. The policy learns from it, unless it overtook its wish.
            times: Seconds of the round before.
            active: Rows that go on, `[rows]`, bool.
        """
        if done.plan.deferred is not None:
            return self._bounded(done.plan.deferred, active), None
        with self._timed():
            outcome = outcome_of(done, self.requires, times)
            self._policy.observe(outcome)
            lengths = self._policy.draft_lengths()
        return self._bounded(lengths, active), outcome

    def monitor(self, expect: Expect) -> DraftMonitor:
        """Return what a drafter asks in one round."""
        should_stop = self._should_stop if self._policy.stops_inside_round else None
        return DraftMonitor(should_stop, self.requires, self._sequences.device, expect)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        with self._timed():
            self._policy.select_rows(index)

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

    def _bounded(self, lengths: Tensor, active: Tensor) -> Tensor:
        config = self._config
        return usable_lengths(
            lengths,
            active,
            self._sequences.remaining,
            self._drafter.room(),
            config.max_draft_length,
            fill=config.fill_to_batch,
        )
