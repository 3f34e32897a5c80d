"""Notices that prompts of plain text get empty answers from a model that expects its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hf_dsde.batch.refill_loop import FinishedText
from hf_dsde.batch.requests import RejectedRow, Request
from hf_dsde.batch.results import END_TOKEN

WATCHED = 8
"""Prompts whose texts are waited for while a job runs. Whichever texts end first are short, which says nothing about
the others; those of the first prompts do."""


class EmptyTextsWarning(UserWarning):
    """Most texts end at their first token, and their prompts went through no chat template although there is one."""


class FirstTokens:
    """Counts texts that end at their first token: of the first `WATCHED` prompts, and of a whole job.

    Only texts count whose prompts are plain text, and only an end token as their end.
    """

    def __init__(self) -> None:
        self._watched: dict[int, bool | None] = {}
        self._texts = self._empty = 0

    def watched(self, requests: Iterable[Request | RejectedRow]) -> Iterator[Request | RejectedRow]:
        """Yield requests as they come and remember which are the first."""
        for request in requests:
            if isinstance(request, Request) and request.is_raw_text and len(self._watched) < WATCHED:
                self._watched[request.index] = None
            yield request

    def after(self, text: FinishedText | RejectedRow) -> str | None:
        """Count a text; return a complaint if it is the last of the first ones, and most of those are empty."""
        if isinstance(text, RejectedRow) or not text.request.is_raw_text:
            return None
        is_empty = text.finish_reason == END_TOKEN and len(text.tokens) == 1
        self._texts += 1
        self._empty += is_empty
        if text.request.index not in self._watched:
            return None
        self._watched[text.request.index] = is_empty
        ends = list(self._watched.values())
        return None if len(ends) < WATCHED or None in ends else _complaint(sum(map(bool, ends)), WATCHED, "first ")

    def at_the_end(self) -> str | None:
        """Return a complaint if most texts of the job are empty."""
        return _complaint(self._empty, self._texts, "")


def _complaint(empty: int, texts: int, which: str) -> str | None:
    if 2 * empty <= texts:
        return None
    return (
        f"{empty} of the {which}{texts} texts end at their first token. Their prompts are plain text, which goes "
        "through the tokenizer's chat template only if that is asked for: pass chat=True (--chat), or give `messages`."
    )
