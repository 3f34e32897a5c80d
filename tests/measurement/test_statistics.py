"""Counting, clipping at the ends of texts, and the predicted speedup against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_rounds import phases, round_record

from hf_dsde.measurement import counts
from hf_dsde.measurement.rounds import RoundRecord
from hf_dsde.measurement.statistics import SpeculationStatistics, SpeculationWarning, StatisticsRecorder
from hf_dsde.policies import PhaseTimes

Block = tuple[int, int, int]
"""drafted, accepted, emitted"""


def record(
    rounds: Sequence[Sequence[Block | None]],
    times: PhaseTimes | Sequence[PhaseTimes] | None = None,
    packed_tokens: int | None = None,
) -> StatisticsRecorder:
    """A recorder fed with one block per round and row; None is a row that is not active."""
    recorder = StatisticsRecorder(len(rounds[0]), "fixed")
    for number, blocks in enumerate(rounds):
        entries = [block or (0, 0, 0) for block in blocks]
        width = max(entry[0] for entry in entries)
        drafted, accepted, emitted = zip(*entries, strict=True)
        of_round = times[number] if isinstance(times, Sequence) else times
        recorder.on_round(
            round_record(
                drafted,
                accepted,
                emitted=emitted,
                active=[block is not None for block in blocks],
                packed_tokens=packed_tokens,
                times=of_round or phases(draft=width * 1.0, verify=4.0, bookkeeping=1.0),
            )
        )
    return recorder


@st.composite
def recorded_batches(draw: st.DrawFn) -> tuple[list[list[Block | None]], list[int]]:
    """Rounds as a loop could report them, and output lengths that later criteria may have shortened."""
    rows = draw(st.integers(1, 4))
    rounds: list[list[Block | None]] = []
    running = [True] * rows
    for _ in range(draw(st.integers(0, 6))):
        blocks: list[Block | None] = []
        for row in range(rows):
            if not running[row]:
                blocks.append(None)
                continue
            drafted = draw(st.integers(0, 5))
            accepted = draw(st.integers(0, drafted))
            emitted = accepted + 1
            if draw(st.booleans()) and draw(st.booleans()):
                emitted = draw(st.integers(1, accepted + 1))
                running[row] = False
            blocks.append((drafted, accepted, emitted))
        rounds.append(blocks)
    rounds = rounds or [[(0, 0, 1)] * rows]
    totals = [sum(blocks[row][2] for blocks in rounds if blocks[row]) for row in range(rows)]
    return rounds, [draw(st.integers(0, total)) for total in totals]


def token_by_token(rounds: list[list[Block | None]], lengths: list[int]) -> dict[str, list[int]]:
    """Lays every text out token by token and cuts it with a slice; slow, and shares nothing with the recorder."""
    rows = len(lengths)
    result = {name: [0] * rows for name in ("rounds", "drafted", "past_end", "accepted", "emitted")}
    result |= {"drafted_at": [0] * 6, "accepted_at": [0] * 6}
    for row, length in enumerate(lengths):
        text: list[str] = []
        for blocks in rounds:
            block = blocks[row]
            room = length - len(text)
            if block is None or room == 0:
                continue
            drafted, accepted, emitted = block
            kept = (["draft"] * accepted + ["bonus"])[:emitted][:room]
            text += kept
            result["rounds"][row] += 1
            result["emitted"][row] += len(kept)
            ended = len(text) == length and "bonus" not in kept
            for position in range(drafted):
                if ended and position >= len(kept):
                    result["past_end"][row] += 1
                    continue
                result["drafted"][row] += 1
                result["drafted_at"][position] += 1
                if kept[position : position + 1] == ["draft"]:
                    result["accepted"][row] += 1
                    result["accepted_at"][position] += 1
    return result


def without_zeros_at_the_end(values: list[int]) -> list[int]:
    while values and values[-1] == 0:
        values = values[:-1]
    return values


@given(recorded_batches())
def test_counts_equal_a_walk_over_every_token(batch: tuple[list[list[Block | None]], list[int]]) -> None:
    rounds, lengths = batch
    statistics = record(rounds).finish(lengths)
    expected = token_by_token(rounds, lengths)
    for name in ("rounds", "drafted", "past_end", "accepted", "emitted"):
        assert [getattr(row, name) for row in statistics.rows] == expected[name], name
    assert list(statistics.drafted_by_position) == without_zeros_at_the_end(expected["drafted_at"])
    positions = len(statistics.drafted_by_position)
    assert list(statistics.accepted_by_position) == expected["accepted_at"][:positions]
    assert sum(expected["accepted_at"][positions:]) == 0


@given(recorded_batches())
def test_emitted_tokens_sum_to_the_outputs_however_they_are_cut(
    batch: tuple[list[list[Block | None]], list[int]],
) -> None:
    rounds, lengths = batch
    statistics = record(rounds).finish(lengths)
    assert [row.emitted for row in statistics.rows] == lengths
    assert statistics.emitted == sum(lengths) == sum(r.emitted for r in statistics.rounds)
    assert statistics.accepted == sum(r.accepted for r in statistics.rounds)
    assert statistics.drafted == sum(r.drafted for r in statistics.rounds)
    assert statistics.accepted == sum(statistics.accepted_by_position)
    assert statistics.drafted == sum(statistics.drafted_by_position)


@given(recorded_batches())
def test_ratios_stay_in_range(batch: tuple[list[list[Block | None]], list[int]]) -> None:
    rounds, lengths = batch
    statistics = record(rounds).finish(lengths)
    for ratio in (statistics.acceptance_rate, statistics.draft_waste, *statistics.acceptance_by_position):
        assert math.isnan(ratio) or 0.0 <= ratio <= 1.0
    assert math.isnan(statistics.block_efficiency) or 1.0 <= statistics.block_efficiency <= 6.0
    assert statistics.accepted <= statistics.emitted
    speedup = statistics.predicted_speedup
    assert speedup is None or speedup >= 0.0


@given(recorded_batches())
def test_every_column_of_a_target_pass_is_real_or_padding_or_idle(
    batch: tuple[list[list[Block | None]], list[int]],
) -> None:
    rounds, lengths = batch
    for r in record(rounds).finish(lengths).rounds:
        assert r.active + r.drafted + r.past_end + r.padding + r.idle == len(lengths) * r.pass_width
        assert r.padding >= 0
        assert r.idle >= 0


PACKED = [[(4, 2, 3), None, (0, 0, 1), (2, 2, 1)]]


def test_padding_of_a_packed_round_is_what_the_bucket_adds() -> None:
    """5 + 1 + 3 tokens of three active rows, in a pass of 16; the row that has finished has no columns."""
    statistics = record(PACKED, packed_tokens=16).finish([3, 0, 1, 1])
    [entry] = statistics.rounds
    assert (entry.packed_tokens, entry.padding, entry.idle) == (16, 7, 0)
    assert (entry.drafted, entry.past_end) == (5, 1)
    assert statistics.to_dict()["by_round"]["packed_tokens"] == [16]
    assert statistics.padding == 7


def test_padding_of_the_same_round_padded() -> None:
    [entry] = record(PACKED).finish([3, 0, 1, 1]).rounds
    assert (entry.packed_tokens, entry.padding, entry.idle) == (None, 3 * 5 - 9, 5)


def test_draft_that_always_agrees_has_acceptance_rate_one_although_the_text_ends_inside_a_block() -> None:
    statistics = record([[(4, 4, 5)], [(4, 4, 2)]]).finish([7])
    assert statistics.acceptance_rate == 1.0
    assert statistics.acceptance_by_position == (1.0, 1.0, 1.0, 1.0)
    assert (statistics.drafted, statistics.past_end, statistics.accepted) == (6, 2, 6)
    assert statistics.draft_waste == pytest.approx(2 / 8)


def test_row_cut_after_its_rounds_counts_nothing_past_its_end() -> None:
    statistics = record([[(3, 3, 4), (3, 1, 2)], [(3, 3, 4), (3, 2, 3)]]).finish([2, 5])
    cut, whole = statistics.rows
    assert (cut.rounds, cut.drafted, cut.past_end, cut.accepted, cut.emitted) == (1, 2, 1, 2, 2)
    assert (whole.rounds, whole.drafted, whole.past_end, whole.accepted, whole.emitted) == (2, 6, 0, 3, 5)
    assert [r.active for r in statistics.rounds] == [2, 1]
    assert statistics.rounds[1].idle == 4


def test_output_longer_than_what_was_emitted_is_an_internal_error() -> None:
    with pytest.raises(RuntimeError, match="Internal error"):
        record([[(2, 1, 2)]]).finish([3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafted": [1]}, "`drafted` has 1 entries"),
        ({"accepted": [3, 0]}, "accepted <= drafted"),
        ({"emitted": [3, 1]}, "emitted <= accepted"),
        ({"active": [False, True]}, "not `active`"),
        ({"pass_width": 2}, "needs 3 columns"),
    ],
)
def test_contradicting_numbers_are_refused(change: dict[str, object], message: str) -> None:
    usual = {"drafted": [2, 0], "accepted": [1, 0]}
    StatisticsRecorder(2, "fixed").on_round(round_record(**usual))
    with pytest.raises(ValueError, match=message):
        StatisticsRecorder(2, "fixed").on_round(round_record(**{**usual, "pass_width": 3, **change}))  # type: ignore[arg-type]


def test_number_of_output_lengths_must_be_the_number_of_rows() -> None:
    with pytest.raises(ValueError, match="one per row, 1"):
        record([[(2, 1, 2)]]).finish([2, 0])


def timed(rounds: Sequence[tuple[int, int, PhaseTimes]]) -> SpeculationStatistics:
    """One row; each round is its drafted and accepted tokens and its times."""
    blocks = [[(drafted, accepted, accepted + 1)] for drafted, accepted, _ in rounds]
    return record(blocks, [times for *_, times in rounds]).finish([sum(a + 1 for _, a, _ in rounds)])


def test_predicted_speedup_by_hand() -> None:
    plain = phases(draft=0.0, verify=9.0, bookkeeping=1.0)
    speculative = phases(draft=6.0, verify=11.0, bookkeeping=1.0)
    statistics = timed([(0, 0, plain), (3, 3, speculative), (3, 1, speculative)])
    assert statistics.plain_step_seconds == 10.0
    assert statistics.plain_steps == 7
    assert statistics.draft_step_seconds == 2.0
    assert statistics.predicted_speedup == pytest.approx(7 * 10 / (10 + 18 + 18))
    assert statistics.speculation_loses is False
    assert statistics.losing_reason() is None


def test_predicted_speedup_counts_steps_to_the_end_of_the_longest_row() -> None:
    plain, speculative = phases(verify=10.0), phases(draft=2.0, verify=10.0)
    rounds = [[(0, 0, 1), (0, 0, 1)], [(2, 2, 3), (2, 0, 1)], [None, (2, 0, 1)], [None, (2, 0, 1)]]
    statistics = record(rounds, [plain, *[speculative] * 3]).finish([4, 4])
    assert statistics.predicted_speedup == pytest.approx(4 * 10 / (10 + 3 * 12))
    credit_for_the_early_row = (1 + 2 + 1 + 1) * 10 / (10 + 3 * 12)
    assert credit_for_the_early_row > 1.0 > (statistics.predicted_speedup or 0.0)


def test_one_slow_round_does_not_pass_for_the_price_of_speculation() -> None:
    plain, usual = phases(verify=10.0), phases(draft=2.0, verify=12.0)
    capturing = phases(draft=500.0, verify=900.0)
    statistics = timed([(2, 2, capturing), (0, 0, plain), (2, 2, usual), (2, 2, usual)])
    assert statistics.predicted_speedup == pytest.approx(10 * 10 / (10 + 3 * 14))
    assert statistics.total_seconds == pytest.approx(1400 + 10 + 28)


def test_the_policy_takes_part_of_the_rounds_and_adds_nothing_to_the_total() -> None:
    times = phases(draft=3.0, verify=4.0, bookkeeping=1.0, policy=0.4)
    statistics = record([[(2, 1, 2)], [(1, 1, 2)]], times).finish([4])
    assert statistics.policy_seconds == pytest.approx(0.8)
    assert statistics.policy_overhead == pytest.approx(0.05)
    assert statistics.total_seconds == pytest.approx(16.0)
    assert statistics.to_dict()["ratios"]["policy_overhead"] == pytest.approx(0.05)


def test_plain_step_is_the_median_of_rounds_in_which_nobody_drafted_and_their_shortest_wait() -> None:
    speculative = phases(draft=0.125, verify=5.0)
    plain = [(0, 0, phases(wait, verify, 0.5)) for wait, verify in ((7.0, 4.0), (0.25, 90.0), (9.0, 5.0))]
    assert timed([*plain, (2, 0, speculative)]).plain_step_seconds == 5.75


def test_without_a_plain_round_or_without_drafting_nothing_is_predicted() -> None:
    never_plain = timed([(2, 2, phases(1.0, 1.0, 1.0))])
    never_drafted = timed([(0, 0, phases(0.0, 1.0, 1.0))])
    for statistics in (never_plain, never_drafted):
        assert statistics.predicted_speedup is None
        assert statistics.speculation_loses is None
        assert statistics.losing_reason() is None
    assert never_drafted.draft_step_seconds is None


def losing() -> SpeculationStatistics:
    plain, speculative = phases(verify=10.0), phases(draft=16.0, verify=12.0)
    return timed([(0, 0, plain), (2, 1, speculative), (2, 0, speculative)])


def test_losing_reason_names_the_measured_numbers() -> None:
    reason = losing().losing_reason()
    assert reason is not None
    assert "a draft step costs 0.80 of a target step" in reason
    assert "a whole round 2.20" in reason
    assert "acceptance rate of 0.25" in reason
    assert "replaces only 1.33 target steps" in reason
    assert "0.61x" in reason
    assert reason.count(". ") == 0


def test_losing_warns_exactly_once_and_points_at_the_caller() -> None:
    with pytest.warns(SpeculationWarning, match="slower than plain decoding") as caught:
        losing().warn_if_losing()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_winning_does_not_warn() -> None:
    statistics = timed([(0, 0, phases(verify=10.0)), (3, 3, phases(draft=1.0, verify=10.0))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        statistics.warn_if_losing()


def test_call_that_generated_nothing_has_defined_ratios() -> None:
    statistics = StatisticsRecorder(2, "fixed").finish([0, 0])
    assert math.isnan(statistics.acceptance_rate)
    assert math.isnan(statistics.block_efficiency)
    assert math.isnan(statistics.draft_waste)
    assert math.isnan(statistics.tokens_per_second)
    assert statistics.acceptance_by_position == ()
    assert [row.emitted for row in statistics.rows] == [0, 0]
    assert "0 tokens" in str(statistics)


def test_dictionary_is_json_without_nan_and_names_its_schema() -> None:
    empty = StatisticsRecorder(1, "fixed").finish([0]).to_dict()
    full = losing().to_dict()
    for dictionary in (empty, full):
        assert json.loads(json.dumps(dictionary, allow_nan=False)) == dictionary
        assert dictionary["schema_version"] == 1
    assert empty["ratios"]["acceptance_rate"] is None
    assert full["counts"]["emitted"] == 4
    assert full["counts"]["rounds"] == 3
    assert full["by_round"]["emitted"] == [1, 2, 1]
    assert full["by_row"]["emitted"] == [4]
    assert full["by_position"] == {"drafted": [2, 2], "accepted": [1, 0]}


def test_merging_adds_counts_and_keeps_prediction_of_equal_calls() -> None:
    one = losing()
    merged = SpeculationStatistics.merge([one, one])
    assert merged.emitted == 2 * one.emitted
    assert merged.drafted_by_position == (4, 4)
    assert merged.acceptance_rate == one.acceptance_rate
    assert merged.predicted_speedup == pytest.approx(one.predicted_speedup)
    assert SpeculationStatistics.merge([one]) == one


def test_merging_calls_of_different_draft_lengths_aligns_positions() -> None:
    times = phases(1.0, 1.0, 1.0)
    merged = SpeculationStatistics.merge([timed([(1, 1, times)]), timed([(3, 2, times)])])
    assert merged.drafted_by_position == (2, 1, 1)
    assert merged.accepted_by_position == (2, 1, 0)


def test_merging_needs_one_policy() -> None:
    with pytest.raises(ValueError, match="0 policies"):
        SpeculationStatistics.merge([])
    other = StatisticsRecorder(1, "dsde").finish([0])
    with pytest.raises(ValueError, match="2 policies"):
        SpeculationStatistics.merge([other, losing()])


def test_prefill_is_summed_and_part_of_the_total() -> None:
    recorder = record([[(1, 1, 2)]], phases(1.0, 2.0, 3.0))
    recorder.record_prefill(0.25)
    recorder.record_prefill(0.5)
    statistics = recorder.finish([2])
    assert statistics.prefill_seconds == 0.75
    assert statistics.total_seconds == 6.75
    assert statistics.tokens_per_second == pytest.approx(2 / 6.75)


Settle = Callable[[RoundRecord, int, list[int]], counts.RowCounts]


def settled_by(settle: Settle, rounds: list[RoundRecord], output_lengths: Sequence[int]) -> Any:
    """What `counts.settle_all` returns, round by round and row by row."""
    left = list(output_lengths)
    return np.array([[astuple(settle(entry, row, left)) for row in range(len(left))] for entry in rounds])


@given(data=st.data())
def test_all_rounds_at_once_are_settled_as_one_after_another(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    rounds = []
    for _ in range(data.draw(st.integers(1, 6))):
        active = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        drafted = [data.draw(st.integers(0, 4)) if on else 0 for on in active]
        accepted = [data.draw(st.integers(0, count)) for count in drafted]
        emitted = [data.draw(st.integers(0, a + 1)) if on else 0 for a, on in zip(accepted, active, strict=True)]
        rounds.append(round_record(drafted, accepted, emitted=emitted, active=active))
    totals = [sum(entry.emitted[row] for entry in rounds) for row in range(rows)]
    lengths = [data.draw(st.integers(0, total)) for total in totals]
    assert (counts.settle_all(rounds, lengths) == settled_by(counts.settle, rounds, lengths)).all()


def settle_without_clipping(entry: RoundRecord, row: int, left: list[int]) -> counts.RowCounts:
    emitted = entry.emitted[row]
    left[row] = max(0, left[row] - emitted)
    return counts.RowCounts(int(entry.active[row]), entry.drafted[row], 0, entry.accepted[row], emitted)


def settle_calling_the_unjudged_rejected(entry: RoundRecord, row: int, left: list[int]) -> counts.RowCounts:
    if not entry.active[row] or not left[row]:
        return counts.RowCounts(0, 0, 0, 0, 0)
    emitted = min(entry.emitted[row], left[row])
    left[row] -= emitted
    return counts.RowCounts(1, entry.drafted[row], 0, min(entry.accepted[row], emitted), emitted)


@pytest.mark.parametrize("mutant", [settle_without_clipping, settle_calling_the_unjudged_rejected])
def test_mutants_of_clipping_are_noticed(monkeypatch: pytest.MonkeyPatch, mutant: Settle) -> None:
    monkeypatch.setattr("hf_dsde.measurement.statistics.settle_all", partial(settled_by, mutant))
    with pytest.raises(AssertionError):
        test_counts_equal_a_walk_over_every_token()
    with pytest.raises(AssertionError):
        test_draft_that_always_agrees_has_acceptance_rate_one_although_the_text_ends_inside_a_block()
