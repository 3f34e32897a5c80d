"""Lengths by batch size: which size is nearest, what happens as rows finish, and how a table is profiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
import reference_batch_table as reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_calls import round_of, starter

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import BatchCosts, CostCurve
from hf_dsde.policies import BatchTablePolicy, batch_table
from hf_dsde.policies.batch_table import DEFAULT_TABLE, best_length, survival_probabilities

started = starter(BatchTablePolicy)
tables = st.dictionaries(st.integers(1, 200), st.integers(0, 12), min_size=1, max_size=6)
rounds_of_a_profile = st.lists(st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))))


class TestLookUp:
    @pytest.mark.parametrize(("rows", "length"), [(1, 5), (2, 5), (3, 3), (8, 3), (15, 3), (16, 2), (32, 2), (500, 2)])
    def test_nearest_size_by_ratio_the_larger_of_two(self, rows: int, length: int) -> None:
        # The root of 1 * 8 is 2.83; that of 8 * 32 is 16, as far from 8 as from 32.
        assert started(rows, table={1: 5, 8: 3, 32: 2}).draft_lengths().tolist() == [length] * rows

    @given(table=tables)
    def test_is_the_references_at_every_size(self, table: dict[int, int]) -> None:
        sizes = torch.arange(1, 301)
        expected = [reference.nearest_length(table, rows) for rows in sizes.tolist()]
        assert BatchTablePolicy(table).lengths_at(sizes).tolist() == expected

    @pytest.mark.parametrize(
        "nearest_from",
        [
            lambda low, high: (low + high + 1) // 2,  # nearest by difference
            lambda low, high: int((low * high) ** 0.5) + 1,  # the smaller of two equally near ones
            lambda _low, high: high,  # the next smaller one
        ],
    )
    def test_the_reference_catches_mutants(self, nearest_from: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batch_table, "nearest_from", nearest_from)
        table = {1: 5, 4: 4, 16: 3, 50: 1}
        sizes = torch.arange(1, 60)
        expected = [reference.nearest_length(table, rows) for rows in sizes.tolist()]
        assert BatchTablePolicy(table).lengths_at(sizes).tolist() != expected

    def test_the_loops_limit_holds(self) -> None:
        assert started(2, table={1: 9}, max_draft_length=4).draft_lengths().tolist() == [4, 4]

    def test_zero_decodes_without_drafts(self) -> None:
        assert started(3, table={1: 4, 3: 0}).draft_lengths().tolist() == [0, 0, 0]


class TestShrinkingBatch:
    def test_rows_that_finish_make_the_batch_smaller(self) -> None:
        policy = started(4, table={1: 6, 4: 2})
        assert policy.draft_lengths().tolist() == [2] * 4
        policy.observe(round_of([True, False, True, True]))
        assert policy.draft_lengths().tolist() == [2] * 4
        policy.observe(round_of([True, False, False, False]))
        assert policy.draft_lengths().tolist() == [6] * 4

    def test_rows_leave_and_join(self) -> None:
        policy = started(4, table={1: 6, 4: 2})
        policy.observe(round_of([True, False, False, False]))
        policy.select_rows(torch.tensor([0, -1, -1, -1, -1]))
        assert policy.draft_lengths().tolist() == [2] * 5
        policy.select_rows(torch.tensor([0]))
        assert policy.draft_lengths().tolist() == [6]

    def test_when_all_have_finished_the_answer_is_still_a_length(self) -> None:
        policy = started(2, table={1: 6, 4: 2})
        policy.observe(round_of([False, False]))
        assert policy.draft_lengths().tolist() == [6, 6]


class TestTable:
    def test_survives_json(self) -> None:
        config = SpeculationConfig(policy="batch_table", policy_arguments={"table": {1: 5, 8: 3, 32: 2}})
        restored = SpeculationConfig.from_json(config.to_json())
        assert restored == config
        policy = restored.build_policy()
        assert isinstance(policy, BatchTablePolicy)
        assert policy.table == {1: 5, 8: 3, 32: 2}

    def test_sizes_are_sorted_as_numbers(self) -> None:
        table = json.loads('{"16": 2, "2": 4, "128": 1}')
        assert list(BatchTablePolicy(table).table.items()) == [(2, 4), (16, 2), (128, 1)]

    def test_default_is_documented_and_shortens_large_batches(self) -> None:
        assert BatchTablePolicy().table == DEFAULT_TABLE
        lengths = list(DEFAULT_TABLE.values())
        assert lengths == sorted(lengths, reverse=True)

    @pytest.mark.parametrize(
        ("table", "error", "fragments"),
        [
            ([5, 3], TypeError, ["`table` is [5, 3]", "by batch size"]),
            ({}, ValueError, ["`table` is empty"]),
            ({"8": 3, 8: 2}, ValueError, ["batch size 8 twice"]),
            ({0: 3}, ValueError, ["`table` is 0", "at least 1", "batch size"]),
            ({"eight": 3}, TypeError, ["`table` is 'eight'", "batch size"]),
            ({"-1": 3}, TypeError, ["`table` is '-1'"]),
            ({True: 3}, TypeError, ["`table` is True"]),
            ({1: -1}, ValueError, ["`table` is -1", "draft length of batch size 1"]),
            ({1: 2.0}, TypeError, ["`table` is 2.0"]),
        ],
    )
    def test_bad_tables_are_named(self, table: Any, error: type[Exception], fragments: list[str]) -> None:
        with pytest.raises(error) as caught:
            BatchTablePolicy(table)
        for fragment in fragments:
            assert fragment in str(caught.value)


class TestSurvival:
    def test_worked_example(self) -> None:
        # Three of four rounds accept the first token; of those, two tested a second one and one of them accepted it.
        assert survival_probabilities([2, 2, 1, 3], [2, 0, 1, 1]) == pytest.approx((3 / 4, 3 / 8))

    def test_ends_before_what_no_round_has_tested(self) -> None:
        assert survival_probabilities([3, 3], [0, 0]) == (0.0,)
        assert survival_probabilities([0, 0], [0, 0]) == ()
        assert survival_probabilities([], []) == ()

    def test_a_round_cut_short_is_no_rejection(self) -> None:
        assert survival_probabilities([1, 1, 1, 4], [1, 1, 1, 4]) == (1.0,) * 4

    @given(rounds=rounds_of_a_profile)
    def test_is_the_references(self, rounds: list[tuple[int, int]]) -> None:
        chances = survival_probabilities([k for k, _ in rounds], [a for _, a in rounds])
        assert list(chances) == pytest.approx(reference.survival(rounds))
        assert list(chances) == sorted(chances, reverse=True)

    @pytest.mark.parametrize(
        ("drafted", "accepted", "fragment"),
        [([1], [], "`drafted` has 1 rounds"), ([1], [2], "`accepted` is 2"), ([-1], [0], "`drafted` is -1")],
    )
    def test_impossible_rounds_are_refused(self, drafted: list[int], accepted: list[int], fragment: str) -> None:
        with pytest.raises(ValueError, match=fragment):
            survival_probabilities(drafted, accepted)


def costs(draft_step: float, verify: list[float], overhead: float = 0.0) -> BatchCosts:
    draft = CostCurve.line(draft_step, draft_step) if draft_step else None
    return BatchCosts(draft, CostCurve(tuple(range(1, len(verify) + 1)), tuple(verify)), overhead)


class TestBestLength:
    survival = (0.8, 0.6, 0.4)

    def test_worked_example(self) -> None:
        # Per token: 1, 1.2 / 1.8 = 0.667, 1.4 / 2.4 = 0.583, 1.6 / 2.8 = 0.571.
        assert best_length(self.survival, costs(0.1, [1.0, 1.1, 1.2, 1.3])) == 3
        # Per token: 1, 1.4 / 1.8 = 0.778, 1.9 / 2.4 = 0.792, 2.4 / 2.8 = 0.857.
        assert best_length(self.survival, costs(0.1, [1.0, 1.3, 1.7, 2.1])) == 1

    def test_plain_decoding_where_drafts_do_not_pay(self) -> None:
        assert best_length((0.1, 0.0), costs(0.5, [1.0, 1.0, 1.0])) == 0
        assert best_length((), costs(0.5, [1.0])) == 0

    def test_shortest_of_equally_good(self) -> None:
        assert best_length((1.0, 0.0), costs(1.0, [1.0, 1.0, 1.0])) == 0
        # 1.5 / 1.5 and 2 / 2 both take as long as a plain step.
        assert best_length((0.5, 0.5), costs(0.5, [1.0, 1.0, 1.0])) == 0

    def test_overhead_makes_longer_rounds_pay(self) -> None:
        verify = [1.0, 1.3, 1.7, 2.1]
        assert best_length(self.survival, costs(0.1, verify, overhead=3.0)) == 3

    @given(
        chances=st.lists(st.floats(0, 1), max_size=8).map(lambda values: sorted(values, reverse=True)),
        draft=st.floats(0.01, 1),
        growth=st.lists(st.floats(0, 0.5), min_size=8, max_size=8),
    )
    def test_is_as_good_as_the_references(self, chances: list[float], draft: float, growth: list[float]) -> None:
        verify = [1 + sum(growth[:width]) for width in range(9)]
        price = costs(draft, verify)
        chosen = best_length(chances, price)
        expected = reference.best_length(chances, draft, price.verify.at)
        of_chosen, of_expected = (
            reference.seconds_per_token(chances, length, draft, price.verify.at) for length in (chosen, expected)
        )
        assert of_chosen == pytest.approx(of_expected, rel=1e-9)

    @pytest.mark.parametrize("survival", [(0.5, 0.6), (1.2,), (-0.1,), (float("nan"),)])
    def test_impossible_chances_are_refused(self, survival: tuple[float, ...]) -> None:
        with pytest.raises(ValueError, match="`survival` is"):
            best_length(survival, costs(0.1, [1.0, 1.1, 1.2]))
