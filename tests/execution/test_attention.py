"""Masks against a plain double loop, packed attention against repeated heads; and checkers that catch mutants."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, noisy_copy, ragged_batch, tiny_model
from tiny_trees import LENGTHS, PARENTS, Trees
from torch import nn

import hf_dsde
from hf_dsde import compat
from hf_dsde.execution import attention
from hf_dsde.execution.attention import PACKED_ATTENTION, additive_mask, packed_gqa_attention, visible_slots

MaskFunction = Callable[[torch.Tensor, int, "int | None"], torch.Tensor]
POSITIONS = [[-1, -1, 0, 1], [7, 8, 9, 10], [3, 4, -1, -1], [-1, 15, 2, 0]]


def check_mask(function: MaskFunction, positions: list[list[int]], view: int, window: int | None) -> None:
    """Compare with the definition, one query and one slot at a time. Entries that are no token see slot 0 alone."""
    mask = function(torch.tensor(positions), view, window)
    assert mask.shape == (len(positions), 1, len(positions[0]), view)
    assert mask.dtype == torch.bool
    for row, row_positions in enumerate(positions):
        for column, position in enumerate(row_positions):
            for slot in range(view):
                query = max(position, 0)
                near = window is None or query - slot < window
                expected = slot <= query and near
                assert bool(mask[row, 0, column, slot]) == expected, (row, column, slot)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_mask_is_causality_and_window(window: int | None) -> None:
    check_mask(visible_slots, POSITIONS, 16, window)


@given(
    positions=st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(st.integers(-3, 11), min_size=width, max_size=width), min_size=1, max_size=4)
    ),
    view=st.integers(1, 14),
    window=st.none() | st.integers(1, 12),
)
@settings(deadline=None, max_examples=50)
def test_mask_for_any_positions(positions: list[list[int]], view: int, window: int | None) -> None:
    check_mask(visible_slots, positions, view, window)


def _wider_window(positions: torch.Tensor, view: int, window: int | None) -> torch.Tensor:
    return visible_slots(positions, view, None if window is None else window + 1)


def _narrower_window(positions: torch.Tensor, view: int, window: int | None) -> torch.Tensor:
    return visible_slots(positions, view, None if window is None else window - 1)


def _blind_to_itself(positions: torch.Tensor, view: int, window: int | None) -> torch.Tensor:
    return visible_slots(positions - 1, view, window)


def _sees_the_next(positions: torch.Tensor, view: int, window: int | None) -> torch.Tensor:
    return visible_slots(positions + 1, view, window)


@pytest.mark.parametrize("mutant", [_wider_window, _narrower_window, _blind_to_itself, _sees_the_next])
def test_masks_off_by_one_are_caught(mutant: MaskFunction) -> None:
    with pytest.raises(AssertionError):
        check_mask(mutant, POSITIONS, 16, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_says_the_same(dtype: torch.dtype) -> None:
    visible = visible_slots(torch.tensor(POSITIONS), 16, 3)
    mask = additive_mask(visible, dtype)
    assert mask.dtype == dtype
    assert mask.isfinite().all()
    assert torch.equal(mask == 0, visible)
    weights = mask.softmax(dim=-1)
    assert torch.equal(weights > 0, visible)


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_token_of_a_tree_sees_the_text_and_its_path(window: int | None, padding: int) -> None:
    trees = Trees.drawn()
    block = trees.block().map(lambda tensor: torch.nn.functional.pad(tensor, (padding, 0), value=-1))
    visible = visible_slots(block.positions, 32, window, block.slots, block.ancestors)
    for row, (length, parents) in enumerate(zip(LENGTHS, PARENTS, strict=True)):
        for index in range(len(parents)):
            path = trees.path(row, index)
            slots = [*range(length - 1), *(length - 1 + place for place in path)]
            seen = slots if window is None else slots[-window:]
            assert visible[row, 0, padding + index].nonzero().flatten().tolist() == seen
        for index in [*range(padding), *range(padding + len(parents), block.width)]:
            assert visible[row, 0, index].nonzero().flatten().tolist() == [0], "no token"


AttentionFunction = Callable[..., "tuple[torch.Tensor, None]"]


def check_attention(function: AttentionFunction, key_value_heads: int, *, scaling: float | None, seed: int = 0) -> None:
    """Compare in float64 with softmax attention over heads that are copied one by one."""
    generator = torch.Generator().manual_seed(seed)
    heads, width, view, head_dim, value_dim = 6, 3, 7, 4, 5
    positions = torch.tensor([[2, 3, 4], [-1, 5, 6]])

    def random(count: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(2, count, length, dim, generator=generator, dtype=torch.float64)

    query = random(heads, width, head_dim)
    key, value = random(key_value_heads, view, head_dim), random(key_value_heads, view, value_dim)
    mask = visible_slots(positions, view, 3)
    output, weights = function(nn.Identity(), query, key, value, mask, scaling=scaling)
    assert weights is None
    assert output.shape == (2, width, heads, value_dim)
    for head in range(heads):
        shared = head // (heads // key_value_heads)
        scores = query[:, head] @ key[:, shared].mT * (head_dim**-0.5 if scaling is None else scaling)
        expected = scores.masked_fill(~mask[:, 0], -torch.inf).softmax(dim=-1) @ value[:, shared]
        torch.testing.assert_close(output[:, :, head], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", [None, 0.3], ids=["default-scale", "own-scale"])
@pytest.mark.parametrize("key_value_heads", [1, 2, 3, 6])
def test_packed_attention_equals_repeated_heads(key_value_heads: int, scaling: float | None) -> None:
    check_attention(packed_gqa_attention, key_value_heads, scaling=scaling)


def test_packed_masks_hide_scores_that_are_larger_than_any_float16() -> None:
    query, key, value = torch.ones(1, 2, 1, 4).half(), torch.ones(1, 1, 3, 4).half(), torch.randn(1, 1, 3, 4).half()
    key[:, :, 2] = 6e4  # a score of 240000
    visible = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    mask = attention.packed_mask(visible, 2, torch.float16)
    output, _ = packed_gqa_attention(nn.Identity(), query, key, value, mask, scaling=1.0)
    expected = value[:, :, :2].mean(2, keepdim=True).expand_as(output)
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)


def _interleaved_heads(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, *arguments: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Give head h the key-value head h % count, instead of h // share."""
    count = key.shape[1]
    order = torch.arange(query.shape[1]).view(-1, count).T.flatten()
    output, nothing = packed_gqa_attention(module, query[:, order], key, *arguments, **kwargs)
    return output[:, :, order.argsort()], nothing


