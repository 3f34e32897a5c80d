"""Token ids of many prompts at once: what each row wants encoded is put together, and handed back to it.

Tokenizers encode a list on all cores and let go of Python's global lock meanwhile. Making a prompt is therefore a
generator that yields what is to be encoded and is sent the ids, or is thrown the error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

R = TypeVar("R")


@dataclass(frozen=True)
class ToEncode:
    """A prompt that is to be encoded.

    Attributes:
        content: Text or messages.
        encode: Returns the ids of a content, or of each of a list of contents.
        group: Contents of one group may be encoded by any one's `encode`; None for none but its own.
    """

    content: Any
    encode: Callable[[Any], Any]
    group: Hashable | None


Encoding = Generator[ToEncode, Any, "list[int]"]
"""Yields what is to be encoded, is sent its ids, and returns those of the prompt."""
_Making = Generator[ToEncode, Any, R]


def make_all(makings: Sequence[_Making[R]]) -> list[R]:
    """What some generators return, each of which has at most one thing encoded."""
    made: list[R | None] = [None] * len(makings)
    groups: dict[Hashable, list[tuple[int, ToEncode]]] = {}
    for place, making in enumerate(makings):
        try:
            wanted = next(making)
        except StopIteration as end:  # noqa: PERF203  that is how generators return
            made[place] = end.value
        else:
            groups.setdefault(place if wanted.group is None else (wanted.group,), []).append((place, wanted))
    for members in groups.values():
        together = _encoded([wanted for _, wanted in members])
        for number, (place, wanted) in enumerate(members):
            made[place] = _finished(makings[place], wanted, None if together is None else together[number])
    return cast("list[R]", made)


def _encoded(wanted: Sequence[ToEncode]) -> list[Any] | None:
    """The ids of a group; None if it has to be encoded one by one."""
    if len(wanted) == 1:
        return None
    try:
        ids = wanted[0].encode([one.content for one in wanted])
    except Exception:  # noqa: BLE001  one content is to blame, and is found when each is encoded alone
        return None
    return list(ids) if len(ids) == len(wanted) else None


def _finished(making: _Making[R], wanted: ToEncode, ids: Any) -> R:
    try:
        if ids is None:
            try:
                ids = wanted.encode(wanted.content)
            except Exception as failure:  # noqa: BLE001  tokenizers raise bare `Exception`, templates whatever they like
                making.throw(failure)
        making.send(ids)
    except StopIteration as end:
        return cast("R", end.value)
    raise RuntimeError("a prompt wants more than one thing encoded")
