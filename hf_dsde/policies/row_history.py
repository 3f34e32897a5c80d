"""State that a policy keeps for every row: the newest values of each row, and rows that leave and join the batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

State = TypeVar("State", bound="RowState")


@dataclass
class RowState:
    """Base of a policy's state: every field is a tensor whose first dimension counts the rows."""

    def select_rows(self: State, index: Tensor, fresh: State) -> State:  # noqa: PYI019 - Self needs Python 3.11
        """The state after the batch was rearranged.

        Args:
            index: Which row stands in each place from now on, int64, shape `[places]`; -1 for a new sequence.
            fresh: The state of one new sequence.
        """
        selected = {f.name: select_rows(getattr(self, f.name), index, getattr(fresh, f.name)) for f in fields(self)}
        return type(self)(**selected)


def select_rows(values: Tensor, index: Tensor, fresh: Tensor) -> Tensor:
    """Each place's entry after the batch was rearranged.

    Args:
        values: Shape `[rows, ...]`.
        index: Which row stands in each place from now on, int64, shape `[places]`; -1 for a new sequence.
        fresh: The entry of one new sequence, shape `[1, ...]`, the dtype of `values`.

    Returns:
        Shape `[places, ...]`.
    """
    is_new = (index < 0).view(-1, *[1] * (values.dim() - 1))
    return torch.where(is_new, fresh, values.index_select(0, index.clamp_min(0)))


def append_newest(history: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """The newest values of each row after `counts` more have arrived, newest last.

    Rows gain different numbers of values, so each row is shifted by its own count; no row waits for another and
    nothing is fetched to the host.

    Args:
        history: Shape `[rows, window]`, newest last.
        values: What arrived, oldest first, shape `[rows, width]`, the history's dtype.
        counts: How many of the first `values` of each row are real, shape `[rows]`, int64, from 0 to width.

    Returns:
        The last `window` values of each row, shape `[rows, window]`.
    """
    window = torch.arange(history.shape[1], device=history.device)
    return torch.cat([history, values], dim=1).gather(1, counts.unsqueeze(-1) + window)
