"""Products of few tokens with weight matrices: Triton kernels that are as fast as the weights can be read.

With a handful of tokens a product is a single pass over its weights, and those of one layer are so small that a GPU
reads them in the time it takes to start a kernel. So products of the same input share a launch, and each program
streams few rows of one matrix with many loads under way. The sums of so small a tile wait for each other more than for
memory; so each warp has a slice of the inner dimension, and they add theirs up at the end. Among programs that
dimension is not divided. Sums have a fixed order, whatever the other tokens are. Weights stay where the model has them.

Which launch suits which sizes, and where the vendor's library is left alone, says `hf_dsde.utils.tuning`; it is settled
by measurement (`benchmarks/skinny_linear.py`).
"""

# ruff: noqa: PLR0917 - kernels take pointers, sizes and strides one by one
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.launching import HOPPER_SHARED_MEMORY, on_its_device, shared_memory
from hf_dsde.utils.tuning import HOPPER, Tuning, tuning_of

MOST_TOKENS = 64
"""What the kernels take. Beyond it, a product no longer is a mere pass over its weights."""
PAYING_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SkinnyPlan:
    """The shape of one launch; all sizes are powers of two.

    Attributes:
        block_m: Tokens that a program computes with, at least 16, and not fewer than there are.
        block_n: Rows of a weight matrix per program, at least 8.
        block_k: Elements of a row that are read at once, at least 16.
        warps: Warps per program, each of which sums a slice of at least 16 elements of every read.
        stages: Reads under way at once, plus the one that is computed with.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def plan_product(
    tokens: int,
    rows: int,
    width: int,
    element_size: int,
    *,
    gated: bool,
    shared: int = HOPPER_SHARED_MEMORY,
    tuning: Tuning = HOPPER,
) -> SkinnyPlan:
    """Choose the shape of a launch.

    Args:
        tokens: Up to `MOST_TOKENS`.
        rows: Rows of all weights of the launch together.
        width: Elements of a row.
        element_size: Bytes per element.
        gated: Whether it is for `gated_linear`.
        shared: Bytes of shared memory that a program can have.
        tuning: Shapes for the device.
    """
    table = tuning.gated_plans if gated else tuning.linears_plans
    shape = tuning.wide_plan if tokens > 16 else next(shape for bound, shape in table.items() if rows <= bound)
    block_n, block_k, warps, stages = shape
    plan = SkinnyPlan(max(16, triton.next_power_of_2(tokens)), block_n, block_k, warps, stages)
    # Larger elements take the room of what is read ahead. Of less than 256 bytes from each of 8 rows, not every thread
    # of 4 warps would get 16 at once.
    plan = fitted(replace(plan, block_k=max(256 // element_size, 2 * block_k // element_size)), width)
    return _within(shared, plan, element_size, gated=gated)


def _plan_for(x: Tensor, rows: int, *, gated: bool) -> SkinnyPlan:
    """The shape of a launch for these tokens on their device."""
    shared, tuning = shared_memory(x.device), tuning_of(x.device)
    return plan_product(len(x), rows, x.shape[-1], x.element_size(), gated=gated, shared=shared, tuning=tuning)


def _within(shared: int, plan: SkinnyPlan, element_size: int, *, gated: bool) -> SkinnyPlan:
    """The plan, with less under way at once where a program would not get the shared memory for it."""

    def held(plan: SkinnyPlan) -> int:
        read = plan.block_k * element_size * (plan.block_m + (1 + gated) * plan.block_n)
        sums = 4 * plan.warps * plan.block_m * plan.block_n
        return max((plan.stages - 1) * read, sums)  # what is computed with is in registers

    while held(plan) > shared and (plan.stages > 2 or plan.block_k > 64):
        plan = replace(plan, stages=plan.stages - 1) if plan.stages > 2 else replace(plan, block_k=plan.block_k // 2)
    return plan


def fitted(plan: SkinnyPlan, width: int) -> SkinnyPlan:
    """The plan, with smaller reads if those would not divide a row evenly but smaller ones of at least 64 would."""
    block_k = plan.block_k
    while block_k > 64 and width % block_k:
        block_k //= 2
    return plan if width % block_k else replace(plan, block_k=block_k)


def pays(tokens: int, matrices: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a launch of these kernels is preferred to the products of the vendor's library.

    Args:
        tokens: Tokens of the input.
        matrices: Weights of the launch.
        rows: Rows of all weights of the launch together.
        width: Elements of a row.
        dtype: Of input and weights.
        device: Likewise.
    """
    if dtype not in PAYING_DTYPES or width % 16:  # 16 bytes at once, or not at all
        return False
    bounds = tuning_of(device).paying.get(matrices, ())
    return any(tokens <= most and rows * width * dtype.itemsize <= room for most, room in bounds)


