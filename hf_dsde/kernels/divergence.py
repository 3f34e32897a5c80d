"""The divergence between target and draft, in one kernel.

In plain torch it is a dozen kernels over both vocabularies, and, for a draft that knows only some of the target's
tokens, a copy of its logits over all of them. Between two rounds the host waits for the result.
"""

# ruff: noqa: PLR0917 - kernels take pointers, sizes and strides one by one
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_dsde.kernels.chaining import await_inputs, chaining
from hf_dsde.kernels.launching import on_its_device
from hf_dsde.signals import DRAFT_PROBABILITY_FLOOR

BLOCK = 4096
"""Logits that a program reads at once."""
FARTHEST: tl.constexpr = tl.constexpr(-200.0)
"""Below the largest logit: there the exponential is 0 in float32."""


@triton.jit
def _below(values: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """How far logits lie below the largest; an excluded token is infinitely far away, and NaN stays what it is."""
    distance = values - largest
    return tl.where(distance < FARTHEST, FARTHEST, distance)


@triton.jit
def _largest(logits: tl.tensor, count: int, block: tl.constexpr) -> tl.tensor:
    """The largest of `count` logits."""
    lane = tl.arange(0, block)
    largest = tl.full((block,), float("-inf"), tl.float32)
    for start in range(0, count, block):
        largest = tl.maximum(largest, tl.load(logits + start + lane, mask=start + lane < count, other=float("-inf")))
    return tl.max(largest, axis=0)


@triton.jit(do_not_specialize=["width"])
def _kl_divergence_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    ids: tl.tensor,
    divergence: tl.tensor,
    width: int,
    row_stride: int,
    column_stride: int,
    draft_row_stride: int,
    draft_column_stride: int,
    vocabulary: int,
    drafted: int,
    log_floor: float,
    mapped: tl.constexpr,
    block: tl.constexpr,
    chained: tl.constexpr,
) -> None:
    """Handle one position: the sums of both softmaxes, then the divergence over the tokens that the draft knows.

    What the target gives the others is all that it gives, less that.
    """
    await_inputs(chained)
    place = tl.program_id(0).to(tl.int64)
    row, column = place // width, place % width
    target += row * row_stride + column * column_stride
    draft += row * draft_row_stride + column * draft_column_stride
    lane = tl.arange(0, block)

    largest = _largest(target, vocabulary, block)
    total = tl.zeros((block,), tl.float32)
    moment = tl.zeros((block,), tl.float32)
    for start in range(0, vocabulary, block):
        value = tl.load(target + start + lane, mask=start + lane < vocabulary, other=float("-inf"))
        distance = _below(value, largest)
        weight = tl.exp(distance)
        total += weight
        moment += weight * distance
    mass = tl.sum(total, axis=0)
    log_mass = tl.log(mass)

    best = _largest(draft, drafted, block)
    drawn = tl.zeros((block,), tl.float32)
    for start in range(0, drafted, block):
        value = tl.load(draft + start + lane, mask=start + lane < drafted, other=float("-inf"))
        drawn += tl.exp(_below(value, best))
    log_drawn = tl.log(tl.sum(drawn, axis=0))

    known = tl.zeros((block,), tl.float32)
    known_moment = tl.zeros((block,), tl.float32)
    inside = tl.zeros((block,), tl.float32)
    for start in range(0, drafted, block):
        there = start + lane < drafted
        token = tl.load(ids + start + lane, mask=there, other=0) if mapped else start + lane
        distance = _below(tl.load(target + token, mask=there, other=float("-inf")), largest)
        weight = tl.exp(distance)
        likely = tl.load(draft + start + lane, mask=there, other=float("-inf")) - best - log_drawn
        likely = tl.where(likely < log_floor, log_floor, likely)
        inside += weight * (distance - log_mass - likely)
        known += weight
        known_moment += weight * distance
    sum_inside = tl.sum(inside, axis=0)
    if drafted < vocabulary:
        # Of what the draft does not know: sum of p (ln p - ln floor).
        unknown = tl.maximum(mass - tl.sum(known, axis=0), 0.0)
        unknown_moment = tl.sum(moment, axis=0) - tl.sum(known_moment, axis=0)
        sum_inside += unknown_moment - unknown * (log_mass + log_floor)
    result = sum_inside / mass
    tl.store(divergence + place, tl.where(result < 0.0, 0.0, result))


@on_its_device
def kl_divergence(target_logits: Tensor, draft_logits: Tensor, ids: Tensor | None) -> Tensor:
    """KL(target || draft) of the softmaxes at temperature 1, the draft's probabilities at least the usual floor.

    `sum_x p(x) (ln p(x) - ln max(q(x), floor))`, as in `signals.kl_divergence`; q is 0 where the draft has no token.

    Args:
        target_logits: `[rows, width, vocabulary]`, float32; -inf where the target excludes a token.
        draft_logits: `[rows, width, n]`, float32, n at most the vocabulary.
        ids: The target's id of each of the draft's tokens, `[n]`, int64, each at most once; None for its first n.

    Returns:
        Divergences, `[rows, width]`, float32, nats, at least 0; NaN where logits are.
    """
    rows, width, vocabulary = target_logits.shape
    if target_logits.stride(2) != 1:
        target_logits = target_logits.contiguous()
    if draft_logits.stride(2) != 1:
        draft_logits = draft_logits.contiguous()
    divergence = torch.empty(rows, width, dtype=torch.float32, device=target_logits.device)
    if rows * width:
        _kl_divergence_kernel[(rows * width,)](
            target_logits,
            draft_logits,
            target_logits if ids is None else ids,
            divergence,
            width,
            *target_logits.stride()[:2],
            *draft_logits.stride()[:2],
            vocabulary,
            draft_logits.shape[2],
            math.log(DRAFT_PROBABILITY_FLOOR),
            mapped=ids is not None,
            block=BLOCK,
            num_warps=16,
            **chaining(target_logits.device),
        )
    return divergence
