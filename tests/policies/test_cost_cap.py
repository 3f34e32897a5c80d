"""The cap with prices against its formula in plain Python, and what it does to policies that know no costs."""

from __future__ import annotations

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


def best_depth(acceptance: float, wishes: list[int], active: list[bool], times: list[float]) -> tuple[int, float]:
    """The depth of the best goodput, and by how much it is better than the next best."""
    goodputs = []
    for depth, time in enumerate(times):
        tokens = sum(
            acceptance**j for wish, on in zip(wishes, active, strict=True) if on for j in range(min(wish, depth) + 1)
        )
        goodputs.append(tokens / max(sum(active), 1) / time)
    best = max(range(len(times)), key=lambda depth: goodputs[depth])
    return best, min(abs(goodputs[best] - value) for depth, value in enumerate(goodputs) if depth != best)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), draft_cost=st.sampled_from([0.05, 0.2, 0.5]), rows=st.integers(1, 6))
def test_follows_the_formula_over_random_rounds(seed: int, draft_cost: float, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    script = torch.randint(0, LIMIT + 1, (30, rows), generator=generator).tolist()
    policy = CostCap(ScriptedLengths(script))
    policy.start(batch_with_costs(rows, draft_cost, VERIFY, LIMIT))
    times = [depth * draft_cost + VERIFY[depth] for depth in range(LIMIT + 1)]
    active = [True] * rows
    for wishes in script:
        depth, margin = best_depth(policy.acceptance, wishes, active, times)
        lengths = policy.draft_lengths().tolist()
        if margin > 1e-6:
            probes = depth == 0 and max(lengths) == 1
            assert lengths == [
                min(wish, length if probes else depth) for wish, length in zip(wishes, lengths, strict=True)
            ]
        active = [bool(on) for on in (torch.rand(rows, generator=generator) < 0.9)]
        drafted = [length * on for length, on in zip(lengths, active, strict=True)]
        accepted = [int(torch.randint(0, length + 1, (), generator=generator)) for length in drafted]
        policy.observe(outcome(drafted, accepted, active))


def test_one_row_that_would_go_far_does_not_keep_seven_waiting() -> None:
    """Seven rows stop at one token; what the eighth gains by a third and fourth is not worth their waiting."""
    wishes = [[4, *[1] * 7]] * 3
    far, equal = CostCap(ScriptedLengths(wishes)), CostCap(StaticPolicy(4))
    for policy in (far, equal):
        policy.start(batch_with_costs(8, 0.1))
    assert far.draft_lengths().tolist() == [1] * 8
    assert equal.draft_lengths().tolist() == [4] * 8


def test_over_a_length_that_is_never_too_short_it_is_goodput() -> None:
    played = [Simulation(policy, 4, 0.2).play(200, 0.8) for policy in (CostCap(StaticPolicy(12)), GoodputPolicy(12))]
    assert played[0] == played[1]


def test_where_passes_cost_the_same_the_other_policy_plays_as_if_alone() -> None:
    alone, capped = HeuristicPolicy(), CostCap(HeuristicPolicy())
    generator = torch.Generator().manual_seed(0)
    for policy in (alone, capped):
        policy.start(batch_with_costs(4, 0.0, [1.0] * 13))
    for number in range(40):
        lengths = alone.draft_lengths().tolist()
        assert capped.draft_lengths().tolist() == lengths
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
