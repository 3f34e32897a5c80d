"""What is left of texts' drafts that a plain step has overtaken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.choice import model_offer, survival
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.utils.transfers import upload


class LeftOver:
    """Drafts without their first token, for rows whose text has gone on with that.

    The device decides so by itself, before the host knows the token (`offer`); then the host does the same
    (`standing`).

    Attributes:
        candidates: What the device drafts; None if there is nothing.
    """

    def __init__(self) -> None:
        self.candidates: CandidateBatch | None = None
        self._drafts: Sequence[Continuation] = ()

    def offer(
        self, drafts: Sequence[Continuation], sequences: SequenceBatch, going_on: Tensor
    ) -> CandidateBatch | None:
        """Let the device draft what is left.

        Args:
            drafts: Of all rows, for the token that the sequences have got on the device only, and further ones.
            sequences: The batch.
            going_on: Rows that may draft, `[rows]`, bool.

        Returns:
            As `Drafter.left_over`.
        """
        tokens = [draft.tokens for draft in drafts]
        longest = max(map(len, tokens), default=0)
        if longest < 2:
            return None
        table = torch.tensor([[max(len(each) - 1, 0), *each, *[0] * (longest - len(each))] for each in tokens])
        block = upload(table, sequences.device)
        last, _ = sequences.tail(1)
        room = (sequences.remaining - 1).clamp_min(0)
        stands = going_on & (block[:, 1] == last[:, 0])
        lengths = torch.where(stands, torch.minimum(block[:, 0], room), 0)
        self._drafts = drafts
        self.candidates = CandidateBatch(block[:, 2:], lengths, host_lengths=table[:, 0].tolist(), steps=1)
        return self.candidates

    def standing(self, sequences: SequenceBatch, most: Sequence[int]) -> list[Continuation]:
        """Return what the device drafts of each row; if that is nothing, it is over.

        Args:
            sequences: The batch; the host knows the token by now.
            most: Tokens that each row has a use for, 0 for rows that have finished.
        """
        last, _ = sequences.host_tail()
        drafts = [NOTHING] * len(self._drafts)
        for row, (draft, token) in enumerate(zip(self._drafts, last[:, 0].tolist(), strict=True)):
            n = min(len(draft.tokens) - 1, most[row])
            if n > 0 and draft.tokens[0] == token:
                # Of further tokens, what was promised of the first ones if each stands with the same probability.
                score = model_offer(n, survival(len(draft.tokens), round(10 * draft.score))).gain
                drafts[row] = Continuation(draft.tokens[1 : 1 + n], score, draft.match)
        if not any(draft.tokens for draft in drafts):
            self.forget()
        return drafts

    def take(self, lengths: Sequence[int]) -> CandidateBatch | None:
        """Return what the device drafts, of which the host knows the lengths by now; nothing is left over then."""
        candidates = self.candidates
        self.forget()
        return None if candidates is None else replace(candidates, host_lengths=lengths)

    def forget(self) -> None:
        """Leave nothing over."""
        self.candidates, self._drafts = None, ()
