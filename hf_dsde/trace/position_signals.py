"""The scalars of a position: what the target's and the draft's raw distributions say about each other and a token.

Pure functions over tensors, from raw logits at temperature 1. Positions are worked on a few at a time, so that no more
than a few distributions exist at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde import signals


def position_signals(
    target_logits: Tensor, draft_logits: Tensor, tokens: Tensor, draws: Tensor | None
) -> dict[str, Tensor]:
    """Everything a trace says about the positions of a block.

    Args:
        target_logits: The target's raw logits, shape `[positions, vocabulary]`, float32.
        draft_logits: The draft's, over the same vocabulary.
        tokens: The token that stands, or was drafted, at each position, shape `[positions]`, int64.
        draws: Numbers uniform on [0, 1) that choose the tokens of `residual_draft_probability`, shape `[positions]`,
            float32; None at temperature 0, where a rejected draft token is the draft's best one.

    Returns:
        By column name: `target_argmax` and `draft_argmax`, int64, `target_agrees` and `draft_agrees`, bool, and every
        one of `schema.SIGNAL_COLUMNS`, float32; all of shape `[positions]`, on the CPU.
    """
    size = max(1, signals.CPU_CACHE_ELEMENTS // target_logits.shape[-1])
    if target_logits.device.type != "cpu":
        size = max(1, len(target_logits))
    parts = [
        _few_positions(
            target_logits[start : start + size],
            draft_logits[start : start + size],
            tokens[start : start + size],
            None if draws is None else draws[start : start + size],
        )
        for start in range(0, max(1, len(target_logits)), size)
    ]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def residual_draft_probability(target_probs: Tensor, draft_probs: Tensor, draws: Tensor) -> Tensor:
    """Draft probability of a token that the draft proposes and the target rejects.

    A token drawn from q and rejected follows `norm(max(q - p, 0))`. The draw is by inversion: the first token whose
    cumulated weight exceeds the drawn share of the total.

    Args:
        target_probs: p, shape `[positions, vocabulary]`, float32.
        draft_probs: q, likewise.
        draws: Uniform on [0, 1), shape `[positions]`.

    Returns:
        `q(y)`, shape `[positions]`, float32. Where p and q are equal nothing is rejected; y is then drawn from q.
    """
    residual = (draft_probs - target_probs).clamp_min(0)
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, draft_probs)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    share = draws.to(cumulated).unsqueeze(-1) * cumulated[:, -1:]
    # A share that rounding has brought up to the total would point past the last token of positive weight.
    share = torch.minimum(share, torch.nextafter(cumulated[:, -1:], torch.zeros_like(share)))
    chosen = torch.searchsorted(cumulated, share, right=True).clamp_max(weights.shape[-1] - 1)
    return draft_probs.gather(-1, chosen).squeeze(-1)


def _few_positions(
    target_logits: Tensor, draft_logits: Tensor, tokens: Tensor, draws: Tensor | None
) -> dict[str, Tensor]:
    target_probs, draft_probs = target_logits.softmax(-1), draft_logits.softmax(-1)
    target_argmax, draft_argmax = target_logits.argmax(-1), draft_logits.argmax(-1)
    target_top, draft_top = signals.top_probabilities(target_logits), signals.top_probabilities(draft_logits)
    residual = draft_top[:, 0] if draws is None else residual_draft_probability(target_probs, draft_probs, draws)
    return {
        "target_argmax": target_argmax,
        "draft_argmax": draft_argmax,
        "target_agrees": target_argmax == tokens,
        "draft_agrees": draft_argmax == tokens,
        "target_probability": signals.token_probability(target_logits, tokens),
        "draft_probability": signals.token_probability(draft_logits, tokens),
        # Summing up rounds, and a probability of more than 1 would be a trap for whoever takes its logarithm.
        "acceptance": signals.acceptance_probability(target_probs, draft_probs).clamp_max(1),
        "kld": signals.kl_divergence(target_logits, draft_logits),
        "reverse_kld": signals.kl_divergence(draft_logits, target_logits),
        "target_entropy": signals.entropy(target_logits),
        "draft_entropy": signals.entropy(draft_logits),
        "target_top1": target_top[:, 0],
        "target_top2": target_top[:, 1],
        "draft_top1": draft_top[:, 0],
        "draft_top2": draft_top[:, 1],
        "residual_draft_probability": residual,
    }
