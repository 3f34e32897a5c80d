"""Which draft tokens stand, and which token follows them. Pure functions: no model, no state, no policy.

Each rule returns per row the number of accepted draft tokens and one more token of the target's own: the correction at
the first rejection, or the bonus token when every draft token was accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.lossy_acceptance import LossyAcceptance


class VerifiedBlock(NamedTuple):
    """What a target pass says about a block of draft tokens.

    Attributes:
        accepted: Draft tokens accepted from the front, `[rows]`, int64.
        next_tokens: The correction or bonus token after them, `[rows]`, int64.
    """

    accepted: Tensor
    next_tokens: Tensor

    def with_next_token(self, draft_tokens: Tensor) -> Tensor:
        """Write each row's correction or bonus token after its accepted draft tokens, `[rows, width + 1]`, int64."""
        if not draft_tokens.shape[1]:
            return self.next_tokens[:, None]
        room = torch.nn.functional.pad(draft_tokens, (0, 1))
        return room.scatter(1, self.accepted[:, None], self.next_tokens[:, None])


def verify(
    scores: Tensor, candidates: CandidateBatch, *, do_sample: bool, acceptance: LossyAcceptance | None = None
) -> VerifiedBlock:
    """Judge a block by the exact rule that fits its law, or by a lossy one that was asked for.

    Args:
        scores: The target's processed scores after each prefix of the block, `[rows, width + 1, vocabulary]`, float32.
        candidates: The block.
        do_sample: Whether the output follows the target's distribution; otherwise it is the target's best tokens.
        acceptance: A lossy rule in place of the exact ones.
    """
    tokens, lengths = candidates.tokens, candidates.lengths
    if acceptance is not None:
        return lossy(scores, tokens, lengths, acceptance, do_sample=do_sample)
    if not do_sample:
        return greedy(scores.argmax(dim=-1), tokens, lengths)
    probs = scores.softmax(dim=-1)
    if isinstance(candidates.law, Sampled):
        return speculative_sampling(probs, candidates.law.probs, tokens, lengths)
    return sample_and_match(probs, tokens, lengths)


def leading_run(stands: torch.Tensor, lengths: Tensor) -> Tensor:
    """Count the positions before the first that does not stand, within each row's length.

    Args:
        stands: `[rows, width]`, bool.
        lengths: Positions that count, `[rows]`, int64.

    Returns:
        `[rows]`, int64, at most `lengths`.
    """
    inside = torch.arange(stands.shape[1], device=stands.device) < lengths[:, None]
    return (stands & inside).cumprod(dim=1, dtype=torch.long).sum(dim=1)


def greedy(target_tokens: Tensor, draft_tokens: Tensor, lengths: Tensor) -> VerifiedBlock:
    """Accept draft tokens as long as they are the target's own choice.

    Args:
        target_tokens: The target's choice after each prefix of the block, `[rows, width + 1]`, int64.
        draft_tokens: `[rows, width]`, int64; anything beyond a row's length.
        lengths: Tokens that each row drafted, `[rows]`, int64, 0 to width.
    """
    if not draft_tokens.shape[1]:
        return VerifiedBlock(torch.zeros_like(lengths), target_tokens[:, 0])
    accepted = leading_run(draft_tokens == target_tokens[:, :-1], lengths)
    return VerifiedBlock(accepted, target_tokens.gather(1, accepted[:, None])[:, 0])


def speculative_sampling(
    target_probs: Tensor, draft_probs: Tensor, draft_tokens: Tensor, lengths: Tensor
) -> VerifiedBlock:
    """Accept or replace draft tokens so that the output follows the target's distribution exactly.

    Token x drawn from q is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw
    from max(0, p - q), normalised (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318). The
    test is `u * q(x) < p(x)` with u uniform on [0, 1): no division, and nothing added to q, which would bias it.

    Args:
        target_probs: The target's distribution after each prefix of the block, after all logits processors,
            `[rows, width + 1, vocabulary]`, float32.
        draft_probs: The distributions that the draft tokens were drawn from, `[rows, width, vocabulary]`, float32.
        draft_tokens: `[rows, width]`, int64; anything beyond a row's length.
        lengths: Tokens that each row drafted, `[rows]`, int64, 0 to width.
    """
    index = draft_tokens[:, :, None]
    p = target_probs[:, :-1].gather(2, index)[:, :, 0]
    q = draft_probs.gather(2, index)[:, :, 0]
    accepted = leading_run(torch.rand_like(p) * q < p, lengths)
    leftover = residual_distribution(target_probs, draft_probs, accepted, lengths)
    return VerifiedBlock(accepted, draw(leftover))


