"""The static tensors that a model's own forward pass reads a block from."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.row_block import RowBlock
from hf_dsde.heads.head import DraftHead
from hf_dsde.kernels.block import Block


def state_size(model: PreTrainedModel) -> int | None:
    """Return the width of the states that a draft head reads beside its tokens; None for models of tokens alone."""
    size: int | None = model.config.hidden_size if isinstance(model, DraftHead) else None
    return size


class BlockBuffers:
    """Static inputs of one (width, view) bucket: tokens, positions, slots and one mask per kind of attention.

    `positions` and `slots` keep -1 where the block holds no token; `position_ids`, what the model gets, says 0 there,
    since a model with learned positions has to look something up. The slots of a chain are its positions. A draft head
    has `states` of some size and dtype as well.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        device: torch.device,
        *,
        tree: bool = False,
        states: tuple[int, torch.dtype] | None = None,
    ) -> None:
        self.tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.positions = torch.full((rows, width), -1, dtype=torch.long, device=device)
        self.position_ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.slots = torch.full_like(self.positions, -1) if tree else self.positions
        self.ancestors = torch.zeros_like(self.tokens) if tree else None
        self.states: Tensor | None = None
        if states is not None:
            self.states = torch.zeros(rows, width, states[0], dtype=states[1], device=device)
        self.masks: dict[str, Tensor] = {}
        self._last_columns: dict[int, Tensor] = {}

    def last_columns(self, count: int, device: torch.device | None) -> int | list[int] | Tensor:
        """Return what `logits_to_keep` has to be for the last `count` columns, for a model on `device`.

        A number would make the model slice its hidden states, and a slice is not contiguous: torch then multiplies it
        with the head as a batch, for which it copies the head's weights once per row. An index makes a small copy.

        Where layers are on several devices (None), accelerate moves every tensor that the model is given to the first
        of them, whereas the index has to be where the last layer is, or on the CPU: a list of numbers stays as it is.
        """
        width = self.tokens.shape[1]
        if count == width:
            return 0
        if device is None:
            return list(range(width - count, width))
        if count not in self._last_columns:
            self._last_columns[count] = torch.arange(width - count, width, device=device)
        return self._last_columns[count]

    def fill(self, block: RowBlock) -> None:
        """Copy a block into the buffers, right-aligned: its last column is the bucket's last column."""
        padding = self.tokens.shape[1] - block.width
        self.tokens[:, padding:].copy_(block.tokens)
        self._fill_places(self.positions, block.positions)
        if self.ancestors is not None and block.ancestors is not None and block.slots is not None:
            self._fill_places(self.slots, block.slots)
            self.ancestors[:, padding:].copy_(block.ancestors)
        if self.states is not None and block.states is not None:
            self.states[:, padding:].copy_(block.states)

    def flat(self, size: int, rows: int, widest: int) -> Block:
        """Return the same tensors as a flat block of `size` tokens over `rows` cache rows, yet to be placed in them.

        Args:
            size: All tokens of the buffers.
            rows: Rows of the cache.
            widest: Bound on a row's tokens.
        """
        device = self.tokens.device
        return Block(
            tokens=self.tokens.view(-1),
            rows=torch.zeros(size, dtype=torch.long, device=device),
            positions=self.positions.view(-1),
            starts=torch.zeros(rows, dtype=torch.int32, device=device),
            counts=torch.zeros(rows, dtype=torch.int32, device=device),
            max_count=widest,
            slots=self.slots.view(-1),
            ancestors=None if self.ancestors is None else self.ancestors.view(-1),
            states=None if self.states is None else self.states.flatten(0, 1),
        )

    def number(self) -> None:
        """Write the position ids that a model's own forward pass looks up."""
        torch.clamp(self.positions, min=0, out=self.position_ids)

    @staticmethod
    def _fill_places(buffer: Tensor, places: Tensor) -> None:
        padding = buffer.shape[1] - places.shape[1]
        if padding:
            buffer[:, :padding].fill_(-1)
        buffer[:, padding:].copy_(places)
