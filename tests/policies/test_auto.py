"""`auto` behaves as the policy it has chosen for the batch."""

from __future__ import annotations

import pytest
import torch
from simulated_rounds import Simulation

from hf_dsde.policies import AutoPolicy, GoodputPolicy, MarginalGoodputPolicy, Signal, StoppingPolicy


@pytest.mark.parametrize(("rows", "expected"), [(1, MarginalGoodputPolicy), (2, GoodputPolicy), (8, GoodputPolicy)])
def test_decides_as_the_policy_for_the_batch(rows: int, expected: type[StoppingPolicy]) -> None:
    auto, direct = AutoPolicy(), expected()
    played, wanted = (Simulation(policy, rows, 0.1).play(40, 0.8) for policy in (auto, direct))
    assert type(auto.chosen) is expected
    assert auto.requires == direct.requires
    assert auto.stops_inside_round == direct.stops_inside_round
    assert played == wanted


def test_asks_for_costs_before_it_has_chosen() -> None:
    assert Signal.COSTS in AutoPolicy().requires


def test_keeps_its_choice_when_rows_leave() -> None:
    auto = AutoPolicy()
    Simulation(auto, 4, 0.1).play(3, 0.8)
    auto.select_rows(torch.tensor([2]))
    assert isinstance(auto.chosen, GoodputPolicy)
    assert auto.draft_lengths().shape == (1,)