def sample_and_match(target_probs: Tensor, draft_tokens: Tensor, lengths: Tensor) -> VerifiedBlock:
    """Draw the target's own token at each position, and accept draft tokens as long as they are the ones drawn.

    Every token of the output is one that was drawn from the target's distribution after the tokens before it, so the
    output follows it exactly, however the draft tokens were chosen, as long as they do not depend on these draws. For
    a token that is certain to be drafted this accepts as often as the ratio test with all of q in that token.

    Args:
        target_probs: As in `speculative_sampling`.
        draft_tokens: As in `speculative_sampling`.
        lengths: As in `speculative_sampling`.
    """
    weights = target_probs
    if draft_tokens.shape[1]:
        unused = torch.arange(target_probs.shape[1], device=lengths.device) > lengths[:, None]  # of a shorter draft
        weights = target_probs.masked_fill(unused[:, :, None], 1.0)
    drawn = draw(weights.flatten(0, 1)).view(target_probs.shape[:2])
    return greedy(drawn, draft_tokens, lengths)


def lossy(
    scores: Tensor, draft_tokens: Tensor, lengths: Tensor, rule: LossyAcceptance, *, do_sample: bool
) -> VerifiedBlock:
    """Accept draft tokens as long as a lossy rule lets them stand.

    When sampling, the token after them is drawn from the target's own distribution there, nothing of it taken away.
    When decoding greedily it is the target's best token, and drafted tokens that are the target's best stand whatever
    the rule says, since the text would get the same token: a rule that lets nothing pass decodes exactly.

    Args:
        scores: The target's processed scores after each prefix of the block, `[rows, width + 1, vocabulary]`, float32.
        draft_tokens: As in `speculative_sampling`.
        lengths: As in `speculative_sampling`.
        rule: Says what stands.
        do_sample: Whether the token after the accepted ones is drawn.
    """
    stands = rule.stands(scores[:, :-1], draft_tokens)
    if do_sample:
        accepted = leading_run(stands, lengths)
        rows = torch.arange(len(accepted), device=accepted.device)
        return VerifiedBlock(accepted, draw(scores[rows, accepted].softmax(dim=-1)))
    best = scores.argmax(dim=-1)
    accepted = leading_run(stands | (draft_tokens == best[:, :-1]), lengths)
    return VerifiedBlock(accepted, best.gather(1, accepted[:, None])[:, 0])


def draw(weights: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Draw a token per row, each with a probability in proportion to its weight.

    It is the one whose weight over an exponential variable of its own is largest (the Gumbel-max trick without
    logarithms). `torch.multinomial` draws the same token from the same seed, with eleven operations of checks.

    Args:
        weights: `[rows, vocabulary]`, float32, at least 0.
        numbers: The exponential variables, like `weights`, of which each call needs new ones; None to draw them.

    Returns:
        `[rows]`, int64.

    Raises:
        RuntimeError: If a row has no positive weight, or one that is no number. A CUDA device asserts it later, since
            nothing waits for it.
    """
    if numbers is None:
        numbers = torch.empty_like(weights).exponential_()
    largest, token = (weights / numbers).max(dim=-1)
    torch._assert_async((largest > 0).all(), "probabilities are not numbers, or all are 0")
    return token


def residual_distribution(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor, lengths: Tensor) -> Tensor:
    """Return the unnormalised law of the token after the accepted ones.

    That is max(0, p - q) where a draft token was rejected, and p itself after a fully accepted draft. A residual
    without mass can only come from rounding, when p and q are equal; there p is the right law.

    Args:
        target_probs: `[rows, width + 1, vocabulary]`, float32.
        draft_probs: `[rows, width, vocabulary]`, float32.
        accepted: `[rows]`, int64.
        lengths: `[rows]`, int64.

    Returns:
        `[rows, vocabulary]`, float32.
    """
    rows = torch.arange(len(accepted), device=accepted.device)
    target = target_probs[rows, accepted]
    if draft_probs.shape[1] == 0:
        return target
    rejected = (accepted < lengths)[:, None]
    draft = draft_probs[rows, accepted.clamp_max(draft_probs.shape[1] - 1)]
    residual = (target - draft).clamp_min(0)
    usable = rejected & (residual.sum(dim=1, keepdim=True) > 0)
    return torch.where(usable, residual, target)
