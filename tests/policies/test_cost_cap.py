"""The cap with prices against its formula in plain Python, and what it does to policies that know no costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_calls import outcome
from simulated_rounds import VERIFY, Simulation, batch_with_costs
from tiny_calls import compared, config_of, pair
from tiny_models import ragged_batch
from tiny_policies import ScriptedLengths

from hf_dsde import SpeculationConfig
from hf_dsde.policies import (
    CostCap,
    DSDEStoppingPolicy,
    GoodputPolicy,
    HeuristicPolicy,
    Signal,
    StaticPolicy,
    SVIPPolicy,
)

LIMIT = 6


@pytest.fixture(autouse=True)
def given_costs() -> None:
    """Here the costs of the configuration count."""


def best_depth(acceptance: float, longest: int, times: list[float]) -> tuple[int, float]:
    """The depth of the best goodput, and by how much it is better than the next best."""
    goodputs = [sum(acceptance**j for j in range(depth + 1)) / times[depth] for depth in range(longest + 1)]
    best = max(range(longest + 1), key=lambda depth: goodputs[depth])
    others = [value for depth, value in enumerate(goodputs) if depth != best]
    return best, goodputs[best] - max(others, default=0.0)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), draft_cost=st.sampled_from([0.05, 0.2, 0.5]), rows=st.integers(1, 6))
def test_follows_the_formula_over_random_rounds(seed: int, draft_cost: float, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    script = torch.randint(0, LIMIT + 1, (30, rows), generator=generator).tolist()
    policy = CostCap(ScriptedLengths(script))
    policy.start(replace(batch_with_costs(rows, draft_cost, VERIFY, LIMIT), refilled=True))
    times = [depth * draft_cost + VERIFY[depth] for depth in range(LIMIT + 1)]
    active = [True] * rows
    for wishes in script:
        longest = max((wish for wish, on in zip(wishes, active, strict=True) if on), default=0)
        depth, margin = best_depth(policy.acceptance, longest, times)
        lengths = policy.draft_lengths().tolist()
        if margin > 1e-6:
            probes = depth == 0 and max(lengths) == 1
            assert probes or lengths == [depth] * rows
        active = [bool(on) for on in (torch.rand(rows, generator=generator) < 0.9)]
        drafted = [length * on for length, on in zip(lengths, active, strict=True)]
        accepted = [int(torch.randint(0, length + 1, (), generator=generator)) for length in drafted]
        policy.observe(outcome(drafted, accepted, active))


@pytest.mark.parametrize(
    ("draft", "column", "wishes", "depth"),
    [
        (0.1, 0.4, [4, *[1] * 7], 1),
        (0.1, 0.0, [4, *[1] * 7], 4),  # all wait for the longest draft, so all draft
        (0.1, 0.025, [1, *[2] * 7], 2),
        (1.0, 0.0, [4, *[1] * 7], 0),
        (0.1, 0.0, [0, 0, 0], 0),
    ],
)
def test_all_rows_draft_as_far_as_that_pays_and_the_policy_lets_one(
    draft: float, column: float, wishes: list[int], depth: int
) -> None:
    policy = CostCap(ScriptedLengths([wishes] * 3))
    policy.start(batch_with_costs(len(wishes), draft, [1 + column * k for k in range(LIMIT + 1)], LIMIT))
    assert policy.draft_lengths().tolist() == [depth] * len(wishes)


def test_prices_take_the_place_of_the_cap_of_dsde() -> None:
    """One row agrees with its draft and the others do not, so that their mean would keep it short."""
    batch = batch_with_costs(4, 0.0, [1.0] * (LIMIT + 1), LIMIT)
    priced, paper = DSDEStoppingPolicy(long_window=4), DSDEStoppingPolicy(long_window=4)
    for policy, prices in ((priced, batch), (paper, replace(batch, costs=None))):
        policy.start(prices)
        for kld in (0.01, 0.02, 0.01, 0.01):
            divergence = torch.full((4, 6), 4.0)
            divergence[0] = kld
            policy.observe(replace(outcome([6] * 4, [6, 0, 0, 0]), kld=divergence))
    (far, *short), capped = priced.draft_lengths().tolist(), paper.draft_lengths().tolist()
    assert far > max(short)
    assert far > max(capped)
    assert min(capped) == min(short)


def test_over_a_length_that_is_never_too_short_it_is_goodput() -> None:
    played = [Simulation(policy, 4, 0.2).play(200, 0.8) for policy in (CostCap(StaticPolicy(12)), GoodputPolicy(12))]
    assert played[0] == played[1]


def test_where_passes_cost_the_same_all_draft_as_far_as_the_other_policy_lets_any() -> None:
    alone, capped = HeuristicPolicy(), CostCap(HeuristicPolicy())
    generator = torch.Generator().manual_seed(0)
    for policy in (alone, capped):
        policy.start(batch_with_costs(4, 0.0, [1.0] * 13))
    for number in range(40):
        lengths = alone.draft_lengths().tolist()
        assert capped.draft_lengths().tolist() == [max(lengths)] * 4
        accepted = [int(torch.randint(length // 2, length + 1, (), generator=generator)) for length in lengths]
        for policy in (alone, capped):
            policy.observe(outcome(lengths, accepted))
            if number == 20:
                policy.select_rows(torch.tensor([2, -1, 0, 3]))
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("rows", [1, 8])
def test_a_draft_that_is_never_right_is_dropped_and_taken_up_again(rows: int) -> None:
    simulation = Simulation(CostCap(StaticPolicy(4)), rows, 0.2)
    good, bad, again = (simulation.play(*part).lengths for part in ((60, 0.95), (300, 0.02), (300, 0.95)))
    assert sum(good[20:]) / 40 > 2
    assert sum(bad[50:]) / 250 < 0.1
    assert sum(again[200:]) / 100 > 2


def test_signals_names_and_stops_are_those_of_the_other_policy() -> None:
    dsde, svip = CostCap(DSDEStoppingPolicy()), CostCap(SVIPPolicy())
    assert dsde.requires == DSDEStoppingPolicy().requires | {Signal.COSTS}
    assert (dsde.name, svip.name) == ("dsde", "svip")
    assert (dsde.stops_inside_round, svip.stops_inside_round) == (False, True)


@pytest.mark.parametrize(
    ("cost_cap", "costs", "policy", "capped"),
    [
        (None, False, "dsde", False),
        (None, True, "dsde", True),
        (True, False, "static", True),
        (False, True, "dsde", False),
        (True, True, "goodput", False),  # it weighs costs itself
    ],
)
def test_a_configuration_caps_where_costs_are_known_or_wanted(
    cost_cap: bool | None, costs: bool, policy: str, capped: bool
) -> None:
    known = {"4": {"draft_step": 0.1, "verify": {"1": 1.0, "5": 1.1}}} if costs else None
    config = SpeculationConfig(policy, cost_cap=cost_cap, costs=known)
    assert isinstance(config.build_policy(), CostCap) == capped
    assert SpeculationConfig.from_json(config.to_json()) == config


def test_text_stays_exact_and_drafts_that_cost_too_much_are_not_made() -> None:
    target, draft = pair()
    costs = {"3": {"draft_step": 1.0, "verify": {"1": 1.0, "9": 1.2}}}
    config = config_of(costs=costs, refresh_costs=False)
    inputs = ragged_batch([5, 1, 9])
    output = compared(target, draft, inputs, StaticPolicy(6), config, max_new_tokens=24)
    assert output.speculation_statistics.drafted < 10, "a draft step costs what a plain step does"
    output = compared(target, draft, inputs, StaticPolicy(6), config.replace(cost_cap=False), max_new_tokens=24)
    assert output.speculation_statistics.drafted > 20
