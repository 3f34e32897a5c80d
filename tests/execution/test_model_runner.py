"""A runner's buckets, buffers, prefill and growth do not show in its logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import prompts_of, store_texts
from tiny_models import FAMILIES, VOCABULARY, ragged_batch, tiny_model
from torch import nn
from transformers import PreTrainedModel

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution import attention, model_runner
from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.model_runner import WIDTH_BUCKETS, next_bucket, single_device
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock

LENGTHS = [9, 1, 5]


def texts() -> SequenceBatch:
    return SequenceBatch(**ragged_batch(LENGTHS), max_new_tokens=8, scratch=4, pad_token=0)


def runner_of(model: PreTrainedModel, rows: int = len(LENGTHS), capacity: int = 32, **changes: Any) -> EagerRunner:
    runner = create_runner(model, rows, capacity, RuntimeOptions(**changes))
    assert isinstance(runner, EagerRunner)
    return runner


def expected_logits(model: PreTrainedModel, row: int) -> torch.Tensor:
    """Run a row alone, without padding and without a cache of ours; `[length, vocabulary]`."""
    tokens = ragged_batch(LENGTHS)["input_ids"][row : row + 1, -LENGTHS[row] :]
    with torch.no_grad():
        return model(input_ids=tokens).logits[0].float()


def last_logits(runner: EagerRunner, width: int = 1) -> torch.Tensor:
    """Store all texts but for their last `width` tokens, then run those; `[rows, width, vocabulary]`."""
    batch = texts()
    with runner.active(), torch.no_grad():
        store_texts(runner, prompts_of(batch), [max(length - width, 0) for length in LENGTHS])
        return runner.forward(RowBlock(*batch.tail(width)), longest=max(LENGTHS)).logits


def check_logits(model: PreTrainedModel, logits: torch.Tensor) -> None:
    for row, length in enumerate(LENGTHS):
        columns = min(length, logits.shape[1])
        torch.testing.assert_close(logits[row, -columns:], expected_logits(model, row)[-columns:], rtol=1e-5, atol=1e-5)


@given(size=st.integers(1, 300), buckets=st.sets(st.integers(1, 64), min_size=1).map(lambda b: tuple(sorted(b))))
@settings(deadline=None)
def test_bucket_is_the_smallest_that_holds_a_block(size: int, buckets: tuple[int, ...]) -> None:
    bucket = next_bucket(size, buckets)
    assert bucket >= size
    candidates = [*buckets, *(buckets[-1] * factor for factor in range(2, 302))]
    assert bucket == min(c for c in candidates if c >= size)


def test_own_buckets_ascend_and_hold_one_token() -> None:
    assert list(WIDTH_BUCKETS) == sorted(set(WIDTH_BUCKETS))
    assert WIDTH_BUCKETS[0] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"buckets": (4,)},
        {"buckets": (7, 20), "view_bucket": 5},
        {"prefill_chunk": 1},
        {"prefill_chunk": 3, "view_bucket": 1},
        {"packed_attention": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "opt"])
def test_logits_are_those_of_each_row_alone(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    changes = dict(changes)
    monkeypatch.setattr(model_runner, "WIDTH_BUCKETS", changes.pop("buckets", WIDTH_BUCKETS))
    for width in (1, 3):
        check_logits(model, last_logits(runner_of(model, **changes), width))


def test_keep_returns_the_last_columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "WIDTH_BUCKETS", (8,))
    model = tiny_model()
    batch = texts()
    runner = runner_of(model)
    with runner.active(), torch.no_grad():
        everything = runner.forward(RowBlock(*batch.tail(9)), longest=9).logits
        kept = runner.forward(RowBlock(*batch.tail(9)), longest=9, keep=2).logits
    assert kept.shape == (3, 2, VOCABULARY)
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept, everything[:, -2:])


def test_tokens_of_junk_columns_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands where there is no token, and whatever older blocks left in the buffers and in other slots."""
    monkeypatch.setattr(model_runner, "WIDTH_BUCKETS", (6,))
    model = tiny_model("gemma3")
    outputs = []
    for poison in (0, VOCABULARY - 1):
        runner = runner_of(model)
        batch = texts()
        tokens, positions = batch.tail(5)
        real = positions >= 0
        with runner.active(), torch.no_grad():
            junk = torch.full((3, 6), poison)
            runner.forward(RowBlock(junk, torch.arange(10, 16).expand(3, -1)), longest=16)
            runner.forward(RowBlock(junk, torch.full((3, 6), -1)), longest=1)
            store_texts(runner, prompts_of(batch), [max(length - 5, 0) for length in LENGTHS])
            logits = runner.forward(RowBlock(tokens.where(real, poison), positions), longest=9).logits
        assert logits.isfinite().all()
        outputs.append(logits[real])
    assert torch.equal(*outputs)


def test_junk_after_a_draft_does_not_matter() -> None:
    """Rows of one round have drafts of different length; the columns after the shorter ones are no tokens."""
    model = tiny_model()
    for poison in (3, VOCABULARY - 1):
        runner = runner_of(model)
        batch = texts()
        last, position = batch.tail(1)
        tokens = torch.cat([last, torch.full((3, 4), poison)], dim=1)
        positions = (position + torch.arange(5)).masked_fill(torch.arange(5) > 0, -1)
        with runner.active(), torch.no_grad():
            store_texts(runner, prompts_of(batch), [length - 1 for length in LENGTHS])
            logits = runner.forward(RowBlock(tokens, positions), longest=13).logits
        check_logits(model, logits[:, :1])


