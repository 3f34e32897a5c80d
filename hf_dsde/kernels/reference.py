"""The operations of a fused pass in plain torch: any device, any floating dtype, nothing clever.

They say what the kernels have to compute, and they serve where there is no kernel. Each rounds where the stock modules
of transformers round, so that a pass made of them differs from the stock one only by the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_dsde import signals
from hf_dsde.kernels.block import Block
from hf_dsde.kernels.four_bit_weights import FourBits, dequantised

QUERIES_AT_ONCE = 64
"""Tokens whose keys and values are gathered at once; bounds the memory of `ragged_attention`, not its result."""


class LowRank(NamedTuple):
    """What one adapter adds to a linear module (Hu et al., "LoRA", 2021): scaling * B A x.

    Attributes:
        down: A, `[r, H]`, contiguous.
        up: B, `[N, r]`, contiguous, of the same dtype.
        scaling: Factor of the product.
    """

    down: Tensor
    up: Tensor
    scaling: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise by the root mean square (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4).

    In float32 whatever the dtype of `x`, rounded to that dtype before the product with `weight`, as Llama's norm does.

    Args:
        x: `[T, H]`; or heads of queries and keys, `[T * heads, D]`.
        weight: `[H]`, of the dtype of `x`.
        eps: Added to the mean square.

    Returns:
        Of the shape and dtype of `x`.
    """
    single = x.float()
    scale = torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (single * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream and normalise the sum.

    Args:
        x: Output of a sublayer, `[T, H]`.
        residual: The stream it is added to, `[T, H]`.
        weight: `[H]`, of the dtype of `x`.
        eps: Added to the mean square.

    Returns:
        The normalised sum, and the sum rounded to the dtype of `x`, both `[T, H]`.
    """
    summed = residual + x
    return rms_norm(summed, weight, eps), summed


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The gated product of SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): silu(gate) * up.

    Args:
        gate: `[T, I]`.
        up: `[T, I]`, of the same dtype.

    Returns:
        `[T, I]`; silu is rounded to the dtype before the product.
    """
    return functional.silu(gate) * up


def pays(
    tokens: int,  # noqa: ARG001 - as the kernels
    matrices: int,  # noqa: ARG001
    rows: int,  # noqa: ARG001
    width: int,  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
) -> bool:
    """Whether `linears` and `gated_linear` are preferred to calling modules: always, since it comes to the same."""
    return True


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    """Multiply the same tokens by several weight matrices.

    Args:
        x: `[T, H]`.
        weights: `[N_i, H]` each, of the dtype of `x`.
        biases: For each weight a vector `[N_i]`, or None; None for no bias at all.

    Returns:
        `x @ weight.T + bias` for each weight, `[T, N_i]`, rounded once.
    """
    vectors = [None] * len(weights) if biases is None else biases
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, vectors, strict=True)]


