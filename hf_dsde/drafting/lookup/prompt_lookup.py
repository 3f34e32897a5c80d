"""Prompt lookup (Saxena 2023, prompt-lookup-decoding) by the rule of transformers, for all rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.text_drafter import TextDrafter
from hf_dsde.utils.checks import check_integer

NGRAM_SIZE = 2
"""Tokens that are matched at most, as in transformers."""


class FirstNgrams:
    """A text, and where each of its n-grams stands first.

    Args:
        longest: The largest n.
    """

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self._longest = longest
        self._ends: dict[tuple[int, ...], int] = {}  # of each n-gram, where the token after it stands

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take over the tokens that come next."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        # An n-gram is known once there is a token after it.
        for end in range(max(first, 1), len(self.tokens)):
            for size in range(1, min(self._longest, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - size : end]), end)

    def find(self) -> tuple[int, int]:
        """Return n and the place after the first occurrence of the longest n-gram that ends the text; 0, 0 if none."""
        for size in range(min(self._longest, len(self.tokens) - 1), 0, -1):
            end = self._ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                return size, end
        return 0, 0


class PromptLookupDrafter(TextDrafter[FirstNgrams]):
    """Proposes what followed the longest n-gram at the end of a row's text where it stands first.

    The proposals are those of `transformers.PromptLookupCandidateGenerator` for each row alone, but for one thing: that
    one asks the call's logits processors, token by token, and proposes none that they forbid. Here the target refuses
    such a token when it is verified.

    Args:
        max_matching_ngram_size: The largest n.
        end_tokens: Proposals end before these.
    """

    def __init__(self, max_matching_ngram_size: int = NGRAM_SIZE, *, end_tokens: Sequence[int] = ()) -> None:
        super().__init__()
        self._size = check_integer("max_matching_ngram_size", max_matching_ngram_size, 1)
        self._end_tokens = frozenset(end_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """Its arguments."""
        return {"max_matching_ngram_size": self._size, "end_tokens": sorted(self._end_tokens)}

    def new_text(self) -> FirstNgrams:
        """Return an empty text."""
        return FirstNgrams(self._size)

    def continuation(self, text: FirstNgrams, most: int) -> Continuation:
        """Return the tokens after the first occurrence; all are expected to stand, since nothing else is known."""
        match, begin = text.find()
        if not match:
            return NOTHING
        tokens = text.tokens[begin : begin + most]
        if not self._end_tokens.isdisjoint(tokens):
            tokens = tokens[: next(n for n, token in enumerate(tokens) if token in self._end_tokens)]
        return Continuation(tokens, float(len(tokens)), match)
