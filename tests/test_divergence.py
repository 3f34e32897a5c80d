"""Near-tie or fault: verdicts on logits that are chosen exactly, and on real forward passes.

In bfloat16 greedy text depends on the batch's size (unsloth #9708, vLLM #54506), which is no fault of anybody's.
"""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_models import tiny_model
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from hf_dsde import divergence
from hf_dsde.divergence import BatchComparison, RowComparison, Verdict, compare_outputs, ulp

EOS, PAD = 0, 1


class TableModel:
    """A target whose next-token logits depend on nothing but the last token; it notes every call."""

    def __init__(self, table: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        self.table = table.to(dtype)
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.training = False
        self.generation_config = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: LongTensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        assert bool(attention_mask.all())
        self.calls.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.table[input_ids])


def model_with(logits: dict[int, float], dtype: torch.dtype = torch.bfloat16, others: float = 0.0) -> TableModel:
    """After any token the same logits: those given, and `others` for the rest of 12 tokens."""
    row = torch.full((12,), others)
    for token, value in logits.items():
        row[token] = value
    return TableModel(row.expand(12, 12), dtype)


def compare(
    model: TableModel, expected: list[list[int]], actual: list[list[int]], prompt: int = 2, **kwargs: object
) -> BatchComparison:
    wanted, got = torch.tensor(expected), torch.tensor(actual)
    return compare_outputs(model, wanted[:, :prompt], None, wanted, got, **kwargs)  # type: ignore[arg-type]


def ulp_by_stepping(value: float, dtype: torch.dtype) -> float:
    """Distance to the next representable number away from zero, found by stepping its bit pattern."""
    start = torch.tensor(abs(value), dtype=dtype)
    bits = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}[dtype]
    following = (start.view(bits) + 1).view(dtype)
    return following.double().item() - start.double().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(value=st.floats(0.01, 1000.0))
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    rounded = torch.tensor(value, dtype=dtype).item()
    assert ulp(rounded, dtype) == ulp_by_stepping(rounded, dtype)
    assert ulp(-rounded, dtype) == ulp(rounded, dtype)


def test_ulp_of_float64_is_that_of_python() -> None:
    for value in (1.0, 3.9, 1000.25):
        assert ulp(value, torch.float64) == math.ulp(value)


def test_equal_rows_need_no_forward_pass() -> None:
    model = model_with({5: 4.0})
    comparison = compare(model, [[2, 3, 5, 6], [2, 4, 5, 7]], [[2, 3, 5, 6], [2, 4, 5, 7]])
    assert [row.verdict for row in comparison.rows] == [Verdict.EQUAL, Verdict.EQUAL]
    assert comparison.is_exact
    assert comparison.is_explained
    assert model.calls == []


@pytest.mark.parametrize(
    ("second_logit", "tolerance", "verdict"),
    [
        (4.0, 0.0, Verdict.NEAR_TIE),
        (3.984375, 2.0, Verdict.NEAR_TIE),
        (3.9375, 2.0, Verdict.NEAR_TIE),
        (3.921875, 2.0, Verdict.DIFFERENT),
        (3.921875, 3.0, Verdict.NEAR_TIE),
        (2.0, 2.0, Verdict.DIFFERENT),
    ],
)
def test_gap_is_measured_in_ulps_of_the_model(second_logit: float, tolerance: float, verdict: Verdict) -> None:
    model = model_with({5: 4.0, 6: second_logit})
    (row,) = compare(model, [[2, 3, 7, 5]], [[2, 3, 7, 6]], tolerance_ulps=tolerance).rows
    assert row.verdict is verdict
    assert row.position == 1
    assert (row.expected_token, row.actual_token) == (5, 6)
    assert (row.expected_rank, row.actual_rank) == (0, 0 if second_logit == 4.0 else 1)
    assert row.gap == 4.0 - second_logit
    assert row.ulp == 0.03125
    assert row.gap_ulps == row.gap / 0.03125


def test_the_same_gap_is_no_tie_in_float32() -> None:
    tied = {5: 4.0, 6: 3.96875}
    assert compare(model_with(tied), [[2, 3, 5]], [[2, 3, 6]]).is_explained
    assert not compare(model_with(tied, torch.float32), [[2, 3, 5]], [[2, 3, 6]]).is_explained


def test_verdict_does_not_depend_on_which_output_is_called_expected() -> None:
    for logits in ({5: 4.0, 6: 3.96875}, {5: 4.0, 6: 3.0}):
        one = compare(model_with(logits), [[2, 3, 5]], [[2, 3, 6]]).rows[0]
        other = compare(model_with(logits), [[2, 3, 6]], [[2, 3, 5]]).rows[0]
        assert (one.verdict, one.gap) == (other.verdict, other.gap)


