"""Passes that are made ready, or run, before the host knows whether they are needed.

At the end of a round the host waits for the device's answer. Meanwhile the device can begin the next round's first
pass: the draft's, or, after rounds without drafts, the target's plain step. The target's pass over the candidates is
made ready before the host knows that drafting is over: inside a round that asks it after each token, and for a proposal
that has begun, as if every row drafted as much as in the last round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.drafter import Drafter, StagedStep
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.target_pass import VerificationPass
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.streams import SideStream, overlaps

Staged = Callable[[], PassOutput]
"""Runs a pass that was made ready."""


class RunAhead:
    """Holds every pass of the target that is ready or under way, and lets the drafter begin its own.

    Args:
        target: Runs the target over blocks.
        drafter: Drafts.
        sequences: The text.
    """

    def __init__(self, target: VerificationPass, drafter: Drafter, sequences: SequenceBatch) -> None:
        self.overlaps = overlaps(sequences.device)
        self._target = target
        self._drafter = drafter
        self._sequences = sequences
        self._side = SideStream(sequences.device)
        self._draft: StagedStep | None = None
        self._plain: Staged | None = None  # of a step without drafts, ...
        self._left_over: CandidateBatch | None = None  # or over these
        self._result: PassOutput | None = None  # of either, once it has begun
        self._expected: tuple[Tensor, Staged] | None = None
        self._going_on: Tensor | None = None  # rows of the next round, ...
        self._bound = 0  # and a bound on their lengths

    @property
    def plain_begun(self) -> bool:
        """Whether the target's pass of a round without drafts is under way."""
        return self._result is not None and self._left_over is None

    @property
    def begun(self) -> bool:
        """Whether the target's next pass is under way."""
        return self._result is not None

    @property
    def unused(self) -> CandidateBatch | None:
        """Candidates that a pass is under way over, none of which follows its text; None if there are no such."""
        left = self._left_over if self.begun else None
        return None if left is None else replace(left, host_lengths=[0] * len(left.lengths), steps=0)

    def expect(self, tokens: Tensor, lengths: Tensor, plan: RoundPlan) -> None:
        """Get ready for a proposal that may be over; at once if that takes no recording, and else not at all.

        Args:
            tokens: Of the candidates, `[rows, width]`, int64.
            lengths: Tokens that each row drafted, `[rows]`, int64.
            plan: The round.
        """
        if self._target.recorded(tokens.shape[1] + 1, self._longest(tokens.shape[1])):
            self._expected = tokens, self._stage_candidates(CandidateBatch(tokens, lengths), plan)

    def is_ready(self, candidates: CandidateBatch) -> bool:
        """Return whether the pass over these candidates was made ready."""
        return self._expected is not None and self._expected[0] is candidates.tokens

    def run_target(self, candidates: CandidateBatch, plan: RoundPlan) -> PassOutput:
        """Run the target over each row's last token and candidates, or take the result of the pass that was begun.

        Returns:
            What it gives of `width + 1` columns.
        """
        plain, left_over, result = self._plain, self._left_over, self._result
        staged = self._expected[1] if self._expected is not None and self.is_ready(candidates) else None
        self.forget()
        tokens = None if left_over is None else left_over.tokens
        if plain is not None and (candidates.tokens is tokens or (tokens is None and not candidates.width)):
            return plain() if result is None else result
        return (staged or self._stage_candidates(candidates, plan))()

    def stage(self, plan: RoundPlan, going_on: Tensor, width: int, foreseen: int | None, *, probes: bool) -> None:
        """Get the next round's first passes ready, from what the device alone knows of the text.

        Args:
            plan: The round.
            going_on: Rows that take part, `[rows]`, bool.
            width: Tokens that the row that drafted most has drafted in this round.
            foreseen: The most that a row will draft in the next one, if that is known.
            probes: Whether the next round is one without drafts in any case.
        """
        longest = self._longest(width + 1)  # the host's lengths are those before this round
        self._going_on, self._bound = going_on, longest
        self._draft = self._drafter.stage_next(going_on, longest, foreseen)
        if probes or plan.foretells_plain(1):
            nothing = self._sequences.tokens[:, :0]
            self._plain = self._stage(nothing, going_on.long(), None, longest)
        elif plan.overtaken and self._target.runs_beside(self._sequences.device):
            self._left_over = found = self._drafter.left_over(going_on)
            if found is not None:
                counts = torch.where(going_on, found.lengths + 1, 0)
                bounds = [1 + bound for bound in found.host_lengths or ()]
                self._plain = self._stage(found.tokens, counts, bounds, longest + found.width)
        self._side.fork()

    @contextmanager
    def running(self, *, draft: bool, target: bool) -> Iterator[None]:
        """Let the device begin what was made ready; when the `with` block ends, the current stream waits for it.

        Also if the block fails, as when memory runs out: what a pass writes to is not free before it has ended.

        Args:
            draft: Begin the draft's pass.
            target: Begin the target's pass.
        """
        try:
            if draft:
                self.begin_draft()
            if target:
                self.begin_target()
            yield
        finally:
            self._side.join()

    def begin_draft(self) -> None:
        """Run the draft's first step of the next round, beside what follows if it can."""
        staged, self._draft = self._draft, None
        if staged is not None:
            with self._side.beside() if staged.beside else nullcontext():
                tokens = staged.run()
                if tokens is not None and self._plain is None:
                    self._expect_next(tokens)

    def begin_target(self) -> None:
        """Run the target's pass beside what follows, if it was made ready and is a recorded one."""
        if self._plain is not None and self._target.runs_beside(self._sequences.device):
            with self._side.beside():
                self._result = self._plain()

    def _expect_next(self, tokens: Tensor) -> None:
        """Get ready for a proposal of the next round, as `expect` does; rows that draft less ignore further columns."""
        width, longest = tokens.shape[1], self._bound + tokens.shape[1]
        assert self._going_on is not None
        if self._target.recorded(width + 1, longest):
            counts = self._going_on * self._sequences.remaining.clamp_max(width + 1)
            self._expected = tokens, self._stage(tokens, counts, None, longest)

    def forget(self) -> None:
        """Do without the passes of the target that were made ready or begun: some row has another text."""
        self._plain = self._left_over = self._result = self._expected = None

    def _longest(self, width: int) -> int:
        return max(self._sequences.length_counts) + width

    def _stage_candidates(self, candidates: CandidateBatch, plan: RoundPlan) -> Staged:
        known = None if candidates.host_lengths is None else plan.pass_counts(candidates.host_lengths)
        longest = self._longest(candidates.width)
        if known is not None and candidates.host_tokens is not None:
            # The device waits for the block: put together on the host, it gets there in one transfer.
            block = _block(*self._sequences.host_tail(), candidates.host_tokens, torch.tensor(known))
            return self._target.stage(block, known, longest)
        counts = torch.where(plan.active, candidates.lengths + 1, 0)
        return self._stage(candidates.tokens, counts, known, longest)

    def _stage(self, tokens: Tensor, counts: Tensor, host_counts: list[int] | None, longest: int) -> Staged:
        return self._target.stage(_block(*self._sequences.tail(1), tokens, counts), host_counts, longest)


def _block(last: Tensor, position: Tensor, tokens: Tensor, counts: Tensor) -> RowBlock:
    """Put each row's last token, which has that position, and the first `counts - 1` of `tokens` into a block."""
    block = torch.cat([last, tokens], dim=1)
    column = torch.arange(block.shape[1], device=block.device)
    positions = (position + column).masked_fill(column >= counts[:, None], -1)
    return RowBlock(block, positions, counts=counts)
