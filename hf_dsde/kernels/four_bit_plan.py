"""How a product with a weight of four bits is divided among programs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_dsde.kernels.four_bit_weights import FourBits
from hf_dsde.kernels.launching import HOPPER_SHARED_MEMORY
from hf_dsde.utils.tuning import HOPPER, Tuning, tuning_of

SLICE = 64
"""Elements of a row that are multiplied at once and share a scale."""
MOST_TOKENS = 64
"""What the kernel takes."""
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FourBitPlan:
    """The shape of a launch.

    Attributes:
        block_m: Tokens that a program computes with, a power of two, at least 16, and not fewer than there are.
        block_n: Rows of the weight per program, a power of two, at least 16.
        slices: Slices of a row that are read at once: as many as there are warps, each of which then has one of its
            own, or one, of which each warp multiplies some rows.
        warps: Warps per program.
        stages: Reads under way at once, plus the one that is computed with.
        splits: Parts of the inner dimension, each of which leaves sums of its own if there are several.
    """

    block_m: int
    block_n: int
    slices: int
    warps: int
    stages: int
    splits: int


def plan_four_bits(
    tokens: int, rows: int, width: int, *, shared: int = HOPPER_SHARED_MEMORY, tuning: Tuning = HOPPER
) -> FourBitPlan:
    """Choose the shape of a launch.

    Args:
        tokens: Up to `MOST_TOKENS`.
        rows: Of the weight.
        width: Elements of a row.
        shared: Bytes of shared memory that a program can have.
        tuning: Shapes for the device.
    """
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_n, slices, warps, stages = tuning.four_bit_plans[block_m]
    reads = -(-width // (SLICE * slices))
    # A part of fewer reads than are under way at once would end before it has begun.
    splits = min(tuning.four_bit_programs * block_n // rows, reads // (2 * stages))
    plan = FourBitPlan(block_m, block_n, slices, warps, stages, max(1, splits))
    while held(plan) > shared and (plan.stages > 2 or plan.block_n > 16):
        smaller = replace(plan, stages=plan.stages - 1)
        plan = smaller if plan.stages > 2 else replace(plan, block_n=plan.block_n // 2)
    return plan if held(plan) <= shared else replace(plan, slices=1)


def held(plan: FourBitPlan) -> int:
    """Bytes of shared memory that a program takes for what is read ahead, on its way into products, and summed."""
    weights, states = plan.block_n * SLICE // 2, plan.block_m * SLICE * 2
    ahead = (plan.stages - 1) * plan.slices * (weights + states)
    operands = plan.slices * (4 * weights + states)
    sums = 4 * plan.slices * plan.block_m * plan.block_n if plan.slices > 1 else 0
    return max(ahead + operands, sums)


def reads_four_bits(tokens: int, weight: FourBits, dtype: torch.dtype) -> bool:
    """Whether the kernel is preferred to a module's own product.

    Args:
        tokens: Tokens of the input.
        weight: It has to have whole slices, each of which has one scale.
        dtype: Of the input.
    """
    few = tokens <= min(MOST_TOKENS, tuning_of(weight.codes.device).four_bit_tokens)
    return few and dtype in DTYPES and weight.width % SLICE == 0 and weight.blocksize % SLICE == 0
