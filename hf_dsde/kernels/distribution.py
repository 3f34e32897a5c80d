"""What policies ask of a draft's distribution, in one kernel: its entropy and its two largest probabilities.

In plain torch that is a dozen kernels over the vocabulary, one after another, and a draft step is bound by their
number.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.launching import on_its_device

BLOCK = 4096
"""Logits that a program reads at once."""
FARTHEST: tl.constexpr = tl.constexpr(-200.0)
"""Below the largest logit: there the exponential is 0 in float32."""


@triton.jit
def _entropy_and_top_kernel(
    logits: tl.tensor,
    entropy: tl.tensor,
    top: tl.tensor,
    row_stride: int,
    vocabulary: int,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Handle one row, which is read twice: for its two largest logits, then for sums of exponentials."""
    await_inputs(chained)
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    lane = tl.arange(0, block)
    first = tl.full((block,), float("-inf"), tl.float32)
    second = tl.full((block,), float("-inf"), tl.float32)
    for start in range(0, vocabulary, block):
        value = tl.load(logits + start + lane, mask=start + lane < vocabulary, other=float("-inf")).to(tl.float32)
        second = tl.maximum(second, tl.minimum(first, value))
        first = tl.maximum(first, value)
    largest, place = tl.max(first, axis=0, return_indices=True)
    next_largest = tl.max(tl.where(lane == place, second, first), axis=0)

    total = tl.zeros((block,), tl.float32)
    moment = tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        value = tl.load(logits + start + lane, mask=start + lane < vocabulary, other=float("-inf")).to(tl.float32)
        distance = tl.maximum(value - largest, FARTHEST)  # an excluded token is infinitely far away
        weight = tl.exp(distance)
        total += weight
        moment += weight * distance
    mass = tl.sum(total, axis=0)
    tl.store(entropy + row, tl.maximum(tl.log(mass) - tl.sum(moment, axis=0) / mass, 0.0))
    tl.store(top + 2 * row, 1.0 / mass)
    tl.store(top + 2 * row + 1, tl.exp(next_largest - largest) / mass)


@on_its_device
def entropy_and_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and the two largest probabilities of the softmax at temperature 1.

    With `m` the largest logit, `Z = sum_x exp(z_x - m)`: `H = ln Z - sum_x exp(z_x - m) (z_x - m) / Z`.

    Args:
        logits: `[rows, vocabulary]`, any float dtype, at least one finite one in each row; -inf where a token is
            excluded.

    Returns:
        Entropies, `[rows]`, nats; the two largest probabilities, largest first, `[rows, 2]`; float32.
    """
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    entropy = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    if rows:
        _entropy_and_top_kernel[(rows,)](
            logits, entropy, top, logits.stride(0), vocabulary, block=BLOCK, num_warps=16, **chaining(logits.device)
        )
    return entropy, top
