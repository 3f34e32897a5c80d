"""A batch of sequences behaves like plain Python lists of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import prompts_of
from tiny_models import PAD, ragged_batch

from hf_dsde.decoding.sequences import SequenceBatch

SCRATCH, MAX_NEW_TOKENS = 5, 12


class ListModel:
    """What a batch is: one list of tokens per row, drafts not among them."""

    def __init__(self, lengths: list[int], extra_padding: int) -> None:
        inputs = ragged_batch(lengths, seed=sum(lengths))
        self.width = max(lengths) + extra_padding
        self.prompts = [row[-n:].tolist() for row, n in zip(inputs["input_ids"], lengths, strict=True)]
        self.generated: list[list[int]] = [[] for _ in lengths]
        self.batch = SequenceBatch(
            torch.nn.functional.pad(inputs["input_ids"], (extra_padding, 0), value=PAD),
            torch.nn.functional.pad(inputs["attention_mask"], (extra_padding, 0)),
            max_new_tokens=MAX_NEW_TOKENS,
            scratch=SCRATCH,
            pad_token=PAD,
        )

    @property
    def rows(self) -> list[list[int]]:
        return [prompt + new for prompt, new in zip(self.prompts, self.generated, strict=True)]

    def append(self, blocks: list[list[int]]) -> None:
        """Append a block to each row, as the loop does: padded, with junk after the count."""
        blocks = [block[: MAX_NEW_TOKENS - len(new)] for block, new in zip(blocks, self.generated, strict=True)]
        width = max(1, *(len(block) for block in blocks))
        padded = torch.tensor([block + [77] * (width - len(block)) for block in blocks])
        self.batch.append(padded, torch.tensor([len(block) for block in blocks]))
        for new, block in zip(self.generated, blocks, strict=True):
            new.extend(block)
        self.batch.synchronise([len(new) for new in self.generated], padded)

    def padded(self, row: list[int], width: int) -> list[int]:
        return [PAD] * (width - len(row)) + row


@st.composite
def batches(draw: st.DrawFn) -> ListModel:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    model = ListModel(lengths, draw(st.integers(0, 2)))
    block = st.lists(st.integers(1, 70), max_size=SCRATCH)
    for blocks in draw(st.lists(st.tuples(*[block] * len(lengths)), max_size=5)):
        model.append(list(blocks))
    return model


@given(model=batches())
@settings(deadline=None, max_examples=50)
def test_lengths_and_budgets(model: ListModel) -> None:
    lengths = [len(row) for row in model.rows]
    assert model.batch.lengths.tolist() == model.batch.length_counts == lengths
    assert model.batch.remaining.tolist() == [MAX_NEW_TOKENS - len(new) for new in model.generated]


@given(model=batches())
@settings(deadline=None, max_examples=50)
def test_the_host_knows_the_text_in_the_same_columns(model: ListModel) -> None:
    text = model.batch.host_tokens
    assert (text.shape, text.dtype, text.device.type) == (model.batch.tokens.shape, torch.int64, "cpu")
    for row, (prompt, new) in enumerate(zip(model.prompts, model.generated, strict=True)):
        known = model.padded(prompt, model.width) + new
        assert text[row, : len(known)].tolist() == known


def test_the_host_knows_what_stands_in_the_padding() -> None:
    """Plain decoding shows it to stopping criteria."""
    ids = torch.tensor([[8, 9, 4], [5, 6, 7]])
    batch = SequenceBatch(ids, torch.tensor([[0, 0, 1], [1, 1, 1]]), max_new_tokens=2, scratch=1, pad_token=PAD)
    assert batch.host_tokens[:, :3].tolist() == ids.tolist() == batch.tokens[:, :3].tolist()
    assert batch.host_tokens.data_ptr() != batch.tokens.data_ptr()


@given(model=batches(), width=st.integers(1, 25))
@settings(deadline=None, max_examples=50)
def test_tail_is_right_aligned_with_positions(model: ListModel, width: int) -> None:
    tokens, positions = model.batch.tail(width)
    for row, text in enumerate(model.rows):
        assert positions[row].tolist() == list(range(len(text) - width, len(text)))
        real = positions[row] >= 0
        assert tokens[row][real].tolist() == text[-width:]


@given(model=batches())
@settings(deadline=None, max_examples=25)
def test_prompts_have_no_padding_in_front(model: ListModel) -> None:
    prompts = prompts_of(model.batch)
    assert prompts.shape[1] == max(len(prompt) for prompt in model.prompts)
    for row, prompt in enumerate(model.prompts):
        assert prompts[row, : len(prompt)].tolist() == prompt


def test_prompts_of_very_different_length() -> None:
    batch = SequenceBatch(**ragged_batch([50, 1]), max_new_tokens=1, scratch=1, pad_token=PAD)
    assert prompts_of(batch)[1, 0] == ragged_batch([50, 1])["input_ids"][1, -1]


@given(model=batches(), data=st.data())
@settings(deadline=None, max_examples=50)
def test_prefix_is_what_plain_generate_would_show(model: ListModel, data: st.DataObject) -> None:
    """Drafts written after a row's text are part of the prefix; rows that lack tokens are shown more padding."""
    drafts = data.draw(st.lists(st.integers(71, 95), min_size=1, max_size=SCRATCH))
    model.batch.write_drafts(torch.tensor([drafts] * len(model.rows)))
    length = data.draw(st.integers(0, max(len(new) for new in model.generated) + len(drafts)))
    missing = [length - len(new) for new in model.generated]
    holds = [0 <= count <= len(drafts) for count in missing]
    prefix = model.batch.prefix(length, torch.tensor(holds))
    width = model.width + length
    assert prefix.shape == (len(model.rows), width)
    for row, text in enumerate(model.rows):
        shown = text + drafts[: missing[row]] if holds[row] else text
        if missing[row] < 0:
            shown = text[: len(model.prompts[row]) + length]
        elif not holds[row]:
            shown = text[-width:]
        assert prefix[row].tolist() == model.padded(shown, width)


