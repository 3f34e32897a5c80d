"""Costs of passes: reading a curve, batch sizes in between, following the timings of rounds, measuring on a model."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_calls import config_of
from tiny_models import fresh_pair, noisy_copy, ragged_batch, tiny_model
from tiny_rounds import round_record
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts
from hf_dsde.decoding import cost_measurement
from hf_dsde.decoding.cost_measurement import remembered_costs
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.policies import BatchInfo, Signal, StoppingPolicy


@pytest.fixture(autouse=True)
def given_costs() -> None:
    """Costs are measured here."""


pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def test_a_curve_is_linear_between_its_points_flat_before_and_goes_on_after() -> None:
    curve = CostCurve((1, 5, 9), (1.0, 2.0, 4.0))
    assert [curve.at(count) for count in (1, 3, 5, 6, 9, 11)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 4.0, 5.0])
    assert CostCurve((4, 8), (1.0, 2.0)).at(1) == 1.0
    assert CostCurve((4,), (1.0,)).at(100) == 1.0
    assert curve.at(0) == 0.0


def test_a_curve_is_exact_at_its_points() -> None:
    seconds = (0.1, 0.30000000000000004, 0.7)
    assert tuple(CostCurve((1, 2, 5), seconds).at(count) for count in (1, 2, 5)) == seconds


def test_a_straight_curve_has_a_first_count_and_further_ones() -> None:
    line = CostCurve.line(0.5, 0.1)
    assert [line.at(count) for count in (0, 1, 2, 2.5, 20)] == pytest.approx([0.0, 0.5, 0.6, 0.65, 2.4])
    assert line.slope == pytest.approx(0.1)
    assert CostCurve((4,), (1.0,)).slope == 0.0


def test_noise_in_the_last_points_makes_no_wider_pass_cheaper() -> None:
    assert CostCurve((1, 5), (2.0, 1.0)).at(9) == 1.0


@pytest.mark.parametrize(
    ("counts", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0,), (1.0,)), ((1,), (0.0,))]
)
def test_points_that_make_no_curve_are_refused(counts: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"counts|seconds"):
        CostCurve(counts, seconds)


def test_a_round_costs_its_draft_steps_its_pass_and_what_comes_in_addition() -> None:
    costs = BatchCosts(CostCurve((1, 5), (0.4, 0.8)), CostCurve((1, 5), (1.0, 1.4)), overhead=0.1)
    assert costs.round_seconds(0) == pytest.approx(1.1)
    assert costs.round_seconds(1) == pytest.approx(0.4 + 1.1 + 0.1)
    assert costs.round_seconds(4) == pytest.approx(0.7 + 1.4 + 0.1)
    assert BatchCosts(None, costs.verify).round_seconds(4) == pytest.approx(1.4)


def test_drafts_of_one_known_length_have_equal_steps() -> None:
    costs = BatchCosts(CostCurve((4,), (0.8,)), CostCurve((1,), (1.0,)))
    assert [costs.draft_seconds(steps) for steps in (0, 1, 4, 10)] == pytest.approx([0.0, 0.2, 0.8, 2.0])


def test_a_number_is_no_curve() -> None:
    with pytest.raises(TypeError, match=r"`draft` is 0\.25.*CostCurve\.line"):
        BatchCosts(0.25, CostCurve((1,), (1.0,)))  # type: ignore[arg-type]


def two_batches() -> CostModel:
    small = BatchCosts(CostCurve.line(0.1, 0.1), CostCurve((1, 5), (1.0, 1.2)))
    large = BatchCosts(CostCurve((1, 3), (0.3, 0.9)), CostCurve((1, 3), (2.0, 3.0)), overhead=0.4, resumption=0.6)
    return CostModel({8: large, 4: small})


def test_batch_sizes_in_between_are_interpolated_and_others_take_the_nearest() -> None:
    model = two_batches()
    middle = model.at(6)
    assert [middle.draft_seconds(steps) for steps in range(4)] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert middle.verify.at(1) == pytest.approx(1.5)
    assert middle.verify.at(3) == pytest.approx((1.1 + 3.0) / 2)
    assert middle.overhead == pytest.approx(0.2)
    assert middle.resumption == pytest.approx(0.3)
    assert model.at(1) == model.at(4)
    assert model.at(100) == model.at(8)


def test_costs_survive_json_also_inside_a_config(tmp_path) -> None:
    model = two_batches()
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    config = hf_dsde.SpeculationConfig("static", costs=model.to_dict(), refresh_costs=False)
    config.save_pretrained(tmp_path)
    loaded = hf_dsde.SpeculationConfig.from_pretrained(tmp_path)
    assert loaded == config
    assert loaded.cost_model == model


def test_one_number_per_draft_step_is_read_as_a_curve() -> None:
    verify = {"1": 1.0, "5": 1.4}
    read = CostModel.from_dict({"4": {"draft_step": 0.1, "verify": verify}, "8": {"draft_step": 0, "verify": verify}})
    assert [read.at(4).draft_seconds(steps) for steps in (0, 1, 2, 12)] == pytest.approx([0.0, 0.1, 0.2, 1.2])
    assert read.at(8).draft is None
    assert CostModel.from_dict(json.loads(json.dumps(read.to_dict()))) == read
    config = hf_dsde.SpeculationConfig("static", costs={"4": {"draft_step": 0.1, "verify": verify}})
    assert config.costs is not None
    assert set(config.costs["4"]) == {"draft", "verify", "overhead", "resumption"}
    curve = CostModel.from_dict({"4": {"draft": {"4": 0.7, "1": 0.4}, "verify": verify}}).at(4)
    assert [curve.draft_seconds(steps) for steps in (0, 1, 2, 6)] == pytest.approx([0.0, 0.4, 0.5, 0.9])


def test_of_two_batches_one_of_which_has_no_timed_drafts_the_other_ones_count() -> None:
    known = CostCurve.line(0.3, 0.1)
    verify = CostCurve((1,), (1.0,))
    for pair in ((known, None), (None, known)):
        model = CostModel({rows: BatchCosts(draft, verify) for rows, draft in zip((2, 6), pair, strict=True)})
        assert model.at(4).draft == known


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"8": {}},
        {"8": 3},
        {"x": {"draft_step": 1.0, "verify": {"1": 1.0}}},
        {"8": {"draft_step": -1.0, "verify": {"1": 1.0}}},
        {"8": {"draft": 1.0, "verify": {"1": 1.0}}},
        {"8": {"draft": {"0": 1.0}, "verify": {"1": 1.0}}},
        {"8": {"draft": {"1": -1.0}, "verify": {"1": 1.0}}},
        {"8": {"verify": {"1": 1.0}}},
        [1],
    ],
)
def test_a_config_refuses_what_describes_no_costs(broken) -> None:
    with pytest.raises(ValueError, match="costs"):
        hf_dsde.SpeculationConfig("static", costs=broken)


def test_live_costs_follow_timings_and_say_so() -> None:
    live = LiveCosts(CostModel.relative(0.1, [1.0, 1.1, 1.2]), rows=1)
    for _ in range(200):
        live.observe(draft_steps=2, width=3, draft=0.3, verify=1.8, overhead=0.05)
    assert live.current.draft_seconds(2) == pytest.approx(0.3, rel=0.01)
    assert live.current.verify.at(3) == pytest.approx(1.8, rel=0.01)
    assert live.current.overhead == pytest.approx(0.05, rel=0.01)
    # The other widths moved along: whatever made this one dearer, it is not this one's alone.
    assert live.current.verify.at(1) > 1.15
    assert live.version > 5


def test_a_pass_between_two_widths_moves_both_and_neither_where_it_is_as_expected() -> None:
    """Packed passes have any number of tokens: charged to the width that is next, they would make plain steps dear."""
    live = LiveCosts(CostModel.relative(0.1, [1.0, 2.0, 3.0]), rows=1)
    for width in (1.4, 1.45, 2.6) * 20:
        live.observe(draft_steps=0, width=width, draft=0.0, verify=width, overhead=0.0)
    assert [live.current.verify.at(width) for width in (1, 1.4, 2, 3)] == pytest.approx([1.0, 1.4, 2.0, 3.0])
    live.observe(draft_steps=0, width=1.25, draft=0.0, verify=1.1 * 1.25, overhead=0.0)
    moved = [live.current.verify.at(width) / width - 1 for width in (1, 2, 3)]
    assert moved[0] > moved[1] > moved[2] > 0
    live.set_rows(1)
    shrinking = LiveCosts(CostModel({8: BatchCosts(None, CostCurve((1, 2), (8.0, 16.0)))}), rows=8)
    shrinking.observe(draft_steps=0, width=1.25, draft=0.0, verify=10.0, overhead=0.0)
    shrinking.set_rows(4)
    assert [shrinking.current.verify.at(width) for width in (1, 2)] == pytest.approx([4.0, 8.0])


def test_the_width_of_a_packed_pass_is_the_mean_over_its_rows() -> None:
    packed = round_record([2, 0, 1], [0, 0, 0], pass_width=3, pass_rows=3, packed_tokens=7)
    assert packed.charged_width == pytest.approx(7 / 3)
    assert round_record([2, 0, 1], [0, 0, 0]).charged_width == 3
    assert round_record([1, 0], [0, 0], pass_rows=2, active=[True, False], packed_tokens=1).charged_width == 1


def test_a_stall_moves_a_cost_no_further_than_a_timing_a_quarter_longer() -> None:
    stalled, longer = (LiveCosts(CostModel.relative(0.1, [1.0, 1.1]), rows=1) for _ in range(2))
    stalled.observe(draft_steps=1, width=2, draft=30.0, verify=500.0, overhead=100.0)
    longer.observe(draft_steps=1, width=2, draft=0.125, verify=1.1 * 1.25, overhead=2.0)
    assert stalled.current.draft == longer.current.draft
    assert stalled.current.verify.at(1) == pytest.approx(longer.current.verify.at(1))
    assert stalled.current.verify.at(2) == pytest.approx(longer.current.verify.at(2))
    assert stalled.current.overhead == pytest.approx(longer.current.overhead)


def test_a_host_that_stalls_now_and_then_changes_little() -> None:
    live = LiveCosts(CostModel.relative(0.3, [1.0, 1.02, 1.04]), rows=1)
    for number in range(200):
        slower = 20.0 if number % 5 == 0 else 1.0
        live.observe(draft_steps=2, width=3, draft=0.6 * slower, verify=1.04 * slower, overhead=0.02 * slower)
    assert live.current.round_seconds(0) == pytest.approx(1.0, rel=0.2)
    assert live.current.draft_seconds(2) == pytest.approx(0.6, rel=0.1)


def test_probes_show_that_a_draft_step_was_taken_for_too_dear() -> None:
    """While nothing but probes is drafted, all timings of drafts hold what the draft has to catch up on as well."""
    live = LiveCosts(CostModel.relative(0.9, [1.0, 1.02]), rows=1)
    for _ in range(5):
        live.observe(draft_steps=1, width=2, draft=0.4, verify=1.02, overhead=0.0, resumed=True)
    assert live.current.draft_seconds(1) == pytest.approx(0.4, rel=0.2)
    assert live.current.resumption < 0.05


def test_drafting_again_has_a_price_of_its_own() -> None:
    live = LiveCosts(CostModel.relative(0.1, [1.0, 1.1]), rows=1)
    live.observe(draft_steps=1, width=2, draft=2.1, verify=1.1, overhead=0.0, resumed=True)
    assert live.current.draft_seconds(1) == 0.1, "a draft step is not what took so long"
    assert live.current.resumption == pytest.approx(2.0)
    assert live.version == 1
    live.observe(draft_steps=2, width=3, draft=1.2, verify=1.2, overhead=0.0, resumed=True)
    assert live.current.resumption == pytest.approx(1.5)
    live.observe(draft_steps=2, width=3, draft=0.1, verify=1.2, overhead=0.0, resumed=True)
    assert live.current.resumption == pytest.approx(0.75), "it is not below 0"
    live.observe(draft_steps=0, width=1, draft=0.5, verify=1.0, overhead=0.0, resumed=True)
    live.observe(draft_steps=1, width=2, draft=0.1, verify=1.1, overhead=0.0)
    live.set_rows(1)
    assert live.current.resumption == pytest.approx(0.75)
    assert live.learnt.at(1).resumption == live.current.resumption
    assert CostModel.from_dict(live.learnt.to_dict()) == live.learnt


def test_rounds_in_which_texts_draft_have_a_price_of_their_own() -> None:
    live = LiveCosts(CostModel.relative(0.1, [1.0, 1.1]), rows=1)
    assert "texts" not in live.learnt.to_dict()["1"]
    live.observe(draft_steps=2, width=2, draft=0.5, verify=1.1, overhead=0.0, out_of_texts=True)
    assert live.current.draft == CostModel.relative(0.1, [1.0]).at(1).draft, "draft steps are not what took so long"
    assert live.current.texts == pytest.approx(0.3)
    assert CostModel.from_dict(live.learnt.to_dict()) == live.learnt
    live.observe(draft_steps=0, width=2, draft=0.5, verify=1.1, overhead=0.0, out_of_texts=True)
    assert live.current.texts == pytest.approx(0.9 * 0.3 + 0.1 * 0.5)
    known = live.current.texts
    live.observe(draft_steps=2, width=2, draft=0.1, verify=1.1, overhead=0.0, out_of_texts=True)
    assert live.current.texts == pytest.approx(0.9 * known), "it is not below 0"
    for _ in range(100):
        live.observe(draft_steps=1, width=2, draft=0.1, verify=1.1, overhead=0.0)
    assert live.current.texts == pytest.approx(0.9 * known * 0.99**100), "else nobody would try again"


def test_costs_that_are_not_refreshed_stay() -> None:
    live = LiveCosts(two_batches(), rows=8, refresh=False)
    live.observe(draft_steps=3, width=4, draft=9.0, verify=9.0, overhead=9.0)
    assert live.current == two_batches().at(8)
    assert live.version == 0


def test_what_was_learnt_carries_over_to_a_smaller_batch() -> None:
    live = LiveCosts(two_batches(), rows=8)
    for _ in range(300):
        live.observe(draft_steps=1, width=3, draft=0.6, verify=6.0, overhead=0.4)
    whole = live.current
    live.set_rows(4)
    live.observe(draft_steps=1, width=3, draft=0.01, verify=0.01, overhead=0.4)
    assert live.learnt == CostModel({8: whole})
    assert live.rows == 4
    # One timing, taken for half of what was expected, has moved the draft step by a quarter, and the pass by 5 %.
    assert live.current.draft_seconds(1) == pytest.approx(0.75 * 0.2, rel=0.01)
    assert live.current.verify.at(3) == pytest.approx(0.95 * 2 * 1.1, rel=0.02)


@given(timings=st.lists(st.tuples(st.integers(0, 12), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), max_size=30))
def test_whatever_is_observed_costs_stay_positive_and_finite(timings: list[tuple[int, float, float]]) -> None:
    live = LiveCosts(CostModel.relative(0.1, [1.0, 1.1, 1.2]), rows=1)
    for steps, draft, verify in timings:
        live.observe(draft_steps=steps, width=steps + 1, draft=draft, verify=verify, overhead=0.0)
    current = live.current
    by_steps = [current.draft_seconds(steps) for steps in range(1, 20)]
    assert all(0 < seconds < 1e9 for seconds in by_steps)
    assert by_steps == sorted(by_steps)
    assert all(0 < current.verify.at(width) < 1e9 for width in range(1, 20))


class Costly(StoppingPolicy):
    """Drafts two tokens and keeps what it was told about costs."""

    name = "costly"
    requires = frozenset({Signal.COSTS})

    def start(self, batch: BatchInfo) -> None:
        self.costs = batch.costs
        self.at_start = None if batch.costs is None else batch.costs.current
        self.rows = batch.rows

    def draft_lengths(self) -> torch.Tensor:
        return torch.full((self.rows,), 2)


def generate(target: PreTrainedModel, draft: PreTrainedModel, policy: StoppingPolicy, **call: Any) -> torch.Tensor:
    """A short greedy call over two prompts, unless `call` says otherwise."""
    hf_dsde.enable(target)
    arguments = {**ragged_batch((3, 5), seed=0), "max_new_tokens": 12, "do_sample": False, **call}
    return target.generate(**arguments, assistant_model=draft, speculation_policy=policy)


def test_the_loop_measures_costs_once_per_pair_and_batch_and_follows_its_rounds() -> None:
    target, draft = fresh_pair(noise=0.1)
    policy = Costly()
    assert remembered_costs(target, draft) is None
    generate(target, draft, policy)
    assert policy.costs is not None
    learnt = policy.costs.learnt
    assert list(learnt.batches) == [2]
    assert learnt.at(2) != policy.at_start  # rounds have moved them
    assert remembered_costs(target, draft) == learnt
    generate(target, draft, policy)
    assert policy.at_start == learnt.at(2)  # the second call went on from there


@pytest.mark.parametrize("change", ["dtype", "autocast", "recorded", "own forward"])
def test_costs_are_measured_again_when_passes_are_run_otherwise(change: str, request: pytest.FixtureRequest) -> None:
    target = hf_dsde.enable(tiny_model("llama").float())
    draft = noisy_copy(target, 0.1)
    settings: dict[str, Any] = {"runner": "eager"}
    timed: list[int] = []

    def pass_seconds(runner: ModelRunner, width: int, longest: int) -> float:
        timed.append(width)
        return float(width)

    request.getfixturevalue("monkeypatch").setattr(cost_measurement, "pass_seconds", pass_seconds)

    def measured() -> int:
        before = len(timed)
        generate(target, draft, Costly(), speculation_config=config_of(**settings), max_new_tokens=3)
        return len(timed) - before

    if change == "own forward":
        request.getfixturevalue("recording")
        settings["runner"] = "graph"
    assert measured() > 0
    assert measured() == 0
    with contextlib.ExitStack() as stack:
        if change == "dtype":
            target.double()
            draft.double()
        elif change == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif change == "recorded":
            request.getfixturevalue("recording")
            settings["runner"] = "graph"
        else:
            settings["fused_layers"] = False
        assert measured() > 0
        assert measured() == 0


def test_methods_of_a_benchmark_do_not_learn_from_each_other() -> None:
    target, draft = fresh_pair(noise=0.1)
    policy = Costly()

    def call() -> CostModel | None:
        generate(target, draft, policy, max_new_tokens=3)
        return remembered_costs(target, draft)

    first, second = cost_measurement.CostMemory(), cost_measurement.CostMemory()
    with cost_measurement.remembering_in(first):
        learnt = call()
    assert remembered_costs(target, draft) is None
    with cost_measurement.remembering_in(second):
        assert remembered_costs(target, draft) is None
        assert call() != learnt
    with cost_measurement.remembering_in(first):
        assert remembered_costs(target, draft) == learnt


def test_costs_of_the_config_are_taken_as_they_are() -> None:
    target, draft = fresh_pair(noise=0.1)
    policy = Costly()
    given_costs = CostModel.relative(0.5, [1.0, 1.5], rows=2)
    config = hf_dsde.SpeculationConfig(costs=given_costs.to_dict(), refresh_costs=False)
    generate(target, draft, policy, speculation_config=config)
    assert policy.costs is not None
    assert policy.costs.current == given_costs.at(2)
    assert remembered_costs(target, draft) is None


def test_measuring_leaves_the_text_as_it_is() -> None:
    target, draft = fresh_pair(noise=0.1)
    inputs = ragged_batch((3, 9, 1), seed=0)
    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(generate(target, draft, Costly(), **inputs, max_new_tokens=20), plain)


def test_a_batch_that_shrinks_finds_out_that_wider_passes_have_become_cheap() -> None:
    """Measured at 256 rows only, where a second column doubles a pass; at 16 rows it costs next to nothing."""

    def seconds(tokens: int) -> float:
        return max(5.0, 0.035 * tokens) + 0.001 * tokens

    curve = CostCurve((1, 2, 3), tuple(seconds(256 * width) for width in (1, 2, 3)))
    live = LiveCosts(CostModel({256: BatchCosts(CostCurve.line(2.5, 2.5), curve)}), 256)
    for rows in (256, 128, 64, 32, 16):
        live.set_rows(rows)
        for _ in range(40):
            live.observe(draft_steps=0, width=1, draft=0.0, verify=seconds(rows), overhead=0.0)
    for width in (1, 2, 3):
        assert live.current.verify.at(width) == pytest.approx(seconds(16 * width), rel=0.15)
    assert live.current.draft_seconds(3) == pytest.approx(7.5 * seconds(16) / seconds(256), rel=0.1)
    assert live.learnt.batches[256].verify.at(2) == pytest.approx(seconds(512), rel=0.05)
