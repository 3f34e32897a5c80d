"""Each row of a job ends where its text alone would have ended, whatever the others do and what was there before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PAD
from tiny_text import spelling_tokenizer
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from hf_dsde.batch.row_stopping import RowStopping
from hf_dsde.decoding.sequences import SequenceBatch

TOKENIZER = spelling_tokenizer("ab", "bc", "ca", "aa")
"""Of ten tokens, of which the first is taken for padding: it spells `a`, and would count if it was shown."""
SETS = [(), ("bc",), ("ab", "c"), ("aab", "cc"), ("abcab",)]
CRITERIA = {strings: [StopStringCriteria(TOKENIZER, list(strings))] if strings else [] for strings in SETS}
"""Texts that ask for the same strings share a criterion, as in a job."""
END = 9
WIDTH = 4


class SumsToSeven(StoppingCriteria):
    """A user's criterion, which notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.shown += input_ids.tolist()
        return input_ids.sum(dim=-1) % 7 == 0


@dataclass
class Text:
    """What a row would say if nothing ended it, and what may end it."""

    prompt: list[int]
    endless: list[int]
    limit: int
    strings: tuple[str, ...]
    users: bool

    def criteria(self) -> StoppingCriteriaList:
        return StoppingCriteriaList([*CRITERIA[self.strings], *([SumsToSeven()] if self.users else [])])

    def alone(self) -> tuple[int, bool, list[list[int]]]:
        """Return where plain decoding ends it, whether by a criterion alone, and what the user's criterion is shown."""
        criteria = self.criteria()
        step, stopped = 0, False
        while True:
            step += 1
            shown = torch.tensor([self.prompt + self.endless[:step]])
            stopped = bool(criteria(shown, None).all()) if criteria else False
            ended = self.endless[step - 1] == END or step == self.limit
            if stopped or ended:
                return step, stopped and not ended, criteria[-1].shown if self.users else []


token = st.integers(1, 9)
texts = st.builds(
    Text,
    prompt=st.lists(token, min_size=1, max_size=5),
    endless=st.lists(token, min_size=14, max_size=14),
    limit=st.integers(1, 14),
    strings=st.sampled_from(SETS),
    users=st.integers(0, 4).map(lambda draw: draw == 0),
)


def batch_of(begun: list[Text]) -> SequenceBatch:
    width = max(len(text.prompt) for text in begun)
    ids = torch.tensor([[PAD] * (width - len(text.prompt)) + text.prompt for text in begun])
    mask = torch.tensor([[0] * (width - len(text.prompt)) + [1] * len(text.prompt) for text in begun])
    sequences = SequenceBatch(
        ids, mask, max_new_tokens=max(text.limit for text in begun), scratch=WIDTH + 1, pad_token=PAD
    )
    sequences.limits = torch.tensor([text.limit for text in begun])
    return sequences


@settings(max_examples=100, deadline=None)
@given(data=st.data(), waiting=st.lists(texts, min_size=1, max_size=8), rows=st.integers(1, 3))
def test_rows_end_as_their_texts_alone(data: st.DataObject, waiting: list[Text], rows: int) -> None:
    queue = deque(waiting)
    under_way: list[Text | None] = [queue.popleft() for _ in range(min(rows, len(queue)))]
    begun = [text for text in under_way if text is not None]
    rows = len(begun)
    sequences = batch_of(begun)
    criteria = [text.criteria() for text in begun]
    stopping = RowStopping([END], sequences, criteria)
    while any(under_way):
        counts = [0 if text is None else data.draw(st.integers(1, WIDTH)) for text in under_way]
        block = torch.randint(0, 10, (rows, WIDTH), generator=torch.Generator().manual_seed(0))
        for row, text in enumerate(under_way):
            if text is not None:
                start = sequences.generated_counts[row]
                counts[row] = min(counts[row], text.limit - start)
                block[row, : counts[row]] = torch.tensor(text.endless[start : start + counts[row]])
        kept, ended = stopping.cut(block, torch.tensor(counts))
        sequences.append(block, kept)
        sequences.synchronise(sequences.generated.tolist(), block)
        stopping.advance(ended.tolist(), lambda step: None)
        for row, text in enumerate(under_way):
            end = stopping.ends[row]
            if text is None or end is None:
                continue
            expected, by_criterion, shown = text.alone()
            assert (end, row in stopping.stopped) == (expected, by_criterion), text
            begin = sequences.prompt_width
            assert sequences.host_tokens[row, begin : begin + end].tolist() == text.endless[:end]
            if text.users:
                seen: Any = criteria[row][-1]
                assert seen.shown == shown, "the calls of plain decoding"
            under_way[row] = None
            if queue:
                under_way[row] = following = queue.popleft()
                criteria[row] = following.criteria()
                stopping.begin(row, criteria[row])
                sequences.replace_rows([row], [following.prompt], [following.limit])
        for row, text in enumerate(under_way):
            assert text is None or sequences.generated_counts[row] < text.limit, "it would have ended"