@given(model=batches(), data=st.data())
@settings(deadline=None, max_examples=50)
def test_text_is_padded_on_both_sides(model: ListModel, data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(0, len(new))) for new in model.generated]
    width = data.draw(st.integers(max(lengths), MAX_NEW_TOKENS))
    text = model.batch.text(lengths, width)
    for row, shown in enumerate(lengths):
        new = model.generated[row][:shown]
        expected = model.padded(model.prompts[row], model.width) + new + [PAD] * (width - shown)
        assert text[row].tolist() == expected


@given(model=batches(), offset=st.integers(0, 2))
@settings(deadline=None, max_examples=25)
def test_drafts_are_not_part_of_the_text(model: ListModel, offset: int) -> None:
    lengths = [len(new) for new in model.generated]
    before = model.batch.text(lengths, MAX_NEW_TOKENS)
    model.batch.write_drafts(torch.full((len(lengths), 3), 88), offset=offset)
    assert torch.equal(model.batch.text(lengths, MAX_NEW_TOKENS), before)
    for row, text in enumerate(model.rows):
        assert model.batch.tail(1)[0][row].tolist() == text[-1:]


def test_inputs_are_copied() -> None:
    inputs = ragged_batch([3, 1])
    before = inputs["input_ids"].clone()
    SequenceBatch(**inputs, max_new_tokens=2, scratch=1, pad_token=None).append(
        torch.tensor([[9], [9]]), torch.tensor([1, 1])
    )
    assert torch.equal(inputs["input_ids"], before)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_masks_of_any_kind_are_understood(kind: torch.dtype) -> None:
    inputs = ragged_batch([3, 1])
    mask = (inputs["attention_mask"] / 2).to(kind) if kind is torch.float32 else inputs["attention_mask"].to(kind)
    batch = SequenceBatch(inputs["input_ids"], mask, max_new_tokens=2, scratch=1, pad_token=PAD)
    assert batch.prompt_lengths == batch.lengths.tolist() == [3, 1]
    assert batch.padding.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0], [1, 1, 1]], r"rows \[0\] end in padding.*padding_side = 'left'"),
        ([[1, 1, 1], [0, 0, 0]], r"rows \[1\] end in padding"),
        ([[0, 1, 1], [1, 0, 1]], r"rows \[1\] hide tokens in the middle"),
    ],
    ids=["right-padding", "empty-prompt", "hole"],
)
def test_padding_anywhere_but_in_front_is_refused(mask: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceBatch(torch.full((2, 3), 5), torch.tensor(mask), max_new_tokens=2, scratch=1, pad_token=PAD)
