"""Policies that weigh costs, where a round's drafting has a fixed part that nobody told them of."""

from __future__ import annotations

import pytest
from simulated_rounds import Simulation

from hf_dsde.policies import CostCap, GoodputPolicy, StaticPolicy, StoppingPolicy

FIXED, PER_STEP = 0.3, 0.04
SETTLED = 150
"""Rounds until costs are known."""


def speed(policy: StoppingPolicy, rows: int, seed: int, believed: float) -> float:
    simulation = Simulation(policy, rows, PER_STEP, seed, fixed=FIXED, believed=believed)
    return simulation.play(500, 0.95).rate(SETTLED)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "believed",
    [
        pytest.param(0.04, id="one pass was measured"),
        pytest.param(0.34, id="one draft was timed"),
        pytest.param(0.19, id="two drafts were timed"),
    ],
)
@pytest.mark.parametrize("policy", ["goodput", "cap"])
def test_a_fixed_part_of_drafting_keeps_nobody_from_drafting_long(policy: str, believed: float, rows: int) -> None:
    longest = 6 if policy == "cap" else 12
    best = max(speed(StaticPolicy(length), rows, 0, believed) for length in range(longest + 1))
    found = speed(CostCap(StaticPolicy(6)) if policy == "cap" else GoodputPolicy(), rows, 0, believed)
    assert found > 0.97 * best
