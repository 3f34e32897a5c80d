"""Low-rank adapters in two kernels for all modules that share an input.

LoRA adds scaling * B A x to what a linear module makes of x. As modules of their own, A, B, the scaling and the sum are
four kernels per linear module, each of which has next to nothing to do and takes as long as any kernel. Here the
products with A of up to three modules are one launch, those with B, the scaling and the sum are another.

A has few rows, so its launch divides the inner dimension among programs, which leave partial sums; the second launch
adds them up. Their number depends on sizes alone, and sums have a fixed order. Weights stay where the model has them.

The products with A need nothing but the input. In a recorded pass they are a branch of the graph, beside the products
of the modules themselves, which take longer: what adapters cost there is the second launch. The first one is no link of
a chain (`hf_dsde.kernels.chaining`), but launched when all in front of it has ended.
"""

# ruff: noqa: PLR0917 - kernels take pointers, sizes and strides one by one
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels import reference
from hf_dsde.kernels.branches import branch
from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.launching import on_its_device
from hf_dsde.kernels.linear import token_tile, weight_tile
from hf_dsde.kernels.low_rank_plan import BLOCK_RANK, DOWN_WARPS, MOST_TOKENS, STAGES, UP_WARPS, plan_turn, turns_of
from hf_dsde.kernels.reference import LowRank

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _nearest(single: tl.tensor) -> tl.tensor:
    """The nearest numbers of TensorFloat-32, which has 10 bits after the point where float32 has 23."""
    bits = single.to(tl.int32, bitcast=True)
    return ((bits + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["total", "rank0", "rank1", "rank2"])
def _down_kernel(
    x: tl.tensor,
    down0: tl.tensor,
    down1: tl.tensor,
    down2: tl.tensor,
    sums: tl.tensor,
    total: int,
    rank0: int,
    rank1: int,
    rank2: int,
    width: int,
    x_row: int,
    count: tl.constexpr,
    steps: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    slices: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
    halved: tl.constexpr,
) -> None:
    """Some tokens times `block_n` rows of one A, over one part of the inner dimension.

    First come the programs of the first A, then the others'. With `halved`, states of half precision are multiplied by
    a float32 A as the sum of two numbers of TensorFloat-32 each.
    """
    block, split, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block_m
    down, rank, place = down0, rank0, rank0 * 0
    if count > 1:
        blocks = tl.cdiv(rank0, block_n)
        if block >= blocks:
            block -= blocks
            down, rank, place = down1, rank1, rank0
            if count > 2:
                blocks = tl.cdiv(rank1, block_n)
                if block >= blocks:
                    block -= blocks
                    down, rank, place = down2, rank2, rank0 + rank1
    row = block * block_n + tl.arange(0, block_n)
    read = tl.minimum(row, rank - 1)  # a row after the last is computed again rather than masked, and not stored
    begin = split * steps * block_k
    end = tl.minimum(begin + steps * block_k, width)
    x += first.to(tl.int64) * x_row
    parts = tl.zeros((slices, block_m, block_n), tl.float32)
    for start in tl.range(begin, end, block_k, num_stages=stages):
        states = token_tile(x, start, total - first, width, x_row, block_m, block_k, slices, even)
        part = weight_tile(down, read, start, width, block_k, slices, even)
        states = states.to(part.dtype)
        if halved:
            high = _nearest(part)
            parts = tl.dot(states, part - high, parts, input_precision=precision)
            part = high
        parts = tl.dot(states, part, parts, input_precision=precision)
    token = first + tl.arange(0, block_m)[:, None]
    target = sums + (split * total + token) * (rank0 + rank1 + rank2) + place + row[None, :]
    tl.store(target, tl.sum(parts, axis=0), mask=(token < total) & (row[None, :] < rank))


@triton.jit
def _parts(
    sums: tl.tensor,
    token: tl.tensor,
    lane: tl.tensor,
    start: int,
    total: int,
    rank: int,
    place: int,
    ranks: int,
    splits: tl.constexpr,
    together: tl.constexpr,
) -> tl.tensor:
    """What some lanes of A make of tokens in some parts of the inner dimension, `[together, tokens, lanes]`."""
    split = start + tl.arange(0, together)[:, None, None]
    present = (split < splits) & (token[None, :, None] < total) & (lane[None, None, :] < rank)
    source = sums + (split * total + token[None, :, None]) * ranks + place + lane[None, None, :]
    return tl.load(source, mask=present, other=0.0)


@triton.jit
def _bases(base: tl.tensor, token: tl.tensor, row: tl.tensor, total: int, rows: int, stride: int) -> tl.tensor:
    """A tile of a module's result, `[tokens, rows]`; 0 where there is none."""
    present = (token[:, None] < total) & (row[None, :] < rows)
    return tl.load(base + token[:, None].to(tl.int64) * stride + row[None, :], mask=present, other=0.0)


@triton.jit
def _ups(up: tl.tensor, read: tl.tensor, lane: tl.tensor, rank: int) -> tl.tensor:
    """Some lanes of rows of B, `[lanes, rows]`; 0 where there is none."""
    place = up + read[:, None].to(tl.int64) * rank + lane[None, :]
    return tl.trans(tl.load(place, mask=lane[None, :] < rank, other=0.0))


@triton.jit
def _added(
    value: tl.tensor,
    parts: tl.tensor,
    weight: tl.tensor,
    sums: tl.tensor,
    up: tl.tensor,
    token: tl.tensor,
    read: tl.tensor,
    total: int,
    rank: int,
    place: int,
    ranks: int,
    scaling: float,
    splits: tl.constexpr,
    together: tl.constexpr,
    block_r: tl.constexpr,
    precision: tl.constexpr,
    whole: tl.constexpr,
) -> tl.tensor:
    """A tile of one module's result with what its adapter adds, float32; of that, the first lanes have been read.

    What A and B give and the scaled product are rounded to the adapter's dtype, as four operations would round them.
    """
    dtype = up.dtype.element_ty
    lane = tl.arange(0, block_r)
    inner = tl.sum(parts, axis=0)
    for start in tl.static_range(together, splits, together):
        inner += tl.sum(_parts(sums, token, lane, start, total, rank, place, ranks, splits, together), axis=0)
    product = tl.dot(inner.to(dtype), weight, input_precision=precision)
    if not whole:
        for first in tl.range(block_r, rank, block_r, num_stages=1):
            more = _ups(up, read, first + lane, rank)
            inner = tl.zeros_like(inner)
            for start in tl.static_range(0, splits, together):
                part = _parts(sums, token, first + lane, start, total, rank, place, ranks, splits, together)
                inner += tl.sum(part, axis=0)
            product = tl.dot(inner.to(dtype), more, product, input_precision=precision)
    return value.to(tl.float32) + (product.to(dtype).to(tl.float32) * scaling).to(dtype).to(tl.float32)


@triton.jit(
    do_not_specialize=["total", "rows0", "rows1", "rows2", "rank0", "rank1", "rank2", "stride0", "stride1", "stride2"]
)
def _up_kernel(
    sums: tl.tensor,
    up0: tl.tensor,
    up1: tl.tensor,
    up2: tl.tensor,
    base0: tl.tensor,
    base1: tl.tensor,
    base2: tl.tensor,
    out0: tl.tensor,
    out1: tl.tensor,
    out2: tl.tensor,
    total: int,
    rows0: int,
    rows1: int,
    rows2: int,
    rank0: int,
    rank1: int,
    rank2: int,
    stride0: int,
    stride1: int,
    stride2: int,
    scaling0: float,
    scaling1: float,
    scaling2: float,
    count: tl.constexpr,
    splits: tl.constexpr,
    together: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_r: tl.constexpr,
    whole: tl.constexpr,
    aligned: tl.constexpr,
    gated: tl.constexpr,
    precision: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """A tile of one module's result: first come the programs of the first module, then the others'.

    Or of the gated product of the first two, whose sizes are equal.
    """
    if aligned:  # so that the compiler knows it and reads vectors
        rows0, rows1, rows2 = rows0 // 8 * 8, rows1 // 8 * 8, rows2 // 8 * 8
        rank0, rank1, rank2 = rank0 // 8 * 8, rank1 // 8 * 8, rank2 // 8 * 8
        stride0, stride1, stride2 = stride0 // 8 * 8, stride1 // 8 * 8, stride2 // 8 * 8
    block = tl.program_id(0)
    up, base, out, rows, rank, place = up0, base0, out0, rows0, rank0, rank0 * 0
    scaling, stride = scaling0, stride0
    if count > 1 and not gated:
        blocks = tl.cdiv(rows0, block_n)
        if block >= blocks:
            block -= blocks
            up, base, out, rows, rank, place = up1, base1, out1, rows1, rank1, rank0
            scaling, stride = scaling1, stride1
            if count > 2:
                blocks = tl.cdiv(rows1, block_n)
                if block >= blocks:
                    block -= blocks
                    up, base, out, rows, rank, place = up2, base2, out2, rows2, rank2, rank0 + rank1
                    scaling, stride = scaling2, stride2
    row = block * block_n + tl.arange(0, block_n)
    read = tl.minimum(row, rows - 1)
    lane = tl.arange(0, block_r)
    token = tl.program_id(1) * block_m + tl.arange(0, block_m)
    ranks = rank0 + rank1 + rank2
    weight = _ups(up, read, lane, rank)
    other = _ups(up1, read, lane, rank1) if gated else weight
    await_inputs(chained)
    # Everything is asked for before anything is waited for.
    value = _bases(base, token, row, total, rows, stride)
    parts = _parts(sums, token, lane, 0, total, rank, place, ranks, splits, together)
    other_value = _bases(base1, token, row, total, rows, stride1) if gated else value
    others = _parts(sums, token, lane, 0, total, rank1, rank0, ranks, splits, together) if gated else parts
    result = _added(
        value, parts, weight, sums, up, token, read, total, rank, place, ranks, scaling,
        splits, together, block_r, precision, whole,
    )  # fmt: skip
    dtype = out.dtype.element_ty
    if gated:
        factor = _added(
            other_value, others, other, sums, up1, token, read, total, rank1, rank0, ranks, scaling1,
            splits, together, block_r, precision, whole,
        )  # fmt: skip
        gate = result.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = activated * factor.to(dtype).to(tl.float32)
    present = (token[:, None] < total) & (row[None, :] < rows)
    tl.store(out + token[:, None].to(tl.int64) * rows + row[None, :], result.to(dtype), mask=present)


def add_low_rank(x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> list[Tensor]:
    """Add to what linear modules made of `x` what their adapters make of it (Hu et al., "LoRA", 2021, equation 3).

    Args:
        x: `[T, H]`.
        bases: What one to three modules made of it, `[T, N_i]`; views will do. Looked at when the products with A have
            been launched, so that in a recorded pass those run beside whatever computes a base when it is looked at.
        adapters: Of each module, at least one, in the order in which they are added.

    Returns:
        base + (x A^T B^T) * scaling + ..., for each module, `[T, N_i]`, of the dtype of its base. Sums are float32;
        both products and the scaled one are rounded to the dtype of the adapter, and the sum to the larger of that and
        the base's.

    Raises:
        ValueError: If there are no modules or more than three.
    """
    if not 1 <= len(bases) <= 3:
        msg = f"bases: got {len(bases)}, but one call takes 1 to 3. Divide them among several calls."
        raise ValueError(msg)
    results = _adapted(x, bases, adapters, gated=False)
    return reference.add_low_rank(x, bases, adapters) if results is None else results


def gated_low_rank(x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> Tensor:
    """Adapt gate and up of a SwiGLU layer and take their gated product, which is no launch of its own then.

    Args:
        x: `[T, H]`.
        bases: What the modules of gate and up made of it, `[T, I]` each; looked at as late as by `add_low_rank`.
        adapters: Of both, at least one each.

    Returns:
        silu(gate) * up of what `add_low_rank` returns, `[T, I]`, rounded where `silu_mul` rounds.
    """
    results = _adapted(x, bases, adapters, gated=True)
    return reference.gated_low_rank(x, bases, adapters) if results is None else results[0]


def suits(x: Tensor, adapters: Sequence[Sequence[LowRank]]) -> bool:
    """Whether the kernels take these; otherwise it is plain torch that computes.

    Adapters are of the dtype of everything else, or, as PEFT makes them unless it is told not to, all of float32.
    """
    dtypes = {weight.dtype for each in adapters for term in each for weight in (term.down, term.up)}
    return len(x) <= MOST_TOKENS and x.dtype in DTYPES and len(dtypes) == 1 and dtypes <= {x.dtype, torch.float32}


def _adapted(
    x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]], *, gated: bool
) -> list[Tensor] | None:
    """The results, only one if `gated`; None where plain torch has to compute them."""
    if not suits(x, adapters):
        return None
    turns = turns_of(adapters, x.dtype, gated=gated)
    # A copy of `x` has to be kept, as what the branch reads, until it is joined.
    states = x if x.stride(1) == 1 else x.contiguous()
    sums = [_room(states, turn.terms) for turn in turns]
    with branch(states) as join:
        for turn, room in zip(turns, sums, strict=True):
            _multiply_down(states, turn.terms, room)
    results = list(bases)
    join()
    if any(base.dtype != x.dtype for base in results):
        return None
    for turn, room in zip(turns, sums, strict=True):
        last = gated and turn is turns[-1]
        outs = _add_up(states, room, [results[place] for place in turn.places], turn.terms, turn.dtype, gated=last)
        for place, out in zip(turn.places, outs, strict=not last):
            results[place] = out
    return results


def _room(x: Tensor, terms: Sequence[LowRank]) -> Tensor:
    """For what the programs of the first kernel leave, `[splits * T, ranks]`, float32."""
    splits = plan_turn(len(x), terms).splits if len(x) else 0
    return torch.empty((splits * len(x), sum(len(term.down) for term in terms)), dtype=torch.float32, device=x.device)


@on_its_device
def _multiply_down(x: Tensor, terms: Sequence[LowRank], sums: Tensor) -> None:
    """Launch the products with A of one adapter of each module."""
    total, width = x.shape
    if not total:
        return
    downs, missing = [term.down for term in terms], 3 - len(terms)
    ranks, plan = [len(down) for down in downs], plan_turn(total, terms)
    grid = (sum(triton.cdiv(rank, BLOCK_RANK) for rank in ranks), plan.splits, triton.cdiv(total, plan.block_m))
    _down_kernel[grid](
        # Where there is no module, any tensor will do: it is not read.
        x, *downs, *[x] * missing, sums, total, *ranks, *[0] * missing, width, x.stride(0),
        count=len(terms), steps=plan.steps, block_m=plan.block_m, block_n=BLOCK_RANK, block_k=plan.block_k,
        slices=DOWN_WARPS, even=width % plan.block_k == 0, stages=STAGES,
        precision="ieee" if x.dtype == torch.float32 else "tf32", halved=x.dtype != torch.float32 == downs[0].dtype,
        num_warps=DOWN_WARPS,
    )  # fmt: skip


@on_its_device
def _add_up(
    x: Tensor, sums: Tensor, bases: Sequence[Tensor], terms: Sequence[LowRank], dtype: torch.dtype, *, gated: bool
) -> list[Tensor]:
    """Launch what follows, also if the results are multiplied: there is one of them then."""
    total = len(x)
    outs = [torch.empty(base.shape, dtype=dtype, device=x.device) for base in bases[: 1 if gated else 3]]
    if not total:
        return outs
    bases, missing = [base if base.stride(1) == 1 else base.contiguous() for base in bases], 3 - len(terms)
    downs, ups, scalings = zip(*terms, strict=True)
    ranks, rows, plan = [len(down) for down in downs], [len(up) for up in ups], plan_turn(total, terms)
    strides = [base.stride(0) for base in bases]
    columns = sum(triton.cdiv(size, plan.block_n) for size in (rows[:1] if gated else rows))
    _up_kernel[(columns, triton.cdiv(total, plan.block_m))](
        sums, *ups, *[x] * missing, *bases, *[x] * missing, *outs, *[x] * (3 - len(outs)),
        total, *rows, *[0] * missing, *ranks, *[0] * missing, *strides, *[0] * missing, *scalings, *[0.0] * missing,
        count=len(terms), splits=plan.splits, together=plan.together, block_m=plan.block_m, block_n=plan.block_n,
        block_r=plan.block_r, whole=max(ranks) <= plan.block_r,
        aligned=all(size % 8 == 0 for size in (*rows, *ranks, *strides)),
        gated=gated, precision=_precision(x.dtype, ups[0].dtype), num_warps=UP_WARPS, **chaining(x.device),
    )  # fmt: skip
    return outs


def _precision(states: torch.dtype, adapters: torch.dtype) -> str:
    """How B is multiplied: what A makes of states has all bits of float32 if B has, so three products stand for one."""
    if adapters != torch.float32:
        return "tf32"
    return "ieee" if states == torch.float32 else "tf32x3"
