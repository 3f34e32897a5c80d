"""`auto` behaves as the policy it has chosen for the batch."""

from __future__ import annotations

import pytest
import torch
from simulated_rounds import Simulation

from hf_dsde.policies import AutoPolicy, BatchInfo, GoodputPolicy, MarginalGoodputPolicy, Signal, StoppingPolicy
from hf_dsde.policies.auto import stopping_inside_pays
from hf_dsde.policies.base import DRAFT_SIGNALS


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
    ("asynchronous", "rows", "provided", "pays"),
    [
        (False, 1, DRAFT_SIGNALS, True),
        (False, 1, frozenset(), False),  # nothing could be asked about
        (True, 1, DRAFT_SIGNALS, False),
        (False, 2, DRAFT_SIGNALS, False),
    ],
)
def test_stops_inside_a_round_where_that_pays(
    asynchronous: bool, rows: int, provided: frozenset[Signal], pays: bool
) -> None:
    batch = BatchInfo(rows, torch.device("cpu"), 50, 8, 100, provided=provided, asynchronous=asynchronous)
    assert stopping_inside_pays(batch) == pays
