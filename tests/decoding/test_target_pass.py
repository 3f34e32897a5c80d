"""Which form the target's pass takes, what is asked for to decide it, and what packed rounds count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_calls import config_of
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths

import hf_dsde
from hf_dsde.costs import CostModel, LiveCosts
from hf_dsde.decoding.target_pass import VerificationPass, pass_sizes
from hf_dsde.execution.model_runner import WIDTH_BUCKETS, next_bucket
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.pass_shapes import LEAST_SAVING, MOST_PADDED, packed_bucket
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.policies import Signal
from hf_dsde.utils import tuning
from hf_dsde.utils.tuning import HOPPER

pytestmark = pytest.mark.slow


class FakeRunner:
    """Says which form it was asked for, in place of logits."""

    device = torch.device("cpu")

    def __init__(self, rows: int, *, packs: bool = True, live: int | None = None) -> None:
        self.rows = rows
        self.packs = packs
        self.live_rows = list(range(rows if live is None else live))
        self.calls: list[tuple[Any, ...]] = []

    def padded_width(self, width: int) -> int:
        return next_bucket(width, WIDTH_BUCKETS)

    def recorded(self, width: int, longest: int) -> bool:
        return True

    def stage(self, block: RowBlock, longest: int) -> Callable[[], PassOutput]:
        self.calls.append(("padded", block.width, longest) if block.size is None else ("packed", block.size, longest))
        return lambda: PassOutput(block.tokens, packed_tokens=block.size)


class CountsOnDevice:
    """Counts how often the host asks for them."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.fetched = 0

    def tolist(self) -> list[int]:
        self.fetched += 1
        return self.counts


def run(
    runner: FakeRunner, counts: Sequence[int], width: int | None = None, *, known: bool = True
) -> tuple[PassOutput, CountsOnDevice]:
    """Run a block of the given tokens per row; `known` says whether the host knows them."""
    tokens = torch.zeros(len(counts), width or max(counts), dtype=torch.long)
    on_device = CountsOnDevice(counts)
    block = RowBlock(tokens, tokens, counts=on_device)
    return VerificationPass(runner).stage(block, list(counts) if known else None, longest=77)(), on_device


ROWS = 32
UNEVEN = [9] + [1] * (ROWS - 1)


class TestForm:
    def test_rows_that_left_are_not_padded_any_more(self) -> None:
        counts = [9] * 4 + [0] * (ROWS - 4)
        for live, form in ((ROWS, "packed"), (4, "padded")):
            runner = FakeRunner(ROWS, live=live)
            run(runner, counts)
            assert runner.calls[0][0] == form

    @given(counts=st.lists(st.integers(0, 24), min_size=1, max_size=96), known=st.booleans())
    def test_a_packed_pass_always_computes_less_and_a_padded_one_little_more_than_it_must(
        self, counts: list[int], known: bool
    ) -> None:
        runner = FakeRunner(len(counts))
        run(runner, counts, width=max(1, *counts), known=known)
        foretold = pass_sizes(runner).tokens(sum(counts), max(1, *counts))
        columns = next(bucket for bucket in WIDTH_BUCKETS if bucket >= max(counts))
        padded, packed = len(counts) * columns, packed_bucket(sum(counts))
        if runner.calls[0][0] == "packed":
            assert padded > HOPPER.free_tokens
            assert packed < padded
            assert runner.calls[0][1] == foretold
        else:
            assert foretold == padded
            assert padded * (1 - LEAST_SAVING) < max(packed, HOPPER.free_tokens)


@pytest.mark.parametrize(
    ("counts", "known", "packs", "form", "fetched"),
    [
        (UNEVEN, False, True, "packed", True),
        (UNEVEN, True, True, "packed", False),
        (UNEVEN, False, False, "padded", False),
        (UNEVEN[:8], False, True, "padded", False),
        ([1] * 1000, False, True, "padded", False),
    ],
    ids=["unknown", "known", "a runner that cannot pack", "free tokens", "one column"],
)
def test_counts_are_fetched_only_where_the_form_depends_on_them(
    counts: list[int], known: bool, packs: bool, form: str, fetched: bool
) -> None:
    runner = FakeRunner(len(counts), packs=packs)
    _, on_device = run(runner, counts, known=known)
    assert runner.calls[0][0] == form
    assert on_device.fetched == fetched


@pytest.mark.parametrize(("rows", "ready"), [(8, True), (ROWS, False)])
def test_a_pass_is_made_ready_early_only_where_no_counts_are_needed(rows: int, ready: bool) -> None:
    assert VerificationPass(FakeRunner(rows)).recorded(9, 77) == ready


@pytest.mark.usefixtures("recording")
@pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
class TestCalls:
    """End to end, where no token is free."""

    SCRIPT = ((6, 0, 0, 6, 0), (2, 2, 2, 2, 2), (0, 0, 0, 0, 0), (0, 5, 1, 0, 0))

    @pytest.fixture(autouse=True)
    def costly_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=0))

    def call(self, policy: hf_dsde.StoppingPolicy) -> SpeculationStatistics:
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
            speculation_config=config_of(runner="graph", drop_finished_rows=False),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, plain)
        return output.speculation_statistics

    def test_rounds_take_the_form_that_their_lengths_call_for(self) -> None:
        rounds = self.call(ScriptedLengths(self.SCRIPT)).rounds
        # 17 tokens in 24 places against 5 rows of 7; 15 in 16 against 15; one each; 11 in 16 against 5 rows of 6, which
        # the recorded 24 do for.
        assert [entry.packed_tokens for entry in rounds[:4]] == [24, None, None, 24]
        assert [entry.padding for entry in rounds[:4]] == [7, 0, 0, 13]
        assert [entry.idle for entry in rounds[:4]] == [0, 0, 0, 0]

    def test_packed_rounds_count_no_columns_of_finished_rows(self) -> None:
        statistics = self.call(ScriptedLengths(self.SCRIPT))
        assert any(entry.active < 5 and entry.packed_tokens for entry in statistics.rounds)
        for entry in statistics.rounds:
            if entry.packed_tokens is not None:
                assert entry.idle == 0
                assert entry.padding == entry.packed_tokens - entry.active - entry.drafted - entry.past_end
                needed = packed_bucket(entry.active + entry.drafted)
                assert needed <= entry.packed_tokens <= MOST_PADDED * needed

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

    @pytest.mark.parametrize("free_tokens", [0, 128])
    def test_costs_learn_the_columns_that_a_padded_pass_of_as_many_tokens_has(
        self, free_tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=free_tokens))
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
        rounds = self.call(Asking()).rounds
        assert any(entry.packed_tokens for entry in rounds) == (free_tokens == 0)
        undisturbed = [entry for entry in rounds if not entry.recorded_passes]
        assert undisturbed
        for width, entry in zip(widths, undisturbed, strict=True):
            if entry.packed_tokens is None:
                assert width == entry.pass_width
            else:
                assert abs(width * entry.pass_rows - entry.packed_tokens) <= entry.pass_rows / 2
