"""Numbers and tables as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from statistics import median

from hf_dsde.bench.results import Spread

WIDTH = 120


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell without text was not measured."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def reflowed(text: str) -> str:
    """A document whose paragraphs and list items have the documents' width; all else is left as it is."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _reflowed(part) for part in parts)


def _reflowed(text: str) -> str:
    return "".join(_block(block) for block in re.split(r"(\n{2,}|\n(?=- ))", text))


def _block(block: str) -> str:
    if not block.strip() or block.lstrip()[0] in "|#<":
        return block
    indent = "  " if block.startswith("- ") else ""
    lines = textwrap.fill(
        " ".join(block.split()), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines + ("\n" if block.endswith("\n") else "")


def code(text: str) -> str:
    """A name as code."""
    return f"`{text}`"


def listed(words: Sequence[str]) -> str:
    """Words with commas, and "and" before the last."""
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"


def rate(value: Spread | float | None) -> str:
    """Tokens per second, in the median of a spread."""
    if value is None:
        return ""
    value = value.median if isinstance(value, Spread) else value
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
    """A ratio with the extremes, where they differ."""
    if spread is None:
        return ""
    low, high = ratio(spread.smallest), ratio(spread.largest)
    return low if low == high else f"{ratio(spread)} [{low}..{high}]"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The extremes of some values."""
    numbers = list(values)
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def middle(values: Iterable[float]) -> Spread:
    """The spread of values of which there are some."""
    numbers = list(values)
    return Spread(median(numbers), min(numbers), max(numbers))
