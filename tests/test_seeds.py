"""When a seed gives one text again, however fast the machine is at the time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_calls import pair
from tiny_models import ragged_batch
from transformers import set_seed

from hf_dsde import SpeculationConfig
from hf_dsde.costs import BatchCosts, CostCurve, CostModel

COSTS = CostModel({3: BatchCosts(draft_step=0.001, verify=CostCurve((1, 5, 13), (0.005, 0.006, 0.008)))}).to_dict()
WEIGHING_COSTS = ("goodput", "marginal_goodput", "auto", "token_budget")
BLIND_TO_COSTS = ("dsde", "static", "heuristic", "confidence", "tapout", "adaedl", "svip", "gammatune")

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock by which every look takes as long as the list says next, over and over."""
    steps = [1e-4]
    now = 0.0
    turns = itertools.count()

    def tick() -> float:
        nonlocal now
        now += steps[next(turns) % len(steps)]
        return now

    monkeypatch.setattr(time, "perf_counter", tick)
    yield steps


def texts(clock: list[float], config: SpeculationConfig) -> set[str]:
    """Draw six texts from one seed, with hosts that stall in different places."""
    target, draft = pair()
    found = set()
    for stalls in ([1e-4], [1e-4, 3e-2], [5e-3, 1e-4, 1e-4], [1e-2], [1e-4, 1e-4, 1e-4, 1e-1, 2e-2], [1e-5]):
        clock[:] = stalls
        set_seed(0)
        arguments: dict[str, Any] = {**ragged_batch((3, 6, 1)), "do_sample": True, "max_new_tokens": 32}
        output = target.generate(**arguments, assistant_model=draft, speculation_config=config)
        found.add(str(output.tolist()))
    return found


@pytest.mark.parametrize("policy", WEIGHING_COSTS)
def test_a_seed_and_given_costs_give_one_text_at_any_speed(policy: str, clock: list[float]) -> None:
    config = SpeculationConfig(policy=policy, costs=COSTS, refresh_costs=False)
    assert len(texts(clock, config)) == 1


@pytest.mark.parametrize("policy", BLIND_TO_COSTS)
def test_a_seed_gives_one_text_where_costs_are_not_weighed(policy: str, clock: list[float]) -> None:
    assert len(texts(clock, SpeculationConfig(policy=policy))) == 1


def test_a_text_depends_on_the_clock_where_costs_are_learnt(clock: list[float]) -> None:
    """Else the tests above would show nothing."""
    assert len(texts(clock, SpeculationConfig(policy="goodput", costs=COSTS))) > 1
