"""Numbers and tables as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from statistics import median

from hf_dsde.bench.results import Spread

WIDTH = 120


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell without text was not measured."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def wrapped(text: str) -> str:
    """A paragraph, in lines of the documents' width."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def code(text: str) -> str:
    """A name as code."""
    return f"`{text}`"


def listed(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rate(value: float | None) -> str:
    """Tokens per second."""
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def rate_spread(spread: Spread | None) -> str:
    """Tokens per second with the extremes, where there is more than one value."""
    if spread is None:
        return ""
    extremes = f"{rate(spread.smallest)}..{rate(spread.largest)}"
    return rate(spread.median) if spread.smallest == spread.largest else f"{rate(spread.median)} [{extremes}]"


def ratio(value: Spread | float | None) -> str:
    """A ratio, in the median of a spread."""
    if value is None:
        return ""
    return f"{value.median if isinstance(value, Spread) else value:.2f}"


def ratio_spread(spread: Spread | None) -> str:
    """A ratio with the extremes, where there is more than one value."""
    if spread is None:
        return ""
    extremes = f"{spread.smallest:.2f}..{spread.largest:.2f}"
    return ratio(spread) if spread.smallest == spread.largest else f"{ratio(spread)} [{extremes}]"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The extremes of some values."""
    numbers = list(values)
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def middle(values: Iterable[float]) -> Spread:
    """The spread of values of which there are some."""
    numbers = list(values)
    return Spread(median(numbers), min(numbers), max(numbers))
