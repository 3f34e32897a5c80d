"""What every column of a block has in front of it, as tensors on the device that decides."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hf_dsde.decoding.sequences import SequenceBatch


class BlockText:
    """The texts in front of a block's columns. Nothing is computed before it is asked for, nor a second time.

    Column j of a row has everything up to the end of the row's text and `offset + j` draft tokens in front of it. A
    *place* counts from the left edge of the buffer of tokens.

    Args:
        sequences: The text, with the draft tokens written after it; its host copies are up to date.
        width: Columns of the block.
        offset: Draft tokens in front of the block's first column.
        device: Where the tensors are wanted.
        alone: Whether a row begins at its first real token, as in a batch of its own. Else padding belongs to the text,
            as in the batch that plain `generate` shows to its processors.
    """

    def __init__(self, sequences: SequenceBatch, width: int, offset: int, device: torch.device, *, alone: bool) -> None:
        self._sequences = sequences
        self._width = width
        self._offset = offset
        self._device = device
        self._alone = alone

    @cached_property
    def ends(self) -> Tensor:
        """The place after the last token in front of each column, `[rows, width]`, int64."""
        generated = self._sequences.generated.to(self._device)[:, None]
        first = self._sequences.prompt_width + self._offset
        if self._width == 1:
            return generated + first
        return generated + torch.arange(first, first + self._width, device=self._device)

    @cached_property
    def begins(self) -> Tensor | None:
        """The place of each row's first token, `[rows, 1]`, int64; None when all rows begin at 0."""
        return self._sequences.padding.to(self._device)[:, None] if self._alone else None

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens in front of each column, `[rows, width]`, int64."""
        return self.ends if self.begins is None else self.ends - self.begins

    @property
    def bound(self) -> int:
        """A place that no column of any row reaches beyond."""
        longest = max(self._sequences.generated_counts)
        return self._sequences.prompt_width + longest + self._offset + self._width - 1

    @cached_property
    def places(self) -> Tensor:
        """All places up to the bound, `[bound]`, int64."""
        return torch.arange(self.bound, device=self._device)

    @cached_property
    def tokens(self) -> Tensor:
        """All tokens up to the bound, `[rows, bound]`, int64."""
        return self._sequences.tokens[:, : self.bound].to(self._device)

    def suffix(self, count: int) -> Tensor:
        """Return the last `count` tokens in front of each column, `[rows, width, count]`, int64.

        Where a column has fewer in front of it, they are anything.

        Args:
            count: At least 1, and no more than the bound.
        """
        begins = (self.ends - count).clamp_min_(0)[:, :, None].expand(-1, -1, count)
        return self.tokens.unfold(1, count, 1).gather(1, begins)
