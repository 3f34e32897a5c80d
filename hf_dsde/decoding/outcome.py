"""What a policy and listeners get to see of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_dsde import signals
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.policies.base import PhaseTimes, RoundOutcome, Signal


@dataclass(frozen=True)
class FinishedRound:
    """A round after its commit: what was asked for, proposed and computed.

    Attributes:
        plan: What the round was to do.
        candidates: What it proposed.
        logits: The target's, `[rows, width + 1, vocabulary]`, float32.
        scores: The same after the logits processors.
        verified: What of the candidates stands.
        by_chance: Whether it was a matter of chance what stands, as it is when text is sampled exactly.
        packed_tokens: Tokens in the target's pass when it was packed; None when it was padded.
    """

    plan: RoundPlan
    candidates: CandidateBatch
    logits: Tensor
    scores: Tensor
    verified: VerifiedBlock
    by_chance: bool
    packed_tokens: int | None


NUMBERS = ("kld", "reverse_kld", "entropy", "confidence", "acceptance", "next_entropy", "next_probability")
"""Attributes of an outcome that hold a few numbers per row, and no distributions."""


@dataclass(frozen=True)
class Fetched:
    """What the host has been told of a round.

    Attributes:
        drafted: Tokens that each row drafted.
        accepted: How many of them the target accepted.
        going_on: Rows that are generated further.
        lengths: What is pending of the next round's lengths, each with an entry per row.
        numbers: Values of `numbers_of` the outcome.
    """

    drafted: Sequence[int]
    accepted: Sequence[int]
    going_on: Sequence[bool]
    lengths: Sequence[list[int]]
    numbers: Sequence[Tensor]


def numbers_of(outcome: RoundOutcome) -> dict[str, Tensor]:
    """Return those of `NUMBERS` that an outcome has."""
    values = {name: getattr(outcome, name) for name in NUMBERS}
    return {name: value for name, value in values.items() if value is not None}


def fetched_outcome(
    outcome: RoundOutcome, active: Sequence[bool], unjudged: Sequence[bool], fetched: Fetched
) -> RoundOutcome:
    """Return an outcome with its numbers on the host, and no distributions.

    Args:
        outcome: On the device.
        active: Rows that took part.
        unjudged: As in `CandidateBatch`.
        fetched: The numbers.
    """
    drafted, accepted = _on_host(fetched.drafted), _on_host(fetched.accepted)
    if unjudged:
        left_out = _on_host(unjudged)
        drafted, accepted = drafted.masked_fill(left_out, 0), accepted.masked_fill(left_out, 0)
    return RoundOutcome(
        drafted=drafted,
        accepted=accepted,
        active=_on_host(active),
        timings=outcome.timings,
        **dict(zip(numbers_of(outcome), fetched.numbers, strict=True)),
    )


def _on_host(values: Sequence[int]) -> Tensor:
    # Of a few numbers, numpy makes an array in a third of torch's time, while the device waits.
    return torch.from_numpy(np.array(values))


def outcome_of(done: FinishedRound, required: frozenset[Signal], times: PhaseTimes | None) -> RoundOutcome:
    """Put together what may be learnt from a round, computing only the signals that somebody asks for.

    Args:
        done: The round.
        required: The signals.
        times: Seconds of the round before, if there was one.
    """
    candidates, accepted = done.candidates, done.verified.accepted
    if candidates.judged is not None:
        candidates = candidates.judged
        accepted = torch.where(candidates.lengths > 0, accepted, 0)
    by_name: dict[str, Tensor] = {}
    if candidates.logits is not None:
        target_logits = done.logits[:, : candidates.width]
        if Signal.KLD in required:
            by_name["kld"] = candidates.logits.divergence(target_logits)
        if required & {Signal.REVERSE_KLD, Signal.LOGITS}:
            draft_logits = candidates.logits.over_target()
            if Signal.REVERSE_KLD in required:
                by_name["reverse_kld"] = signals.kl_divergence(draft_logits, target_logits)
            if Signal.LOGITS in required:
                by_name |= {"tokens": candidates.tokens, "draft_logits": draft_logits, "target_logits": target_logits}
    if Signal.ACCEPTANCE in required:
        by_name["acceptance"] = _acceptance(done, candidates)
    if Signal.NEXT_TOKEN in required:
        row = torch.arange(len(done.logits), device=done.logits.device)
        log_probabilities = done.logits[row, done.verified.accepted].log_softmax(dim=-1)
        by_name["next_probability"] = log_probabilities[row, done.verified.next_tokens].exp()
        by_name["next_entropy"] = signals.entropy_of_(log_probabilities)
    return RoundOutcome(
        drafted=candidates.lengths,
        accepted=accepted,
        active=done.plan.active,
        entropy=candidates.entropy,
        confidence=candidates.confidence,
        timings=times if Signal.TIMINGS in required else None,
        **by_name,
    )


def _acceptance(done: FinishedRound, candidates: CandidateBatch) -> Tensor:
    """Probability that the target accepts at each tested position, `[rows, width]`, float32: 0 or 1 without chance."""
    if not done.by_chance:
        position = torch.arange(candidates.width, device=candidates.tokens.device)
        return (position < done.verified.accepted[:, None]).float()
    probs = done.scores[:, : candidates.width].softmax(dim=-1)
    if isinstance(candidates.law, Sampled):
        return signals.acceptance_probability(probs, candidates.law.probs)
    return probs.gather(2, candidates.tokens[:, :, None])[:, :, 0]
