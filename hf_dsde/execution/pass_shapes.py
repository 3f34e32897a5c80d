"""What tells recorded passes of a model apart, and which of them does for another that is not there.

Where lengths differ from round to round, every shape that is needed would be recorded, most of them for a few rounds.
So a larger recording does in a missing one's place until the padding that was computed for that would have paid for a
recording: whatever comes, that costs about twice at most what it had to, as for whoever hires skis and buys some once
the hire has reached their price (Karlin et al., Competitive snoopy caching, Algorithmica 1988). Where there is no
larger one, one of few sizes is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from hf_dsde.execution.cuda_graphs import CapturedPasses

SMALLEST_STEP = 8
"""Packed blocks hold a multiple of this many tokens."""
STEPS_PER_DOUBLING = 16
"""Sizes of packed blocks between one power of two and the next: at most 1 token in 17 is padding."""
ROOMY_STEPS = 4
"""The same of packed passes that are recorded while there is none that is larger: at most 1 token in 5 is padding."""
MOST_PADDED = 2
"""A pass with up to so many times the tokens may take the place of one that is not recorded."""
LONGEST_EXACT = 8
"""Columns of the widest padded pass that is recorded as it is; wider ones are of drafts whose lengths vary."""
LEAST_VARYING_WIDTH = 5
"""Narrower padded passes are the common ones, and as fast as they can be: what takes their place is charged for."""
Shape = tuple[Any, ...]
"""What tells recorded passes apart, apart from the bound on lengths; its kind first."""
PACKED_WIDTHS = (4, 8, 16, 32, 64)
"""Bounds on a row's tokens that packed passes are recorded for."""
LEAST_CHARGE = 32
"""Tokens that a larger pass is charged with at least: it also has wider bounds."""
PADDING_OF_RECORDING = {"packed": 4096, "padded": 1024}
"""Tokens in all that passes in a missing one's place may be charged with before it is recorded, by kind: to record a
pass of an 8B model takes as long as to compute some 3500 tokens (H200). Packed passes are of a size that may not come
back, padded ones of a length that a policy may want in every round."""


def packed_bucket(tokens: int, steps: int = STEPS_PER_DOUBLING) -> int:
    """Return the smallest size of packed block that holds `tokens`, of `steps` sizes in each doubling."""
    step = max(SMALLEST_STEP, (1 << (max(tokens, 1).bit_length() - 1)) // steps)
    return -(-tokens // step) * step


def roomy(shape: Shape, free_tokens: int) -> Shape:
    """Return the shape that is recorded where no larger pass is: of those whose sizes vary, one of few.

    Args:
        shape: As for `larger_shapes`.
        free_tokens: As for `larger_shapes`.
    """
    kind, first, second, *others = shape
    if kind == "packed":
        return kind, packed_bucket(first, ROOMY_STEPS), second, *others
    if kind == "padded" and second > LONGEST_EXACT:
        width = 1 << (second - 1).bit_length()
        if first * width <= free_tokens:
            return _widened(shape, width)
    return shape


def larger_shapes(shape: Shape, widths: Sequence[int], free_tokens: int) -> Iterator[tuple[Shape, int]]:
    """Yield shapes of passes that give the same of a block that is filled up, the smallest first, and what they cost.

    Args:
        shape: `("packed", tokens, bound on a row's, ...)` or `("padded", rows, columns, kept columns, ...)`, of which
            all columns are kept or the last.
        widths: Columns that padded passes have.
        free_tokens: Tokens up to which padding costs next to nothing.

    Yields:
        A shape, and the tokens that it is charged with: its padding, at least `LEAST_CHARGE`; none for padded passes
        whose padding is free and whose lengths vary.
    """
    kind, first, second, *others = shape
    if kind == "packed":
        size = first
        while size <= MOST_PADDED * first:
            for width in PACKED_WIDTHS:
                if width >= second and (size, width) != (first, second):
                    yield (kind, size, width, *others), max(size - first, LEAST_CHARGE)
            size = packed_bucket(size + 1)
    elif kind == "padded":
        needed = first * second
        for width in widths:
            tokens = first * width
            if second < width and tokens <= max(free_tokens, MOST_PADDED * needed):
                free = tokens <= free_tokens and second >= LEAST_VARYING_WIDTH
                yield _widened(shape, width), 0 if free else max(tokens - needed, LEAST_CHARGE)


def _widened(shape: Shape, width: int) -> Shape:
    """A padded pass with more columns, all of which are kept, or the last, as those of `shape` are."""
    kind, rows, columns, kept, *others = shape
    return kind, rows, width, width if kept == columns else kept, *others


def shape_to_run(
    shape: Shape,
    passes: CapturedPasses[Any],
    key: Callable[[Shape], Hashable],
    widths: Sequence[int],
    free_tokens: int,
    *,
    used: bool,
) -> Shape:
    """Return the shape that is run for one: a larger one if that is recorded, as long as that costs less.

    Args:
        shape: What is needed.
        passes: What has been recorded.
        key: Gives what a shape is recorded under.
        widths: As in `larger_shapes`.
        free_tokens: Likewise.
        used: Whether it is run, and the padding charged for.
    """
    if key(shape) in passes:
        return shape
    found = next((each for each in larger_shapes(shape, widths, free_tokens) if key(each[0]) in passes), None)
    if found is None:
        return roomy(shape, free_tokens)
    other, charge = found
    return other if passes.lend(key(shape), charge, PADDING_OF_RECORDING[shape[0]], used=used) else shape
