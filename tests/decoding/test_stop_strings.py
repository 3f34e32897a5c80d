"""Stop strings found on the host are those that transformers' criterion finds, token for token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import spelling_tokenizer, tiny_tokenizer
from transformers import StoppingCriteriaList, StopStringCriteria

from hf_dsde.decoding.stop_strings import StopStrings, without_stop_strings


def plain_ends(criterion: StopStringCriteria, text: Sequence[int], first: int) -> list[bool]:
    """What the criterion says of a text alone at each of its places from `first` on."""
    return [bool(criterion(torch.tensor([text[: place + 1]]), None)) for place in range(first, len(text))]


def own_ends(strings: StopStrings, text: Sequence[int], first: int) -> list[bool]:
    """The same, asked once after each end."""
    ends = [False] * (len(text) - first)
    place = strings.first_end(text, first)
    while place is not None:
        ends[place - first] = True
        place = strings.first_end(text, place + 1)
    return ends


words = st.text("ab\n", min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    vocabulary=st.lists(words, min_size=1, max_size=8),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=3),
    text=st.lists(st.integers(0, 5) | st.integers(6, 18), min_size=1, max_size=24),
    holes=st.integers(0, 2),
    first=st.integers(0, 23),
)
def test_ends_are_those_of_the_criterion(
    vocabulary: list[str], stops: list[str], text: list[int], holes: int, first: int
) -> None:
    """Whatever the tokens are: some lie across an end, some are of no string, some the tokenizer does not know."""
    # A string that no token can end is refused.
    criterion = StopStringCriteria(spelling_tokenizer(*vocabulary, "\n", holes=holes), stops)
    strings = StopStrings(criterion)
    first = min(first, len(text) - 1)
    expected = plain_ends(criterion, text, first)
    assert own_ends(strings, text, first) == expected
    # As much of the text as can make a difference is enough.
    start = max(first + 1 - strings.reach, 0)
    assert own_ends(strings, text[start:], first - start) == expected


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from([0, *range(6, 16)]), min_size=1, max_size=16),
    stops=st.lists(st.text("a\n é", min_size=1, max_size=4), min_size=1, max_size=3),
)
@pytest.mark.parametrize("bytes_are", ["byte level", "byte fallback"])
def test_characters_of_several_bytes_and_half_ones(bytes_are: str, text: list[int], stops: list[str]) -> None:
    if bytes_are == "byte level":
        tokens = ["Ċ", "Ġ", "Ã", "©", "Ã©", "ĊĊ", "aĊ", "Ġa", "aÃ"]
        tokenizer = spelling_tokenizer(*tokens, decoder="ByteLevel")
    else:
        tokens = ["\n", " ", "<0xC3>", "<0xA9>", "é", "\n\n", "a\n", " a"]
        tokenizer = spelling_tokenizer(*tokens, decoder="ByteFallback")
    criterion = StopStringCriteria(tokenizer, stops)
    assert own_ends(StopStrings(criterion), text, 0) == plain_ends(criterion, text, 0)


def test_a_string_may_need_many_tokens_and_end_inside_one() -> None:
    tokenizer = spelling_tokenizer("Question", ":\n", "Qu", "st", "ion", "x")
    number = tokenizer.get_vocab()
    strings = StopStrings(StopStringCriteria(tokenizer, ["Question:", "nobody says this a"]))
    whole = [number[token] for token in ("x", "Qu", "e", "st", "ion", ":\n")]
    assert strings.first_end(whole, 0) == 5
    assert strings.first_end(whole, 5) == 5
    assert strings.first_end([*whole, number["x"]], 6) is None, "it is over"
    assert strings.first_end(whole[2:], 0) is None, "its beginning is not there"
    assert strings.first_end([number["Question"], number[":\n"]], 0) == 1


def test_tokens_without_text_lead_no_further_back_than_the_criterion_looks() -> None:
    tokenizer = spelling_tokenizer("x", "ax", decoder="WithoutX")
    criterion = StopStringCriteria(tokenizer, ["abc"])
    strings = StopStrings(criterion)
    a, b, c, x = (tokenizer.get_vocab()[token] for token in "abcx")
    for text, end in (([a, b, c], 2), ([a, x, b, c], None), ([c, x], None), ([x, a, b, c], 3)):
        assert strings.first_end(text, 0) == end
        assert own_ends(strings, text, 0) == plain_ends(criterion, text, 0)


def test_every_text_ends_in_an_empty_string() -> None:
    criterion = StopStringCriteria(tiny_tokenizer(), ["", "Gh"])
    text = [3, 95, 200, 4]
    assert own_ends(StopStrings(criterion), text, 0) == plain_ends(criterion, text, 0) == [True] * 4


def test_a_criterion_is_left_as_it_is() -> None:
    criterion = StopStringCriteria(tiny_tokenizer(), ["Gh", "iJ"])
    before = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in vars(criterion).items()
    }
    strings = StopStrings.of(criterion)
    strings.first_end(list(range(96)), 0)
    assert StopStrings.of(criterion) is strings, "one is enough"
    assert set(vars(criterion)) == set(before)
    for name, value in vars(criterion).items():
        assert torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]


def test_only_the_very_class_is_judged_on_the_host() -> None:
    class Silent(StopStringCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            return torch.zeros(len(input_ids), dtype=torch.bool)

    stock, own = StopStringCriteria(tiny_tokenizer(), "Gh"), Silent(tiny_tokenizer(), "Gh")
    strings, others = without_stop_strings([own, stock])
    assert strings == [StopStrings.of(stock)]
    assert isinstance(others, StoppingCriteriaList)
    assert others == [own]