def _mask_of_other_columns(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Repeat each column of the mask in place, instead of the whole mask."""
    rows, heads, width, _ = query.shape
    shared = heads // key.shape[1]
    packed = query.reshape(rows, key.shape[1], shared * width, -1)
    output = nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask.repeat_interleave(shared, 2), scale=kwargs["scaling"]
    )
    return output.reshape(rows, heads, width, -1).transpose(1, 2), None


def _default_scale_only(*arguments: Any, scaling: float | None) -> tuple[torch.Tensor, None]:
    return packed_gqa_attention(*arguments, scaling=None)


@pytest.mark.parametrize("mutant", [_interleaved_heads, _mask_of_other_columns, _default_scale_only])
def test_wrong_grouping_mask_or_scale_is_caught(mutant: AttentionFunction) -> None:
    with pytest.raises(AssertionError):
        check_attention(mutant, 2, scaling=0.3)


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias"])
def test_score_modifications_are_refused(argument: str) -> None:
    states = torch.zeros(1, 2, 1, 4)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=rf"Identity passes {argument}.*packed_attention=False"):
        packed_gqa_attention(nn.Identity(), states, states, states, mask, **{argument: torch.ones(1)})


def test_attention_without_a_mask_is_refused() -> None:
    states = torch.zeros(1, 2, 1, 4)
    with pytest.raises(NotImplementedError, match="no attention mask"):
        packed_gqa_attention(nn.Identity(), states, states, states, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_plain_scores_are_reproduced(family: str) -> None:
    assert attention.reproduces_attention(tiny_model(family)) == (family not in {"gemma2", "gpt_oss"})


def test_eager_attention_is_kept_where_somebody_asked_for_it() -> None:
    assert not attention.reproduces_attention(tiny_model("llama", attn_implementation="eager"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_setting_is_restored_also_after_an_error(family: str) -> None:
    model = tiny_model(family)
    before = model.config.to_dict(), compat.get_attention_setting(model.config)
    with attention.packed_attention(model):
        assert model.config._attn_implementation == PACKED_ATTENTION
    with pytest.raises(KeyboardInterrupt), attention.packed_attention(model):
        raise KeyboardInterrupt
    assert (model.config.to_dict(), compat.get_attention_setting(model.config)) == before


def test_one_model_as_target_and_draft_is_restored_as_well() -> None:
    model = tiny_model()
    with attention.packed_attention(model), attention.packed_attention(model):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_calls_that_overlap_in_time_leave_the_setting_as_it_was() -> None:
    """Two threads that serve one model: the first to enter is the first to leave."""
    model = tiny_model()
    first, second = attention.packed_attention(model), attention.packed_attention(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == PACKED_ATTENTION, "the second call still runs"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_a_plain_pass_that_meets_packed_attention_fails_loudly() -> None:
    """As when another thread calls `generate` the stock way in the middle of a speculative call."""
    model = tiny_model()
    with attention.packed_attention(model), pytest.raises(NotImplementedError, match="passes no attention mask"):
        model(**ragged_batch([3, 5]))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "opt"])
def test_a_plain_pass_whose_layers_run_after_packed_attention_has_ended_gets_no_missing_mask(family: str) -> None:
    """The pass asks for its mask while another thread's call runs, and reaches its layers when that one has ended."""
    model = tiny_model(family)
    batch = ragged_batch([3, 5])
    right = model(**batch).logits
    with contextlib.ExitStack() as call:
        call.enter_context(attention.packed_attention(model))
        layer = next(module for name, module in model.named_modules() if name.endswith(".0"))
        handle = layer.register_forward_pre_hook(lambda *_: call.close())
        with pytest.raises(NotImplementedError, match=r"passes no attention mask.*in another thread"):
            model(**batch)
    handle.remove()
    torch.testing.assert_close(model(**batch).logits, right)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 5)], ids=["padded", "full"])
