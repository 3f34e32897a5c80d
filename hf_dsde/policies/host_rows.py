"""State that a policy keeps for every row in arrays on the host: there, an operation on a few numbers costs least."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Rows = TypeVar("Rows", bound="HostRows")


@dataclass
class HostRows:
    """Base of such a state: every field is an array whose first dimension counts the rows."""

    def select_rows(self: Rows, index: NDArray[np.int64], fresh: Rows) -> Rows:  # noqa: PYI019 - Self needs Python 3.11
        """The state after the batch was rearranged.

        Args:
            index: Which row stands in each place from now on, shape `[places]`; -1 for a new sequence.
            fresh: The state of one new sequence.
        """
        selected = {}
        for field in fields(self):
            values = getattr(self, field.name)[index]
            values[index < 0] = getattr(fresh, field.name)[0]
            selected[field.name] = values
        return type(self)(**selected)


def append_newest(history: NDArray[Any], values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[Any]:
    """The newest values of each row after `counts` more have arrived, newest last.

    Args:
        history: Shape `[rows, window]`, newest last.
        values: What arrived, oldest first, shape `[rows, width]`, the history's dtype.
        counts: How many of the first `values` of each row are real, shape `[rows]`, from 0 to width.

    Returns:
        The last `window` values of each row, shape `[rows, window]`.
    """
    rows, window = history.shape
    places = counts[:, None] + np.arange(window)
    newest: NDArray[Any] = np.concatenate([history, values], axis=1)[np.arange(rows)[:, None], places]
    return newest
