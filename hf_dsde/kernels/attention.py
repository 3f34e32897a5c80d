"""Attention of flat tokens over a ragged cache: a Triton kernel whose cost follows each row's own length.

Decoding reads the whole cache for a handful of queries a row, so the one thing that counts is how fast keys and values
stream in, and that each is read once. Hence all queries of a row that share a key-value head (its tokens times its
query heads) are one matrix; and where rows and heads are too few to occupy the device, the slots of a row are divided
among several programs, whose results a second kernel puts together (Dao et al., "Flash-Decoding for long-context
inference", 2023). Inside a program, softmax is computed block by block (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018).

What tells one row from another (start, count, positions) is read by the kernel. The host decides nothing but the shape
of the launch, so a recorded launch stays right when the contents change.
"""

# ruff: noqa: PLR0917 - kernels take pointers, sizes and strides one by one
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

from functools import cache, partial
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from hf_dsde.kernels.attention_plan import FEWEST_SLOTS, LaunchPlan, plan_launch
from hf_dsde.kernels.block import Block
from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.fitting import launch_that_fits
from hf_dsde.kernels.launching import on_its_device, shared_memory
from hf_dsde.kernels.trees import begin_of_tree, visible_in_tree
from hf_dsde.utils.tuning import tuning_of

UNSEEN = tl.constexpr(-1e30)
"""Running maximum of scores before there is one. Finite, so that its difference to itself is 0 and not NaN."""


@triton.jit
def _fill_padding(
    values: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    total: int,
    kv_head: int,
    part: int,
    parts: int,
    v_row: int,
    v_head: int,
    group: tl.constexpr,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_m: tl.constexpr,
) -> None:
    """Give every token without a position the value in slot 0, which is what seeing that slot alone comes to."""
    heads = tl.num_programs(1) * group
    column = tl.arange(0, block_value)[None, :]
    for first in tl.range(part * block_m, total, parts * block_m, num_stages=1):
        token = first + tl.arange(0, block_m)
        empty = tl.load(positions + token, mask=token < total, other=0) < 0
        if tl.max(empty.to(tl.int32), axis=0) > 0:
            row = tl.load(rows + token, mask=empty, other=0).to(tl.int64)
            present = empty[:, None] & (column < value_dim)
            place = values + row[:, None] * v_row + kv_head * v_head + column
            value = tl.load(place, mask=present, other=0.0)
            for member in range(group):  # not unrolled: with one key-value head, the group is all heads
                index = token.to(tl.int64) * heads + kv_head * group + member
                tl.store(out + index[:, None] * value_dim + column, value.to(out.dtype.element_ty), mask=present)


