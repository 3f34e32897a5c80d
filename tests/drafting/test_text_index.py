"""The index of texts says what counting over the texts themselves says, while they grow and are forgotten."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dsde.drafting.lookup import index as module
from hf_dsde.drafting.lookup.continuation import Continuation
from hf_dsde.drafting.lookup.index import TextIndex

Texts = Sequence[Sequence[int]]
FEW, SHALLOW = 3, 5
"""In place of the index's own numbers, so that short texts reach them."""


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OCCURRENCES", FEW)
    monkeypatch.setattr(module, "DEPTH", SHALLOW)


def places(texts: Texts, context: Sequence[int]) -> list[tuple[int, int]]:
    """Where the newest occurrences of a context end that something follows: number of the text, place in it."""
    length = len(context)
    found = [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(length - 1, len(text) - 1)
        if list(text[end - length + 1 : end + 1]) == list(context)
    ]
    return found[-FEW:]


def followed(texts: Texts, found: list[tuple[int, int]], most: int, min_probability: float) -> tuple[list[int], float]:
    """The most frequent continuation, the newest of equals, and the expected number of its tokens that stand."""
    tokens: list[int] = []
    score, probability = 0.0, 1.0
    for step in range(1, most + 1):
        after = [texts[number][end + step] for number, end in found if end + step < len(texts[number])]
        if not after:
            break
        best = max(after, key=lambda token: (after.count(token), len(after) - after[::-1].index(token)))
        probability *= after.count(best) / len(found)
        if probability < min_probability:
            break
        tokens.append(best)
        score += probability
        found = [
            (number, end)
            for number, end in found
            if end + step < len(texts[number]) and texts[number][end + step] == best
        ]
    return tokens, score


def counted(
    texts: Texts, end: Sequence[int], most: int, per_match: float, min_probability: float, least: int = 1
) -> Continuation:
    """What `TextIndex.continuation` returns, by counting over the texts for each suffix."""
    best = Continuation()
    for length in range(min(len(end), SHALLOW), least - 1, -1):
        found = places(texts, end[-length:])
        if found:
            tokens, score = followed(texts, found, min(most, int(per_match * length)), min_probability)
            if score > best.score + 1e-9:
                best = Continuation(tokens, score, length)
    return best


def assert_says(index: TextIndex, texts: Texts, end: Sequence[int], **call: Any) -> None:
    """Compare both. Of suffixes that stood in the same places, the index may name a longer one than needed."""
    call = {"most": 8, "per_match": 1.0, "min_probability": 0.1, **call}
    said, right = index.continuation(end, **call), counted(texts, end, **call)
    assert list(said.tokens) == list(right.tokens)
    assert said.score == pytest.approx(right.score)
    assert said.match == right.match


def play(
    moves: Sequence[tuple[str, list[int]]], ends: Sequence[list[int]], max_tokens: int | None = None, **call: Any
) -> None:
    """Let an index and plain lists go through the same changes, and compare what they say after each.

    Args:
        moves: "extend" the newest text, "end" it, or "add" a whole one.
        ends: Ends of texts to ask about; the newest text's own is asked about as well.
        max_tokens: As for the index.
        call: How it is asked.
    """
    index, texts = TextIndex(max_tokens), deque([[]])
    for move, tokens in moves:
        if move == "extend":
            index.extend(tokens)
            texts[-1].extend(tokens)
        elif move == "end":
            index.end_text()
            texts.append([])
        else:
            index.end_text()
            texts.append([])
            index.add(tokens)
            kept = tokens if max_tokens is None else tokens[-max_tokens:]
            while max_tokens is not None and sum(map(len, texts)) + len(kept) > max_tokens and len(texts) > 1:
                texts.popleft()
            texts[-1].extend(kept)
            texts.append([])
        assert index.texts == [text for text in texts if text]
        assert len(index) == sum(map(len, texts))
        for end in [texts[-1][-SHALLOW:], *ends]:
            assert_says(index, texts, end, **call)


