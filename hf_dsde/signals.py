"""What can be read off the draft's and the target's distributions: entropy, divergence and their statistics.

Pure functions, without model or state. Those of distributions take tensors and never synchronise with the host;
whatever the dtype of the logits, sums over the vocabulary are taken in float32. Divergence and entropy want *raw*
logits: at temperature 0 the processed distributions are one-hot and their divergence says nothing. Those of a row's
divergences take arrays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU_CACHE_ELEMENTS = 1 << 17
"""Values that a CPU works on at once, of distributions it reads several times: far faster than all at once."""
DEVICE_ELEMENTS = 1 << 24
"""Values that another device works on at once: 64 MiB of float32 for each tensor in between, and enough to be busy."""
DRAFT_PROBABILITY_FLOOR = 1e-8
"""The smallest probability that the draft is taken to give a token, so that a KLD stays finite (at most 18.4 nats)."""
UNKNOWN_TOKEN_LOGIT = -1e4
"""Logit of ids that the draft lacks: probability 0 in float32. Finite, so that a logits processor which forbids
everything else leaves a distribution, and no NaN."""
_TINY = np.finfo(np.float32).tiny


def over_vocabulary(logits: Tensor, ids: Tensor | None, size: int) -> Tensor:
    """Put a draft's logits in the places of their tokens in the target's vocabulary.

    Args:
        logits: `[..., n]`, any float dtype.
        ids: The target's id of each of the draft's tokens, `[n]`, int64, each at most once; None if they are the first
            `n`, and n at most `size`.
        size: Of the target's vocabulary.

    Returns:
        `[..., size]`, of their dtype; tokens that the draft lacks get `UNKNOWN_TOKEN_LOGIT`. `logits` itself if nothing
        has to move.
    """
    if ids is None:
        missing = size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=UNKNOWN_TOKEN_LOGIT) if missing else logits
    everything = logits.new_full((*logits.shape[:-1], size), UNKNOWN_TOKEN_LOGIT)
    return everything.index_copy_(-1, ids, logits)


def token_probability(scores: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each token under the softmax of its scores.

    Args:
        scores: Processed scores, shape `[..., vocabulary]`, any float dtype; -inf where a token is excluded.
        tokens: Token ids, shape `[...]`, int64.

    Returns:
        Probabilities, shape `[...]`, float32.
    """
    scores = scores.float()
    chosen = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (chosen - scores.logsumexp(-1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the raw softmax at temperature 1, `H = -sum_x q(x) ln q(x)`.

    Args:
        logits: Raw logits, shape `[..., vocabulary]`, any float dtype; -inf entries contribute nothing.

    Returns:
        Entropies, shape `[...]`, float32, nats.
    """
    entropies = [entropy_of_(torch.log_softmax(part, -1, dtype=torch.float32)) for part in _parts(logits, 8)]
    return torch.cat(entropies).view(logits.shape[:-1])


def entropy_of_(log_probabilities: Tensor) -> Tensor:
    """`entropy` of known log-probabilities, shape `[..., vocabulary]`, float32, which it overwrites.

    Memory that a CPU has not touched lately costs more than the arithmetic.
    """
    probabilities = log_probabilities.exp()
    # An excluded token has log-probability -inf, and 0 * -inf is not a number.
    finite = log_probabilities.clamp_min_(torch.finfo(torch.float32).min)
    return -probabilities.mul_(finite).sum(-1).clamp_max_(0.0)


def kl_divergence(target_logits: Tensor, draft_logits: Tensor, floor: float = DRAFT_PROBABILITY_FLOOR) -> Tensor:
    """KL(target || draft) of the raw softmaxes at temperature 1, the per-token signal of DSDE (arXiv 2509.01083).

    `sum_x p(x) (ln p(x) - ln max(q(x), floor))` with p the target and q the draft. The floored draft is not
    renormalised, as in the authors' public code; since it then sums to slightly more than 1, the sum may fall below
    zero by as much, which is cut off. Tokens of target probability 0 contribute nothing.

    Args:
        target_logits: Shape `[..., vocabulary]`, any float dtype; -inf where the target excludes a token.
        draft_logits: Shape `[..., vocabulary]`, any float dtype; -inf where the draft has no such token.
        floor: The least draft probability, so that a token that only the target knows costs `-ln floor`.

    Returns:
        Divergences, shape `[...]`, float32, nats, at least 0.
    """
    pairs = zip(_parts(target_logits), _parts(draft_logits), strict=True)
    return torch.cat([_divergence(*pair, floor) for pair in pairs]).view(target_logits.shape[:-1])


def _divergence(target_logits: Tensor, draft_logits: Tensor, floor: float) -> Tensor:
    log_target = torch.log_softmax(target_logits, -1, dtype=torch.float32)
    log_draft = torch.log_softmax(draft_logits, -1, dtype=torch.float32)
    target = log_target.exp()
    # An excluded token has log-probability -inf, and 0 * -inf is not a number.
    log_ratio = log_target.clamp_min_(torch.finfo(torch.float32).min).sub_(log_draft.clamp_min_(math.log(floor)))
    return torch.linalg.vecdot(target, log_ratio).clamp_min(0.0)


def _parts(logits: Tensor, factor: int = 1) -> Iterator[Tensor]:
    """Split distributions for passes over them that read them several times: on a CPU into what its cache holds.

    On other devices this bounds what lies in between, which would be several times as much as the logits.

    Args:
        logits: `[..., vocabulary]`.
        factor: How many times more a CPU may work on at once, where fewer passes are made.

    Yields:
        `[rows, vocabulary]`, all rows in order; at least one part.
    """
    elements = factor * CPU_CACHE_ELEMENTS if logits.device.type == "cpu" else DEVICE_ELEMENTS
    vocabulary = logits.shape[-1]
    if logits.dim() > 2 and len(logits):  # a slice is copied before it can be flat, so not all of it at once
        outer = logits.split(max(1, elements // max(1, logits[0].numel())))
    else:
        outer = (logits,)
    for part in outer:
        rows = part.reshape(-1, vocabulary)
        yield from rows.split(max(1, elements // vocabulary))


def two_largest(values: Tensor) -> Tensor:
    """The two largest values of each distribution, as `topk` gives them.

    On a GPU, `topk` sorts by digits in several passes; two reductions read the values twice.

    Args:
        values: Shape `[..., vocabulary]`, any float dtype; at least two.

    Returns:
        Largest first, shape `[..., 2]`, of the dtype of `values`.
    """
    largest, place = values.max(-1, keepdim=True)
    second = values.scatter(-1, place, -math.inf).amax(-1, keepdim=True)
    return torch.cat([largest, second], dim=-1)


def top_probabilities(logits: Tensor) -> Tensor:
    """The two largest probabilities of the raw softmax at temperature 1.

    Args:
        logits: Raw logits, shape `[..., vocabulary]`, any float dtype.

    Returns:
        Largest first, shape `[..., 2]`, float32.
    """
    logits = logits.float()
    return (two_largest(logits) - logits.logsumexp(-1, keepdim=True)).exp()


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability that speculative sampling accepts a token drawn from the draft, `sum_x min(p(x), q(x))`.

    It equals 1 minus the total variation distance (Leviathan et al., arXiv 2211.17192, Theorem 3.5).

    Args:
        target_probs: Shape `[..., vocabulary]`, any float dtype, summing to 1.
        draft_probs: Shape `[..., vocabulary]`, any float dtype, summing to 1.

    Returns:
        Probabilities, shape `[...]`, float32.
    """
    return torch.minimum(target_probs.float(), draft_probs.float()).sum(-1)


def weighted_variance(
    values: NDArray[np.float32], decay: float, counts: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """Variance under exponentially decaying weights, `Var_w` of DSDE (arXiv 2509.01083, Eq. 5-7 with Eq. 4).

    `m = sum_i w_i v_i / sum_i w_i` and `Var_w = sum_i w_i (v_i - m)^2 / sum_i w_i`, with `w_i = decay^age_i` and age
    0 for the newest value.

    Args:
        values: Shape `[rows, window]`, oldest first and newest last.
        decay: Weight of a value relative to the next newer one, in (0, 1].
        counts: How many of the last values of each row count, shape `[rows]`; all when None. What stands before them
            is never read.

    Returns:
        Variances, shape `[rows]`, in the values' unit squared; 0 for a row without values.
    """
    window = values.shape[-1]
    weights = _decaying_weights(window, decay)
    if counts is None:
        deviations = values - (values @ weights)[:, None]
        squares: NDArray[np.float32] = (deviations * deviations) @ weights
        return squares
    counted = np.arange(window - 1, -1, -1) < counts[:, None]
    weights = np.where(counted, weights, np.float32(0))
    values = np.where(counted, values, np.float32(0))
    total = np.maximum(weights.sum(-1, keepdims=True), _TINY)
    mean = (weights * values).sum(-1, keepdims=True) / total
    variance: NDArray[np.float32] = (weights * (values - mean) ** 2).sum(-1) / total[..., 0]
    return variance


@lru_cache(64)
def _decaying_weights(window: int, decay: float) -> NDArray[np.float32]:
    """The weights `decay^age`, newest last, divided by their sum, shape `[window]`."""
    weights = np.float64(decay) ** np.arange(window - 1, -1, -1)
    shares: NDArray[np.float32] = (weights / weights.sum()).astype(np.float32)
    return shares


def weighted_variance_ratio(
    values: NDArray[np.float32],
    short: int,
    decay: float,
    counts: NDArray[np.int64] | None = None,
    *,
    flat_variance: float = 1e-10,
    flat_ratio: float = 1.0,
) -> NDArray[np.float32]:
    """WVIR of DSDE (arXiv 2509.01083, Eq. 4): `Var_w(last short values) / Var_w(all values)`.

    Args:
        values: KLDs of each row, shape `[rows, window]`, newest last.
        short: How many of the newest values make the short window.
        decay: See `weighted_variance`.
        counts: How many of the last values of each row count, shape `[rows]`; all when None.
        flat_variance: A long window whose variance lies below this has no fluctuation to compare with ...
        flat_ratio: ... and the ratio is then this. The paper is silent; 1 leaves the scaling factor alone.

    Returns:
        Ratios, shape `[rows]`, without unit; 0 for rows with fewer than two values.
    """
    window = values.shape[-1]
    short = min(short, window)
    short_variance = weighted_variance(
        values[..., window - short :], decay, None if counts is None else np.minimum(counts, short)
    )
    long_variance = weighted_variance(values, decay, counts)
    ratio: NDArray[np.float32] = np.where(
        long_variance < flat_variance, np.float32(flat_ratio), short_variance / np.maximum(long_variance, _TINY)
    )
    return ratio * (window >= 2 if counts is None else counts >= 2)


def scaling_factor(mean_kld: NDArray[np.float32], exponent: float = 2.0) -> NDArray[np.float32]:
    """SF of DSDE (arXiv 2509.01083, Eq. 3): `exp(2 mu) - 1`, 0 when the models agree.

    Args:
        mean_kld: Mean KLD of the last verified step, any shape, nats.
        exponent: The factor in front of the mean.

    Returns:
        Factors, the shape of `mean_kld`, without unit; infinite where the exponential is.
    """
    with np.errstate(over="ignore"):
        factor: NDArray[np.float32] = np.expm1(exponent * mean_kld)
    return factor
