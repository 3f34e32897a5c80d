"""Products of few tokens with weights of four bits, which are read once and as they are stored.

What takes time beside reading is to turn codes into numbers, a few instructions for each weight however many tokens
there are. So numbers are taken from a table by moving bytes of registers, eight codes at a time, and go into the
products as they are; scales are multiplied with sums, one for each slice of 64 elements, in which all codes of a row
share one. A byte's high and low code are neighbours in a row: they are never put side by side, instead even and odd
elements of the tokens are multiplied apart.

Each warp has a slice of its own, as in `hf_dsde.kernels.linear`, or some rows of one slice for all. Where rows are too
few for all processors, the inner dimension is divided, too, and a second launch adds the parts up. Sums have a fixed
order.
"""

# ruff: noqa: PLR0917 - kernels take pointers, sizes and strides one by one
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import struct
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.four_bit_plan import MOST_TOKENS, SLICE, FourBitPlan, plan_four_bits
from hf_dsde.kernels.four_bit_weights import NUMBERS, FourBits
from hf_dsde.kernels.launching import on_its_device, shared_memory
from hf_dsde.utils.tuning import tuning_of

SUM_BLOCK = 512
"""Results that a program of the second launch adds up."""
_BYTES_OF_NUMBERS = """{{
.reg .b32 codes, later, place, upper, first, second, low, high;
mov.b32 codes, $4;
shr.u32 later, codes, 16;
{first}{second}}}"""
"""Four bytes, $4, to the numbers of their high codes, two in $0 and two in $1, and of their low codes, $2 and $3."""
_TWO_BYTES = """and.b32 place, {codes}, 0x7777;
shr.u32 upper, {codes}, 1;
and.b32 upper, upper, 0x4444;
or.b32 upper, upper, 0x3210;
prmt.b32 first, {low[0]}, {low[1]}, place;
prmt.b32 second, {low[2]}, {low[3]}, place;
prmt.b32 low, first, second, upper;
prmt.b32 first, {high[0]}, {high[1]}, place;
prmt.b32 second, {high[2]}, {high[3]}, place;
prmt.b32 high, first, second, upper;
prmt.b32 {of_high}, low, high, 0x7351;
prmt.b32 {of_low}, low, high, 0x6240;
"""
"""The four codes of two bytes each choose a byte among those of eight numbers, twice, and one of the two by their
highest bit; both for the numbers' lower bytes and for their upper ones, which are put together in the end."""


@cache
def lookup(kind: str, dtype: torch.dtype) -> str:
    """Return PTX that turns four bytes of codes into numbers of a two-byte dtype.

    Args:
        kind: One of `NUMBERS`.
        dtype: Of the numbers, which are rounded to it.
    """
    bits = torch.tensor(NUMBERS[kind]).to(dtype).view(torch.int16).tolist()
    words = {}
    for name, shift in (("low", 0), ("high", 8)):
        parts = bytes(each >> shift & 255 for each in bits)
        words[name] = [f"0x{word:08x}" for word in struct.unpack("<4I", parts)]
    first = _TWO_BYTES.format(codes="codes", of_high="$0", of_low="$2", **words)
    second = _TWO_BYTES.format(codes="later", of_high="$1", of_low="$3", **words)
    return _BYTES_OF_NUMBERS.format(first=first, second=second)


