"""A key-value cache whose rows advance independently: slot index == token position.

Token t of a row lives in slot t of that row; only the candidates of a tree, several of which may have one position, lie
one after another until some of them are text. A block of new tokens names the slot of each of its tokens; whatever is
no token (padding of the block) goes to one extra slot at the end, which no view ever shows. There is no rollback:
a rejected draft token stays in its slot, beyond the row's length, where the attention mask hides it until the next
write replaces it.

The cache does not know which row is how long, and does not need to: lengths belong to the sequences, visibility to
the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_dsde.execution.torch_modes import lasting

GROWTH = 1.5
"""Factor by which a full cache grows, so that a long text is copied a logarithmic number of times."""


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer: `[rows, key_value_heads, capacity + 1, head_dim]`, allocated at the first write.

    Buffers start as zeros. A masked slot weighs nothing, but 0 * NaN is NaN, so no slot may ever hold garbage.
    """

    is_sliding = False

    def __init__(self, plan: WritePlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers with the heads, dtype and device of the first states, which may be of some rows only."""
        rows, heads = self.plan.rows or len(key_states), key_states.shape[1]
        slots = self.plan.capacity + 1
        with lasting():
            self.keys = key_states.new_zeros(rows, heads, slots, key_states.shape[-1])
            self.values = value_states.new_zeros(rows, heads, slots, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002 - transformers' signature
        **kwargs: Any,  # noqa: ARG002 - transformers' signature
    ) -> tuple[Tensor, Tensor]:
        """Write a block into its slots and return the view that the block's queries may look at.

        In float16, a token whose states overflow is stored as numbers. Its slot weighs nothing once it is rejected, but
        neither 0 * infinity nor a masked NaN is a number, and tokens before it would be lost with it.

        Args:
            key_states: `[rows, key_value_heads, width, head_dim]`.
            value_states: `[rows, key_value_heads, width, value_head_dim]`.
            *args: Ignored, as models pass hints that only other caches need.
            **kwargs: Ignored likewise.

        Returns:
            Keys and values, `[rows, key_value_heads, view, head_dim]`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._states()
        if keys.dtype == torch.float16:
            key_states, value_states = key_states.nan_to_num(0.0, 0.0, 0.0), value_states.nan_to_num()
        # Indexing, not `scatter_`: the latter took 15 times as long for bfloat16 on a CPU.
        rows, slots = place = self.plan.place_on(key_states.device)
        keys.transpose(1, 2)[place] = key_states.transpose(1, 2)
        values.transpose(1, 2)[place] = value_states.transpose(1, 2)
        keys, values = keys[:, :, : self.plan.view], values[:, :, : self.plan.view]
        if len(slots) < len(keys):
            return keys.index_select(0, rows[:, 0]), values.index_select(0, rows[:, 0])
        return keys, values

    def grow(self, capacity: int) -> None:
        """Move the states into buffers of `capacity` slots plus the discard slot."""
        if self.is_initialized:
            added = (0, 0, 0, capacity - self.plan.capacity)
            with lasting():
                self.keys, self.values = (torch.nn.functional.pad(states, added) for states in self._states())

    def clear(self) -> None:
        """Fill the buffers with zeros."""
        if self.is_initialized:
            for states in self._states():
                states.zero_()

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows in `index`, in that order."""
        if self.is_initialized:
            self.keys, self.values = (states.index_select(0, index.to(states.device)) for states in self._states())

    def _states(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - transformers' signature
        """Return the number of slots a query sees and the first one's index."""
        return self.plan.view, 0

    def get_seq_length(self) -> int:
        """Return the number of slots in view. Rows have lengths of their own, which the cache does not know."""
        return self.plan.view

    def get_max_length(self) -> int:
        """Return the number of slots a row may fill before the cache has to grow."""
        return self.plan.capacity


class WritePlan:
    """Where the next block goes and how much of the cache it sees; shared by all layers of a cache.

    Attributes:
        capacity: Slots a row can fill. The discard slot lies after them, at index `capacity`.
        rows: Rows of the cache; None until the first block tells, if nobody said.
        view: Slots shown to the next block's queries, at most `capacity`.
        chosen: Rows that the next block's rows are, `[rows]`, int64; None for all, in order.
    """

    def __init__(self, capacity: int, rows: int | None = None) -> None:
        self.capacity = capacity
        self.rows = rows
        self.view = 0
        self.chosen: Tensor | None = None
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def aim(self, slots: Tensor, view: int, rows: Tensor | None) -> None:
        """Set rows and slots of the next block's tokens and the view its queries get, as `RaggedCache.aim` does."""
        self.chosen = rows
        rows = torch.arange(len(slots), device=slots.device) if rows is None else rows
        self._places = {slots.device: (rows[:, None], slots)}
        self.view = view

    def place_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the block's row and slot indices on `device`; layers of one model may live on several."""
        if device not in self._places:
            rows, slots = next(iter(self._places.values()))
            self._places[device] = (rows.to(device), slots.to(device))
        return self._places[device]


class RaggedCache(Cache):
    """A `transformers.Cache` of `RaggedLayer`s with one write offset per row.

    Args:
        layers: Number of decoder layers.
        capacity: Slots per row to begin with; `reserve` raises it.
        rows: Rows, where the first block that is stored may have fewer; None takes that block's.

    Attributes:
        limit: Slots per row that growing ahead of need stops at; None for no limit.
        shifts: How far the positions of each row's tokens are ahead of their slots, once images are over which count
            as fewer positions than they have tokens, `[rows, 1]`, int64; None where they never are.
        companion: Another cache that what is recorded over this one reads, and that is kept with it.
    """

    def __init__(self, layers: int, capacity: int, rows: int | None = None) -> None:
        self.plan = WritePlan(capacity, rows)
        self.limit: int | None = None
        self.shifts: Tensor | None = None
        self.companion: Cache | None = None
        self.ragged_layers = [RaggedLayer(self.plan) for _ in range(layers)]
        super().__init__(layers=list(self.ragged_layers))

    @property
    def capacity(self) -> int:
        """Slots a row can fill without growth."""
        return self.plan.capacity

    @property
    def is_allocated(self) -> bool:
        """Whether every layer has its buffers, which the first block that is stored makes."""
        return all(layer.is_initialized for layer in self.ragged_layers)

    def clear(self) -> None:
        """Fill the buffers with zeros, if there are any: no slot may hold what an earlier text left there."""
        for layer in self.ragged_layers:
            layer.clear()
        if self.shifts is not None:
            self.shifts.zero_()

    def shift_rows(self, device: torch.device) -> None:
        """Let rows have positions ahead of their slots; by 0 to begin with. The tensor stays the same from then on."""
        with lasting():
            self.shifts = torch.zeros(self.plan.rows or 0, 1, dtype=torch.long, device=device)

    @property
    def aimed_shifts(self) -> Tensor | None:
        """The shifts of the rows that the next block is directed to, `[rows of the block, 1]`."""
        if self.shifts is None:
            return None
        rows, _ = self.plan.place_on(self.shifts.device)
        return self.shifts[rows[:, 0]]

    def aim(self, slots: Tensor, view: int, rows: Tensor | None = None) -> None:
        """Direct the next block.

        Args:
            slots: Slot of each token, `[rows, width]`, int64; below 0 where the block holds no token.
            view: Slots that the block's queries may look at; at least the largest of them + 1.
            rows: The cache rows that the block's rows are, `[rows]`, int64, each once; None for all, in order.

        Raises:
            ValueError: If `view` exceeds the capacity.
        """
        if view > self.plan.capacity:
            msg = f"view: {view} slots asked for, but the cache holds {self.plan.capacity}; call reserve({view}) first."
            raise ValueError(msg)
        self.plan.aim(slots.masked_fill(slots < 0, self.plan.capacity), view, rows)

    def reserve(self, slots: int) -> bool:
        """Make room for `slots` tokens per row, growing geometrically when there is not enough.

        Returns:
            Whether the buffers have moved.
        """
        if slots <= self.plan.capacity:
            return False
        ahead = int(self.plan.capacity * GROWTH)
        capacity = max(slots, ahead if self.limit is None else min(ahead, self.limit))
        for layer in self.ragged_layers:
            layer.grow(capacity)
        self.plan.capacity = capacity
        return True

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows in `index` (int64, `[kept]`), in that order."""
        self.plan.rows = len(index)
        if self.shifts is not None:
            self.shifts = self.shifts.index_select(0, index.to(self.shifts.device))
        for layer in self.ragged_layers:
            layer.select_rows(index)
