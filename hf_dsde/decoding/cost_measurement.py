"""Measures what a pair's passes cost, on the models themselves, and remembers it for further calls.

The passes write after the rows' texts, where nothing is kept. Costs are those of a batch size and of the conditions
that passes run under: how they are run, in which dtype, and where.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_seconds import pass_seconds
from hf_dsde.measurement.rounds import RoundListener, RoundRecord

MEASURED_WIDTHS = (1, 2, 3, 5, 9, 13)
"""Columns per row at which the target's pass is timed; costs in between are interpolated."""

Value = TypeVar("Value")
PairMemory = WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[object, dict[Hashable, CostModel]]]
"""By target, and by whatever the costs of drafts belong to."""


class CostMemory:
    """What calls have measured and learnt, for as long as the models live."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # collecting garbage may reach a weak dictionary in the middle of another use
        self._pairs: PairMemory = WeakKeyDictionary()

    def of_pair(self, target: PreTrainedModel, draft: object, conditions: Hashable = None) -> CostModel | None:
        """Costs of a pair under some conditions, by default those that were learnt last; None if there are none."""
        with self._lock:
            known = self._pairs.get(target, WeakKeyDictionary()).get(draft, {})
            return known.get(next(reversed(known), None) if conditions is None else conditions)

    def learn(self, target: PreTrainedModel, draft: object, conditions: Hashable, new: CostModel) -> CostModel:
        """Keep costs, and return them together with those of other batch sizes."""
        with self._lock:
            known = self._pairs.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
            old = known.pop(conditions, None)
            known[conditions] = new if old is None else old.merged(new)
            return known[conditions]


_memory: ContextVar[CostMemory] = ContextVar("cost_memory", default=CostMemory())  # noqa: B039 - shared on purpose


@contextmanager
def remembering_in(memory: CostMemory) -> Iterator[None]:
    """Let calls inside of a `with` block know and keep costs of their own, as measurements of methods need it."""
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


class CostLearner(RoundListener):
    """Lets costs learn from every round but those in which passes were recorded.

    Args:
        costs: Of one call.
    """

    def __init__(self, costs: LiveCosts) -> None:
        self._costs = costs

    def on_round(self, record: RoundRecord) -> None:
        """Learn what the phases of a round took."""
        if not record.recorded_passes:
            times = record.charged_times
            self._costs.observe(
                draft_steps=record.draft_steps,
                width=record.charged_width,
                draft=times.draft,
                verify=times.verify,
                overhead=times.bookkeeping,
                resumed=record.resumed,
                out_of_texts=any(record.out_of_texts),
            )


def measure_costs(target: ModelRunner, drafter: Drafter, max_draft_length: int, longest: int) -> BatchCosts:
    """Time draft steps and verification passes at the target's batch size.

    Args:
        target: Runner of the target.
        drafter: What drafts for it.
        max_draft_length: Wider passes than this many draft tokens need are not timed.
        longest: Tokens in the longest row's cache.

    Returns:
        Seconds per pass. What a round costs in addition, and its draft steps together, is learnt from rounds.
    """
    widths = [width for width in MEASURED_WIDTHS if width <= max_draft_length + 1]
    verify = CostCurve(tuple(widths), tuple(pass_seconds(target, width, longest) for width in widths))
    step = drafter.step_seconds(longest)
    return BatchCosts(CostCurve.line(step, step) if step else None, verify)


def live_costs(target: ModelRunner, drafter: Drafter, config: SpeculationConfig, longest: int) -> LiveCosts:
    """Costs for one call: those of the configuration, else what an earlier call has learnt, else measured now.

    Args:
        target: Runner of the target, with its prompts stored.
        drafter: What drafts for it, likewise.
        config: May hold costs.
        longest: Tokens in the longest row's cache.
    """
    given = config.cost_model
    if given is not None:
        return LiveCosts(given, target.rows, refresh=config.refresh_costs)
    memory = _memory.get()
    known = memory.of_pair(target.model, drafter.cost_owner, _conditions(target, drafter))
    if known is None or target.rows not in known.batches:
        costs = measure_costs(target, drafter, config.max_draft_length, longest)
        known = remember_costs(target, drafter, CostModel({target.rows: costs}))
    return LiveCosts(known, target.rows, refresh=config.refresh_costs)


def remembered_costs(target: PreTrainedModel, draft: PreTrainedModel) -> CostModel | None:
    """What earlier calls with this pair measured, under the conditions of the last of them; None before the first."""
    return _memory.get().of_pair(target, draft)


def remember_costs(target: ModelRunner, drafter: Drafter, new: CostModel) -> CostModel:
    """Keep costs for as long as both models live; return them together with those of other batch sizes.

    Args:
        target: Runner of the target.
        drafter: What drafts for it.
        new: Measured or learnt with them.
    """
    return _memory.get().learn(target.model, drafter.cost_owner, _conditions(target, drafter), new)


def _conditions(target: ModelRunner, drafter: Drafter) -> Hashable:
    return target.conditions, drafter.conditions
