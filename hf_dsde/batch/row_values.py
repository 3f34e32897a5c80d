"""Values of a row as Python's own, whatever library wraps them, and the sentences that say what is wrong with one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60
_shortened.maxlist = _shortened.maxdict = 4


class BadRowError(Exception):
    """What is wrong with a row; it becomes the text of a `RejectedRow`."""


def plain(value: Any) -> Any:
    """The value as Python's own numbers, strings and lists hold it, if a library's scalar or array wraps it."""
    if value is None or isinstance(value, (str, bytes, int, float, list, tuple, Mapping)):
        # numpy's float64 and str_ are floats and strings already, and good as such.
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    for method in ("as_py", "to_pylist", "tolist"):  # pyarrow's scalars, its arrays, and numpy's and torch's of both
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    return value


def without_absent(value: Any) -> Any:
    """The value as plain Python all the way down, without the keys of its mappings whose value is None.

    Arrow gives all mappings of a column the same keys, and None to those that a mapping does not have. None as an item
    of a list stays: no list gets longer there.
    """
    value = plain(value)
    if isinstance(value, Mapping):
        parts = ((key, without_absent(part)) for key, part in value.items())
        return {key: part for key, part in parts if part is not None}
    if isinstance(value, (list, tuple)):
        return [without_absent(part) for part in value]
    return value


def wrong(name: str, value: Any, accepted: str) -> BadRowError:
    """The error that says what a value is and what it should be."""
    needed = accepted if " needed" in accepted else f"{accepted} is needed"
    return BadRowError(f"{name} is {_shortened.repr(value)} ({type(value).__name__}), but {needed}")


def reason(failure: Exception) -> str:
    """An exception in one short line."""
    text = f"{type(failure).__name__}: {failure}"
    # Some errors quote the text they were about, of any length.
    return printable(text if len(text) <= 200 else text[:200] + "...")


def printable(text: str) -> str:
    """The text in a form that can be written to a file, whatever names and values of the row it quotes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def quoted(names: Sequence[Any] | Mapping[Any, Any]) -> str:
    """Names of columns for a sentence, the first ones of many."""
    shown = [f"`{name}`" for name in list(names)[:12]]
    return ", ".join([*shown, "..."] if len(names) > len(shown) else shown)


def check_unicode(name: str, text: str) -> None:
    """Raise a `BadRowError` for text that is no valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise wrong(
            name, text, f"valid Unicode is needed (half of a surrogate pair at character {failure.start})"
        ) from None
