"""The contract between the decoding loop and whatever proposes draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.streams import SideStream
from hf_dsde.policies import Signal, StoppingPolicy

Expect = Callable[[Tensor, Tensor], None]
"""Takes the tokens and lengths that a proposal has if it is over now, as in `CandidateBatch`."""

LOGIT_SIGNALS = frozenset({Signal.KLD, Signal.REVERSE_KLD})
"""Signals that compare the two models' raw logits."""


@dataclass(frozen=True)
class CandidateBatch:
    """Draft tokens of a round, padded to the longest. All tensors are on the device of the sequences.

    Attributes:
        tokens: `[rows, width]`, int64; anything beyond a row's length.
        lengths: Tokens that each row really drafted, `[rows]`, int64.
        probs: The distributions that the tokens were drawn from, `[rows, width, vocabulary]`, float32, over the
            target's vocabulary. None when tokens are greedy choices.
        steps: Forward passes of the draft.
        logits: The draft's raw logits, shaped like `probs`, float32. None unless one of `LOGIT_SIGNALS` is required.
        entropy: Entropy of the raw distributions, `[rows, width]`, float32, nats. None unless required.
        confidence: Probability of each token under the processed scores, `[rows, width]`, float32. None unless
            required.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None
    steps: int
    logits: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None

    @property
    def width(self) -> int:
        """Tokens drafted by the row that drafted most."""
        return self.tokens.shape[1]

    @classmethod
    def nothing(
        cls, lengths: Tensor, vocabulary_size: int, do_sample: bool, required: frozenset[Signal]
    ) -> CandidateBatch:
        """Return the candidates of a round in which nobody drafts: every tensor is there, with no columns.

        Args:
            lengths: Any lengths of the batch, `[rows]`, int64; their shape and device are taken.
            vocabulary_size: Size of the target's vocabulary.
            do_sample: Whether a distribution belongs to each token.
            required: Signals that the policy asks for.
        """
        column = lengths.new_empty(len(lengths), 0)
        scalars = column.float()
        distributions = lengths.new_empty(len(lengths), 0, vocabulary_size, dtype=torch.float32)
        return cls(
            tokens=column,
            lengths=torch.zeros_like(lengths),
            probs=distributions if do_sample else None,
            steps=0,
            logits=distributions if required & LOGIT_SIGNALS else None,
            entropy=scalars if Signal.ENTROPY in required else None,
            confidence=scalars if Signal.CONFIDENCE in required else None,
        )


class Drafter(ABC):
    """Proposes tokens for every row of a batch."""

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The model that drafts."""

    @property
    def conditions(self) -> Hashable:
        """What decides how long a draft step takes, apart from its rows and their tokens."""
        return self.model.dtype, self.model.device

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording passes of the draft has cost so far."""
        return RecordingCosts()

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Hold whatever settings `propose` needs for the duration of a `with` block."""

    @abstractmethod
    def prefill(self, sequences: SequenceBatch, rows: Sequence[int]) -> bool:
        """Read the texts of rows that are about to draft for the first time in their text; return whether any were."""

    @abstractmethod
    def begin_texts(self, rows: Sequence[int]) -> None:
        """Learn that these rows have other texts from now on."""

    def finish(self) -> None:  # noqa: B027 - may be nothing
        """Give back what later calls can use: this one is done."""

    @abstractmethod
    def room(self, sequences: SequenceBatch) -> Tensor | None:
        """The most tokens each row can draft next, `[rows]`, int64; None when there is no limit."""

    @abstractmethod
    def step_seconds(self, longest: int) -> float:
        """Measure and return the seconds of one draft step, with up to `longest` tokens in a row's cache."""

    @abstractmethod
    def propose(
        self, sequences: SequenceBatch, plan: RoundPlan, policy: StoppingPolicy, expect: Expect
    ) -> CandidateBatch:
        """Draft, asking `policy` after every token whether rows shall stop behind it.

        Args:
            sequences: The text. Where logits processors look at it, the tokens are also written behind it.
            plan: How much the rows may draft.
            policy: Is asked.
            expect: Called when the host would wait for an answer, with what is proposed if no row drafts on. If so,
                the proposal has the very tensor of tokens that was given.
        """

    def prepare(self, sequences: SequenceBatch, going_on: Tensor, longest: int) -> None:  # noqa: B027 - may be nothing
        """Get ready what the next proposal starts with, before the host knows how this round ended; `begin` starts it.

        Args:
            sequences: With this round's tokens appended on the device; their host copies are a round behind.
            going_on: Rows that may draft next, `[rows]`, bool.
            longest: A bound on the rows' lengths.
        """

    def begin(self, side: SideStream) -> None:  # noqa: B027 - may be nothing
        """Start what was prepared.

        Args:
            side: Forked behind `prepare`, for work that the current stream need not wait for. The loop joins it before
                it asks the drafter for anything else.
        """

    @abstractmethod
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave all other rows out of forward passes from now on; they have finished."""

    @abstractmethod
    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn how many tokens each row drafted in the last proposal, and how many of them were accepted."""
