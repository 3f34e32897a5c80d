"""The policy to take without measuring anything: the best one known for the batch at hand."""

from __future__ import annotations

from torch import Tensor

from hf_dsde.policies.base import DRAFT_SIGNALS, BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.goodput import GoodputPolicy
from hf_dsde.policies.marginal_goodput import MarginalGoodputPolicy
from hf_dsde.policies.registry import register


def stopping_inside_pays(batch: BatchInfo) -> bool:
    """Whether a rule that asks after each draft token is the one to take.

    Beside a GPU the host would wait for each answer, and launch the rule's arithmetic in dozens of small operations.
    """
    return batch.rows == 1 and not batch.asynchronous and batch.provided >= DRAFT_SIGNALS


@register("auto")
class AutoPolicy(StoppingPolicy):
    """`marginal_goodput` for a single sequence on a CPU, `goodput` otherwise, each with its defaults.

    Stopping inside a round by the draft's own confidence pays for a single sequence where nothing waits for a device.
    In a batch the differences between rows average out, so that a length for the whole round does as well
    and asks the host nothing in between (docs/policies.md has the figures). The choice is made when a batch starts, and
    stays when rows leave it.
    """

    name = "auto"

    def __init__(self) -> None:
        self._chosen: StoppingPolicy | None = None

    @property
    def chosen(self) -> StoppingPolicy:
        """The policy that decides.

        Raises:
            RuntimeError: If no batch has been started.
        """
        if self._chosen is None:
            raise RuntimeError("AutoPolicy was used before `start(batch)`.")
        return self._chosen

    @property
    def requires(self) -> frozenset[Signal]:  # type: ignore[override] # known once a batch has started
        """The signals of the chosen policy; of both before the choice, costs above all, which are measured first."""
        if self._chosen is None:
            return GoodputPolicy.requires | MarginalGoodputPolicy.requires
        return self._chosen.requires

    @property
    def stops_inside_round(self) -> bool:
        """Whether the chosen policy does; not before the choice, which falls on no such policy beside a GPU."""
        return self._chosen is not None and self._chosen.stops_inside_round

    @property
    def may_lag(self) -> bool:
        """While the chosen policy may."""
        return self.chosen.may_lag

    def start(self, batch: BatchInfo) -> None:
        """Choose, forget everything and prepare for a batch."""
        self._chosen = MarginalGoodputPolicy() if stopping_inside_pays(batch) else GoodputPolicy()
        self._chosen.start(batch)

    def draft_lengths(self) -> Tensor:
        """The chosen policy's lengths, shape `[rows]`, int64."""
        return self.chosen.draft_lengths()

    def should_stop(self, step: DraftStep) -> Tensor | None:
        """The chosen policy's answer, shape `[rows]`, bool; None from `goodput`."""
        return self.chosen.should_stop(step)

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the chosen policy learn."""
        self.chosen.observe(outcome)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self.chosen.select_rows(index)