def test_rejected_tokens_leave_nothing_behind() -> None:
    model = tiny_model("mistral")
    runner = runner_of(model)
    batch = texts()
    with runner.active(), torch.no_grad():
        store_texts(runner, prompts_of(batch), [length - 1 for length in LENGTHS])
        draft = batch.lengths[:, None] + torch.arange(4)
        runner.forward(RowBlock(torch.full((3, 4), 7), draft), longest=13)
        logits = runner.forward(RowBlock(*batch.tail(1)), longest=9).logits
    check_logits(model, logits)


def test_blocks_are_aligned_to_the_right_of_their_bucket() -> None:
    buffers = BlockBuffers(1, 4, torch.device("cpu"))
    buffers.fill(RowBlock(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 3]])))
    buffers.fill(RowBlock(torch.tensor([[9, 4]]), torch.tensor([[-2, 4]])))
    assert buffers.positions.tolist() == [[-1, -1, -2, 4]]
    buffers.number()
    assert buffers.position_ids.tolist() == [[0, 0, 0, 4]]
    assert buffers.tokens[0, 2:].tolist() == [9, 4]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_grows_in_the_middle_of_a_text(family: str) -> None:
    model = tiny_model(family)
    runner = runner_of(model, capacity=4, view_bucket=1)
    batch = texts()
    with runner.active(), torch.no_grad():
        for end in range(1, 9):  # one token at a time, right-aligned: longer rows have more of them after them
            tokens, positions = prompts_of(batch)[:, end - 1 : end], torch.full((3, 1), end - 1)
            positions = positions.masked_fill(positions >= batch.lengths[:, None] - 1, -1)
            runner.forward(RowBlock(tokens, positions), longest=end)
        logits = runner.forward(RowBlock(*batch.tail(1)), longest=9).logits
    assert runner.cache.capacity >= 9
    check_logits(model, logits)


def test_rows_that_stay_are_unaffected_by_rows_that_leave() -> None:
    model = tiny_model("gemma3")
    runner = runner_of(model)
    batch = texts()
    tokens, positions = batch.tail(1)
    with runner.active(), torch.no_grad():
        store_texts(runner, prompts_of(batch), [length - 1 for length in LENGTHS])
        everyone = runner.forward(RowBlock(tokens, positions), longest=9).logits
        runner.keep_rows([0, 2])
        first = runner.forward(RowBlock(tokens, positions), longest=9).logits
        runner.keep_rows([2])
        second = runner.forward(RowBlock(tokens, positions), longest=9).logits
    assert runner.cache.layers[0].keys.shape[0] == 1
    torch.testing.assert_close(first[[0, 2]], everyone[[0, 2]])
    torch.testing.assert_close(second[2], everyone[2])
    assert first.shape == second.shape == everyone.shape
    assert first.isfinite().all()


def test_hybrid_models_have_a_mask_per_kind() -> None:
    kinds = {kind.kind: kind.window for kind in attention.attention_kinds(tiny_model("gemma3"))}
    assert kinds == {"sliding_attention": 8, "full_attention": None}
    assert [kind.window for kind in attention.attention_kinds(tiny_model("mistral"))] == [8]
    assert [kind.window for kind in attention.attention_kinds(tiny_model("llama"))] == [None]


@pytest.mark.parametrize(
    ("places", "expected"),
    [(["cuda:1", "cuda:1"], "cuda:1"), (["cuda:0", "cuda:1"], None), (["meta", "meta"], None), (["cpu"], "cpu")],
)
def test_layers_on_several_devices_and_offloaded_ones_are_noticed(places: list[str], expected: str | None) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in places))
    for layer, place in zip(model, places, strict=True):
        layer._parameters.update(weight=SimpleNamespace(device=torch.device(place)), bias=None)
    assert single_device(model) == (expected and torch.device(expected))


def test_the_columns_to_keep_are_the_last_ones() -> None:
    buffers = BlockBuffers(3, 4, torch.device("cpu"))
    index = buffers.last_columns(2, torch.device("cpu"))
    assert isinstance(index, torch.Tensor)
    assert index.tolist() == buffers.last_columns(2, None) == [2, 3]
    assert buffers.last_columns(4, torch.device("cpu")) == buffers.last_columns(4, None) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_columns_that_layers_on_several_devices_need(family: str) -> None:
    """No tensor among the arguments: accelerate would move it to the first device."""
    model, rows = tiny_model(family), ragged_batch([7, 5, 3], seed=1)["input_ids"]
    runner, spread = runner_of(model), runner_of(model)
    spread._single_device = None
    results = []
    for one in (runner, spread):
        with torch.no_grad(), one.active():
            positions = torch.arange(rows.shape[1]).expand(len(rows), -1)
            results.append(one.forward(RowBlock(rows, positions), rows.shape[1], keep=2).logits)
    assert results[0].shape == (3, 2, VOCABULARY)
    assert torch.equal(*results)
