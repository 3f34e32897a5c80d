"""What a drafter proposes for a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_dsde.decoding.draft_logits import DraftLogits
from hf_dsde.policies.base import LOGIT_SIGNALS, Signal
from hf_dsde.utils.transfers import upload


@dataclass(frozen=True)
class Sampled:
    """The law of tokens that were drawn at random.

    Attributes:
        probs: The distributions that they were drawn from, `[rows, width, vocabulary]`, float32, over the target's
            vocabulary.
    """

    probs: Tensor


@dataclass(frozen=True)
class Deterministic:
    """The law of tokens that were chosen in any other way: the most likely ones, those of an earlier text, a user's.

    They may depend on everything that came before, but not on the random numbers of their verification.
    """


Law = Sampled | Deterministic
"""How draft tokens came about, which decides how they are verified."""


@dataclass(frozen=True)
class CandidateBatch:
    """Draft tokens of a round, padded to the longest. All tensors are on the device of the sequences.

    Attributes:
        tokens: `[rows, width]`, int64; anything beyond a row's length.
        lengths: Tokens that each row really drafted, `[rows]`, int64.
        host_lengths: The same on the host, if it knows them; else they are fetched where something depends on them.
        host_tokens: `tokens` on the host, if it has chosen them.
        law: How the tokens came about.
        steps: Forward passes of the draft.
        logits: The draft's raw logits. None unless one of `LOGIT_SIGNALS` is required.
        entropy: Entropy of the raw distributions, `[rows, width]`, float32, nats. None unless required.
        confidence: Probability of each token under the processed scores, `[rows, width]`, float32. None unless
            required.
        judged: What policies and listeners are shown instead, if not all of it: without the drafts of some rows, whose
            lengths are 0 there, and perhaps narrower. What this one has no signals of must be left out there.
        unjudged: Rows that are left out there, on the host.
    """

    tokens: Tensor
    lengths: Tensor
    law: Law = Deterministic()
    host_lengths: Sequence[int] | None = None
    host_tokens: Tensor | None = None
    steps: int = 0
    logits: DraftLogits | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    judged: CandidateBatch | None = None
    unjudged: Sequence[bool] = ()

    @property
    def width(self) -> int:
        """Tokens drafted by the row that drafted most."""
        return self.tokens.shape[1]

    @property
    def counts(self) -> Sequence[int]:
        """The lengths on the host, which waits for them if it does not know them."""
        lengths: Sequence[int] = self.lengths.tolist() if self.host_lengths is None else self.host_lengths
        return lengths

    @property
    def mask(self) -> Tensor:
        """Where there is a token, `[rows, width]`, bool."""
        return torch.arange(self.width, device=self.tokens.device) < self.lengths[:, None]

    @classmethod
    def of_lists(
        cls, drafts: Sequence[Sequence[int]], device: torch.device, steps: int | None = None
    ) -> CandidateBatch:
        """Return tokens that the host has chosen.

        Args:
            drafts: Of each row, any number, also none.
            device: Of the sequences.
            steps: Of the result; None for one to each column.
        """
        lengths = [*map(len, drafts)]
        width = max(lengths)
        table = np.zeros((len(drafts), 1 + width), np.int64)  # lengths in front of tokens: one transfer
        table[:, 0] = lengths
        for row, draft in enumerate(drafts):
            if lengths[row]:
                table[row, 1 : 1 + len(draft)] = draft
        on_host = torch.from_numpy(table)
        block, steps = upload(on_host, device), width if steps is None else steps
        return cls(block[:, 1:], block[:, 0], host_lengths=lengths, host_tokens=on_host[:, 1:], steps=steps)

    @classmethod
    def nothing(cls, lengths: Tensor, vocabulary_size: int, required: frozenset[Signal]) -> CandidateBatch:
        """Return the candidates of a round in which no row drafts: every tensor is there, with no columns.

        Args:
            lengths: Any lengths of the batch, `[rows]`, int64; their shape and device are taken.
            vocabulary_size: Size of the target's vocabulary.
            required: Signals that are asked for.
        """
        column = lengths.new_empty(len(lengths), 0)
        scalars = column.float()
        distributions = lengths.new_empty(len(lengths), 0, vocabulary_size, dtype=torch.float32)
        return cls(
            tokens=column,
            lengths=torch.zeros_like(lengths),
            host_lengths=[0] * len(lengths),
            logits=DraftLogits(distributions, None, vocabulary_size) if required & LOGIT_SIGNALS else None,
            entropy=scalars if Signal.ENTROPY in required else None,
            confidence=scalars if Signal.CONFIDENCE in required else None,
        )
