"""How much the rows draft next: the policy's wish, within what they can use."""

from __future__ import annotations

from torch import Tensor

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import LiveCosts
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.outcome import FinishedRound, outcome_of
from hf_dsde.decoding.plan import usable_lengths
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.measurement.clock import TimedPolicy
from hf_dsde.policies.base import DRAFT_SIGNALS, BatchInfo, PhaseTimes, StoppingPolicy


class DraftLengths:
    """Asks the policy after each round.

    Args:
        policy: Decides.
        drafter: Has signals for the policy, and limits of its own.
        sequences: The batch.
        vocabulary_size: Of the target.
        config: Has limits as well.

    Attributes:
        policy: The policy, with a clock of its own.
    """

    def __init__(
        self,
        policy: StoppingPolicy,
        drafter: Drafter,
        sequences: SequenceBatch,
        vocabulary_size: int,
        config: SpeculationConfig,
    ) -> None:
        self.policy = TimedPolicy(policy)
        self._name = policy.name
        self._drafter = drafter
        self._sequences = sequences
        self._vocabulary_size = vocabulary_size
        self._config = config

    def start(self, costs: LiveCosts | None) -> None:
        """Let the policy begin.

        Raises:
            ValueError: If it needs to know distributions that the drafter does not have.
        """
        provided = self._drafter.provides
        self.policy.start(
            BatchInfo(
                rows=self._sequences.rows,
                device=self._sequences.device,
                vocabulary_size=self._vocabulary_size,
                max_draft_length=self._config.max_draft_length,
                max_new_tokens=self._sequences.max_new_tokens,
                costs=costs,
                provided=provided,
            )
        )
        missing = sorted(signal.value for signal in self.policy.requires & DRAFT_SIGNALS - provided)
        if missing or (self.policy.stops_inside_round and not provided):
            msg = (
                f"speculation_policy={self._name!r} looks at the distributions that tokens are drafted from "
                f"({', '.join(missing) or 'after each token'}), and {type(self._drafter).__name__} has none. Use "
                "'static', 'goodput' or 'auto', or a draft model."
            )
            raise ValueError(msg)

    def first(self, active: Tensor) -> Tensor:
        """Return the lengths of a round that follows none, or other texts: `[rows]`, int64.

        Args:
            active: Rows that take part, `[rows]`, bool.
        """
        return self._bounded(self.policy.draft_lengths(), active)

    def after(self, done: FinishedRound, times: PhaseTimes | None, active: Tensor) -> Tensor:
        """Return the lengths of the next round: after one that overtook the policy's wish, that wish again.

        Args:
            done: The round that is over on the device. The policy learns from it, unless it overtook its wish.
            times: Seconds of the round before.
            active: Rows that go on, `[rows]`, bool.
        """
        wish = done.plan.deferred
        if wish is None:
            with self.policy.timed():
                outcome = outcome_of(done, self.policy.requires, times)
            self.policy.observe(outcome)
            wish = self.policy.draft_lengths()
        return self._bounded(wish, active)

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