def test_two_tied_tokens_below_the_best_are_a_fault() -> None:
    comparison = compare(model_with({5: 3.0, 6: 3.0, 7: 4.0}), [[2, 3, 5]], [[2, 3, 6]])
    assert comparison.rows[0].verdict is Verdict.DIFFERENT
    assert (comparison.rows[0].expected_rank, comparison.rows[0].actual_rank) == (1, 1)


def test_three_tied_tokens_are_a_tie_whichever_two_were_chosen() -> None:
    assert compare(model_with({5: 4.0, 6: 4.0, 7: 4.0}), [[2, 3, 5]], [[2, 3, 6]]).is_explained


def test_best_logit_near_zero_is_judged_by_the_scale_of_all_logits() -> None:
    logits = {5: 0.001, 6: -0.01}
    assert compare(model_with(logits, others=-8.0), [[2, 3, 5]], [[2, 3, 6]]).is_explained


def test_target_is_asked_about_the_shared_text_without_padding() -> None:
    model = model_with({5: 4.0, 6: 4.0})
    prompts = torch.tensor([[PAD, PAD, 9], [7, 8, 9]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    expected = torch.cat([prompts, torch.tensor([[10, 5, 3], [5, 3, 3]])], 1)
    actual = torch.cat([prompts, torch.tensor([[10, 6, 3], [6, 3, 3]])], 1)
    comparison = compare_outputs(model, prompts, mask, expected, actual)  # type: ignore[arg-type]
    assert model.calls == [[9, 10], [7, 8, 9]]
    assert [row.position for row in comparison.rows] == [1, 0]


def test_nothing_after_the_end_token_is_compared() -> None:
    model = model_with({})
    assert compare(model, [[2, 3, 5, EOS, 8, 9]], [[2, 3, 5, EOS, PAD, PAD]]).is_exact


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_outputs_of_different_width_are_equal_up_to_padding(pad: int) -> None:
    model = model_with({})
    assert compare(model, [[2, 3, 5, EOS]], [[2, 3, 5, EOS, pad, pad]], pad_token_id=pad).is_exact
    assert compare(model, [[2, 3, 5, 6, pad]], [[2, 3, 5, 6]], pad_token_id=pad).is_exact


def test_end_token_against_another_token_is_judged_like_any_two_tokens() -> None:
    for gap, verdict in [(0.0, Verdict.NEAR_TIE), (1.0, Verdict.DIFFERENT)]:
        model = model_with({EOS: 4.0, 6: 4.0 - gap})
        (row,) = compare(model, [[2, 3, 5, EOS, PAD]], [[2, 3, 5, 6, 7]]).rows
        assert (row.verdict, row.position, row.expected_token) == (verdict, 1, EOS)


def test_text_that_stops_early_without_an_end_token_is_a_fault() -> None:
    model = model_with({})
    (row,) = compare(model, [[2, 3, 5, 6]], [[2, 3, 5]]).rows
    assert (row.verdict, row.position, row.actual_token, row.gap) == (Verdict.DIFFERENT, 1, None, None)
    assert "one text had ended" in str(row)


def test_without_any_padding_token_a_narrower_output_just_ended() -> None:
    model = model_with({})
    model.generation_config = SimpleNamespace(eos_token_id=None, pad_token_id=None)
    assert compare(model, [[2, 3, 5]], [[2, 3, 5]]).is_exact
    assert compare(model, [[2, 3, 5, 6]], [[2, 3, 5]]).rows[0].verdict is Verdict.DIFFERENT


def test_several_end_tokens() -> None:
    assert compare(model_with({}), [[2, 3, 8, 5]], [[2, 3, 8, 6]], eos_token_id=[EOS, 8]).is_exact


def test_logits_are_judged_as_they_were_processed() -> None:
    model = model_with({4: 9.0, 5: 4.0, 6: 4.0})
    prefixes = []

    def forbid_four(input_ids: LongTensor, logits: Tensor) -> Tensor:
        prefixes.append(input_ids.tolist())
        return logits.index_fill(1, torch.tensor([4]), -math.inf)

    expected, actual = torch.tensor([[PAD, 3, 7, 5]]), torch.tensor([[PAD, 3, 7, 6]])
    prompt, mask = expected[:, :2], torch.tensor([[0, 1]])
    raw = compare_outputs(model, prompt, mask, expected, actual)  # type: ignore[arg-type]
    processed = compare_outputs(
        model,  # type: ignore[arg-type]
        prompt,  # type: ignore[arg-type]
        mask,
        expected,  # type: ignore[arg-type]
        actual,  # type: ignore[arg-type]
        logits_processor=forbid_four,  # type: ignore[arg-type]
    )
    assert not raw.is_explained
    assert processed.is_explained
    assert prefixes == [[[PAD, 3, 7]]]


def test_float32_logits_of_a_bfloat16_model_are_judged_in_bfloat16() -> None:
    model = model_with({5: 4.0, 6: 3.96875})
    model.table = model.table.float()
    comparison = compare(model, [[2, 3, 5]], [[2, 3, 6]])
    assert comparison.dtype is torch.bfloat16
    assert comparison.is_explained


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 3)}, "`attention_mask` has shape"),
        ({"expected": torch.tensor([[2]])}, "`expected` has shape"),
        ({"actual": torch.tensor([[2, 3, 4], [2, 3, 4]])}, "`actual` has shape"),
        ({"actual": torch.tensor([[2, 9, 4]])}, "does not begin with `input_ids`"),
        ({"tolerance_ulps": -1.0}, "`tolerance_ulps` is -1.0"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "model": model_with({}),
        "input_ids": torch.tensor([[2, 3]]),
        "attention_mask": None,
        "expected": torch.tensor([[2, 3, 4]]),
        "actual": torch.tensor([[2, 3, 4]]),
    }
    assert compare_outputs(**arguments).is_exact  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        compare_outputs(**{**arguments, **change})  # type: ignore[arg-type]


