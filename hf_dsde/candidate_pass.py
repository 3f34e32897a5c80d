"""The target's pass over a round's candidates, made ready before the host knows whether drafting is over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_dsde.drafting.base import CandidateBatch, DraftRequest
from hf_dsde.policies.base import StoppingPolicy
from hf_dsde.sequences import SequenceBatch
from hf_dsde.verification_pass import PassResult, VerificationPass


class CandidatePass:
    """Puts the last token and the draft tokens of every row into a block, and has the target run it.

    Args:
        target: Runs blocks.
        sequences: The text.
        policy: Its rows draft as many tokens as they were asked for, unless it stops inside the round.
    """

    def __init__(self, target: VerificationPass, sequences: SequenceBatch, policy: StoppingPolicy) -> None:
        self._target = target
        self._sequences = sequences
        self._policy = policy
        self._expected: tuple[Tensor, Callable[[], PassResult]] | None = None

    def expect(self, tokens: Tensor, lengths: Tensor, request: DraftRequest) -> None:
        """Get ready for a proposal that may be over; at once if that takes no recording, and else not at all.

        Args:
            tokens: Of the candidates, `[rows, width]`, int64.
            lengths: Likewise, `[rows]`, int64.
            request: What was asked of the drafter.
        """
        width = tokens.shape[1]
        if self._target.recorded(width + 1, self._longest(width)):
            self._expected = tokens, self._stage(tokens, lengths, request)

    def run(self, candidates: CandidateBatch, request: DraftRequest) -> PassResult:
        """Run the pass; logits are `[rows, width + 1, vocabulary]`."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] is candidates.tokens:
            return expected[1]()
        return self._stage(candidates.tokens, candidates.lengths, request)()

    def _stage(self, tokens: Tensor, lengths: Tensor, request: DraftRequest) -> Callable[[], PassResult]:
        last, position = self._sequences.tail(1)
        block = torch.cat([last, tokens], dim=1)
        column = torch.arange(block.shape[1], device=block.device)
        counts = torch.where(request.active, lengths + 1, 0)
        positions = (position + column).masked_fill(column >= counts[:, None], -1)
        known = None if self._policy.stops_inside_round else request.pass_counts
        return self._target.stage(block, positions, counts, known, self._longest(tokens.shape[1]))

    def _longest(self, width: int) -> int:
        return max(self._sequences.length_counts) + width
