"""The contract between the decoding loop and whatever decides how many tokens a sequence drafts.

A policy is asked twice. Before a round it may fix a draft length per row (`draft_lengths`); inside a round it may
say, after each draft token, which rows stop *after* that token (`should_stop`). It can never take a token
back: dropping a token because of its own value would make the output follow another law than the target's.
Whatever a policy answers, the output is exact; a policy only decides how fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hf_dsde import signals
from hf_dsde.costs import LiveCosts
from hf_dsde.kernels.dispatch import ops_for


class Signal(Enum):
    """What the loop computes only when a policy asks for it."""

    KLD = "kld"
    """KL(target || draft) of every verified draft position, from raw logits at temperature 1, in nats."""
    REVERSE_KLD = "reverse_kld"
    """KL(draft || target) of every verified draft position, likewise."""
    ENTROPY = "entropy"
    """Entropy of the draft's raw distribution at temperature 1, in nats."""
    CONFIDENCE = "confidence"
    """Probability of the drafted token under the draft's processed scores."""
    ACCEPTANCE = "acceptance"
    """Probability that the target accepts at a draft position: `sum_x min(p(x), q(x))`, both processed."""
    NEXT_TOKEN = "next_token"  # noqa: S105 - a token of text
    """How sure the target was of the correction or bonus token that ended the round."""
    TIMINGS = "timings"
    """Seconds spent in the phases of the round before."""
    LOGITS = "logits"
    """The drafted tokens and both models' raw logits for them: much memory, and more than a trace knows."""
    COSTS = "costs"
    """What draft steps and verification passes cost, in `BatchInfo.costs`."""


LOGIT_SIGNALS = frozenset({Signal.KLD, Signal.REVERSE_KLD, Signal.LOGITS})
"""Signals that need the two models' raw logits."""
DRAFT_SIGNALS = LOGIT_SIGNALS | {Signal.ENTROPY, Signal.CONFIDENCE}
"""Signals that come from the distributions which tokens are drafted from."""


@dataclass(frozen=True)
class BatchInfo:
    """What a policy may know about the batch when generation starts.

    Attributes:
        rows: Number of sequences.
        device: Where the policy's tensors have to live: on the host, or, for a policy that stops inside rounds or looks
            at logits, where the texts are.
        vocabulary_size: Size of the target's vocabulary.
        max_draft_length: The most tokens the loop lets any row draft in one round.
        max_new_tokens: The most tokens any row may emit in the whole call.
        costs: What passes cost, kept up to date by the loop. None unless `Signal.COSTS` is required.
        provided: Those of `DRAFT_SIGNALS` that the drafter can give. One that gives none never asks `should_stop`.
        asynchronous: Whether drafts are made on a device that works beside the host, which would have to wait for each
            answer to `should_stop`.
        refilled: Whether the place of a row that ends is taken by another text, so that none makes the others wait.
    """

    rows: int
    device: torch.device
    vocabulary_size: int
    max_draft_length: int
    max_new_tokens: int
    costs: LiveCosts | None = None
    provided: frozenset[Signal] = DRAFT_SIGNALS
    asynchronous: bool = False
    refilled: bool = False


