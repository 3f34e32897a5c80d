"""What draft steps bring: those before a round that begin early, and those with the host in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dsde.decoding.candidates import CandidateBatch, Deterministic, Sampled
from hf_dsde.decoding.draft_logits import DraftLogits
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.recorded_chain import DraftedChain
from hf_dsde.execution.token_choice import Chosen, TokenChoice
from hf_dsde.policies.base import LOGIT_SIGNALS, DraftStep, Signal


class Drafted(NamedTuple):
    """What draft steps bring with no question to the host in between.

    Attributes:
        rows: Rows that took part in the steps.
        tokens: As the target knows them, `[rows, width]`, int64.
        probs: What they were drawn from, `[rows, width, vocabulary]`, float32; None if they were not drawn.
        logits: What they were chosen from, `[rows, width, the draft's vocabulary]`, float32; None if nobody looks.
    """

    rows: int
    tokens: Tensor
    probs: Tensor | None
    logits: Tensor | None

    @property
    def width(self) -> int:
        """Tokens of each row."""
        return self.tokens.shape[1]

    def begin(self, width: int) -> Drafted:
        """Return the first `width` tokens of each row; all of them are the same tensor again."""
        if width == self.width:
            return self
        probs, logits = (None if each is None else each[:, :width] for each in (self.probs, self.logits))
        return self._replace(tokens=self.tokens[:, :width], probs=probs, logits=logits)


class Prepared(NamedTuple):
    """What was run before the host knew what the round is to do.

    Attributes:
        output: Of the first pass.
        width: Tokens of each row that it was fed.
        choice: Makes tokens of its logits, if that has begun.
        first: Gives them, the same ones each time.
        drafted: What comes of it if the round drafts as much as the last one.
    """

    output: PassOutput
    width: int
    choice: TokenChoice | None = None
    first: Callable[[], Chosen] | None = None
    drafted: Drafted | None = None


@dataclass
class Proposal:
    """What a round's draft steps bring, one entry per step."""

    tokens: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    _block: Tensor | None = None

    def add(self, step: DraftStep, probs: Tensor | None, signals_needed: frozenset[Signal]) -> None:
        """Keep a step's tokens, the law they were drawn from, and the signals that are asked for."""
        self.tokens.append(step.tokens)
        if probs is not None:
            self.probs.append(probs)
        if signals_needed & LOGIT_SIGNALS:
            self.logits.append(step.logits)
        if Signal.ENTROPY in signals_needed:
            self.entropy.append(step.entropy)
        if Signal.CONFIDENCE in signals_needed:
            self.confidence.append(step.confidence)

    def block(self, device: torch.device) -> Tensor:
        """All steps' tokens, `[rows, steps]`, on `device`; the same tensor again until another step is added."""
        if self._block is None or self._block.shape[1] != len(self.tokens):
            self._block = torch.stack(self.tokens, dim=1).to(device)
        return self._block

    def candidates(self, drafted: Tensor, host_lengths: Sequence[int] | None, device: torch.device) -> CandidateBatch:
        """Stack the steps and bring them to the sequences' device, once per round."""

        def stacked(steps: Sequence[Tensor]) -> Tensor | None:
            return torch.stack(list(steps), dim=1).to(device) if steps else None

        probs, logits = stacked(self.probs), stacked(self.logits)
        return CandidateBatch(
            tokens=self.block(device),
            lengths=drafted.to(device),
            law=Deterministic() if probs is None else Sampled(probs),
            host_lengths=host_lengths,
            steps=len(self.tokens),
            logits=None if logits is None else DraftLogits(logits, None, logits.shape[-1]),
            entropy=stacked(self.entropy),
            confidence=stacked(self.confidence),
        )


def tokens_of(first: Callable[[], Chosen], drafted: DraftedChain | None) -> tuple[Tensor, Tensor | None]:
    """Return the tokens of a chain, `[rows, width]`, as in `Chosen`, and what they were drawn from, if they were.

    Args:
        first: Gives the first token of each row.
        drafted: Those after it, if there are any.
    """
    if drafted is None:
        only = first()
        return only.tokens[:, None], None if only.probs is None else only.probs[:, None]
    if drafted.probs is None:
        return drafted.tokens, None
    begin = first()
    assert begin.probs is not None
    tokens = torch.cat([begin.tokens[:, None], drafted.tokens[:, 1:]], dim=1)
    return tokens, torch.cat([begin.probs[:, None], drafted.probs], dim=1)
