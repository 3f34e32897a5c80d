"""What drafters have in common that look at texts alone: something that is kept of each row's text, and grows with it.

Nothing here waits for a device: proposals come out of the host's copies of the texts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from hf_dsde.costs import BatchCosts
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, Drafter
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.choice import Offer, with_texts, worthwhile
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.policies import Signal


class GrowingText(Protocol):
    """What is kept of a row's text: it is shown all of its tokens, in their order."""

    def __len__(self) -> int:
        """Tokens that it has been shown."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take over the tokens that come next."""


Text = TypeVar("Text", bound=GrowingText)

FIRST_PROMISE = 16.0
"""Tokens that scores are thought to have promised before anything was verified, half of which stood."""
LONGEST_PROMISE = 1000.0
"""Promised tokens that are remembered: what is older counts ever less."""


class TextDrafter(Drafter, Generic[Text]):
    """Proposes, of each row, what the text makes likely, as far as that is worth the columns of the target's pass.

    A row that nobody asks for costs nothing. The policy says how much a row may draft at most, and the measured seconds
    of passes say what of it is proposed: `worthwhile` cuts each row's draft, and of the rows those draft that make the
    batch faster (`with_texts`); where none does, the round is a plain step. `SpeculationConfig(cost_cap=False)` leaves
    all to the policy.
    """

    _promised, _kept = FIRST_PROMISE, FIRST_PROMISE / 2

    @property
    def requires(self) -> frozenset[Signal]:  # type: ignore[override] # as the call wants it
        """The costs, unless the call does without."""
        return frozenset() if self.call.config.cost_cap is False else frozenset({Signal.COSTS})

    @property
    def cost_owner(self) -> object:
        """All of a kind cost the same, also one that was made for a single call."""
        return type(self)

    @property
    def trust(self) -> float:
        """Accepted tokens per token that the scores promised, over the last rounds, also of earlier calls.

        A score takes what was seen for all that there is, and so promises too much where little was seen. By how much
        is about the same for all scores on texts of a kind: of a proposal, `trust * score` tokens stand in the mean.
        """
        return self._kept / self._promised

    def start(self, call: DraftCall) -> None:
        """Forget the rows of an earlier call."""
        super().start(call)
        self._texts: list[Text | None] = [None] * call.sequences.rows
        self._allotted: Sequence[Continuation] | None = None  # what the next round may propose, if that is known
        self._scores: list[float] = []  # of the proposals that are being verified

    @abstractmethod
    def new_text(self) -> Text:
        """Return what is kept of a text, before it has been shown any token."""

    @abstractmethod
    def continuation(self, text: Text, most: int) -> Continuation:
        """Return what a text is expected to go on with.

        Args:
            text: What is kept of it.
            most: The most tokens, at least 1.
        """

    def propose(self, sequences: SequenceBatch, most: Sequence[int]) -> list[Continuation]:
        """Return the proposals of all rows, each with the number of its tokens that are expected to stand; see `trust`.

        Args:
            sequences: The batch of this call.
            most: The most tokens of each row; 0 for rows that are not asked.

        Raises:
            RuntimeError: If another call has begun before this one was over.
        """
        if sequences is not self.call.sequences:
            msg = f"{type(self).__name__} serves one call at a time, and another began: give each one of its own."
            raise RuntimeError(msg)
        return [self.continuation(self._read(row), n) if n else NOTHING for row, n in enumerate(most)]

    def prefill(self, rows: Sequence[int]) -> bool:
        """Read the texts of rows that draft for the first time, so that no round's seconds count it."""
        unread = [row for row in rows if self._texts[row] is None]
        for row in unread:
            self._read(row)
        return bool(unread)

    def offers(self, proposals: Sequence[Continuation], costs: BatchCosts) -> list[Offer]:
        """Return what of proposals is worth its columns of the target's pass, and what is expected of it.

        Args:
            proposals: Of any rows.
            costs: Of the batch.
        """
        longest = max((len(proposal.tokens) for proposal in proposals), default=0)
        seconds = [costs.verify.at(1 + tokens) + costs.overhead for tokens in range(longest + 1)]
        return [
            worthwhile(Offer(len(proposal.tokens), self.trust * proposal.score), seconds)
            if proposal.tokens
            else Offer()
            for proposal in proposals
        ]

    def cut(self, proposal: Continuation, offer: Offer) -> Continuation:
        """Return as much of a proposal as an offer takes."""
        if offer.tokens == len(proposal.tokens):
            return proposal
        return replace(proposal, tokens=proposal.tokens[: offer.tokens], score=offer.gain / self.trust)

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:
        """Draft within what the policy wants, where that brings more than it takes; return how much."""
        if Signal.COSTS not in self.requires:
            return wanted
        assert costs is not None
        going_on = [row for row, n in enumerate(most) if n]
        proposals = self.propose(self.call.sequences, wanted)
        offers = self.offers([proposals[row] for row in going_on], costs)
        drafts = [NOTHING] * len(wanted)
        if any(offer.tokens for offer in offers):

            def seconds(columns: float) -> float:
                return costs.draft_seconds(int(columns > 1)) + costs.verify.at(columns) + costs.overhead

            _, taken = with_texts([Offer()] * len(going_on), offers, seconds)
            for place in taken:
                drafts[going_on[place]] = self.cut(proposals[going_on[place]], offers[place])
        self._allotted = drafts
        return [len(draft.tokens) for draft in drafts]

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,
        plan: RoundPlan,
        monitor: DraftMonitor,  # noqa: ARG002
    ) -> CandidateBatch:
        """Propose what `allot` has found, or as many tokens as are likely within what the rows may draft."""
        if self._allotted is None:
            proposals = self.propose(sequences, plan.length_counts)
        else:
            pairs = zip(self._allotted, plan.length_counts, strict=True)
            proposals = [proposal if n else NOTHING for proposal, n in pairs]
        self._scores = [proposal.score for proposal in proposals]
        return CandidateBatch.of_lists([proposal.tokens for proposal in proposals], sequences.device, steps=1)

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        num_matches: Sequence[int],
        drafted: Sequence[int],  # noqa: ARG002
    ) -> None:
        """Compare what stands with what the scores promised."""
        if self._scores:
            self.judge(self._scores, num_matches)
        self._scores = []

    def judge(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """Learn how much scores can be trusted.

        Args:
            scores: Of proposals that were verified, 0 for rows that had none.
            accepted: Tokens of each that stand.
        """
        pairs = [(score, stand) for score, stand in zip(scores, accepted, strict=True) if score > 0]
        past = min(1.0, LONGEST_PROMISE / self._promised)
        self._promised = past * self._promised + sum(score for score, _ in pairs)
        self._kept = past * self._kept + sum(stand for _, stand in pairs)

    def _read(self, row: int) -> Text:
        """Show a row's new tokens to what is kept of its text."""
        text = self._texts[row]
        if text is None:
            self._texts[row] = text = self.new_text()
        text.extend(self.call.sequences.host_text(row, first=len(text)))
        return text

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget the texts that are over."""
        for row in rows:
            self._texts[row] = None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget the texts of rows that have finished."""
        kept = set(rows)
        self._texts = [text if row in kept else None for row, text in enumerate(self._texts)]

    def finish(self) -> None:
        """Let go of all texts."""
        self._texts, self._allotted = [], None
        del self.call