def entropy_and_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What most policies want to know of raw logits `[rows, vocabulary]`, float32, at temperature 1.

    Returns:
        Entropy, shape `[rows]`, nats; the two largest probabilities, largest first, shape `[rows, 2]`; float32.
    """
    entropy, top = ops_for(logits.device).entropy_and_top(logits)
    return entropy, top


class DraftStep:
    """What is known right after a draft token was chosen. Signals are computed when they are first read.

    Attributes:
        position: Index of the token inside the round's block, from 0.
        tokens: The tokens just drafted, shape `[rows]`, int64.
        logits: The draft's raw logits they were chosen from, shape `[rows, vocabulary]`, float32.
        drafting: Rows that really drafted this token, shape `[rows]`, bool. Other rows hold anything.
    """

    def __init__(
        self,
        position: int,
        tokens: Tensor,
        logits: Tensor,
        scores: Tensor,
        drafting: Tensor,
    ) -> None:
        self.position = position
        self.tokens = tokens
        self.logits = logits
        self.drafting = drafting
        self._scores = scores

    def to(self, device: torch.device) -> DraftStep:
        """Return this step with its tensors on `device`; the draft may live on another one than the policy."""
        if self.tokens.device == device:
            return self
        tensors = (self.tokens, self.logits, self._scores, self.drafting)
        return DraftStep(self.position, *(tensor.to(device) for tensor in tensors))

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the drafted token under the draft's processed scores, shape `[rows]`, float32."""
        return signals.token_probability(self._scores, self.tokens)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the draft's raw distribution at temperature 1, shape `[rows]`, float32, nats."""
        return self._entropy_and_top[0]

    @cached_property
    def top_probabilities(self) -> Tensor:
        """The two largest raw probabilities at temperature 1, largest first, shape `[rows, 2]`, float32."""
        return self._entropy_and_top[1]

    @cached_property
    def _entropy_and_top(self) -> tuple[Tensor, Tensor]:
        return entropy_and_top(self.logits)


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds that one round spent in each of its phases.

    Attributes:
        draft: Drafting. On a CUDA device, the policy's work between rounds and the wait for the host as well: in rounds
            with drafts, the first draft pass runs beside them.
        verify: The target's pass and the judging of its result.
        bookkeeping: Everything else.
        policy: What the policy took of all three, on the host: its signals, its answers, its learning.
    """

    draft: float
    verify: float
    bookkeeping: float
    policy: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return self.draft + self.verify + self.bookkeeping


@dataclass(frozen=True)
class RoundOutcome:
    """What a round brought, one entry per row. `width` is the longest draft of the round, possibly 0.

    Attributes:
        drafted: Tokens each row drafted, shape `[rows]`, int64; 0 for finished rows.
        accepted: How many of them the target accepted, from the front, shape `[rows]`, int64. Counted before
            stopping criteria cut the text: it is a fact about the two models, not about the text's end.
        active: Rows that were still generating in this round, shape `[rows]`, bool.
        kld: KL(target || draft) per draft position, shape `[rows, width]`, float32, nats; only where
            `position < drafted`. None unless `Signal.KLD` was required.
        reverse_kld: KL(draft || target), likewise. None unless `Signal.REVERSE_KLD` was required.
        entropy: Entropy of the draft's raw distribution per position, shape `[rows, width]`, float32, nats. None
            unless `Signal.ENTROPY` was required.
        confidence: Probability of each drafted token under the draft's processed scores, shape `[rows, width]`,
            float32. None unless `Signal.CONFIDENCE` was required.
        acceptance: Probability that the target accepts a token drawn there, `sum_x min(p(x), q(x))` of the processed
            distributions, shape `[rows, width]`, float32; when greedy, 1 or 0. Only for tested positions, up
            to the first rejected token: those after it hold anything. None unless `Signal.ACCEPTANCE` was required.
        next_entropy: Entropy of the target's raw distribution at temperature 1 that the round's last token, a
            correction or the bonus, was chosen from, shape `[rows]`, float32, nats. None unless `Signal.NEXT_TOKEN` was
            required.
        next_probability: That token's probability under the same distribution, shape `[rows]`, float32. None likewise.
        tokens: The drafted tokens, shape `[rows, width]`, int64. None unless `Signal.LOGITS` was required, like what
            follows.
        draft_logits: The raw logits they were chosen from, shape `[rows, width, vocabulary]`, float32.
        target_logits: The target's raw logits for the same positions, likewise.
        timings: Phases of the *previous* round, since this one's are known only after the policy has answered.
            None in the first round and unless `Signal.TIMINGS` was required.
    """

    drafted: Tensor
    accepted: Tensor
    active: Tensor
    kld: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    reverse_kld: Tensor | None = None
    acceptance: Tensor | None = None
    next_entropy: Tensor | None = None
    next_probability: Tensor | None = None
    tokens: Tensor | None = None
    draft_logits: Tensor | None = None
    target_logits: Tensor | None = None
    timings: PhaseTimes | None = None

    @property
    def positions(self) -> Tensor:
        """Which positions of the block were really drafted, shape `[rows, width]`, bool."""
        by_position = (self.kld, self.reverse_kld, self.entropy, self.confidence, self.acceptance)
        width = next((signal.shape[1] for signal in by_position if signal is not None), 0)
        return torch.arange(width, device=self.drafted.device) < self.drafted[:, None]


class StoppingPolicy(ABC):
    """Decides how many tokens each sequence drafts. One instance serves one call of `generate` at a time.

    Subclasses keep state with one entry per row, and make it afresh in `start`: two equal calls must behave equally.
    They are told and answer in tensors on `BatchInfo.device`. Where that is the host, a few arrays or lists are the
    fastest state. Those that stop inside rounds are asked beside the drafts, and never synchronise with the host.
    """

    name: ClassVar[str]
    """The name under which `speculation_policy="..."` finds the policy."""
    requires: frozenset[Signal] = frozenset()
    """The signals the loop has to compute for this policy. May be set per instance."""

    @abstractmethod
    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""

    @abstractmethod
    def draft_lengths(self) -> Tensor:
        """The most tokens each row may draft in the next round, shape `[rows]`, int64, at least 0.

        The loop lowers it further where a row's remaining budget or context is shorter, and ignores it for rows
        that have finished. On a GPU, after rounds in which nobody drafted, another one may already be under way:
        what is wanted is then done after it, and the policy does not observe it.
        """

    @property
    def may_lag(self) -> bool:
        """Whether the round after the next observation may still go by the lengths that were answered before it.

        Asked when a round is over. If so, a GPU begins the next round with them, and the policy learns meanwhile:
        nothing waits for its arithmetic. What it observes of that round then answers the lengths before the last ones.
        False, the default, suits a policy that must know which of its answers it observes, as a bandit must.
        """
        return False

    def should_stop(self, step: DraftStep) -> Tensor | None:  # noqa: ARG002 - part of the contract
        """Rows that draft no further token in this round, shape `[rows]`, bool; the token just drafted stays.

        None, the default, says that this policy never stops inside a round, which spares the loop a host
        synchronisation per draft step.
        """
        return None

    def observe(self, outcome: RoundOutcome) -> None:  # noqa: B027 - optional hook, doing nothing is right
        """Learn from a round that has been verified."""

    def select_rows(self, index: Tensor) -> None:  # noqa: B027 - policies without state per row need nothing
        """Rearrange the batch: entry i of `index` says which row stands in place i from now on.

        Args:
            index: Rows of the batch as it was, `[rows from now on]`, int64, each at most once; -1 for a new sequence,
                which starts as rows do after `start`. Rows that are not named have left the batch.
        """

    @property
    def stops_inside_round(self) -> bool:
        """Whether the loop has to ask `should_stop` after every draft token."""
        return type(self).should_stop is not StoppingPolicy.should_stop


PolicyFactory = Callable[..., StoppingPolicy]
