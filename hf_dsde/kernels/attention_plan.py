"""The shape of a launch of the attention kernel, from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hf_dsde.kernels.launching import HOPPER_SHARED_MEMORY
from hf_dsde.utils.tuning import HOPPER, AttentionTimes

FEWEST_SLOTS = 128
"""No program of a divided row gets fewer slots: a handful of loads is not worth a launch and a merge."""
MOST_SPLITS = 64
FILLED = 0.75
"""Slots that rows have, of the slots that they may have: bounds double as texts grow."""


@dataclass(frozen=True)
class LaunchPlan:
    """The shape of one launch.

    Attributes:
        block_m: Queries per program, a power of two, at least 16.
        block_n: Slots read at once, a power of two, at least 16.
        query_blocks: Programs that share the queries of one row and key-value head.
        splits: Programs that share the slots of one row and key-value head, a power of two.
        warps: Warps per program.
        stages: Blocks of keys and values under way at once.
    """

    block_m: int
    block_n: int
    query_blocks: int
    splits: int
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def plan_launch(
    queries: int,
    groups: int,
    slots: int,
    dim: int,
    element_size: int,
    processors: int,
    shared: int = HOPPER_SHARED_MEMORY,
    times: AttentionTimes = HOPPER.attention,
) -> LaunchPlan:
    """Choose the shape of a launch.

    Splits are chosen by an estimate of the time. Programs that run at once share the device's bandwidth, yet no block
    of slots takes less than the latency of one, which is why dividing pays where few programs have many slots; against
    it stand a merge, the float32 means that parts write and it reads, and programs that wait for others. Rows that are
    longer than others keep the last programs waiting, for a quarter of a wave.

    Args:
        queries: Bound on the queries of one row and key-value head: tokens times query heads per key-value head.
        groups: Cache rows times key-value heads.
        slots: Bound on the slots that a row's queries see.
        dim: Size of a head, the larger one of keys' and values'.
        element_size: Bytes per element of the cache.
        processors: Streaming multiprocessors of the device.
        shared: Bytes of shared memory that a program can have.
        times: What the estimate is made of.
    """
    widest = 64 if element_size == 2 else 16  # without tensor cores, larger products would spill registers
    block_m = min(max(16, _power_of_two(queries)), widest)
    block_n = min(max(16, 16384 // (_power_of_two(dim) * element_size)), 128)  # tiles of 16 KiB
    stages = 3 if element_size == 2 else 2
    block_m, block_n, stages = _within(shared, block_m, block_n, stages, _power_of_two(dim), element_size)
    query_blocks = -(-queries // block_m)
    resident = 2 * processors

    slot_bytes = 2 * dim * element_size  # a key and a value

    def estimate(splits: int) -> float:
        programs = groups * query_blocks * splits
        at_once = min(programs, resident)
        block = times.block + at_once * block_n * slot_bytes / times.bandwidth
        each = times.program + max(1.0, FILLED * slots / splits / block_n) * block
        time = (max(1.0, programs / resident) + 0.25) * each
        if splits == 1:
            return time
        means = 2 * 4 * dim * queries * groups * splits  # written and read
        return time + times.merge + means / times.bandwidth

    most = max(1, min(MOST_SPLITS, slots // FEWEST_SLOTS))
    splits = min((1 << power for power in range(most.bit_length())), key=estimate)
    return LaunchPlan(block_m, block_n, query_blocks, splits, warps=4, stages=stages)


def _within(shared: int, block_m: int, block_n: int, stages: int, dim: int, element_size: int) -> tuple[int, int, int]:
    """Return `block_m`, `block_n` and stages, smaller where a program would not get the shared memory for them."""

    def held(block_m: int, block_n: int, stages: int) -> int:
        # Where a large product reads keys and values from shared memory itself, those it is at have to stay there.
        buffers = stages if block_m >= 64 and element_size == 2 else stages - 1
        states = element_size * dim * (2 * block_n * max(1, buffers) + block_m)  # keys and values; queries
        return states + element_size * block_m * block_n  # weights

    while held(block_m, block_n, stages) > shared:
        if stages > 2:
            stages -= 1
        elif block_m > 16:
            block_m //= 2
        elif block_n > 16:
            block_n //= 2
        elif stages > 1:
            stages -= 1
        else:
            break
    return block_m, block_n, stages


def _power_of_two(number: int) -> int:
    """The smallest one that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
