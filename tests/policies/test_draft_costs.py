"""Policies that weigh costs, where a round's drafting has a fixed part that nobody told them of."""

from __future__ import annotations

from functools import cache

import pytest
from simulated_rounds import Simulation

from hf_dsde.policies import CostCap, GoodputPolicy, StaticPolicy, StoppingPolicy

FIXED, PER_STEP = 0.3, 0.04
LONGEST = 6
SETTLED = 100
"""Rounds until costs are known."""


def speed(policy: StoppingPolicy, rows: int, believed: float = PER_STEP) -> float:
    simulation = Simulation(policy, rows, PER_STEP, fixed=FIXED, believed=believed)
    return simulation.play(240, 0.95).rate(SETTLED)


@cache
def best_fixed_speed(rows: int) -> float:
    return max(speed(StaticPolicy(length), rows) for length in range(LONGEST + 1))


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize(
    ("policy", "believed"),
    [
        pytest.param(GoodputPolicy(LONGEST), PER_STEP, id="goodput, one pass was measured"),
        pytest.param(GoodputPolicy(LONGEST), FIXED + PER_STEP, id="goodput, one draft was timed"),
        pytest.param(CostCap(StaticPolicy(LONGEST)), PER_STEP, id="cap, one pass was measured"),
    ],
)
def test_a_fixed_part_of_drafting_keeps_nobody_from_drafting_long(
    policy: StoppingPolicy, believed: float, rows: int
) -> None:
    assert speed(policy, rows, believed) > 0.97 * best_fixed_speed(rows)
