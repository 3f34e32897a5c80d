"""The operations of a fused pass as Triton kernels, for CUDA devices and bfloat16, float16 or float32.

`hf_dsde.kernels.reference` has the same functions in plain torch, and says what each computes. Every function here
launches one kernel (attention one or two, an adapter two) on the current stream, allocates nothing but its results and
sums on the way to them, and never waits for the device, so all of them can be recorded in a CUDA graph. In such a graph
a kernel takes a few microseconds, most of them waiting for memory, which is why each reads everything that it needs at
once, in vectors, and each does as much as can be done between two matrix products.

What differs from call to call (numbers of tokens) is not compiled in; what a model fixes (sizes of heads) is.
"""

# ruff: noqa: PLR0917 - kernels take pointers, sizes and strides one by one
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels.attention import ragged_attention
from hf_dsde.kernels.branches import side_by_side
from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.distribution import entropy_and_top
from hf_dsde.kernels.divergence import kl_divergence
from hf_dsde.kernels.four_bit_plan import reads_four_bits
from hf_dsde.kernels.four_bits import four_bit_linear
from hf_dsde.kernels.launching import on_its_device
from hf_dsde.kernels.linear import gated_linear, linears, pays
from hf_dsde.kernels.low_rank import add_low_rank, gated_low_rank
from hf_dsde.kernels.nucleus import nucleus

__all__ = [
    "add_low_rank",
    "add_rms_norm",
    "entropy_and_top",
    "four_bit_linear",
    "gated_linear",
    "gated_low_rank",
    "kl_divergence",
    "linears",
    "nucleus",
    "pays",
    "ragged_attention",
    "reads_four_bits",
    "rms_norm",
    "rotate_and_store",
    "side_by_side",
    "silu_mul",
]

TILE = 1024
"""Elements that a program of four warps handles: 8 a thread, one 16-byte access of a two-byte dtype."""


LARGEST_HALF: tl.constexpr = tl.constexpr(65504.0)
"""The largest float16."""


@triton.jit(do_not_specialize=["total"])
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    summed: tl.tensor,
    total: int,
    eps: float,
    x_row: int,
    residual_row: int,
    dim: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    add: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Normalise `tile` of `total` vectors of `dim` elements, after adding `residual` to them if `add` says so."""
    vector = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)[:, None]
    column = tl.arange(0, block)[None, :]
    present = (vector < total) & (column < dim)
    factor = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    await_inputs(chained)
    value = tl.load(x + vector * x_row + column, mask=present, other=0.0).to(tl.float32)
    dtype = normed.dtype.element_ty
    if add:
        value += tl.load(residual + vector * residual_row + column, mask=present, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(summed + vector * dim + column, rounded, mask=present)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / dim + eps)
    unit = (value * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(normed + vector * dim + column, (unit * factor).to(dtype), mask=present)


@on_its_device
def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, dim = x.shape
    normed = torch.empty((total, dim), dtype=x.dtype, device=x.device)
    summed = normed if residual is None else torch.empty_like(normed)
    block = triton.next_power_of_2(dim)
    tile = max(1, TILE // block)
    if total:
        other = x if residual is None else residual
        _norm_kernel[(triton.cdiv(total, tile),)](
            x, other, weight, normed, summed, total, eps, _row_stride(x), _row_stride(other),
            dim=dim, block=block, tile=tile, add=residual is not None, num_warps=4 if block <= 2048 else 8,
            **chaining(x.device),
        )  # fmt: skip
    return normed, summed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise by the root mean square (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4).

    Args:
        x: `[T, H]`; or heads of queries and keys, `[T * heads, D]`. Elements of a row are contiguous, rows need not be.
        weight: `[H]`, of the dtype of `x`.
        eps: Added to the mean square.

    Returns:
        `[T, H]`, contiguous. In float32 up to the product with `weight`, before which it is rounded.
    """
    return _launch_norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream and normalise the sum.

    Args:
        x: Output of a sublayer, `[T, H]`.
        residual: The stream it is added to, `[T, H]`, of the same dtype.
        weight: `[H]`, of the dtype of `x`.
        eps: Added to the mean square.

    Returns:
        The normalised sum, and the sum rounded to the dtype of `x`, both `[T, H]` and contiguous.
    """
    return _launch_norm(x, residual, weight, eps)


@triton.jit
def _silu_mul_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_row: int,
    up_row: int,
    dim: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    await_inputs(chained)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    present = column < dim
    gated = tl.load(gate + token * gate_row + column, mask=present, other=0.0).to(tl.float32)
    factor = tl.load(up + token * up_row + column, mask=present, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gated / (1.0 + tl.exp(-gated))).to(dtype).to(tl.float32)
    tl.store(out + token * dim + column, (activated * factor).to(dtype), mask=present)


@on_its_device
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated product of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): silu(gate) * up.

    Args:
        gate: `[T, I]`; elements of a row are contiguous, rows need not be (halves of one matrix will do).
        up: `[T, I]`, of the same dtype.

    Returns:
        `[T, I]`, contiguous; silu is rounded to the dtype before the product.
    """
    total, dim = gate.shape
    out = torch.empty((total, dim), dtype=gate.dtype, device=gate.device)
    if total:
        _silu_mul_kernel[(total, triton.cdiv(dim, TILE))](
            gate, up, out, _row_stride(gate), _row_stride(up), dim=dim, block=TILE, num_warps=4,
            **chaining(gate.device),
        )  # fmt: skip
    return out


