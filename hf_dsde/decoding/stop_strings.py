"""Stop strings, judged on the host: many tokens of many rows in less time than a device needs to be asked once.

What is judged is what transformers' `StopStringCriteria` judges, with its own tables: a text ends in a stop string if
its last token holds an end of the string and the tokens before it continue the string to its beginning. The criterion
works that out with tensors, some twenty operations whatever it is shown; here the tokens are walked back one by one,
which hardly ever goes further than the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria


class _Token(NamedTuple):
    """What a token can be in the stop strings, in characters, or bytes, counted from a string's end.

    Attributes:
        ends: Each string of which the token can be the end, and how much of it.
        positions: For each string, how much of it may follow this token.
        length: The token's own.
    """

    ends: list[tuple[int, int]]
    positions: list[frozenset[int]]
    length: int


class StopStrings:
    """Says what a `StopStringCriteria` would say.

    Args:
        criterion: The criterion, which is left as it is.

    Attributes:
        reach: Tokens at the end of a text that count. What is before them makes no difference.
    """

    def __init__(self, criterion: StopStringCriteria) -> None:
        self.reach: int = max(criterion.maximum_token_len, 1)
        self._table = criterion.embedding_vec.cpu().numpy()
        self._positions: int = criterion.max_valid_positions
        self._overlaps: int = criterion.max_valid_end_lens
        self._lengths: list[int] = criterion.target_lens.tolist()
        self._tokens: dict[int, _Token] = {}

    @staticmethod
    def of(criterion: StopStringCriteria) -> StopStrings:
        """Return the one of a criterion, which the texts of a job share."""
        known = _KNOWN.get(criterion)
        if known is None:
            known = _KNOWN[criterion] = StopStrings(criterion)
        return known

    def first_end(self, text: Sequence[int], first: int) -> int | None:
        """Return the first place from `first` on at which a text ends in a stop string if it ends there.

        Args:
            text: Tokens: all of them, or `reach - 1` and more before `first`.
            first: The first place in question.
        """
        for place in range(first, len(text)):
            ends = self._token(text[place]).ends
            if any(self._is_whole(text, place, string, overlap) for string, overlap in ends):
                return place
        return None

    def _is_whole(self, text: Sequence[int], place: int, string: int, matched: int) -> bool:
        """Say whether the tokens before a place continue a string of which `matched` are at that place."""
        for before in range(place - 1, max(place - self.reach, -1), -1):
            if matched >= self._lengths[string]:
                break
            token = self._token(text[before])
            if matched not in token.positions[string]:
                return False
            matched += token.length
        return matched >= self._lengths[string]

    def _token(self, token: int) -> _Token:
        known = self._tokens.get(token)
        if known is None:
            known = self._tokens[token] = self._read(token)
        return known

    def _read(self, token: int) -> _Token:
        """Take a token's entry apart: all positions, all overlaps, its length, filled up with -1."""
        # The last entry stands for all tokens that the tokenizer does not know.
        *entry, length = self._table[min(token, len(self._table) - 1)].tolist()
        ends: list[tuple[int, int]] = []
        positions: list[frozenset[int]] = []
        for string, whole in enumerate(self._lengths):
            positions.append(frozenset(entry[self._positions * string :][: self._positions]))
            overlaps = entry[self._positions * len(self._lengths) + self._overlaps * string :][: self._overlaps]
            # Every text ends in an empty string.
            ends += [(string, overlap) for overlap in overlaps if overlap > 0] if whole else [(string, 0)]
        return _Token(ends, positions, length)


_KNOWN: WeakKeyDictionary[StopStringCriteria, StopStrings] = WeakKeyDictionary()


def without_stop_strings(criteria: Iterable[StoppingCriteria]) -> tuple[list[StopStrings], StoppingCriteriaList]:
    """Part criteria into stop strings, which can be judged on the host, and the others.

    A class derived from `StopStringCriteria` may do anything, so it is one of the others.
    """
    strings, others = [], StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is StopStringCriteria:
            strings.append(StopStrings.of(criterion))
        else:
            others.append(criterion)
    return strings, others