def side_by_side(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    """Return what each of some linear modules makes of the same `x`, `[T, H]`."""
    return [product(x) for product in products]


def reads_four_bits(
    tokens: int,  # noqa: ARG001 - as the kernels
    weight: FourBits,  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
) -> bool:
    """Whether `four_bit_linear` is preferred to calling modules: never, since those know their device better."""
    return False


def four_bit_linear(x: Tensor, weight: FourBits, bias: Tensor | None = None) -> Tensor:
    """Multiply tokens by a weight of four bits.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        bias: `[N]`, of the dtype of `x`.

    Returns:
        `x @ weight.T + bias`, `[T, N]`, rounded once. What the weight stands for is rounded to the dtype of `x` first;
        the kernel rounds the numbers that codes stand for instead, and not their products with scales.
    """
    return functional.linear(x, dequantised(weight, x.dtype), bias)


def gated_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The first half of a SwiGLU layer (Shazeer, "GLU Variants Improve Transformer", 2020): silu(x gate^T) * x up^T.

    Args:
        x: `[T, H]`.
        gate: `[I, H]`, of the dtype of `x`.
        up: Likewise.

    Returns:
        `[T, I]`; both products and silu are rounded to the dtype before the last product.
    """
    return silu_mul(functional.linear(x, gate), functional.linear(x, up))


def add_low_rank(x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> list[Tensor]:
    """Add to what linear modules made of `x` what their adapters make of it (Hu et al., "LoRA", 2021, equation 3).

    Args:
        x: `[T, H]`.
        bases: What one to three modules made of it, `[T, N_i]`.
        adapters: Of each module, at least one, in the order in which they are added.

    Returns:
        base + (x A^T B^T) * scaling + ..., for each module, `[T, N_i]`, of the dtype of its base. `x` is cast to the
        dtype of an adapter, which both products and the scaled one are rounded to; sums are rounded to the larger of
        that and the base's.
    """
    results = []
    for base, terms in zip(bases, adapters, strict=True):
        result = base
        for down, up, scaling in terms:
            result = result + functional.linear(functional.linear(x.to(down.dtype), down), up) * scaling
        results.append(result.to(base.dtype))
    return results


def gated_low_rank(x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> Tensor:
    """Adapt gate and up of a SwiGLU layer and take their gated product.

    Args:
        x: `[T, H]`.
        bases: What the modules of gate and up made of it, `[T, I]` each.
        adapters: Of both, at least one each.

    Returns:
        silu(gate) * up of what `add_low_rank` returns, `[T, I]`, rounded where `silu_mul` rounds.
    """
    return silu_mul(*add_low_rank(x, bases, adapters))


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    slots: Tensor,
) -> Tensor:
    """Turn queries and keys by their positions, and write keys and values into their places of the cache.

    Rotary embeddings (Su et al., "RoFormer", 2021) in Llama's convention: dimension i is paired with i + D / 2.

    Args:
        q: Queries, `[T, Hq, D]`; this and the next two may be views that are not contiguous.
        k: Keys, `[T, Hkv, D]`.
        v: Values, `[T, Hkv, Dv]`.
        cos: Cosines at the position of each token, `[T, D]`, of the dtype of `q`.
        sin: Sines likewise.
        keys: Cache to write into, `[R, Hkv, S, D]`.
        values: Cache to write into, `[R, Hkv, S, Dv]`. In float16, what is too large for it is stored as its largest.
        rows: Cache row of each token, `[T]`, int64.
        slots: Cache slot of each token, `[T]`, int64. Where two tokens share a place, either may win.

    Returns:
        The turned queries, `[T, Hq, D]`.
    """
    keys.transpose(1, 2)[rows, slots] = _rotated(k, cos, sin)
    values.transpose(1, 2)[rows, slots] = v.nan_to_num() if values.dtype == torch.float16 else v
    return _rotated(q, cos, sin)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[T, heads, D]`, turned by the angles of each token."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return states * cos[:, None] + turned * sin[:, None]


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
    far as its position is in the window. Where there is no token (p < 0) it sees slot 0, so that its output is finite.
    Query heads `i * Hq / Hkv` and following share key-value head i. Scores, softmax and
    sums are float32, float64 for float64 states.

    Args:
        q: Turned queries, `[T, Hq, D]`.
        keys: `[R, Hkv, S, D]`, the block's own included.
        values: `[R, Hkv, S, Dv]`.
        block: Row, position and slot of each token, and its ancestors.
        scaling: Factor of the scores.
        window: Tokens that a query sees, itself included; None for all up to its own.
        reach: Bound on the largest slot + 1, known to the host. Slots beyond it are not looked at.

    Returns:
        `[T, Hq * Dv]`, of the dtype of `q`.
    """
    reach = min(reach, keys.shape[2])
    parts = []
    for part in torch.arange(len(q), device=q.device).split(QUERIES_AT_ONCE):
        rows, visible = block.rows[part], visible_to(block, part, len(keys), reach, window)
        parts.append(_attend(q[part], keys[rows, :, :reach], values[rows, :, :reach], visible, scaling))
    return torch.cat(parts)


def visible_to(block: Block, part: Tensor, rows: int, reach: int, window: int | None) -> Tensor:
    """Say which slots the tokens `part` of a block over so many rows see, `[len(part), reach]`, bool."""
    query = block.positions[part].clamp_min(0)[:, None]
    slot = torch.arange(reach, device=query.device)
    if block.ancestors is None:
        visible, place = slot <= query, slot
    else:
        slots = block.slots.masked_fill(block.positions < 0, reach)
        base = slots.new_full((rows,), reach).scatter_reduce(0, block.rows, slots, "amin")
        places = torch.arange(reach + 1, device=query.device).repeat(rows, 1)
        places[block.rows, slots] = block.positions
        bit = slot - base[block.rows[part], None]
        seen = (block.ancestors[part, None] >> bit.clamp(0, 63)) & 1 == 1
        visible = torch.where(block.positions[part, None] < 0, slot == 0, (bit < 0) | (seen & (bit < 64)))
        place = places[block.rows[part], :reach]
    return visible if window is None else visible & (place > query - window)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Attention of queries `[T, Hq, D]`, each over keys and values of its own, `[T, Hkv, slots, D or Dv]`."""
    tokens, heads, width = q.shape
    key_value_heads = keys.shape[1]
    precision = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(tokens, key_value_heads, heads // key_value_heads, width).to(precision)
    scores = grouped @ keys.to(precision).transpose(2, 3) * scaling
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    return (weights @ values.to(precision)).to(q.dtype).reshape(tokens, -1)


def entropy_and_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and the two largest probabilities of the softmax at temperature 1.

    Args:
        logits: `[rows, vocabulary]`, any float dtype; -inf where a token is excluded.

    Returns:
        Entropies, `[rows]`, nats; the two largest probabilities, largest first, `[rows, 2]`; float32.
    """
    log_probabilities = torch.log_softmax(logits, -1, dtype=torch.float32)
    top = signals.two_largest(log_probabilities).exp()
    return signals.entropy_of_(log_probabilities), top


def kl_divergence(target_logits: Tensor, draft_logits: Tensor, ids: Tensor | None) -> Tensor:
    """KL(target || draft) as in `signals.kl_divergence`, of a draft that need not know all of the target's tokens.

    Args:
        target_logits: `[rows, width, vocabulary]`, float32; -inf where the target excludes a token.
        draft_logits: `[rows, width, n]`, float32, n at most the vocabulary.
        ids: The target's id of each of the draft's tokens, `[n]`, int64, each at most once; None for its first n.

    Returns:
        Divergences, `[rows, width]`, float32, nats, at least 0.
    """
    everything = signals.over_vocabulary(draft_logits, ids, target_logits.shape[-1])
    return signals.kl_divergence(target_logits, everything)


def nucleus(scores: Tensor, best: Tensor, top_p: float) -> Tensor:
    """Keep the most likely ones of the best tokens whose probabilities reach a sum, and exclude all others.

    Best are the tokens that score at least as much as the last of `best`, which may be more than those in it. A token
    is kept if those in front of it have less than `top_p` of their probability; the first always is. Which ones of
    equal scores are kept, where only some are, is left open.

    Args:
        scores: `[rows, vocabulary]`, floating point.
        best: The largest scores of each row, `[rows, k]`, largest first.
        top_p: 0 to 1.

    Returns:
        The scores that are kept and -inf elsewhere, `[rows, vocabulary]`.
    """
    scores = scores.masked_fill(scores < best[:, -1:], float("-inf"))
    ordered, places = scores.sort()
    excluded = ordered.softmax(1).cumsum(1) <= 1 - top_p
    excluded[:, -1].fill_(False)
    return scores.masked_fill(excluded.scatter(1, places, excluded), float("-inf"))