@triton.jit
def _rotate_heads(
    source: tl.tensor,
    target: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head: tl.tensor,
    heads: tl.constexpr,
    source_head: int,
    target_head: int,
    dim: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    """Turn some heads of one token: dimension i is paired with i + dim / 2. Pointers are those of the token."""
    half: tl.constexpr = dim // 2
    column = tl.arange(0, block_half)
    inside = column < half
    present = (head < heads)[:, None] & inside[None, :]
    first = source + head[:, None].to(tl.int64) * source_head + column[None, :]
    left = tl.load(first, mask=present, other=0.0).to(tl.float32)
    right = tl.load(first + half, mask=present, other=0.0).to(tl.float32)
    left_cos = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    right_cos = tl.load(cos + half + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    left_sin = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    right_sin = tl.load(sin + half + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    dtype = target.dtype.element_ty
    new_left = (left * left_cos).to(dtype).to(tl.float32) - (right * left_sin).to(dtype).to(tl.float32)
    new_right = (right * right_cos).to(dtype).to(tl.float32) + (left * right_sin).to(dtype).to(tl.float32)
    place = target + head[:, None].to(tl.int64) * target_head + column[None, :]
    tl.store(place, new_left.to(dtype), mask=present)
    tl.store(place + half, new_right.to(dtype), mask=present)


@triton.jit
def _rotate_and_store_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    q_token: int,
    q_head: int,
    k_token: int,
    k_head: int,
    v_token: int,
    v_head: int,
    cos_token: int,
    sin_token: int,
    keys_row: int,
    keys_head: int,
    keys_slot: int,
    values_row: int,
    values_head: int,
    values_slot: int,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_half: tl.constexpr,
    block_value: tl.constexpr,
    block_heads: tl.constexpr,
    q_parts: tl.constexpr,
    k_parts: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Handle a group of heads of one token: first come the groups of queries, then those of keys, then of values."""
    await_inputs(chained)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, block_heads)
    cos += token * cos_token
    sin += token * sin_token
    if part < q_parts:
        turned = out + token * heads * dim
        _rotate_heads(
            q + token * q_token, turned, cos, sin, part * block_heads + lane, heads, q_head, dim, dim, block_half
        )
    else:
        row = tl.load(rows + token).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        if part < q_parts + k_parts:
            head = (part - q_parts) * block_heads + lane
            place = keys + row * keys_row + slot * keys_slot
            _rotate_heads(k + token * k_token, place, cos, sin, head, kv_heads, k_head, keys_head, dim, block_half)
        else:
            value_head = ((part - q_parts - k_parts) * block_heads + lane)[:, None].to(tl.int64)
            column = tl.arange(0, block_value)[None, :]
            present = (value_head < kv_heads) & (column < value_dim)
            value = tl.load(v + token * v_token + value_head * v_head + column, mask=present)
            if values.dtype.element_ty == tl.float16:
                # A token of weight 0 adds nothing, but 0 times infinity is not a number: a draft token that overflows
                # and is rejected must not reach the tokens before it.
                number = value.to(tl.float32)
                number = tl.where(tl.abs(number) <= float("inf"), number, 0.0)
                value = tl.minimum(tl.maximum(number, -LARGEST_HALF), LARGEST_HALF)
            target = values + row * values_row + slot * values_slot
            tl.store(target + value_head * values_head + column, value.to(values.dtype.element_ty), mask=present)


@on_its_device
def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    slots: Tensor,
) -> Tensor:
    """Turn queries and keys by their positions, and write keys and values into their places of the cache.

    Rotary embeddings (Su et al., "RoFormer", 2021) in Llama's convention: dimension i is paired with i + D / 2.

    Args:
        q: Queries, `[T, Hq, D]`; this and the next two may be views, as long as the last dimension is contiguous.
        k: Keys, `[T, Hkv, D]`.
        v: Values, `[T, Hkv, Dv]`.
        cos: Cosines at the position of each token, `[T, D]`, of the dtype of `q`.
        sin: Sines likewise.
        keys: Cache to write into, `[R, Hkv, S, D]`.
        values: Cache to write into, `[R, Hkv, S, Dv]`. In float16, what is too large for it is stored as its largest.
        rows: Cache row of each token, `[T]`, int64.
        slots: Cache slot of each token, `[T]`, int64. Where two tokens share a place, either may win.

    Returns:
        The turned queries, `[T, Hq, D]`, contiguous.
    """
    total, heads, dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    out = torch.empty((total, heads, dim), dtype=q.dtype, device=q.device)
    block_heads = min(max(1, TILE // triton.next_power_of_2(dim)), triton.next_power_of_2(heads))
    q_parts, k_parts = triton.cdiv(heads, block_heads), triton.cdiv(kv_heads, block_heads)
    if total:
        _rotate_and_store_kernel[(total, q_parts + 2 * k_parts)](
            q, k, v, cos, sin, out, keys, values, rows, slots,
            *_outer_strides(q), *_outer_strides(k), *_outer_strides(v), _row_stride(cos), _row_stride(sin),
            *_outer_strides(keys), *_outer_strides(values),
            heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim,
            block_half=triton.next_power_of_2(dim // 2), block_value=triton.next_power_of_2(value_dim),
            block_heads=block_heads, q_parts=q_parts, k_parts=k_parts, num_warps=4,
            # Fused into one instruction, a product and the sum after it would lose the rounding between them.
            enable_fp_fusion=False,
            **chaining(q.device),
        )  # fmt: skip
    return out


def _row_stride(matrix: Tensor) -> int:
    return _outer_strides(matrix)[0]


def _outer_strides(states: Tensor) -> tuple[int, ...]:
    """All strides but the last one, which has to be 1: the kernels read vectors along it."""
    *outer, last = states.stride()
    if last != 1 and states.shape[-1] > 1:
        msg = (
            f"a tensor of shape {tuple(states.shape)} has strides {states.stride()}, but the last one has to be 1. "
            "Call .contiguous() on it."
        )
        raise ValueError(msg)
    return tuple(outer)