def test_training_mode_is_refused() -> None:
    model = model_with({})
    model.training = True
    with pytest.raises(ValueError, match="training mode"):
        compare(model, [[2, 3, 5]], [[2, 3, 5]])


def real_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return tiny_model(family, vocab_size=64, seed=3, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=2).to(dtype)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_token_of_left_padded_greedy_text_ranks_first_in_a_real_model(family: str) -> None:
    """Replacing any token by another must show the original one at rank 0: prefix and positions are right."""
    model = real_model(family, torch.float32)
    prompts = torch.tensor([[PAD, PAD, PAD, 9, 10], [5, 6, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    output = model.generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert compare_outputs(model, prompts, mask, output, output.clone()).is_exact
    for position in range(6):
        changed = output.clone()
        changed[:, 5 + position] = (changed[:, 5 + position] + 1) % 60 + 2
        for row in compare_outputs(model, prompts, mask, output, changed, eos_token_id=[]).rows:
            assert (row.position, row.expected_rank) == (position, 0)
            assert row.verdict is Verdict.DIFFERENT
            assert (row.actual_rank or 0) > 0


def test_bfloat16_batched_against_alone_is_explained() -> None:
    model = real_model("llama", torch.bfloat16)
    torch.manual_seed(1)
    prompts = torch.randint(3, 64, (4, 7))
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    batched = model.generate(prompts, attention_mask=torch.ones_like(prompts), **kwargs)
    alone = torch.cat([model.generate(p[None], attention_mask=torch.ones_like(p[None]), **kwargs) for p in prompts])
    comparison = compare_outputs(model, prompts, None, alone, batched, eos_token_id=[])
    assert comparison.is_explained, str(comparison)


def test_text_and_table_name_the_verdicts() -> None:
    comparison = BatchComparison(
        (
            RowComparison(0, Verdict.EQUAL),
            RowComparison(1, Verdict.NEAR_TIE, 17, 5, 6, 0, 1, 0.015625, 0.015625),
            RowComparison(2, Verdict.DIFFERENT, 3, 5, None),
        ),
        torch.bfloat16,
        2.0,
    )
    text = str(comparison)
    assert text.splitlines()[0] == "3 rows: 1 equal, 1 near tie, 1 different (bfloat16, tolerance 2 ulps)"
    assert "row 1: near tie at generated position 17, expected token 5, got token 6" in text
    assert "= 1 ulps" in text
    assert "row 0" not in text
    output = io.StringIO()
    Console(file=output, width=80, color_system=None).print(comparison)
    assert "near tie" in output.getvalue()
    assert "ended" in output.getvalue()
    assert max(len(line) for line in output.getvalue().splitlines()) <= 80


def test_mutant_that_looks_only_at_the_two_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap between the two tokens alone would excuse any two equally bad ones."""
    original = divergence._judge

    def judge(
        row: int, position: int, pair: tuple[int, int], scores: Tensor, dtype: torch.dtype, tolerance: float
    ) -> RowComparison:
        only = torch.full_like(scores, -100.0)
        only[list(pair)] = scores[list(pair)]
        return original(row, position, pair, only, dtype, tolerance)

    monkeypatch.setattr(divergence, "_judge", judge)
    with pytest.raises(AssertionError):
        test_two_tied_tokens_below_the_best_are_a_fault()