@triton.jit
def token_tile(
    x: tl.tensor,
    start: int,
    total: int,
    width: int,
    x_row: int,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    slices: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """Elements from `start` of every token, `[slices, block_m, block_k / slices]`; 0 where there is none."""
    token = tl.arange(0, block_m)[None, :, None]
    column = start + tl.arange(0, slices)[:, None, None] * (block_k // slices)
    column += tl.arange(0, block_k // slices)[None, None, :]
    present = token < total
    if not even:
        present = present & (column < width)
    return tl.load(x + token * x_row + column, mask=present, other=0.0)


@triton.jit
def weight_tile(
    weight: tl.tensor,
    row: tl.tensor,
    start: int,
    width: int,
    block_k: tl.constexpr,
    slices: tl.constexpr,
    even: tl.constexpr,
) -> tl.tensor:
    """Elements from `start` of rows that exist, `[slices, block_k / slices, rows]`; 0 after their ends."""
    column = start + tl.arange(0, slices)[:, None, None] * (block_k // slices)
    column += tl.arange(0, block_k // slices)[None, None, :]
    place = weight + row[None, :, None].to(tl.int64) * width + column
    if even:
        return tl.permute(tl.load(place), (0, 2, 1))
    return tl.permute(tl.load(place, mask=column < width, other=0.0), (0, 2, 1))


@triton.jit(do_not_specialize=["total", "rows0", "rows1", "rows2"])
def _linears_kernel(
    x: tl.tensor,
    weight0: tl.tensor,
    weight1: tl.tensor,
    weight2: tl.tensor,
    bias0: tl.tensor,
    bias1: tl.tensor,
    bias2: tl.tensor,
    out0: tl.tensor,
    out1: tl.tensor,
    out2: tl.tensor,
    total: int,
    rows0: int,
    rows1: int,
    rows2: int,
    width: int,
    x_row: int,
    count: tl.constexpr,
    biased0: tl.constexpr,
    biased1: tl.constexpr,
    biased2: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    slices: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """All tokens times `block_n` rows of one weight: first come the programs of the first weight, then the others'."""
    block = tl.program_id(0)
    weight, bias, out, rows, biased = weight0, bias0, out0, rows0, biased0
    if count > 1:
        blocks = tl.cdiv(rows0, block_n)
        if block >= blocks:
            block -= blocks
            weight, bias, out, rows, biased = weight1, bias1, out1, rows1, biased1
            if count > 2:
                blocks = tl.cdiv(rows1, block_n)
                if block >= blocks:
                    block -= blocks
                    weight, bias, out, rows, biased = weight2, bias2, out2, rows2, biased2
    row = block * block_n + tl.arange(0, block_n)
    read = tl.minimum(row, rows - 1)  # a row after the last is computed again rather than masked, and not stored
    await_inputs(chained)
    parts = tl.zeros((slices, block_m, block_n), tl.float32)
    for start in tl.range(0, width, block_k, num_stages=stages):
        states = token_tile(x, start, total, width, x_row, block_m, block_k, slices, even)
        part = weight_tile(weight, read, start, width, block_k, slices, even)
        parts = tl.dot(states, part, parts, input_precision=precision)
    sums = tl.sum(parts, axis=0)
    if biased:
        sums += tl.load(bias + read).to(tl.float32)[None, :]
    token = tl.arange(0, block_m)[:, None]
    present = (token < total) & (row[None, :] < rows)
    tl.store(out + token * rows + row[None, :], sums.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["total", "rows"])
def _gated_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    total: int,
    rows: int,
    width: int,
    x_row: int,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    slices: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """All tokens times `block_n` rows of both weights, and the gated product of the two results."""
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    read = tl.minimum(row, rows - 1)
    await_inputs(chained)
    gate_parts = tl.zeros((slices, block_m, block_n), tl.float32)
    up_parts = tl.zeros((slices, block_m, block_n), tl.float32)
    for start in tl.range(0, width, block_k, num_stages=stages):
        states = token_tile(x, start, total, width, x_row, block_m, block_k, slices, even)
        gate_part = weight_tile(gate, read, start, width, block_k, slices, even)
        up_part = weight_tile(up, read, start, width, block_k, slices, even)
        gate_parts = tl.dot(states, gate_part, gate_parts, input_precision=precision)
        up_parts = tl.dot(states, up_part, up_parts, input_precision=precision)
    dtype = out.dtype.element_ty
    gated = tl.sum(gate_parts, axis=0).to(dtype).to(tl.float32)
    activated = (gated / (1.0 + tl.exp(-gated))).to(dtype).to(tl.float32)
    token = tl.arange(0, block_m)[:, None]
    present = (token < total) & (row[None, :] < rows)
    factor = tl.sum(up_parts, axis=0).to(dtype).to(tl.float32)
    tl.store(out + token * rows + row[None, :], (activated * factor).to(dtype), mask=present)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    """Multiply the same few tokens by up to three weight matrices in one launch.

    Args:
        x: `[T, H]`, T up to `MOST_TOKENS`; elements of a row are contiguous.
        weights: One to three, `[N_i, H]`, contiguous, of the dtype of `x`.
        biases: For each weight a vector `[N_i]` of the dtype of `x`, or None; None for no bias at all.

    Returns:
        `x @ weight.T + bias` for each weight, `[T, N_i]`, contiguous. Summed in float32 and rounded once.

    Raises:
        ValueError: If there are too many tokens or weights, or shapes, dtypes or strides do not fit.
    """
    rows = sum(weight.shape[0] for weight in weights)
    plan = _plan_for(x, rows, gated=False)
    return launch_linears(x, weights, biases, plan)


@on_its_device
def launch_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None, plan: SkinnyPlan
) -> list[Tensor]:
    """`linears` in a launch of a given shape, for measuring shapes against each other."""
    if not 1 <= len(weights) <= 3:
        msg = f"weights: got {len(weights)}, but one launch takes 1 to 3. Divide them among several calls."
        raise ValueError(msg)
    _check_fit(x, weights, plan)
    vectors = [None] * len(weights) if biases is None else list(biases)
    outs = [torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device) for weight in weights]
    if not len(x):
        return outs
    missing = 3 - len(weights)
    sizes = [len(weight) for weight in weights]
    programs = sum(triton.cdiv(size, plan.block_n) for size in sizes)
    _linears_kernel[(programs,)](
        # Where there is no weight or no bias, any tensor will do: it is not read.
        x, *weights, *[x] * missing, *[x if bias is None else bias for bias in vectors], *[x] * missing,
        *outs, *[x] * missing, len(x), *sizes, *[0] * missing, x.shape[1], x.stride(0),
        count=len(weights),
        **{f"biased{place}": place < len(vectors) and vectors[place] is not None for place in range(3)},
        **_constants(x, plan),
    )  # fmt: skip
    return outs


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The first half of a SwiGLU layer (Shazeer, "GLU Variants Improve Transformer", 2020): silu(x gate^T) * x up^T.

    Args:
        x: `[T, H]`, T up to `MOST_TOKENS`; elements of a row are contiguous.
        gate: `[I, H]`, contiguous, of the dtype of `x`.
        up: Likewise.

    Returns:
        `[T, I]`, contiguous. Both products are summed in float32, and they, silu and the result are rounded to the
        dtype of `x`, as four operations of their own would round them.

    Raises:
        ValueError: If there are too many tokens, or shapes, dtypes or strides do not fit.
    """
    plan = _plan_for(x, 2 * len(gate), gated=True)
    return launch_gated(x, gate, up, plan)


@on_its_device
def launch_gated(x: Tensor, gate: Tensor, up: Tensor, plan: SkinnyPlan) -> Tensor:
    """`gated_linear` in a launch of a given shape, for measuring shapes against each other."""
    if gate.shape != up.shape:
        msg = f"up: has the shape {tuple(up.shape)}, but that of gate is needed, {tuple(gate.shape)}."
        raise ValueError(msg)
    _check_fit(x, (gate, up), plan)
    out = torch.empty((len(x), len(gate)), dtype=x.dtype, device=x.device)
    if len(x):
        grid = (triton.cdiv(len(gate), plan.block_n),)
        _gated_kernel[grid](x, gate, up, out, len(x), len(gate), x.shape[1], x.stride(0), **_constants(x, plan))
    return out


def _constants(x: Tensor, plan: SkinnyPlan) -> dict[str, object]:
    """What is compiled in, and how."""
    return {
        "block_m": plan.block_m,
        "block_n": plan.block_n,
        "block_k": plan.block_k,
        "slices": min(plan.warps, plan.block_k // 16),
        "even": x.shape[1] % plan.block_k == 0,
        "stages": plan.stages,
        "precision": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": plan.warps,
        **chaining(x.device),
    }


def _check_fit(x: Tensor, weights: Sequence[Tensor], plan: SkinnyPlan) -> None:
    """Raise where a kernel would read what is not there."""
    if x.dim() != 2 or len(x) > min(MOST_TOKENS, plan.block_m) or x.stride(1) != 1:
        msg = (
            f"x: has the shape {tuple(x.shape)} and strides {x.stride()}, but up to {min(MOST_TOKENS, plan.block_m)} "
            "tokens in contiguous rows, [T, H], are needed. Use torch.nn.functional.linear for others."
        )
        raise ValueError(msg)
    for weight in weights:
        if weight.shape[1:] != x.shape[1:] or weight.dtype != x.dtype or not weight.is_contiguous():
            msg = (
                f"a weight has the shape {tuple(weight.shape)}, strides {weight.stride()} and dtype {weight.dtype}, "
                f"but a contiguous matrix [N, {x.shape[1]}] of {x.dtype} is needed. Use torch.nn.functional.linear."
            )
            raise ValueError(msg)