tokens = st.lists(st.integers(0, 2), max_size=8)
moves = st.lists(st.tuples(st.sampled_from(["extend", "extend", "add", "end"]), tokens), max_size=12)


@settings(max_examples=120, deadline=None)
@given(
    moves,
    st.lists(tokens, max_size=3),
    st.sampled_from([None, 1, 5, 12]),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_it_says_what_counting_says(
    moves: list[tuple[str, list[int]]],
    ends: list[list[int]],
    max_tokens: int | None,
    per_match: float,
    min_probability: float,
    most: int,
    least: int,
) -> None:
    play(moves, ends, max_tokens, per_match=per_match, min_probability=min_probability, most=most, least=least)


def random_moves(seed: int) -> tuple[list[tuple[str, list[int]]], list[list[int]]]:
    numbers = random.Random(seed)

    def some(longest: int) -> list[int]:
        return [numbers.randrange(2 + seed % 3) for _ in range(numbers.randrange(longest))]

    kinds = ["extend", "extend", "add", "end"]
    return [(numbers.choice(kinds), some(14)) for _ in range(14)], [some(7) for _ in range(4)]


def play_all() -> None:
    for seed in range(12):
        play(*random_moves(seed), max_tokens=[None, 25][seed % 2], least=1 + seed // 2 % 2)


def test_many_random_texts() -> None:
    play_all()


def _oldest_of_equals(followers: list[int]) -> tuple[int, int]:
    best = max(followers, key=followers.count)
    return best, followers.count(best)


def _newest(followers: list[int]) -> tuple[int, int]:
    return followers[-1], followers.count(followers[-1])


def _nothing_removed(self: TextIndex, place: int) -> None:
    """Leave places of texts that are forgotten."""


def _extend_with_the_last(original: Callable[..., None]) -> Callable[..., None]:
    def extend(self: TextIndex, tokens: Sequence[int]) -> None:
        original(self, tokens)
        if tokens:
            self._insert(len(self._tokens) - 2 + self._shift)  # nothing follows it yet

    return extend


def _nothing_new(self: TextIndex, end: Sequence[int], least: int) -> bool:
    """Take tokens that were only added for ones that no end needs."""
    return False


def _never_ends(self: TextIndex) -> None:
    """Let texts run into each other."""


def _divides_too_few(original: Callable[..., None]) -> Callable[..., None]:
    def divide(self: TextIndex, parent: Any, token: int, places: list[int], depth: int) -> None:
        original(self, parent, token, places[-FEW:], depth)

    return divide


MUTANTS = {
    "the oldest of equals": (module, "most_frequent", _oldest_of_equals),
    "the newest, however rare": (module, "most_frequent", _newest),
    "forgotten texts are found": (TextIndex, "_remove", _nothing_removed),
    "the last token is learnt from at once": (TextIndex, "extend", _extend_with_the_last(TextIndex.extend)),
    "new tokens are not looked at": (TextIndex, "_ends_in_new_tokens", _nothing_new),
    "contexts reach into the text before": (TextIndex, "end_text", _never_ends),
    "places are lost when contexts are divided": (TextIndex, "_divide", _divides_too_few(TextIndex._divide)),
    "another number of places": (module, "OCCURRENCES", FEW + 1),
    "another depth": (module, "DEPTH", SHALLOW - 1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, IndexError)):
        play_all()


def test_what_is_forgotten_takes_no_memory() -> None:
    index, numbers = TextIndex(max_tokens=40), random.Random(0)
    for _ in range(200):
        index.add([numbers.randrange(50) for _ in range(10)])
    assert len(index) <= 40
    assert len(index._tokens) <= 3 * 40

    def known(branch: Any) -> int:
        return sum(known(below) if isinstance(below, module._Branch) else 1 for below in branch.before.values())

    assert known(index._root) <= 40
