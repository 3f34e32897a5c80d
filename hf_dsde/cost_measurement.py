"""Measures what a pair's passes cost, on the models themselves, and remembers it for further calls.

The passes write behind the rows' texts, where nothing is kept.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts
from hf_dsde.drafting.base import Drafter
from hf_dsde.runner import ModelRunner, pass_seconds

MEASURED_WIDTHS = (1, 2, 3, 5, 9, 13)
"""Columns per row at which the target's pass is timed; costs in between are interpolated."""

_remembered: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, CostModel]] = WeakKeyDictionary()


def measure_costs(target: ModelRunner, drafter: Drafter, max_draft_length: int, longest: int) -> BatchCosts:
    """Time draft steps and verification passes at the target's batch size.

    Args:
        target: Runner of the target.
        drafter: What drafts for it.
        max_draft_length: Wider passes than this many draft tokens need are not timed.
        longest: Tokens in the longest row's cache.

    Returns:
        Seconds per pass. What a round costs besides is learnt from rounds.
    """
    widths = [width for width in MEASURED_WIDTHS if width <= max_draft_length + 1]
    verify = CostCurve(tuple(widths), tuple(pass_seconds(target, width, longest) for width in widths))
    return BatchCosts(draft_step=drafter.step_seconds(longest), verify=verify)


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
    known = remembered_costs(target.model, drafter.model)
    if known is None or target.rows not in known.batches:
        costs = measure_costs(target, drafter, config.max_draft_length, longest)
        remember_costs(target.model, drafter.model, CostModel({target.rows: costs}))
        known = remembered_costs(target.model, drafter.model)
        assert known is not None
    return LiveCosts(known, target.rows, refresh=config.refresh_costs)


def remembered_costs(target: PreTrainedModel, draft: PreTrainedModel) -> CostModel | None:
    """What earlier calls with this pair measured; None before the first."""
    return _remembered.get(target, WeakKeyDictionary()).get(draft)


def remember_costs(target: PreTrainedModel, draft: PreTrainedModel, new: CostModel) -> None:
    """Keep costs for as long as both models live."""
    known = remembered_costs(target, draft)
    _remembered.setdefault(target, WeakKeyDictionary())[draft] = new if known is None else known.merged(new)


_token_costs: WeakKeyDictionary[PreTrainedModel, dict[int, CostCurve]] = WeakKeyDictionary()


def token_costs(runner: ModelRunner, longest: int) -> CostCurve:
    """Seconds of a model's pass by the number of tokens in it, measured once per model and batch size.

    Args:
        runner: With its prompts stored.
        longest: Tokens of the longest prompt.
    """
    known = _token_costs.setdefault(runner.model, {})
    if runner.rows not in known:
        seconds = tuple(pass_seconds(runner, width, longest) for width in MEASURED_WIDTHS)
        known[runner.rows] = CostCurve(tuple(runner.rows * width for width in MEASURED_WIDTHS), seconds)
    return known[runner.rows]
