"""Which slots the tokens of a tree see, for the attention kernel; `hf_dsde.kernels.block` says what trees are."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_of_tree(
    positions: tl.tensor, slots: tl.tensor, count: int, columns: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the slot of a row's first token, and its place among the row's columns."""
    column = tl.arange(0, columns)
    real = tl.load(positions + column, mask=column < count, other=-1) >= 0
    slot = tl.load(slots + column, mask=real, other=0).to(tl.int32)
    return tl.min(tl.where(real, slot, 1 << 30), axis=0), tl.min(tl.where(real, column, 1 << 30), axis=0)


@triton.jit
def visible_in_tree(
    position: tl.tensor,
    ancestors: tl.tensor,
    slot: tl.tensor,
    base: int,
    positions: tl.tensor,
    end: int,
    window: tl.constexpr,
) -> tl.tensor:
    """Say which slots tokens of a tree see; `positions` are those of the tokens from slot `base` on."""
    bit = slot - base
    # A shift by more bits than there are is undefined.
    seen = (ancestors[:, None] >> tl.minimum(tl.maximum(bit, 0), 63).to(tl.int64)[None, :]) & 1
    visible = (slot < base)[None, :] | ((seen == 1) & (bit < 64)[None, :])
    if window > 0:
        inside = (bit >= 0) & (slot < end)
        place = tl.where(inside, tl.load(positions + bit, mask=inside, other=0).to(tl.int32), slot)
        visible = visible & (place[None, :] > position[:, None] - window)
    return visible
