"""The nucleus of the best tokens, in one kernel: top-p after top-k, equal scores included.

In plain torch that sorts the vocabulary. Only the best tokens, the number of scores that equal the last of them, and
one more look at each score are needed.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels.chaining import await_inputs, chaining

BLOCK = 4096
"""Scores that a program reads at once."""
SMALLEST: tl.constexpr = tl.constexpr(1e-38)
"""What a weight is taken to have at least where it divides."""


@triton.jit
def _nucleus_kernel(
    scores: tl.tensor,
    best: tl.tensor,
    kept: tl.tensor,
    row_stride: int,
    vocabulary: int,
    count: int,
    top_p: float,
    block: tl.constexpr,
    block_best: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Handle one row, which is read twice: to count what equals the last of the best, and to write what is kept."""
    await_inputs(chained)
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    kept += row * vocabulary
    best += row * count
    lane = tl.arange(0, block)
    place = tl.arange(0, block_best)
    value = tl.load(best + place, mask=place < count, other=float("-inf"))
    largest = tl.load(best)
    last = tl.load(best + count - 1)

    equal = tl.zeros((block,), tl.int32)
    for start in range(0, vocabulary, block):
        score = tl.load(scores + start + lane, mask=start + lane < vocabulary, other=float("nan"))
        equal += (score == last).to(tl.int32)
    counted = tl.sum(((value == last) & (place < count)).to(tl.int32), axis=0)
    more = (tl.sum(equal, axis=0) - counted).to(tl.float32)

    weight = tl.exp(value - largest)
    before = tl.cumsum(weight, axis=0) - weight
    mass = tl.sum(weight, axis=0)
    last_weight = tl.exp(last - largest)
    limit = top_p * (mass + more * last_weight)
    inside = ((before < limit) | (place == 0)) & (place < count)
    # Of what equals the last but is none of the best, as much as has less than the limit in front of it.
    room = top_p * more - (1 - top_p) * mass / tl.maximum(last_weight, SMALLEST)
    beyond = tl.minimum(tl.maximum(tl.ceil(room), 0.0), more).to(tl.int32)
    threshold = tl.min(tl.where(inside, value, float("inf")), axis=0)
    allowed = tl.sum((inside & (value == threshold)).to(tl.int32), axis=0) + beyond

    seen = tl.zeros((), tl.int32)
    for start in range(0, vocabulary, block):
        there = start + lane < vocabulary
        score = tl.load(scores + start + lane, mask=there, other=float("nan"))
        tie = (score == threshold).to(tl.int32)
        rank = seen + tl.cumsum(tie, axis=0)
        stays = (score > threshold) | ((tie > 0) & (rank <= allowed))
        tl.store(kept + start + lane, tl.where(stays, score, float("-inf")), mask=there)
        seen += tl.sum(tie, axis=0)


def nucleus(scores: Tensor, best: Tensor, top_p: float) -> Tensor:
    """Keep the most likely ones of the best tokens whose probabilities reach a sum, and exclude all others.

    Best are the tokens that score at least as much as the last of `best`, which may be more than those in it. A token
    is kept if those in front of it have less than `top_p` of their probability; the first always is. Where only some of
    equal scores are kept, they are those of the smallest ids.

    Args:
        scores: `[rows, vocabulary]`, float32, no NaN.
        best: The largest scores of each row, `[rows, k]`, float32, largest first; k at most 1024.
        top_p: 0 to 1.

    Returns:
        The scores that are kept and -inf elsewhere, `[rows, vocabulary]`, float32.
    """
    rows, vocabulary = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    best = best.contiguous()
    kept = torch.empty(rows, vocabulary, dtype=torch.float32, device=scores.device)
    if rows:
        _nucleus_kernel[(rows,)](
            scores,
            best,
            kept,
            scores.stride(0),
            vocabulary,
            best.shape[1],
            top_p,
            block=BLOCK,
            block_best=triton.next_power_of_2(best.shape[1]),
            num_warps=16,
            **chaining(scores.device),
        )
    return kept
