"""`auto` behaves as the policy it has chosen for the batch."""

from __future__ import annotations

import pytest
import torch
from simulated_rounds import Simulation

from hf_dsde.costs import CostModel, LiveCosts
from hf_dsde.policies import AutoPolicy, BatchInfo, GoodputPolicy, MarginalGoodputPolicy, Signal, StoppingPolicy
from hf_dsde.policies.auto import stopping_inside_pays
from hf_dsde.utils.tuning import HOPPER


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


@pytest.mark.parametrize(
    ("device", "rows", "draft_cost", "pays"),
    [
        ("cpu", 1, 0.9, True),
        ("cuda", 1, 0.2, True),
        ("cuda", 1, 0.21, False),
        ("cuda", 1, None, True),
        ("cuda", 2, 0.05, False),
        ("cpu", 2, 0.05, False),
    ],
)
def test_stops_inside_a_round_where_that_pays(
    device: str, rows: int, draft_cost: float | None, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_dsde.policies.auto.tuning_of", lambda _: HOPPER)  # no GPU is asked
    costs = None if draft_cost is None else LiveCosts(CostModel.relative(draft_cost, [1.0, 1.1], rows), rows)
    assert stopping_inside_pays(BatchInfo(rows, torch.device(device), 50, 8, 100, costs)) == pays
