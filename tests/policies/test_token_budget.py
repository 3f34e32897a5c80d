"""The token budget: worked budgets, the knee from costs that change, and the knee from peak rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_calls import check_refused, round_of

from hf_dsde.costs import CostCurve, CostModel, LiveCosts
from hf_dsde.policies import BatchInfo, Signal, TokenBudgetPolicy
from hf_dsde.policies.token_budget import knee_from_rates, widest_cheap_pass


def started(
    rows: int, costs: LiveCosts | None = None, max_draft_length: int = 32, **arguments: Any
) -> TokenBudgetPolicy:
    policy = TokenBudgetPolicy(**arguments)
    policy.start(BatchInfo(rows, torch.device("cpu"), 100, max_draft_length, 1000, costs))
    return policy


class TestGivenKnee:
    @pytest.mark.parametrize(
        ("rows", "knee", "length"),
        [
            (1, 300, 5),
            (50, 300, 5),
            (51, 300, 4),
            (100, 300, 2),
            (149, 300, 1),
            (151, 300, 0),
            (400, 300, 0),
            (4, 11.9, 1),
        ],
    )
    def test_rows_times_columns_stay_under_it(self, rows: int, knee: float, length: int) -> None:
        assert started(rows, knee_tokens=knee).draft_lengths().tolist() == [length] * rows

    @given(rows=st.integers(1, 64), knee=st.floats(0.1, 5000), most=st.integers(0, 40), loop=st.integers(1, 40))
    def test_is_the_longest_that_fits(self, rows: int, knee: float, most: int, loop: int) -> None:
        policy = started(rows, max_draft_length=loop, knee_tokens=knee, num_draft_tokens=most)
        (length,) = set(policy.draft_lengths().tolist())
        fitting = [k for k in range(min(most, loop) + 1) if rows * (k + 1) <= knee]
        assert length == max(fitting, default=0)

    def test_finished_rows_make_room(self) -> None:
        policy = started(4, knee_tokens=12)
        assert policy.draft_lengths().tolist() == [2] * 4
        policy.observe(round_of([True, False, True, False]))
        assert policy.draft_lengths().tolist() == [5] * 4
        policy.observe(round_of([False] * 4))
        assert policy.draft_lengths().tolist() == [5] * 4

    def test_rows_leave_and_join(self) -> None:
        policy = started(4, knee_tokens=12)
        policy.select_rows(torch.tensor([2, -1, 0]))
        assert policy.draft_lengths().tolist() == [3] * 3
        policy.select_rows(torch.tensor([0, -1, -1, -1, -1, -1]))
        assert policy.draft_lengths().tolist() == [1] * 6

    def test_needs_no_costs(self) -> None:
        assert TokenBudgetPolicy(knee_tokens=300).requires == frozenset()
        assert TokenBudgetPolicy().requires == {Signal.COSTS}

    def test_no_knee_is_too_large(self) -> None:
        assert started(2, knee_tokens=1e300).draft_lengths().tolist() == [5, 5]


CURVE = [1.0, 1.05, 1.1, 1.25, 1.6]


class TestMeasuredKnee:
    @pytest.mark.parametrize(("slack", "length"), [(0.0, 0), (0.05, 1), (0.2, 2), (0.3, 3), (0.5, 3), (0.6, 4)])
    def test_widest_pass_within_the_slack(self, slack: float, length: int) -> None:
        costs = LiveCosts(CostModel.relative(0.1, CURVE, rows=8), 8)
        assert started(8, costs, slack=slack).draft_lengths().tolist() == [length] * 8

    def test_length_limits_hold(self) -> None:
        flat = LiveCosts(CostModel.relative(0.1, [1.0, 1.0]), 2)
        assert started(2, flat).draft_lengths().tolist() == [5, 5]
        assert started(2, flat, max_draft_length=3).draft_lengths().tolist() == [3, 3]
        assert started(2, flat, num_draft_tokens=0).draft_lengths().tolist() == [0, 0]

    def test_follows_costs_that_change_during_the_call(self) -> None:
        costs = LiveCosts(CostModel.relative(0.1, CURVE), 1)
        policy = started(1, costs)
        assert policy.draft_lengths().tolist() == [2]
        for _ in range(40):
            costs.observe(draft_steps=2, width=3, draft=0.2, verify=1.9, overhead=0.0)
        assert policy.draft_lengths().tolist() == [1]

    def test_follows_rows_that_leave_the_passes(self) -> None:
        small = CostModel.relative(0.1, [1.0, 1.0, 1.0, 1.0], rows=2).batches
        large = CostModel.relative(0.1, [1.0, 1.5, 2.0, 2.5], rows=16).batches
        costs = LiveCosts(CostModel({**small, **large}), 16)
        policy = started(16, costs, num_draft_tokens=3)
        assert policy.draft_lengths().tolist() == [0] * 16
        costs.set_rows(2)
        assert policy.draft_lengths().tolist() == [3] * 16

    def test_a_second_call_starts_from_its_own_costs(self) -> None:
        policy = started(1, LiveCosts(CostModel.relative(0.1, CURVE), 1))
        assert policy.draft_lengths().tolist() == [2]
        flat = LiveCosts(CostModel.relative(0.1, [1.0, 1.0]), 1)
        policy.start(BatchInfo(1, torch.device("cpu"), 100, 32, 1000, flat))
        assert policy.draft_lengths().tolist() == [5]

    def test_a_dip_after_a_dear_width_counts(self) -> None:
        """Kernels come in tile sizes: a width may be dear and a wider one cheap."""
        dipping = CostCurve((1, 2, 3, 4, 5), (1.0, 1.3, 1.1, 1.4, 1.5))
        assert widest_cheap_pass(dipping, 0.2, 5) == 3
        assert widest_cheap_pass(dipping, 0.2, 2) == 1
        assert widest_cheap_pass(dipping, 0.0, 0) == 1

    def test_costs_are_required(self) -> None:
        with pytest.raises(ValueError, match=r"`batch\.costs` is None.*`knee_tokens`"):
            started(1)


class TestKneeFromRates:
    def test_h100(self) -> None:
        assert knee_from_rates(989e12, 3.35e12) == pytest.approx(295.2, abs=0.1)

    def test_arithmetic_and_reading_take_equally_long_there(self) -> None:
        flops_per_second, bytes_per_second, bytes_per_parameter, parameters = 312e12, 2.0e12, 1.0, 7e9
        tokens = knee_from_rates(flops_per_second, bytes_per_second, bytes_per_parameter)
        arithmetic = 2 * parameters * tokens / flops_per_second
        assert arithmetic == pytest.approx(parameters * bytes_per_parameter / bytes_per_second)

    def test_smaller_weights_reach_it_earlier(self) -> None:
        assert knee_from_rates(989e12, 3.35e12, 0.5) == pytest.approx(knee_from_rates(989e12, 3.35e12) / 4)

    @pytest.mark.parametrize("position", range(3))
    def test_rates_are_positive(self, position: int) -> None:
        rates = [1.0, 1.0, 2.0]
        rates[position] = 0.0
        with pytest.raises(ValueError, match=r"is 0\.0, but a number greater than 0"):
            knee_from_rates(*rates)


@pytest.mark.parametrize(
    ("arguments", "error", "fragment"),
    [
        ({"knee_tokens": 0}, ValueError, "`knee_tokens` is 0, but a number greater than 0"),
        ({"knee_tokens": "300"}, TypeError, "`knee_tokens` is '300'"),
        ({"num_draft_tokens": -1}, ValueError, "`num_draft_tokens` is -1"),
        ({"slack": -0.1}, ValueError, "`slack` is -0.1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], fragment: str) -> None:
    check_refused(TokenBudgetPolicy, arguments, error, fragment)
