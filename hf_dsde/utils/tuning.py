"""Constants that depend on the hardware: one row for each class of devices on which they have been measured.

What belongs to an algorithm is no part of it, nor is what a device tells of itself (its processors and shared memory).
Whatever the row, results are the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

ProductShape = tuple[int, int, int, int]
"""Rows per program, elements read at once, warps, stages; as in `hf_dsde.kernels.linear.SkinnyPlan`."""


@dataclass(frozen=True)
class AttentionTimes:
    """What the time of an attention launch is estimated from. Of an H100, and from a few timings.

    `benchmarks/attention_variants.py --sweep` times the launches that come of it against others, in
    attention_h200.json on an H200.

    Attributes:
        program: Microseconds until a program has read where its row is and has its first keys under way.
        block: Microseconds of a block of slots, however few programs there are: its loads wait for memory, its sums for
            each other.
        bandwidth: Bytes per microsecond that the device reads for all programs together.
        merge: Microseconds of a second kernel, and of the gap in front of it.
    """

    program: float
    block: float
    bandwidth: float
    merge: float


@dataclass(frozen=True)
class Tuning:
    """Constants of a class of devices. Files are those of benchmarks/results/gpu.

    Attributes:
        paying: Number of matrices in a launch -> up to so many tokens, this package's products are preferred to the
            vendor's library for up to so many bytes of weights. Of a large matrix the library reads as fast as anybody,
            and several in one launch spare the others' beginnings and ends. Queries, keys and values of models up to
            32B take 0.4 to 0.75 of the library's time with up to 16 tokens (skinny_products_h100.json), those of 1B
            0.49 with 32 and 0.69 with 64 (skinny_products_h200.json). Those of 8B are faster as branches of the graph
            from 24 tokens on: a step of 32 rows takes 0.98 of the time (H200).
        linears_plans: Bound on the rows of all weights of a launch, ascending -> its shape, for up to 16 tokens of a
            two-byte dtype. Rows per program are few enough for every processor of an H100 (132) to have some
            (skinny_products_h100.json).
        gated_plans: The same for `gated_linear`, whose programs read as many rows of each of its two matrices
            (skinny_products_h100.json).
        wide_plan: Of either kind, for more than 16 tokens, which need room themselves: little is read ahead
            (skinny_products_h200.json).
        four_bit_tokens: Up to so many tokens, this package's product with weights of four bits is preferred to that of
            bitsandbytes. It takes 1.05 to 1.2 of the time with one token, 0.4 to 0.6 with 4, 0.4 to 0.7 with 32 and 0.5
            to 0.9 with 64 (four_bit_products_h200.json).
        four_bit_plans: Tokens that a program computes with -> rows of the weight, slices of a row that are read at
            once, warps and stages, as in `hf_dsde.kernels.four_bit_plan.FourBitPlan` (four_bit_products_h200.json).
        four_bit_programs: The inner dimension of such a product is divided where rows alone would give half as many
            programs, or fewer.
        branch_tokens: Up to so many tokens, products of one input are branches of a recorded pass; with more, every
            product occupies the device by itself (H200, up to 256 rows).
        attention: What launches of the attention kernel are divided by (attention_h200.json).
        whole_row: Tokens from which on a prompt that is alone in its pass is left to torch's attention, which then
            takes 0.5 to 0.6 of the kernel's time with 32 heads, 8 of keys (H200).
        stored_sizes: Tokens of recorded passes that only store them, ascending. Storing 1024 tokens of an 8B model
            takes 24 ms recorded and 30 ms eagerly; with more, arithmetic hides the launches (prefill_8B_d34fb29.json).
        split_saving: Columns of padding that a further pass has to save when prompts of different lengths are stored:
            about what launching it costs (14 to 33 ms on an H200's host).
        reach_factor: Ratio of neighbouring bounds of rows' lengths that a fused pass is recorded for. Passes over 400
            slots of 32 rows take 3 to 6 % longer when they are recorded for 4000 slots instead of 500, those of 8 rows
            up to 2 %, those of one no longer (H200).
        fine_rows: Rows above which passes get smaller by a third or a quarter, and not only by half, as rows finish:
            there, arithmetic and reading the cache outweigh reading the weights (H200, 8 to 256 rows).
        long_gap: Tokens that a row may miss and still be caught up in the first pass of a draft, whether it drafts or
            not. Whoever misses more is caught up when it drafts, by passes of its own: a probe in a few rows then does
            not cost what all rows have missed (bad_draft_probes_h200.json).
        free_tokens: Tokens that a pass takes in while it is bound by reading weights: padding below costs nothing
            (pass_times_h200.json).
        wide_pass_tokens: In a batch of few rows, the first pass of a draft takes in all that is missed if it has no
            more tokens than this, padding included: such a pass takes little longer than one of a token per row, where
            two passes take twice as long (pass_times_h200.json: 1.5 times with 96 tokens of 1B).
    """

    paying: Mapping[int, tuple[tuple[int, int], ...]]
    linears_plans: Mapping[int, ProductShape]
    gated_plans: Mapping[int, ProductShape]
    wide_plan: ProductShape
    four_bit_tokens: int
    four_bit_plans: Mapping[int, ProductShape]
    four_bit_programs: int
    branch_tokens: int
    attention: AttentionTimes
    whole_row: int
    stored_sizes: tuple[int, ...]
    split_saving: int
    reach_factor: int
    fine_rows: int
    long_gap: int
    free_tokens: int
    wide_pass_tokens: int


HOPPER = Tuning(
    paying=MappingProxyType(
        {
            1: ((16, 40 << 20),),
            2: ((16, 96 << 20),),
            3: ((16, 96 << 20), (64, 16 << 20)),
        }
    ),
    linears_plans=MappingProxyType(
        {
            2048: (8, 256, 4, 6),
            6144: (16, 256, 4, 5),
            16384: (32, 256, 4, 4),
            1 << 62: (64, 128, 4, 5),
        }
    ),
    gated_plans=MappingProxyType(
        {
            8192: (8, 256, 4, 5),
            16384: (16, 128, 2, 6),
            1 << 62: (32, 128, 4, 5),
        }
    ),
    wide_plan=(16, 256, 4, 3),
    four_bit_tokens=64,
    four_bit_plans=MappingProxyType({16: (32, 4, 4, 3), 32: (32, 4, 4, 3), 64: (32, 4, 4, 3)}),
    four_bit_programs=264,
    branch_tokens=512,
    attention=AttentionTimes(program=1.0, block=0.4, bandwidth=3.0e6, merge=2.4),
    whole_row=1024,
    stored_sizes=(64, 128, 192, 256, 384, 512, 768, 1024),
    split_saving=256,
    reach_factor=4,
    fine_rows=64,
    long_gap=8,
    free_tokens=128,
    wide_pass_tokens=128,
)
"""Compute capability 9: H100, H200, GH200."""

SAFE = replace(
    HOPPER,
    paying=MappingProxyType({}),
    linears_plans=MappingProxyType({1 << 62: (16, 128, 4, 3)}),
    gated_plans=MappingProxyType({1 << 62: (16, 128, 4, 3)}),
    wide_plan=(16, 128, 4, 2),
    four_bit_tokens=0,
    four_bit_programs=256,
    branch_tokens=64,
    attention=replace(HOPPER.attention, bandwidth=1.5e6),
    whole_row=128,
    stored_sizes=(64, 128, 192, 256),
    wide_pass_tokens=64,
)
"""GPUs on which nothing has been measured. Where the vendor's library can do it, it does: all products, and attention
of a prompt alone. Launches read little ahead, the device is taken to read half as fast as a Hopper, and passes are
recorded, branched and widened only where they are so small that any GPU waits for launches and weights. What is as on a
Hopper costs a few per cent at most where it does not suit."""


def tuning_for(capability: tuple[int, int] | None) -> Tuning:
    """Return the row of a CUDA compute capability; None is a GPU that has none, such as AMD's."""
    return HOPPER if capability is not None and capability[0] == 9 else SAFE


def tuning_of(device: torch.device) -> Tuning:
    """Return the row of a device.

    What is no GPU gets that of a Hopper: there kernels are interpreted and recordings are rehearsed, as a Hopper would
    run them.
    """
    if device.type != "cuda":
        return HOPPER
    return tuning_for(_capability(torch.cuda.current_device() if device.index is None else device.index))


def half_precision(device: torch.device) -> torch.dtype:
    """Return the two-byte dtype of a device: bfloat16, or float16 on GPUs before Ampere, which lack the other."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.bfloat16
    capability = _capability(torch.cuda.current_device() if device.index is None else device.index)
    return torch.float16 if capability is not None and capability < (8, 0) else torch.bfloat16


@cache
def _capability(index: int) -> tuple[int, int] | None:
    """CUDA compute capability of a GPU; AMD's have numbers that look like one."""
    return None if torch.version.hip else torch.cuda.get_device_capability(index)
