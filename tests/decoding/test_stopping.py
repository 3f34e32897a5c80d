"""`Stopping` by itself, against a plain model of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PAD
from tiny_text import spelling_tokenizer
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import MaxTimeCriteria

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stopping import Stopping, length_limit


class RowSays(StoppingCriteria):
    """Stops a row whose last two tokens are equal, and everything when the last tokens of all rows are equal."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        twice = input_ids[:, -1] == input_ids[:, -2]
        return twice | bool((input_ids[:, -1] == input_ids[0, -1]).all())


def plain_lengths(
    texts: list[list[int]], prompt: list[int], eos: list[int], criteria: Sequence[StoppingCriteria]
) -> list[int]:
    """Where plain decoding ends rows that would otherwise go on like `texts`."""
    rows, limit = len(texts), len(texts[0])
    shown = [[token] for token in prompt]
    ends: list[int | None] = [None] * rows
    for step in range(1, limit + 1):
        for row in range(rows):
            pads = eos and ends[row] is not None
            shown[row].append(PAD if pads else texts[row][step - 1])
        says = StoppingCriteriaList(criteria)(torch.tensor(shown), None).tolist()
        for row in range(rows):
            stops = says[row] or step == limit or shown[row][-1] in eos
            if stops and ends[row] is None:
                ends[row] = step
        if None not in ends:
            break
    width = max(end for end in ends if end is not None)
    return [end if eos and end is not None else width for end in ends]


def batch_of(prompt: list[int], limit: int) -> SequenceBatch:
    ids = torch.tensor(prompt)[:, None]
    return SequenceBatch(ids, torch.ones_like(ids), max_new_tokens=limit, scratch=8, pad_token=PAD)


TOKENIZER = spelling_tokenizer("ab", "bc", "ca", "aa")
"""Of ten tokens, of which the first is taken for padding."""


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 4),
    limit=st.integers(1, 14),
    with_criteria=st.booleans(),
    stop_strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=2),
)
def test_stopping_agrees_with_a_plain_model_of_it(
    data: st.DataObject, rows: int, limit: int, with_criteria: bool, stop_strings: list[str]
) -> None:
    token = st.integers(1, 9)
    texts = data.draw(st.lists(st.lists(token, min_size=limit, max_size=limit), min_size=rows, max_size=rows))
    prompt = data.draw(st.lists(token, min_size=rows, max_size=rows))
    eos = data.draw(st.lists(token, max_size=2))
    users: list[StoppingCriteria] = [RowSays()] if with_criteria else []
    if stop_strings:
        users.insert(data.draw(st.integers(0, len(users))), StopStringCriteria(TOKENIZER, stop_strings))
    expected = plain_lengths(texts, prompt, eos, users)

    sequences = batch_of(prompt, limit)
    criteria = [MaxLengthCriteria(limit + 1), *users, *([EosTokenCriteria(eos)] if eos else [])]
    stopping = Stopping(StoppingCriteriaList(criteria), sequences)
    promised = [0] * rows
    while not all(stopping.finished()):
        counts = [
            0 if done else min(data.draw(st.integers(1, 5)), limit - sent)
            for done, sent in zip(stopping.finished(), sequences.generated_counts, strict=True)
        ]
        block = torch.full((rows, 5), PAD)
        for row, (start, count) in enumerate(zip(sequences.generated_counts, counts, strict=True)):
            block[row, :count] = torch.tensor(texts[row][start : start + count])
        kept, ended = stopping.cut(block, torch.tensor(counts))
        assert all(0 <= keeps <= count for keeps, count in zip(kept.tolist(), counts, strict=True))
        sequences.append(block, kept)
        sequences.synchronise(sequences.generated.tolist(), block)
        stopping.advance(ended.tolist(), lambda step: None)
        for row in range(rows):
            assert promised[row] <= stopping.confirmed(row) <= expected[row], "promised a token that was not to be"
            promised[row] = stopping.confirmed(row)
    assert stopping.final_lengths() == expected
    assert promised == expected


def test_cut_takes_the_first_of_eos_and_limit_and_leaves_finished_rows_alone() -> None:
    sequences = batch_of([7, 7, 7, 7], limit=3)
    stopping = Stopping(StoppingCriteriaList([EosTokenCriteria([4, 5])]), sequences)
    block = torch.tensor([[1, 5, 4, 1], [1, 1, 1, 5], [5, 1, 1, 1], [1, 1, 5, 1]])
    kept, ended = stopping.cut(block, torch.tensor([4, 4, 0, 2]))
    assert kept.tolist() == [2, 3, 0, 2]
    assert ended.tolist() == [True, True, False, False]


def test_an_eos_token_beyond_a_rows_count_is_not_seen() -> None:
    stopping = Stopping(StoppingCriteriaList([EosTokenCriteria([5])]), batch_of([7], limit=9))
    kept, ended = stopping.cut(torch.tensor([[1, 5]]), torch.tensor([1]))
    assert kept.tolist() == [1]
    assert ended.tolist() == [False]


def test_final_lengths_are_not_given_out_early() -> None:
    stopping = Stopping(StoppingCriteriaList(), batch_of([7, 7], limit=9))
    with pytest.raises(RuntimeError, match="still being generated"):
        stopping.final_lengths()


@pytest.mark.parametrize("eos", [[], [9]])
def test_time_never_takes_back_what_was_confirmed(eos: list[int]) -> None:
    """Without padding, rows end together, so what ran ahead may yet be cut and is not confirmed."""
    sequences = batch_of([7, 7], limit=9)
    limit = MaxTimeCriteria(max_time=1e6)
    stopping = Stopping(StoppingCriteriaList([limit, *([EosTokenCriteria(eos)] if eos else [])]), sequences)
    confirmed = [0, 0]
    for counts, time_is_up in (([3, 1], False), ([2, 1], True)):
        limit.max_time = -1.0 if time_is_up else 1e6
        sequences.append(torch.full((2, 3), 3), torch.tensor(counts))
        sequences.synchronise(sequences.generated.tolist(), torch.full((2, 3), 3))
        stopping.advance([False, False], lambda step: None)
        for row in range(2):
            assert stopping.confirmed(row) >= confirmed[row]
            confirmed[row] = stopping.confirmed(row)
    assert stopping.final_lengths() == confirmed


def test_what_ran_ahead_of_a_row_that_may_stop_is_not_confirmed_where_rows_go_on_together() -> None:
    """Without padding the first row goes on after its stop string, for as long as the second has none."""
    sequences = batch_of([3, 3], limit=9)
    stopping = Stopping(StoppingCriteriaList([StopStringCriteria(TOKENIZER, "bc")]), sequences)
    blocks = ([[1, 2, 4, 4, 4], [1, 0, 0, 0, 0]], [[4, 4, 4, 4, 4], [5, 1, 2, 0, 0]])
    seen = []
    for block, counts in zip(blocks, ([5, 1], [1, 4]), strict=True):
        sequences.append(torch.tensor(block), torch.tensor(counts))
        sequences.synchronise(sequences.generated.tolist(), torch.tensor(block))
        stopping.advance([False, False], lambda step: None)
        seen.append([stopping.confirmed(row) for row in range(2)])
    assert seen == [[1, 1], [4, 4]]
    assert stopping.final_lengths() == [4, 4]


def test_the_strictest_length_limit_counts() -> None:
    limits = StoppingCriteriaList([MaxLengthCriteria(9), MaxLengthCriteria(7)])
    assert length_limit(limits, 20) == 7
    assert length_limit(StoppingCriteriaList(), 20) == 20
