"""What rows bring along from an encoder, and the keys and values that a decoder makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_dsde.execution.torch_modes import lasting


@dataclass(frozen=True)
class EncoderStates:
    """What an encoder has made of each row's input: a model that reads it is run by a `CrossRunner`.

    Attributes:
        hidden: Hidden states of the encoder's last layer, `[rows, inputs, H]`.
        mask: The call's `attention_mask`, 0 on padding of the inputs, `[rows, inputs]`; None where nothing is padded.
        offsets: Position of each row's first token, `[rows]`, int64, where plain decoding counts the padding in front
            of it; None where it is 0.
    """

    hidden: Tensor
    mask: Tensor | None = None
    offsets: Tensor | None = None

    def select(self, rows: Tensor) -> EncoderStates:
        """Return what some rows bring along, `[selected]`, int64, in their order."""
        parts = (self.hidden, self.mask, self.offsets)
        hidden, mask, offsets = (None if part is None else part.index_select(0, rows.to(part.device)) for part in parts)
        assert hidden is not None
        return EncoderStates(hidden, mask, offsets)

    def padded(self, inputs: int) -> EncoderStates:
        """Return the same with padding after the inputs, up to `inputs` of them, and a mask that hides it."""
        added = inputs - self.hidden.shape[1]
        mask = self.hidden.new_ones(self.hidden.shape[:2], dtype=torch.long) if self.mask is None else self.mask
        return EncoderStates(pad(self.hidden, (0, 0, 0, added)), pad(mask, (0, added)), self.offsets)

    def to(self, device: torch.device, dtype: torch.dtype) -> EncoderStates:
        """Return the same on a device, hidden states in a dtype."""
        mask, offsets = (None if part is None else part.to(device) for part in (self.mask, self.offsets))
        return EncoderStates(self.hidden.to(device, dtype), mask, offsets)


class CrossLayer(CacheLayerMixin):
    """Keys and values that one layer's cross-attention has made of encoder states, `[rows, heads, inputs, head_dim]`.

    The model itself makes them, in the first pass over all rows; passes over some rows before that make their own.

    Args:
        stays: Whether they stay where they are from call to call, since recorded passes read them there.
    """

    is_sliding = False

    def __init__(self, *, stays: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: tuple[Tensor, Tensor] | None = None
        self._stays = stays
        self._keeps = False

    def aim(self, rows: Tensor | None) -> None:
        """Show the keys and values of the next pass's rows, if there are any yet; None for all rows."""
        self._keeps = rows is None
        if self.kept is not None:
            self.keys, self.values = self.kept if rows is None else self._of_rows(rows)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over what a pass over all rows has made."""
        if not self._stays:
            self.kept = key_states, value_states
        elif self.kept is None:
            with lasting():
                self.kept = key_states.clone(), value_states.clone()
        else:
            for kept, made in zip(self.kept, (key_states, value_states), strict=True):
                kept.copy_(made)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Keep what a pass over all rows has made; return it."""
        if self._keeps:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def select_rows(self, rows: Tensor) -> None:
        """Keep some rows, in their order."""
        if self.kept is not None:
            self.kept = self._of_rows(rows)

    def _of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        assert self.kept is not None
        keys, values = (states.index_select(0, rows.to(states.device)) for states in self.kept)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - transformers' signature
        """Return the number of inputs that a query sees and the first one's index."""
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """Return the number of inputs whose keys and values are kept."""
        return 0 if self.kept is None else self.kept[0].shape[2]

    def get_max_length(self) -> int:
        """Return the same: nothing is ever added."""
        return self.get_seq_length()


class CrossCache(Cache):
    """What all layers' cross-attention has made of encoder states.

    Args:
        layers: Number of decoder layers.
        stays: As for a layer.
    """

    def __init__(self, layers: int, *, stays: bool = False) -> None:
        self.cross_layers = [CrossLayer(stays=stays) for _ in range(layers)]
        self._held: dict[str, Tensor] = {}
        super().__init__(layers=list(self.cross_layers))

    def hold(self, name: str, values: Tensor) -> Tensor:
        """Put something beside keys and values, in the place where it was in an earlier call; return it there."""
        if name not in self._held:
            with lasting():
                self._held[name] = torch.empty_like(values)
        return self._held[name].copy_(values)

    def start_anew(self) -> None:
        """Forget the last call's inputs: the next pass over all rows makes keys and values again, in their place."""
        for layer in self.cross_layers:
            layer.is_initialized = False

    def aim(self, rows: Tensor | None) -> bool:
        """Direct the next pass.

        Args:
            rows: The rows that are in it, as places among those that are still in, `[rows]`, int64; None for all.

        Returns:
            Whether keys and values are there; else the pass has to make them.
        """
        for layer in self.cross_layers:
            layer.aim(rows)
        return all(layer.is_initialized for layer in self.cross_layers)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the rows in `rows` (int64, `[kept]`), in that order."""
        for layer in self.cross_layers:
            layer.select_rows(rows)
