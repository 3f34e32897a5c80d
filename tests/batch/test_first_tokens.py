"""Prompts of plain text that a chat model answers with nothing are noticed, once, and from few texts."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from datasets import Dataset
from tiny_models import EOS, noisy_copy, tiny_model
from tiny_text import tiny_tokenizer
from transformers import LogitsProcessor

from hf_dsde.batch.first_tokens import WATCHED, EmptyTextsWarning, FirstTokens
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.batch.refill_loop import FinishedText
from hf_dsde.batch.requests import RejectedRow, Request
from hf_dsde.batch.results import END_TOKEN, LENGTH, RowStatistics


def request(index, *, raw=True):
    return Request(index, [3], 8, is_raw_text=raw)


def text(index, *, empty, raw=True, reason=None):
    tokens = [EOS] if empty else [5, EOS]
    counts = RowStatistics(1, len(tokens), 1, 0, 0, 0.0)
    return FinishedText(request(index, raw=raw), tokens, reason or END_TOKEN, counts)


def complaints(requests, texts):
    """What is said after each text, and at the end."""
    first = FirstTokens()
    assert list(first.watched(requests)) == requests
    return [first.after(text) for text in texts], first.at_the_end()


def test_the_texts_that_end_first_are_no_sample():
    requests = [request(index) for index in range(40)]
    empty = set(range(1, 40, 4))  # a quarter, of which all are through before the first other one
    order = [*sorted(empty), *(index for index in range(40) if index not in empty)]
    during, end = complaints(requests, [text(index, empty=index in empty) for index in order])
    assert during == [None] * 40
    assert end is None


@pytest.mark.parametrize(("empty", "said"), [(4, False), (5, True), (8, True)])
def test_more_than_half_of_the_first_prompts_decide_as_soon_as_they_are_through(empty, said):
    requests = [request(index) for index in range(40)]
    texts = [text(index, empty=index < empty) for index in reversed(range(WATCHED))]
    during, _ = complaints(requests, texts)
    assert during[:-1] == [None] * (WATCHED - 1)
    assert (during[-1] is not None) == said
    if said:
        assert f"{empty} of the first 8 texts" in during[-1]
        assert "chat=True" in during[-1]


@pytest.mark.parametrize(("empty", "texts", "said"), [(0, 0, False), (1, 1, True), (1, 2, False), (2, 3, True)])
def test_a_small_job_is_judged_at_its_end(empty, texts, said):
    requests = [request(index) for index in range(texts)]
    during, end = complaints(requests, [text(index, empty=index < empty) for index in range(texts)])
    assert during == [None] * texts
    assert (end is not None) == said


def test_only_raw_text_that_an_end_token_ended_counts():
    requests = [*(request(index, raw=False) for index in range(20)), *(request(index) for index in range(20, 28))]
    asked = [text(index, empty=True, raw=False) for index in range(20)]
    assert complaints(requests, asked) == ([None] * 20, None)
    cut = [text(index, empty=True, reason=LENGTH) for index in range(20, 28)]
    assert complaints(requests, cut) == ([None] * 8, None)
    assert complaints([RejectedRow(0, "x")], [RejectedRow(0, "x")]) == ([None], None)
    raw = [text(index, empty=True) for index in range(20, 28)]
    assert complaints(requests, [*asked, *raw])[0][-1] is not None


class EndsAtOnce(LogitsProcessor):
    """What a chat model does with a prompt that is no chat."""

    def __call__(self, input_ids, scores):
        ended = torch.full_like(scores, -100.0)
        ended[:, EOS] = 0.0
        return ended


def generator(template, **changes):
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    model = tiny_model()
    return BatchGenerator(
        model,
        tokenizer,
        assistant_model=noisy_copy(model, 0.0),
        speculation_policy="static",
        batch_size=2,
        max_new_tokens=4,
        logits_processor=[EndsAtOnce()],
        **changes,
    )


TEMPLATE = "{% for m in messages %}a{{ m.content }}{% endfor %}"
ROWS = ["a", "b", "c"]


def test_a_generator_says_it_once_however_it_is_used(tmp_path):
    made = generator(TEMPLATE)
    with pytest.warns(EmptyTextsWarning, match=r"3 of the 3 texts end at their first token.*chat=True"):
        list(made.stream(ROWS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", EmptyTextsWarning)
        list(made.stream(ROWS))
        made.run(ROWS, tmp_path / "out.jsonl")
        Dataset.from_dict({"prompt": ROWS * 5}).map(made, batched=True, batch_size=2)


def test_a_long_job_says_it_before_its_end():
    results = generator(TEMPLATE).stream(ROWS * 1000)
    with pytest.warns(EmptyTextsWarning, match="8 of the first 8"):
        list(itertools.islice(results, 12))
    results.close()


@pytest.mark.parametrize("rows", [[[{"role": "user", "content": "a"}]] * 3, [[3, 4]] * 3], ids=["messages", "ids"])
def test_other_prompts_end_where_they_like(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error", EmptyTextsWarning)
        assert len(list(generator(TEMPLATE).stream(rows))) == 3
        assert len(list(generator(None).stream(ROWS))) == 3
        assert len(list(generator(TEMPLATE, chat=True).stream(ROWS))) == 3


def test_chat_is_part_of_what_a_job_is_and_its_absence_is_no_change():
    raw, asked = generator(TEMPLATE), generator(TEMPLATE, chat=True)
    assert raw.fingerprint != asked.fingerprint
    assert "chat" not in raw.identity["settings"]
    assert asked.identity["settings"]["chat"] is True
