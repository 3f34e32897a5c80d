"""What tells recorded passes of a model apart, and which of them does for another that is not there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from hf_dsde.execution.cuda_graphs import CapturedPasses

LEAST_SAVING = 0.1
"""Share of a padded pass that packing has to save: putting tokens into place and results back costs something."""
SMALLEST_STEP = 8
"""Packed blocks hold a multiple of this many tokens."""
STEPS_PER_DOUBLING = 16
"""Sizes of packed blocks between one power of two and the next: at most 1 token in 17 is padding."""
ROOMY_STEPS = 4
"""The same of packed passes that are recorded while there is none that is larger: at most 1 token in 5 is padding."""
MOST_PADDED = 2
"""A pass with up to so many times the tokens may take the place of one that is not recorded."""
LEAST_VARYING_WIDTH = 5
"""Narrower padded passes are the common ones, and as fast as they can be."""
Shape = tuple[Any, ...]
"""What tells recorded passes apart, apart from the bound on lengths; its kind first."""
PACKED_WIDTHS = (4, 8, 16, 32, 64)
"""Bounds on a row's tokens that packed passes are recorded for."""
LEAST_CHARGE = 32
"""Tokens that a larger pass is charged with at least: it also has wider bounds."""
RECORDING_CHARGE = 4096
"""Tokens in all that passes in a missing one's place may be charged with before it is recorded: to record a pass of an
8B model takes as long as to compute some 3500 tokens (H200)."""

IDLE_PLACES = 1024
"""Places that passes have had for finished rows by when they have cost what recording passes without them does."""
LONG_WIDTH = 16
"""Tokens of a row in a pass over long drafts."""


def packed_bucket(tokens: int, steps: int = STEPS_PER_DOUBLING) -> int:
    """Return the smallest size of packed block that holds `tokens`, of `steps` sizes in each doubling."""
    step = max(SMALLEST_STEP, (1 << (max(tokens, 1).bit_length() - 1)) // steps)
    return -(-tokens // step) * step


class PassSizes(NamedTuple):
    """How many tokens the target's passes over a batch take in, padded to the longest row or packed.

    Attributes:
        rows: Rows in the pass, those included that have finished and still keep their place.
        padded_width: Gives the columns that rows of some columns are run with.
        packs: Whether a pass can be packed.
        free_tokens: Tokens of the smallest packed pass.
    """

    rows: int
    padded_width: Callable[[int], int]
    packs: bool
    free_tokens: int

    def packed(self, tokens: int, width: int) -> int | None:
        """Return the size of a packed pass; None where a padded one does with hardly more.

        Args:
            tokens: Of all rows.
            width: Of the row that has most.
        """
        size = max(packed_bucket(tokens), self.free_tokens)
        return size if self.packs and size <= (1 - LEAST_SAVING) * self.rows * self.padded_width(width) else None

    def tokens(self, tokens: int, width: int) -> int:
        """Return the tokens of the pass, padding included; arguments as for `packed`."""
        return self.packed(tokens, width) or self.rows * self.padded_width(width)


def roomy(shape: Shape) -> Shape:
    """Return the shape that is recorded where no larger pass is: of packed ones, one of fewer sizes."""
    kind, size, *others = shape
    return (kind, packed_bucket(size, ROOMY_STEPS), *others) if kind == "packed" else shape


def larger_shapes(shape: Shape, widths: Sequence[int], free_tokens: int) -> Iterator[tuple[Shape, int]]:
    """Yield shapes of passes that give the same of a block that is filled up, the smallest first, and what they cost.

    Lengths that differ from round to round would have a pass recorded for each.

    Args:
        shape: `("packed", tokens, bound on a row's, ...)` or `("padded", rows, columns, kept columns, ...)`.
        widths: Columns that padded passes have.
        free_tokens: Tokens up to which padding costs nothing.

    Yields:
        A shape, and the tokens that it is charged with: of packed passes its padding, at least `LEAST_CHARGE`. Padded
        ones are padded further only where that is free.
    """
    kind, first, second, *others = shape
    if kind == "packed":
        size = first
        while size <= MOST_PADDED * first:
            for width in PACKED_WIDTHS:
                if width >= second and (size, width) != (first, second):
                    yield (kind, size, width, *others), max(size - first, LEAST_CHARGE)
            size = packed_bucket(size + 1)
    elif kind == "padded" and others[0] == second >= LEAST_VARYING_WIDTH:
        for width in widths:
            if second < width <= free_tokens / first:
                yield (kind, first, width, width, *others[1:]), 0


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
        return roomy(shape)
    other, charge = found
    return other if passes.lend(key(shape), charge, RECORDING_CHARGE, used=used) else shape


def finished_may_stay(rows: int, idle_places: int, free_tokens: int) -> bool:
    """Whether rows that have finished keep their places in passes.

    The last rounds of a batch are few, and where reading the weights is what takes their time whatever rows draft,
    fewer rows gain little, while each number of rows has several passes recorded anew. Nothing that was recorded before
    counts: rows that are in draw random numbers together, and a seed gives one text.

    Args:
        rows: Rows in the passes.
        idle_places: Places of finished rows in all passes since some have left.
        free_tokens: Tokens up to which padding costs nothing.
    """
    return idle_places < IDLE_PLACES and rows * LONG_WIDTH <= free_tokens