@triton.jit
def _attend(
    queries: tl.tensor,
    position: tl.tensor,
    ancestors: tl.tensor,
    base: int,
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    begin: int,
    end: int,
    log_scale: float,
    k_slot: int,
    v_slot: int,
    window: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    precision: tl.constexpr,
    tree: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Let queries look at the slots from `begin` to before `end`; return sums of values, maxima, sums of weights.

    Scores are binary logarithms: `log_scale` is the scaling times log2(e). `ancestors`, `base` and `positions`, as
    `visible_in_tree` takes them, matter to a `tree` only.
    """
    column, value_column = tl.arange(0, block_dim)[None, :], tl.arange(0, block_value)[None, :]
    largest = tl.full((block_m,), UNSEEN, tl.float32)
    weight = tl.zeros((block_m,), tl.float32)
    sums = tl.zeros((block_m, block_value), tl.float32)
    for first in range(begin, end, block_n):
        slot = first + tl.arange(0, block_n)
        # Slots after the row's last token cost no bandwidth; what lies there is never seen anyway.
        loaded = slot[:, None] < end
        key_present, value_present = loaded, loaded
        if block_dim != dim:
            key_present = key_present & (column < dim)
        if block_value != value_dim:
            value_present = value_present & (value_column < value_dim)
        key = tl.load(keys + slot[:, None] * k_slot + column, mask=key_present, other=0.0)
        score = tl.dot(queries, tl.trans(key), input_precision=precision) * log_scale
        if tree:
            visible = visible_in_tree(position, ancestors, slot, base, positions, end, window)
        else:
            visible = slot[None, :] <= position[:, None]
            if window > 0:
                visible = visible & (slot[None, :] > position[:, None] - window)
        score = tl.where(visible & (slot[None, :] < end), score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        share = tl.exp2(score - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        weight = weight * shrink + tl.sum(share, axis=1)
        value = tl.load(values + slot[:, None] * v_slot + value_column, mask=value_present, other=0.0)
        sums = tl.dot(share.to(value.dtype), value, sums * shrink[:, None], input_precision=precision)
        largest = new_largest
    return sums, largest, weight


@triton.jit(do_not_specialize=["total", "query_blocks", "splits"])
def _attention_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    logsums: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    ancestors: tl.tensor,
    total: int,
    query_blocks: int,
    splits: int,
    log_scale: float,
    q_token: int,
    q_head: int,
    k_row: int,
    k_head: int,
    k_slot: int,
    v_row: int,
    v_head: int,
    v_slot: int,
    group: tl.constexpr,
    window: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_value: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    divided: tl.constexpr,
    fewest: tl.constexpr,
    precision: tl.constexpr,
    tree_columns: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """One block of queries, one key-value head, one cache row, one part of its slots.

    Unless `divided`, `out` is the result. Otherwise `out` and `logsums` are partial results, `[T, Hq, splits, Dv]` and
    `[T, Hq, splits]`: means of values, and logarithms of the sums of weights, to base 2. `tree_columns` bounds a row's
    tokens where they are trees, and is 0 where they are chains, whose slots and ancestors are not looked at.
    """
    await_inputs(chained)
    query_block = tl.program_id(0) % query_blocks
    split = tl.program_id(0) // query_blocks
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2)
    if not divided:  # the first programs have the tokens that are none; of several parts, merging sees to them
        row -= 1
        if row < 0:
            _fill_padding(
                values, out, rows, positions, total, kv_head, query_block, query_blocks, v_row, v_head,
                group, value_dim, block_value, block_m,
            )  # fmt: skip
            return
    count, start = tl.load(counts + row), tl.load(starts + row)  # both under way before the first is waited for
    if query_block * block_m >= count * group:
        return
    lane = query_block * block_m + tl.arange(0, block_m)
    counted = lane < count * group
    token = (start + lane // group).to(tl.int64)
    position = tl.load(positions + token, mask=counted, other=-1).to(tl.int32)
    last = tl.max(position, axis=0)
    if last < 0:
        return
    real = position >= 0
    head = kv_head * group + lane % group

    first, base, lead, seen = 0, 0, 0, position
    if window > 0:
        earliest = tl.min(tl.where(real, position, last), axis=0) - window + 1
        first = tl.maximum(earliest, 0) // block_n * block_n
    if tree_columns > 0:  # a slot is never below its token's position
        base, lead = begin_of_tree(positions + start, slots + start, count, tree_columns)
        seen = tl.load(ancestors + token, mask=real, other=0)
        last = tl.max(tl.load(slots + token, mask=real, other=-1).to(tl.int32), axis=0)
    share = tl.cdiv(tl.cdiv(last + 1 - first, splits), block_n) * block_n
    begin = first + split * tl.maximum(share, fewest)
    end = tl.minimum(begin + tl.maximum(share, fewest), last + 1)
    index = (token * (tl.num_programs(1) * group) + head) * splits + split
    if begin >= end:
        # Only with several splits, since a row with a token has a slot.
        tl.store(logsums + index, tl.full((block_m,), float("-inf"), tl.float32), mask=real)
        return

    column, value_column = tl.arange(0, block_dim)[None, :], tl.arange(0, block_value)[None, :]
    place = q + token[:, None] * q_token + head[:, None] * q_head + column
    queries = tl.load(place, mask=real[:, None] & (column < dim), other=0.0)
    sums, largest, weight = _attend(
        queries, position, seen, base, positions + start + lead, keys + row.to(tl.int64) * k_row + kv_head * k_head,
        values + row.to(tl.int64) * v_row + kv_head * v_head, begin, end, log_scale, k_slot, v_slot,
        window, dim, value_dim, block_dim, block_value, block_m, block_n, precision, tree_columns > 0,
    )  # fmt: skip
    # A token may see nothing in this part of the row.
    seen = weight > 0
    mean = sums / tl.where(seen, weight, 1.0)[:, None]
    if divided:
        tl.store(
            logsums + index, tl.where(seen, largest + tl.log2(tl.where(seen, weight, 1.0)), float("-inf")), mask=real
        )
    present = real[:, None] & (value_column < value_dim)
    tl.store(out + index[:, None] * value_dim + value_column, mean.to(out.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["group"])
def _merge_kernel(
    means: tl.tensor,
    logsums: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    v_row: int,
    v_head: int,
    group: int,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    splits: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Put the parts of one token and query head together; a token that is none gets the value in slot 0."""
    await_inputs(chained)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    index = token * tl.num_programs(1) + head
    split = tl.arange(0, splits)
    column = tl.arange(0, block_value)
    position = tl.load(positions + token)
    logsum = tl.load(logsums + index * splits + split)  # whatever it is where there is no token
    if position < 0:
        row = tl.load(rows + token).to(tl.int64)
        first = values + row * v_row + (head // group).to(tl.int64) * v_head + column
        tl.store(out + index * value_dim + column, tl.load(first, mask=column < value_dim), mask=column < value_dim)
    else:
        weight = tl.exp2(logsum - tl.max(logsum, axis=0))
        # Parts of weight 0 may never have been written, and a mask also spares reading them.
        present = (weight > 0)[:, None] & (column < value_dim)[None, :]
        place = means + (index * splits + split)[:, None] * value_dim + column[None, :]
        mean = tl.load(place, mask=present, other=0.0)
        result = tl.sum(mean * weight[:, None], axis=0) / tl.sum(weight, axis=0)
        tl.store(out + index * value_dim + column, result.to(out.dtype.element_ty), mask=column < value_dim)


def ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block: Block,
    scaling: float,
    window: int | None,
    reach: int,
) -> Tensor:
    """Scaled dot-product attention of every token over its own cache row, in which slot == position.

    A token of a chain at position p sees the slots `max(0, p - window + 1)` to p; one of a tree what `Block` says, as
    far as its position is in the window; one without a position gets the value in slot 0 of its row. Query heads
    `i * Hq / Hkv` and following share key-value head i. Scores, softmax and sums are float32; weights are rounded to
    the dtype of the values before the product with them.

    Args:
        q: Turned queries, `[T, Hq, D]`; the last dimension is contiguous, here and in the cache.
        keys: `[R or more, Hkv, S, D]`, the block's own included, finite everywhere.
        values: `[R or more, Hkv, S, Dv]` likewise.
        block: Tokens with positions have to be counted by their row; others need not be.
        scaling: Factor of the scores.
        window: Tokens that a query sees, itself included; None for all up to its own.
        reach: Bound on the largest slot + 1, known to the host. It decides how many programs share a row, which has
            no influence on the result beyond rounding, and little on the time as long as it is not far off.

    Returns:
        `[T, Hq * Dv]`, of the dtype of `q`.
    """
    tuning = tuning_of(q.device)
    chain = block.ancestors is None
    if block.whole_row is not None and chain and len(q) >= tuning.whole_row and window is None:
        return _causal_attention(q, keys[block.whole_row], values[block.whole_row], scaling)
    slots = reach if window is None else min(reach, window + block.max_count)
    group = q.shape[1] // keys.shape[1]
    plan = plan_launch(
        max(1, block.max_count) * group,
        block.starts.shape[0] * keys.shape[1],
        slots,
        max(keys.shape[-1], values.shape[-1]),
        keys.element_size(),
        _processors(q.device),
        shared_memory(q.device),
        tuning.attention,
    )
    sizes = (q.dtype, keys.shape[3], values.shape[3], window, chain)
    launch = partial(launch_attention, q, keys, values, block, scaling, window)
    return launch_that_fits(q.device, sizes, plan, launch)


def _causal_attention(q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention of the first tokens of one row among themselves, by torch; keys and values `[Hkv, S, D or Dv]`."""
    tokens = len(q)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None, :, :tokens], values[None, :, :tokens],
        is_causal=True, scale=scaling, enable_gqa=True,
    )  # fmt: skip
    return mixed[0].transpose(0, 1).flatten(1)


@on_its_device
def launch_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block: Block,
    scaling: float,
    window: int | None,
    plan: LaunchPlan,
) -> Tensor:
    """`ragged_attention` in a launch of a given shape, for measuring shapes against each other."""
    total, heads, dim = q.shape
    kv_heads, value_dim = values.shape[1], values.shape[-1]
    out = torch.empty((total, heads * value_dim), dtype=q.dtype, device=q.device)
    if not total:
        return out
    splits, group = plan.splits, heads // kv_heads
    logsums, means = out, out
    if splits > 1:
        logsums = torch.empty((total, heads, splits), dtype=torch.float32, device=q.device)
        means = torch.empty((total, heads, splits, value_dim), dtype=torch.float32, device=q.device)
    block_value = triton.next_power_of_2(value_dim)
    value_strides = _vector_strides(values)
    grid = (plan.query_blocks * splits, kv_heads, block.starts.shape[0] + (splits == 1))
    _attention_kernel[grid](
        q, keys, values, means, logsums, block.rows, block.positions, block.starts, block.counts,
        block.slots, block.positions if block.ancestors is None else block.ancestors,
        total, plan.query_blocks, splits, scaling * log2(e),
        *_vector_strides(q), *_vector_strides(keys), *value_strides,
        group=group, window=window or 0, dim=dim, value_dim=value_dim,
        block_dim=max(16, triton.next_power_of_2(dim)), block_value=max(16, block_value),
        block_m=plan.block_m, block_n=plan.block_n, divided=splits > 1, fewest=FEWEST_SLOTS,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        tree_columns=0 if block.ancestors is None else max(16, triton.next_power_of_2(block.max_count)),
        num_warps=plan.warps, num_stages=plan.stages, **chaining(q.device),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(total, heads)](
            means, logsums, values, out, block.rows, block.positions, *value_strides[:2], group,
            value_dim=value_dim, block_value=block_value, splits=splits,
            num_warps=4 if splits * block_value > 1024 else 2, **chaining(q.device),
        )  # fmt: skip
    return out


@cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; of an H100 where kernels are only interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _vector_strides(states: Tensor) -> tuple[int, ...]:
    """All strides but the last one, which has to be 1: the kernels read vectors along it."""
    *outer, last = states.stride()
    if last != 1:
        msg = (
            f"a tensor of shape {tuple(states.shape)} has strides {states.stride()}, but the last one has to be 1. "
            "Call .contiguous() on it."
        )
        raise ValueError(msg)
    return tuple(outer)