def test_a_plain_pass_that_packed_attention_overtakes_is_right_or_fails(lengths: tuple[int, int]) -> None:
    """The pass has its mask, or none since none is needed, when another thread's call begins."""
    model = tiny_model()
    batch = ragged_batch(lengths)
    right = model(**batch).logits
    with contextlib.ExitStack() as call:
        handle = model.model.layers[0].register_forward_pre_hook(
            lambda *_: call.enter_context(attention.packed_attention(model))
        )
        with contextlib.suppress(NotImplementedError):
            torch.testing.assert_close(model(**batch).logits, right)
        handle.remove()
    assert model.config._attn_implementation == "sdpa"


def test_a_mask_of_tokens_is_refused() -> None:
    """As flash attention gets one, when a call of another thread begins in between."""
    states = torch.zeros(1, 2, 1, 4)
    with pytest.raises(NotImplementedError, match="no attention mask of four dimensions"):
        packed_gqa_attention(nn.Identity(), states, states, states, torch.ones(1, 3))


def test_plain_passes_of_another_thread_are_right_or_fail() -> None:
    model = hf_dsde.enable(tiny_model())
    draft = noisy_copy(model, 0.05)
    batch = ragged_batch([3, 5])
    right = model(**batch).logits
    done = threading.Event()
    wrong: list[float] = []

    def passes() -> None:
        while not done.is_set():
            try:
                logits = model(**batch).logits
            except NotImplementedError:
                continue
            wrong.extend([float((logits - right).abs().max())] if not torch.allclose(logits, right) else [])

    thread = threading.Thread(target=passes)
    thread.start()
    try:
        for _ in range(8):
            model.generate(**batch, max_new_tokens=2, assistant_model=draft, speculation_policy="static")
    finally:
        done.set()
        thread.join()
    assert not wrong
