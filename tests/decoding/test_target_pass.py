"""Which form the target's pass takes, what is asked for to decide it, and what packed rounds count."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import recording  # noqa: F401 - a fixture
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths

import hf_dsde
from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import CostCurve, CostModel, LiveCosts
from hf_dsde.decoding import cost_measurement
from hf_dsde.decoding import target_pass as verification_pass
from hf_dsde.decoding.cost_measurement import MEASURED_WIDTHS, token_costs
from hf_dsde.decoding.target_pass import LARGE_BATCH, LEAST_GAIN, PassResult, VerificationPass
from hf_dsde.execution.model_runner import WIDTH_BUCKETS, next_bucket
from hf_dsde.execution.packing import packed_bucket
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.measurement.statistics import SpeculationStatistics, StatisticsRecorder
from hf_dsde.policies import Signal
from hf_dsde.policies.base import PhaseTimes

pytestmark = pytest.mark.slow

BY_TOKEN = CostCurve((1, 10_000), (1e-3, 10.0))
"""Arithmetic decides: every token costs the same."""
BY_WEIGHTS = CostCurve((1, 10_000), (1.0, 1.0))
"""Reading weights decides: tokens are free."""


class FakeRunner:
    """Says which form it was asked for, in place of logits."""

    conditions = ("graph", torch.bfloat16)

    def __init__(self, rows: int, *, packs: bool = True, live: int | None = None) -> None:
        self.rows = rows
        self.packs = packs
        self.live_rows = list(range(rows if live is None else live))
        self.calls: list[tuple[Any, ...]] = []

    def padded_width(self, width: int) -> int:
        return next_bucket(width, WIDTH_BUCKETS)

    def stage(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> Callable[[], PassOutput]:
        self.calls.append(("padded", tokens.shape[1], longest))
        return lambda: PassOutput(tokens)

    def forward_packed(
        self, tokens: torch.Tensor, positions: torch.Tensor, counts: Any, size: int, longest: int
    ) -> PassOutput:
        self.calls.append(("packed", size, longest))
        return PassOutput(tokens)


class CountsOnDevice:
    """Counts how often the host asks for them."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.fetched = 0

    def tolist(self) -> list[int]:
        self.fetched += 1
        return self.counts


def measured_pass(
    runner: FakeRunner, curve: CostCurve, monkeypatch: pytest.MonkeyPatch | None = None, choice: str = "auto"
) -> VerificationPass:
    patch = monkeypatch or pytest.MonkeyPatch()
    patch.setattr(verification_pass, "token_costs", lambda *_: curve)
    target = VerificationPass(runner, SpeculationConfig(verification=choice))
    target.measure(9)
    if monkeypatch is None:
        patch.undo()
    return target


def run(
    target: VerificationPass, counts: Sequence[int], width: int | None = None, *, known: bool = True
) -> tuple[PassResult, CountsOnDevice]:
    """Run a block of the given tokens per row; `known` says whether the host knows them."""
    block = torch.zeros(len(counts), width or max(counts), dtype=torch.long)
    on_device = CountsOnDevice(counts)
    return target.stage(block, block, on_device, list(counts) if known else None, longest=77)(), on_device


UNEVEN = [9] + [1] * (LARGE_BATCH - 1)


