"""Stop strings, judged on the host for all new tokens of a round together.

Whether a text ends in a stop string is what transformers' `StopStringCriteria` says. It looks at the last few tokens of
each text alone, never across texts, so any number of prefixes can be put to it in one call, and on a CPU nobody waits.
Most need not be put to it at all: a text can only end with a token in which an end of a stop string lies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria


class NewTokens(NamedTuple):
    """Tokens of a row that nobody has judged yet, in columns of a text `[rows, columns]`.

    Attributes:
        row: Which row.
        shown_from: Where the text begins that the criterion is shown.
        first: The first new token.
        behind: The column behind the last one.
    """

    row: int
    shown_from: int
    first: int
    behind: int


class StopStrings:
    """What a `StopStringCriteria` says, on the host.

    Args:
        criterion: The criterion, which is left as it is.
    """

    def __init__(self, criterion: StopStringCriteria) -> None:
        # A call moves the tables to wherever the text is, so a text on the host has to come with tables of its own.
        self._criterion = copy.copy(criterion)
        self._criterion.embedding_vec = table = criterion.embedding_vec.cpu()
        self._criterion.target_lens = criterion.target_lens.cpu()
        # Its last entry stands for tokens that the tokenizer does not know: they are part of no stop string.
        self._unknown = len(table) - 1
        self._width = max(criterion.maximum_token_len, 1)
        overlaps = table[:, criterion.max_valid_positions * criterion.num_stop_strings : -1]
        self._can_end = frozenset((overlaps > 0).any(dim=1).nonzero()[:, 0].tolist())
        self._ends_anywhere = bool((self._criterion.target_lens <= 0).any())

    @staticmethod
    def of(criterion: StopStringCriteria) -> StopStrings:
        """Return the one of a criterion, which texts of a job share."""
        known = _KNOWN.get(criterion)
        if known is None:
            known = _KNOWN[criterion] = StopStrings(criterion)
        return known

    def first_ends(self, text: Tensor, spans: Iterable[NewTokens]) -> dict[int, int]:
        """Return the column of the first new token of each row with which its text ends in a stop string.

        Args:
            text: `[rows, columns]`, int64, on the host.
            spans: What to judge.

        Returns:
            Row to column; rows that no stop string ends are left out.
        """
        places = list(self._possible_ends(text, spans))
        if not places:
            return {}
        rows, shown_from, last = torch.tensor(places).T[:, :, None]
        columns = last + torch.arange(1 - self._width, 1)
        windows = text[rows, columns.clamp_min(0)].masked_fill_(columns < shown_from, self._unknown)
        ends: dict[int, int] = {}
        for (row, _, column), stops in zip(places, self._criterion(windows, None).tolist(), strict=True):
            if stops:
                ends.setdefault(row, column)
        return ends

    def _possible_ends(self, text: Tensor, spans: Iterable[NewTokens]) -> Iterator[tuple[int, int, int]]:
        """Yield row, first column to show, and column of each new token with which a text may end."""
        for row, shown_from, first, behind in spans:
            for column, token in enumerate(text[row, first:behind].tolist(), first):
                if token in self._can_end or self._ends_anywhere:
                    yield row, shown_from, column


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
