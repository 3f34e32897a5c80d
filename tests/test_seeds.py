"""When a seed gives one text again, however fast the machine is at the time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tiny_calls import pair
from tiny_models import ragged_batch
from transformers import PreTrainedModel, set_seed

from hf_dsde import SpeculationConfig
from hf_dsde.costs import BatchCosts, CostCurve, CostModel

VERIFY = CostCurve((1, 5, 13), (0.005, 0.006, 0.008))
COSTS = CostModel({3: BatchCosts(CostCurve.line(0.001, 0.001), VERIFY)}).to_dict()
WEIGHING_COSTS = ("goodput", "marginal_goodput", "auto", "token_budget")
BLIND_TO_COSTS = ("dsde", "heuristic", "tapout", "adaedl")
MACHINES = ((5e-3, 1e-4), (5e-3, 1e-2), (1e-3, 2e-2), (2e-2, 1e-5))
"""Seconds of a pass of the target and of one of the draft."""

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


@pytest.fixture(autouse=True)
def given_costs() -> None:
    """Let costs be measured and learnt, as they are for users."""


class Clock:
    """A clock that moves on when a model runs, and only then."""

    now = 0.0

    def read(self) -> float:
        return self.now

    def charge(self, model: PreTrainedModel, seconds: float) -> Any:
        """Let every pass of a model take this long, until the handle is removed."""

        def move_on(*_: Any) -> None:
            self.now += seconds

        return model.register_forward_pre_hook(move_on)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "perf_counter", fake.read)
    return fake


def texts(clock: Clock, config: SpeculationConfig) -> set[str]:
    """Draw texts from one seed, on machines where draft and target cost otherwise."""
    models = pair()
    found = set()
    for machine in MACHINES:
        handles = [clock.charge(model, seconds) for model, seconds in zip(models, machine, strict=True)]
        set_seed(0)
        arguments: dict[str, Any] = {**ragged_batch((3, 6, 1)), "do_sample": True, "max_new_tokens": 24}
        output = models[0].generate(**arguments, assistant_model=models[1], speculation_config=config)
        found.add(str(output.tolist()))
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.parametrize("policy", WEIGHING_COSTS)
def test_a_seed_and_given_costs_give_one_text_at_any_speed(policy: str, clock: Clock) -> None:
    config = SpeculationConfig(policy=policy, costs=COSTS, refresh_costs=False)
    assert len(texts(clock, config)) == 1


@pytest.mark.parametrize("policy", BLIND_TO_COSTS)
def test_a_seed_gives_one_text_where_costs_are_not_weighed(policy: str, clock: Clock) -> None:
    assert len(texts(clock, SpeculationConfig(policy=policy))) == 1


def test_a_text_depends_on_the_clock_where_costs_are_learnt(clock: Clock) -> None:
    """Else the tests above would show nothing."""
    assert len(texts(clock, SpeculationConfig(policy="goodput", costs=COSTS))) > 1