class TestForm:
    def test_one_long_draft_is_not_paid_for_by_all_rows_where_tokens_cost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = FakeRunner(LARGE_BATCH)
        result, _ = run(measured_pass(runner, BY_TOKEN, monkeypatch), UNEVEN)
        assert runner.calls == [("packed", packed_bucket(sum(UNEVEN)), 77)]
        assert result.packed_tokens == packed_bucket(sum(UNEVEN))

    def test_passes_are_padded_where_tokens_are_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = FakeRunner(LARGE_BATCH)
        result, _ = run(measured_pass(runner, BY_WEIGHTS, monkeypatch), UNEVEN)
        assert runner.calls == [("padded", 9, 77)]
        assert result.packed_tokens is None

    @pytest.mark.parametrize(("columns", "form"), [(5, "padded"), (9, "packed")])
    def test_columns_that_a_bucket_adds_count_as_padding(
        self, columns: int, form: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All rows are equally long: 5 columns are run as 5, and 9 as 10."""
        runner = FakeRunner(LARGE_BATCH)
        run(measured_pass(runner, BY_TOKEN, monkeypatch), [columns] * LARGE_BATCH)
        assert runner.calls[0][0] == form

    def test_rows_that_left_are_not_padded_any_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = [5] * 4 + [0] * (LARGE_BATCH - 4)
        for live, form in ((LARGE_BATCH, "packed"), (4, "padded")):
            runner = FakeRunner(LARGE_BATCH, live=live)
            run(measured_pass(runner, BY_TOKEN, monkeypatch), counts)
            assert runner.calls[0][0] == form

    def test_a_gain_below_the_least_one_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where 16 of 200 rows draft nothing, 384 tokens in place of 400 save 4 %; 272 in place of 280 save 2.9 %."""
        for rows, idle, size, form in ((200, 16, 384, "packed"), (140, 8, 272, "padded")):
            runner = FakeRunner(rows)
            counts = [2] * (rows - idle) + [1] * idle
            assert packed_bucket(sum(counts)) == size
            run(measured_pass(runner, BY_TOKEN, monkeypatch), counts)
            assert runner.calls[0][0] == form

    @pytest.mark.parametrize("choice", ["padded", "packed"])
    @pytest.mark.parametrize("rows", [2, LARGE_BATCH])
    @pytest.mark.parametrize("curve", [BY_TOKEN, BY_WEIGHTS])
    def test_a_form_asked_for_by_name_is_taken_whatever_it_costs(
        self, curve: CostCurve, rows: int, choice: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = FakeRunner(rows)
        run(measured_pass(runner, curve, monkeypatch, choice), UNEVEN[:rows])
        assert [call[0] for call in runner.calls] == [choice]

    @pytest.mark.parametrize("choice", ["auto", "padded", "packed"])
    def test_a_block_of_one_column_is_never_packed(self, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = FakeRunner(LARGE_BATCH)
        target = measured_pass(runner, BY_TOKEN, monkeypatch, choice)
        result, counts = run(target, [1] * LARGE_BATCH, known=False)
        assert runner.calls == [("padded", 1, 77)]
        assert result.packed_tokens is None
        assert not counts.fetched

    @pytest.mark.parametrize("choice", ["auto", "packed"])
    def test_a_runner_that_cannot_pack_is_not_asked_to(self, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = FakeRunner(LARGE_BATCH, packs=False)
        _, counts = run(measured_pass(runner, BY_TOKEN, monkeypatch, choice), UNEVEN, known=False)
        assert runner.calls[0][0] == "padded"
        assert not counts.fetched

    def test_a_runner_that_gave_up_recording_is_not_asked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = FakeRunner(LARGE_BATCH)
        target = measured_pass(runner, BY_TOKEN, monkeypatch)
        run(target, UNEVEN)
        runner.packs = False
        run(target, UNEVEN)
        assert [call[0] for call in runner.calls] == ["packed", "padded"]

    @given(
        counts=st.lists(st.integers(1, 24), min_size=LARGE_BATCH, max_size=3 * LARGE_BATCH),
        flat_until=st.integers(1, 600),
        known=st.booleans(),
    )
    def test_the_cheaper_form_is_taken(self, counts: list[int], flat_until: int, known: bool) -> None:
        def price(tokens: int) -> float:
            """A pass that reads weights for as long as `flat_until` tokens take to compute."""
            return max(tokens, flat_until) * 1e-4

        runner = FakeRunner(len(counts))
        points = (1, flat_until + 1, 100_000)
        target = measured_pass(runner, CostCurve(points, tuple(price(n) for n in points)))
        run(target, counts, known=known)
        columns = next(bucket for bucket in WIDTH_BUCKETS if bucket >= max(counts))
        padded, packed = price(len(counts) * columns), price(packed_bucket(sum(counts)))
        slack = 2e-4  # the curve's knee is one token wide
        if packed < (1 - LEAST_GAIN) * padded - slack and max(counts) > 1:
            assert runner.calls[0][0] == "packed"
        if packed > (1 - LEAST_GAIN) * padded + slack:
            assert runner.calls[0][0] == "padded"


class TestCountsOnTheHost:
    def test_counts_are_fetched_when_the_choice_depends_on_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = FakeRunner(LARGE_BATCH)
        _, counts = run(measured_pass(runner, BY_TOKEN, monkeypatch), UNEVEN, known=False)
        assert runner.calls[0][0] == "packed"
        assert counts.fetched == 1

    def test_known_counts_are_not_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, counts = run(measured_pass(FakeRunner(LARGE_BATCH), BY_TOKEN, monkeypatch), UNEVEN)
        assert not counts.fetched

    def test_nothing_is_fetched_where_no_lengths_could_make_packing_pay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a token per row, the least there is, packing would save too little."""
        _, counts = run(measured_pass(FakeRunner(LARGE_BATCH), BY_WEIGHTS, monkeypatch), UNEVEN, known=False)
        assert not counts.fetched

    @pytest.mark.parametrize("rows", [1, LARGE_BATCH - 1])
    def test_nothing_is_fetched_in_small_batches(self, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = FakeRunner(rows)
        _, counts = run(measured_pass(runner, BY_TOKEN, monkeypatch), UNEVEN[:rows], known=False)
        assert runner.calls[0][0] == "padded"
        assert not counts.fetched


class TestMeasuring:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Rows and widths of the passes that were timed; a pass takes a second per column."""
        passes: list[tuple[int, int]] = []

        def timed(runner: FakeRunner, width: int, longest: int) -> float:
            passes.append((runner.rows, width))
            return float(width)

        monkeypatch.setattr(cost_measurement, "pass_seconds", timed)
        return passes

    @pytest.mark.parametrize(
        ("rows", "packs", "choice", "measures"),
        [
            (LARGE_BATCH, True, "auto", True),
            (LARGE_BATCH + 1, True, "auto", True),
            (LARGE_BATCH - 1, True, "auto", False),
            (LARGE_BATCH, False, "auto", False),
            (LARGE_BATCH, True, "packed", False),
            (LARGE_BATCH, True, "padded", False),
        ],
    )
    def test_passes_are_timed_only_where_the_choice_rests_on_it(
        self, rows: int, packs: bool, choice: str, measures: bool, measured: list[tuple[int, int]]
    ) -> None:
        runner = FakeRunner(rows, packs=packs)
        runner.model = tiny_model()
        VerificationPass(runner, SpeculationConfig(verification=choice)).measure(9)
        assert measured == ([(rows, width) for width in MEASURED_WIDTHS] if measures else [])

    def test_a_model_and_batch_size_are_measured_once(self, measured: list[tuple[int, int]]) -> None:
        first, second = tiny_model(), tiny_model()
        curves = {}
        for model, rows in [(first, 40), (first, 40), (first, 64), (second, 40), (first, 40), (first, 64)]:
            runner = FakeRunner(rows)
            runner.model = model
            curve = token_costs(runner, 9)
            assert curves.setdefault((id(model), rows), curve) is curve
        assert [rows for rows, _ in measured[:: len(MEASURED_WIDTHS)]] == [40, 64, 40]
        assert len(measured) == 3 * len(MEASURED_WIDTHS)

    def test_costs_are_by_tokens_of_the_pass(self, measured: list[tuple[int, int]]) -> None:
        runner = FakeRunner(40)
        runner.model = tiny_model()
        curve = token_costs(runner, 9)
        assert curve.counts == tuple(40 * width for width in MEASURED_WIDTHS)
        assert curve.at(40 * 5) == 5.0
        assert curve.at(40) == 1.0

    def test_measured_costs_do_not_keep_a_model_alive(self, measured: list[tuple[int, int]]) -> None:
        runner = FakeRunner(40)
        model = runner.model = tiny_model()
        token_costs(runner, 9)
        gone = weakref.ref(model)
        del model, runner
        gc.collect()
        assert gone() is None


def record_packed(blocks: Sequence[tuple[int, int, int] | None], packed_tokens: int | None) -> SpeculationStatistics:
    """A round of one block (drafted, accepted, emitted) per row, None for a finished row; outputs as emitted."""
    recorder = StatisticsRecorder(len(blocks), "fixed")
    drafted, accepted, emitted = zip(*[block or (0, 0, 0) for block in blocks], strict=True)
    recorder.record_round(
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        active=[block is not None for block in blocks],
        draft_steps=max(drafted),
        pass_width=max(drafted) + 1,
        packed_tokens=packed_tokens,
        times=PhaseTimes(1.0, 1.0, 1.0),
    )
    return recorder.finish(emitted)


class TestCounts:
    BLOCKS = ((4, 2, 3), None, (0, 0, 1), (2, 2, 1))

    def test_padding_of_a_packed_round_is_what_the_bucket_adds(self) -> None:
        """5 + 1 + 3 tokens of three active rows, in a pass of 16; the row that has finished has no columns."""
        [entry] = record_packed(self.BLOCKS, 16).rounds
        assert (entry.packed_tokens, entry.padding, entry.idle) == (16, 7, 0)
        assert (entry.drafted, entry.past_end) == (5, 1)

    def test_padding_of_the_same_round_padded(self) -> None:
        [entry] = record_packed(self.BLOCKS, None).rounds
        assert (entry.packed_tokens, entry.padding, entry.idle) == (None, 3 * 5 - 9, 5)

    def test_packed_tokens_are_in_what_is_written_to_files(self) -> None:
        statistics = record_packed(self.BLOCKS, 16)
        assert statistics.to_dict()["by_round"]["packed_tokens"] == [16]
        assert statistics.padding == 7


@pytest.mark.usefixtures("recording")
@pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
class TestCalls:
    """End to end, with tokens that cost what arithmetic costs and batches of four that count as large."""

    SCRIPT = ((6, 0, 0, 6, 0), (2, 2, 2, 2, 2), (0, 0, 0, 0, 0), (0, 5, 1, 0, 0))

    @pytest.fixture(autouse=True)
    def costly_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verification_pass, "LARGE_BATCH", 4)
        monkeypatch.setattr(verification_pass, "token_costs", lambda *_: BY_TOKEN)

    def call(self, policy: hf_dsde.StoppingPolicy, **settings: Any) -> SpeculationStatistics:
        """Check the text against that of plain decoding; return the statistics."""
        target = tiny_model()
        target.generation_config.eos_token_id = None
        inputs = ragged_batch(random_lengths(5))
        plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
        output = hf_dsde.enable(target).generate(
            **inputs,
            max_new_tokens=30,
            do_sample=False,
            assistant_model=noisy_copy(target, 0.0),
            speculation_policy=policy,
            speculation_config=SpeculationConfig(runner="graph", drop_finished_rows=False, **settings),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, plain)
        return output.speculation_statistics

    def test_rounds_take_the_form_that_their_lengths_call_for(self) -> None:
        rounds = self.call(ScriptedLengths(self.SCRIPT)).rounds
        # 17 tokens in 24 places against 5 rows of 7; 15 in 16 against 15; one each; 11 in 16 against 5 rows of 6.
        assert [entry.packed_tokens for entry in rounds[:4]] == [24, None, None, 16]
        assert [entry.padding for entry in rounds[:4]] == [7, 0, 0, 5]
        assert [entry.idle for entry in rounds[:4]] == [0, 0, 0, 0]

    def test_packed_rounds_count_no_columns_of_finished_rows(self) -> None:
        statistics = self.call(ScriptedLengths(self.SCRIPT), verification="packed")
        assert any(entry.active < 5 and entry.packed_tokens for entry in statistics.rounds)
        for entry in statistics.rounds:
            if entry.packed_tokens is not None:
                assert entry.idle == 0
                assert entry.padding == entry.packed_tokens - entry.active - entry.drafted - entry.past_end
                assert 0 <= entry.padding < 8

    def test_counts_that_only_the_device_knows_lead_to_the_same_choice(self) -> None:
        class Stopping(ScriptedLengths):
            """Asks for 6 tokens of everybody, and stops each row where the script does."""

            def draft_lengths(self) -> torch.Tensor:
                self._lengths = super().draft_lengths()
                return torch.where(self._lengths > 0, 6, 0)

            def should_stop(self, step: Any) -> torch.Tensor:
                return self._lengths <= step.position + 1

        known, unknown = self.call(ScriptedLengths(self.SCRIPT)), self.call(Stopping(self.SCRIPT))
        assert [entry.drafted for entry in unknown.rounds] == [entry.drafted for entry in known.rounds]
        assert [entry.packed_tokens for entry in unknown.rounds] == [entry.packed_tokens for entry in known.rounds]

    @pytest.mark.parametrize("verification", ["auto", "padded", "packed"])
    def test_costs_learn_the_columns_that_a_padded_pass_of_as_many_tokens_has(
        self, verification: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        widths = []

        class Watched(LiveCosts):
            def observe(self, *, width: int, **timings: Any) -> None:
                widths.append(width)

        class Asking(RandomLengths):
            requires = frozenset({Signal.COSTS})

        monkeypatch.setattr(
            "hf_dsde.decoding.loop.live_costs",
            lambda target, *_: Watched(CostModel.relative(0.1, [1.0, 1.1]), target.rows),
        )
        rounds = self.call(Asking(), verification=verification).rounds
        assert any(entry.packed_tokens for entry in rounds) == (verification != "padded")
        undisturbed = [entry for entry in rounds if not entry.recorded_passes]
        assert undisturbed
        for width, entry in zip(widths, undisturbed, strict=True):
            if entry.packed_tokens is None:
                assert width == entry.pass_width
            else:
                assert abs(width * entry.pass_rows - entry.packed_tokens) <= entry.pass_rows / 2

    def test_measuring_leaves_no_trace_in_the_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timed = []
        original = cost_measurement.pass_seconds
        monkeypatch.setattr(verification_pass, "token_costs", token_costs)
        monkeypatch.setattr(cost_measurement, "pass_seconds", lambda *block: timed.append(block[1]) or original(*block))
        self.call(RandomLengths())
        assert timed == list(MEASURED_WIDTHS)