@cache
def _table(kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor, for devices that do not run PTX."""
    return torch.tensor(NUMBERS[kind], device=device).to(dtype)


@triton.jit
def _numbers(codes: tl.tensor, table: tl.tensor, permute: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """What the high and the low codes of bytes stand for."""
    if permute is None:
        high = tl.load(table + (codes >> 4).to(tl.int32))
        low = tl.load(table + (codes & 15).to(tl.int32))
    else:
        kind = table.dtype.element_ty
        high, low = tl.inline_asm_elementwise(
            permute, "=&r,=&r,=&r,=&r,r", [codes], dtype=(kind, kind), is_pure=True, pack=4
        )
    return high, low


@triton.jit
def _stored_scales(
    absmax: tl.tensor, inner_absmax: tl.tensor, block: tl.tensor, nested: tl.constexpr, inner: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scales of blocks as they are stored, and the scales that those have."""
    scale = tl.load(absmax + block)
    of_scale = tl.load(inner_absmax + block // inner) if nested else scale
    return scale, of_scale


@triton.jit
def _scales(
    stored: tl.tensor, of_stored: tl.tensor, inner_numbers: tl.tensor, offset: tl.tensor, nested: tl.constexpr
) -> tl.tensor:
    """Scales in float32."""
    return tl.load(inner_numbers + stored.to(tl.int32)) * of_stored + offset if nested else stored


@triton.jit(do_not_specialize=["total", "rows", "steps"])
def _four_bit_kernel(
    pairs: tl.tensor,
    codes: tl.tensor,
    absmax: tl.tensor,
    inner_numbers: tl.tensor,
    inner_absmax: tl.tensor,
    inner_offset: tl.tensor,
    table: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: int,
    rows: int,
    width: int,
    pairs_row: int,
    steps: int,
    blocksize: tl.constexpr,
    inner_blocksize: tl.constexpr,
    nested: tl.constexpr,
    biased: tl.constexpr,
    permute: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    slices: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """All tokens times `block_n` rows, over `steps` reads of `slices` slices of 64 elements."""
    half: tl.constexpr = 32
    element: tl.constexpr = table.dtype.element_ty
    row = tl.program_id(0) * block_n + tl.arange(0, block_n)
    read = tl.minimum(row, rows - 1).to(tl.int64)  # a row after the last is computed again, and not stored
    begin = tl.program_id(1) * steps * slices * half
    piece = tl.arange(0, slices)
    token = tl.arange(0, block_m)
    column = piece[:, None, None] * half + tl.arange(0, half)[None, None, :]
    of_token = pairs + token[None, :, None] * pairs_row + column
    of_row = codes + read[None, :, None] * (width // 2) + column
    present = (token < total)[None, :, None]
    first = read[None, :] * width
    last = width - 2 * half
    await_inputs(chained)
    offset = tl.load(inner_offset) if nested else 0.0
    # Scales of the next read are under way: they are part of no product, so that the compiler reads none ahead.
    place = tl.minimum(2 * (begin + piece * half), last)[:, None]
    stored, of_stored = _stored_scales(absmax, inner_absmax, (first + place) // blocksize, nested, inner_blocksize)
    sums = tl.zeros((slices, block_m, block_n), tl.float32)
    for step in tl.range(0, steps, num_stages=stages):
        start = begin + step * slices * half
        inside = start + column < width // 2
        states = tl.load(of_token + start, mask=present if even else present & inside, other=0)
        weights = tl.load(of_row + start) if even else tl.load(of_row + start, mask=inside, other=0)
        place = tl.minimum(2 * (start + (slices + piece) * half), last)[:, None]
        later, of_later = _stored_scales(absmax, inner_absmax, (first + place) // blocksize, nested, inner_blocksize)
        high, low = _numbers(weights, table, permute)
        evens = (states & 0xFFFF).to(tl.int16).to(element, bitcast=True)
        odds = (states >> 16).to(tl.int16).to(element, bitcast=True)
        scale = _scales(stored, of_stored, inner_numbers, offset, nested)
        if slices == 1:  # of a batch of one, every warp would compute everything
            part = tl.dot(tl.reshape(evens, (block_m, half)), tl.trans(tl.reshape(high, (block_n, half))))
            part = tl.dot(tl.reshape(odds, (block_m, half)), tl.trans(tl.reshape(low, (block_n, half))), part)
            sums += (part * scale)[None, :, :]
        else:
            part = tl.dot(evens, tl.permute(high, (0, 2, 1)))
            part = tl.dot(odds, tl.permute(low, (0, 2, 1)), part)
            sums += part * scale[:, None, :]
        stored, of_stored = later, of_later
    sums = tl.sum(sums, axis=0)
    if biased:
        sums += tl.load(bias + read).to(tl.float32)[None, :]
    target = out + tl.program_id(1) * total * rows + token[:, None] * rows + row[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(token[:, None] < total) & (row[None, :] < rows))


@triton.jit(do_not_specialize=["size", "rows"])
def _sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: int,
    rows: int,
    splits: tl.constexpr,
    biased: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Add up what the parts of the inner dimension came to."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    present = place < size
    await_inputs(chained)
    sums = tl.load(parts + place, mask=present, other=0.0)
    for split in tl.static_range(1, splits):
        sums += tl.load(parts + split * size + place, mask=present, other=0.0)
    if biased:
        sums += tl.load(bias + place % rows, mask=present, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=present)


def four_bit_linear(x: Tensor, weight: FourBits, bias: Tensor | None = None) -> Tensor:
    """Multiply few tokens by a weight of four bits.

    Args:
        x: `[T, K]`, T up to `MOST_TOKENS`; bfloat16 or float16.
        weight: `[N, K]`; K and the size of its blocks are multiples of 64.
        bias: `[N]`, of the dtype of `x`.

    Returns:
        `x @ weight.T + bias`, `[T, N]`, contiguous. Numbers that codes stand for are rounded to the dtype of `x`: a
        weight is off by as much as if it was rounded to that dtype itself. Their products with scales are not; summed
        in float32 and rounded once.

    Raises:
        ValueError: If there are too many tokens, or shapes or dtypes do not fit.
    """
    shared, tuning = shared_memory(x.device), tuning_of(x.device)
    plan = plan_four_bits(len(x), weight.rows, weight.width, shared=shared, tuning=tuning)
    return launch_four_bits(x, weight, bias, plan)


@on_its_device
def launch_four_bits(x: Tensor, weight: FourBits, bias: Tensor | None, plan: FourBitPlan) -> Tensor:
    """`four_bit_linear` in a launch of a given shape, for measuring shapes against each other."""
    _check_fit(x, weight, plan)
    out = torch.empty((len(x), weight.rows), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.contiguous()
    pairs, reads = x.view(torch.int32), triton.cdiv(weight.width, SLICE * plan.slices)
    steps = triton.cdiv(reads, plan.splits)
    splits = triton.cdiv(reads, steps)
    parts, nested = out, weight.nested
    if splits > 1:
        parts = torch.empty((splits * len(x), weight.rows), dtype=torch.float32, device=x.device)
    chained, permute = chaining(x.device), _permute(weight.kind, x)
    _four_bit_kernel[(triton.cdiv(weight.rows, plan.block_n), splits)](
        # Where scales are not nested, or there is no bias or no table, any tensor will do: it is not read.
        pairs, weight.codes, weight.absmax, *((weight.absmax,) * 3 if nested is None else nested[:3]),
        _table(weight.kind, x.dtype, x.device) if permute is None else x, x if bias is None else bias, parts,
        len(x), weight.rows, weight.width, pairs.stride(0), steps,
        blocksize=weight.blocksize, inner_blocksize=1 if nested is None else nested.blocksize,
        nested=nested is not None, biased=bias is not None and splits == 1, permute=permute,
        block_m=plan.block_m, block_n=plan.block_n, slices=plan.slices,
        even=reads % steps == 0 and weight.width % (SLICE * plan.slices) == 0, stages=plan.stages,
        num_warps=plan.warps, **chained,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), SUM_BLOCK),)](
            parts, x if bias is None else bias, out, out.numel(), weight.rows,
            splits=splits, biased=bias is not None, block=SUM_BLOCK, num_warps=4, **chained,
        )  # fmt: skip
    return out


def _permute(kind: str, x: Tensor) -> str | None:
    """How codes become numbers where PTX runs; None where they are looked up in memory."""
    return lookup(kind, x.dtype) if x.is_cuda and torch.version.hip is None else None


def _check_fit(x: Tensor, weight: FourBits, plan: FourBitPlan) -> None:
    """Raise where the kernel would read what is not there."""
    most = min(MOST_TOKENS, plan.block_m)
    if x.dim() != 2 or len(x) > most or x.shape[1] != weight.width or x.dtype.itemsize != 2:
        msg = (
            f"x: has the shape {tuple(x.shape)} and dtype {x.dtype}, but up to {most} tokens of {weight.width} "
            "elements in bfloat16 or float16 are needed. Dequantise the weight for others."
        )
        raise ValueError(msg)
    if weight.width % SLICE or weight.blocksize % SLICE or 2 * weight.codes.numel() != weight.rows * weight.width:
        msg = (
            f"weight: has {weight.codes.numel()} bytes for {weight.rows} rows of {weight.width} in blocks of "
            f"{weight.blocksize}, but rows and blocks have to be multiples of {SLICE}. Dequantise such a weight."
        )
        raise ValueError(msg)
