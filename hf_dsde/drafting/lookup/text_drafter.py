"""What drafters have in common that look at texts alone: something that is kept of each row's text, and grows with it.

Nothing here waits for a device: proposals come out of the host's copies of the texts.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from hf_dsde.costs import BatchCosts
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, Drafter, StagedStep
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.target_pass import pass_sizes
from hf_dsde.drafting.choice import Choice, Offer, RoundPrices, chosen, common_length, shortened, with_texts, worthwhile
from hf_dsde.drafting.lookup.continuation import LONGEST_CLASS, NOTHING, Continuation, match_class
from hf_dsde.drafting.lookup.left_over import LeftOver
from hf_dsde.drafting.lookup.rests import RowRests
from hf_dsde.drafting.lookup.stragglers import Stragglers
from hf_dsde.drafting.lookup.trust import ScoreTrust
from hf_dsde.policies import Signal


class GrowingText(Protocol):
    """What is kept of a row's text: it is shown all of its tokens, in their order."""

    def __len__(self) -> int:
        """Tokens that it has been shown."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take over the tokens that come next."""


Text = TypeVar("Text", bound=GrowingText)

LOOKING_SHARE = 0.01
"""Share of the time that looks may take beyond what their drafts save."""
READ_BESIDE = 256
"""Tokens of texts that are read beside one pass of the target: at most a millisecond's work."""
DEAR_COLUMN = 0.25
"""Share of a plain round that a further column of all rows takes at least where only stragglers are looked up: a token
more of a row that is ahead brings no more than that."""
LONGEST_PAUSE = 100
"""Rounds without a look, at most: hosts stall, and a look that took ages says nothing about the next one."""
WAITING_SHARE = 0.5
"""Of a plain round: what looks have to save in the mean for the device to wait for them. A round that it waits for
takes longer by 0.4 of a plain one at 8 rows of an 8B model, and by 0.5 at 32 (H200)."""
SAVED_RATE = 0.1
"""Weight of a look in that mean."""
NO_OFFER = Offer()


class TextDrafter(Drafter, Generic[Text]):
    """Proposes, of each row, what the text makes likely, as far as that is worth the columns of the target's pass.

    A row that nobody asks for is read, but not looked up. The policy says how much a row may draft at most, and the
    measured seconds of passes say what of it is proposed: `offers` cuts the rows' drafts, and of the rows those draft
    that make the batch faster (`with_texts`); where none does, the round is a plain step. Looking texts up takes time
    of its own, which decides how often that is done (`look`). `SpeculationConfig(cost_cap=False)` leaves all to the
    policy.
    """

    _saved_share = WAITING_SHARE  # of a plain round, by what looks find, had it all been drafted at once
    least_match = 1
    """Tokens of the shortest agreement that `continuation` need look for: what is found by shorter ones is not worth
    its columns."""

    def __init__(self) -> None:
        self._trust = ScoreTrust()

    @property
    def requires(self) -> frozenset[Signal]:  # type: ignore[override] # as the call wants it
        """The costs, unless the call does without."""
        return frozenset() if self.call.config.cost_cap is False else frozenset({Signal.COSTS})

    @property
    def cost_owner(self) -> object:
        """All of a kind cost the same, also one that was made for a single call."""
        return type(self)

    @property
    def conditions(self) -> Hashable:
        """Whether prices decide: without, draft steps are charged with looks, as policies have to weigh them."""
        return self._priced

    @property
    def trust(self) -> float:
        """Accepted tokens per token that the scores promised, over the last rounds, also of earlier calls."""
        return self._trust.overall

    @property
    def trusts(self) -> list[float]:
        """The same by `match_class`: see `ScoreTrust.of_classes`."""
        return self._trust.of_classes

    def start(self, call: DraftCall) -> None:
        """Forget the rows of an earlier call."""
        super().start(call)
        self._priced = Signal.COSTS in self.requires
        self._texts: list[Text | None] = [None] * call.sequences.rows
        self._allotted: Sequence[Continuation] | None = None  # what the next round may propose, if that is known
        self._proposed: Sequence[Continuation] = ()  # what is being verified
        self._left = LeftOver()
        self._rests = RowRests(call.sequences.rows)
        self._pause = 0  # rounds in which nobody looks
        self._stragglers = Stragglers(call.sequences.rows)
        self._looking = 0.0  # seconds of the last look, ...
        self._patience = math.inf  # how many of them a row has that bring nothing, before it is left out, ...
        self._looked: Sequence[int] = ()  # rows that it looked up, of which nothing is known yet, ...
        self._found: Sequence[int] = ()  # and those that it found drafts for which were not verified yet

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
        proposals = [NOTHING] * len(most)
        for row, n in enumerate(most):
            if n:
                proposals[row] = self.continuation(self._read(row), n)
        return proposals

    def read_texts(self, rows: Sequence[int]) -> None:
        """Read prompts, while the device stores them."""
        self.prefill(rows)

    def prefill(self, rows: Sequence[int]) -> bool:
        """Read the texts of rows that draft for the first time, so that no round's seconds count it."""
        unread = [row for row in rows if self._texts[row] is None]
        for row in unread:
            self._read(row)
        return bool(unread)

    def offers(self, proposals: Sequence[Continuation], prices: RoundPrices, others_width: int = 0) -> list[Offer]:
        """Return what of proposals is worth its columns of the target's pass, and what is expected of it.

        Args:
            proposals: Of all rows that go on.
            prices: Of the batch.
            others_width: The longest draft that a row may have otherwise.
        """
        rows, trusts = len(proposals), self.trusts
        offers = [NO_OFFER] * rows
        found = [place for place, each in enumerate(proposals) if each.tokens]
        for place in found:
            each = proposals[place]
            offers[place] = Offer(len(each.tokens), trusts[match_class(each.match)] * each.score)
        longest = max((offers[place].tokens for place in found), default=0)
        seconds = [prices.seconds(0, rows * (1 + n), n) for n in range(longest + 1)]
        if not prices.sizes.packs:
            most = max(common_length([offers[place] for place in found], seconds, rows), others_width)
            for place in found:
                offers[place] = shortened(offers[place], most)
        else:
            for place in found:
                offers[place] = worthwhile(offers[place], seconds)
        return offers

    def cut(self, proposal: Continuation, offer: Offer) -> Continuation:
        """Return as much of a proposal as an offer takes."""
        if offer.tokens == len(proposal.tokens):
            return proposal
        score = offer.gain / self.trusts[match_class(proposal.match)]
        return Continuation(proposal.tokens[: offer.tokens], score, proposal.match)

    def look(
        self,
        wanted: Sequence[int],
        most: Sequence[int],
        costs: BatchCosts,
        choose: Callable[[list[Offer], RoundPrices, bool], Choice],
        others_width: int = 0,
    ) -> tuple[list[Continuation], Choice | None]:
        """Look texts up, unless the last look took more time than it saved; return the drafts, and what was chosen.

        In large batches a look at all texts takes as long as a good part of a pass. What is found is drafted if that
        saves any time, since the look's is spent by then. But after a look that took longer than its drafts save, as
        many rounds pass without one as keep what was lost within `LOOKING_SHARE` of the time. Rows whose looks bring
        nothing are left out of some (`RowRests`), once they have taken longer than a token of the row takes otherwise.
        Where rows make no place for other texts, drafts save what `Stragglers` gain, and a model's are not left out
        unless most of these have drafts out of texts.

        Args:
            wanted: The most tokens of each row; 0 for rows that are not looked up.
            most: Tokens that each row has a use for, 0 for rows that have finished.
            costs: Of the batch.
            choose: Is given what the texts offer the rows that go on, what rounds take, and whether a model may be left
                out.
            others_width: The longest draft that a row may have otherwise.

        Returns:
            The drafts of all rows, most of them empty; the choice, None if nobody was looked up.
        """
        drafts = [NOTHING] * len(most)
        overtaken, self._found, self._looked, self._looking = bool(self._found), (), (), 0.0
        assert self.call.target is not None
        prices = RoundPrices(costs, pass_sizes(self.call.target))
        if self._pause and not overtaken:
            self._pause -= 1
            return drafts, None
        self._rests.next_look()
        column, sequences = self._column_price(prices), self.call.sequences
        going_on = [row for row, n in enumerate(most) if n]
        # Nobody waits for a row that ends late while texts are left to take the places of the others. Beside a model,
        # which drafts for all rows anyway, these have to be a batch: with fewer, what rows that are ahead gain is lost.
        refilled = sequences.texts_left >= (sequences.rows if others_width else 1)
        counted = going_on if refilled else self._stragglers.among(going_on, sequences.generated_counts)
        lookable = counted if column >= DEAR_COLUMN else going_on
        self._looked = [row for row in lookable if wanted[row] and self._rests.over(row)]
        if not self._looked:
            return drafts, None
        asked = [0] * len(most)
        for row in self._looked:
            asked[row] = wanted[row]
        started = time.perf_counter()
        self.prefill(self._looked)
        begun = time.perf_counter()
        self.least_match = self._least_worthwhile(column)
        proposals = self.propose(sequences, asked)
        self.least_match = 1
        offers = self.offers([proposals[row] for row in going_on], prices, others_width)
        offered = {row for row, each in zip(going_on, offers, strict=True) if each.tokens}
        choice = choose(offers, prices, refilled or 2 * len(offered.intersection(counted)) >= len(counted))
        if not refilled:
            expected = {going_on[place]: offers[place].gain for place in choice.texts}
            choice = self._stragglers.judged(choice, counted, expected)
        self._found = [going_on[place] for place in choice.texts]
        for place in choice.texts:
            drafts[going_on[place]] = self.cut(proposals[going_on[place]], offers[place])
        ended = time.perf_counter()
        self._looking = ended - started
        # As long as its looks take, together, less than a token of a row does otherwise.
        look_of_row, token = (ended - begun) / len(self._looked), choice.otherwise / len(going_on)
        self._patience = token / look_of_row if look_of_row else math.inf
        lost = max(ended - begun - choice.saved, 0.0) / choice.otherwise
        self._pause = min(int(lost / LOOKING_SHARE), LONGEST_PAUSE)
        return drafts, choice

    def _column_price(self, prices: RoundPrices) -> float:
        """A further column of all rows, in plain rounds; 0 where passes are padded: other rows may need it anyway."""
        if not prices.sizes.packs:
            return 0.0
        plain, wider = (prices.seconds(0, prices.sizes.rows * width, width - 1) for width in (1, 2))
        return wider / plain - 1

    def _least_worthwhile(self, column: float) -> int:
        """Return the shortest match whose tokens are worth a column, even if all of what it promises were sure."""
        trusts = self.trusts
        shortest = next((n for n in range(1, LONGEST_CLASS) if trusts[n] > column), LONGEST_CLASS)
        return 1 << (shortest - 1)

    @property
    def looking_seconds(self) -> float:
        """Seconds of the last look; 0 if there was none for this round."""
        return self._looking

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:
        """Draft within what the policy wants, where that brings more than it takes; return how much."""
        if not self._priced:
            return wanted
        if self._left.candidates is not None:
            return self._allot_left_over(most)
        assert costs is not None

        def choose(texts: list[Offer], prices: RoundPrices, _: bool) -> Choice:
            taken = with_texts([NO_OFFER] * len(texts), texts, prices, 0, 1)
            return chosen(taken, taken.without, len(texts), model=False)

        self._allotted, choice = self.look(wanted, most, costs, choose)
        if choice is not None:
            self._saved_share += SAVED_RATE * (choice.saved / choice.otherwise - self._saved_share)
        return [len(draft.tokens) for draft in self._allotted]

    def _allot_left_over(self, most: Sequence[int]) -> list[int]:
        """Return how much of what was left over each row drafts."""
        self._looked, self._looking = [row for row, draft in enumerate(self._allotted or ()) if draft.tokens], 0.0
        self._allotted = self._left.standing(self.call.sequences, most)
        self._found = [row for row, draft in enumerate(self._allotted) if draft.tokens]
        return [len(draft.tokens) for draft in self._allotted]

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,
        plan: RoundPlan,
        monitor: DraftMonitor,  # noqa: ARG002
    ) -> CandidateBatch:
        """Propose what `allot` has found, or as many tokens as are likely within what the rows may draft."""
        left = self._left.take(plan.length_counts)
        if left is not None:
            self._proposed = self._allotted or ()
            return left
        if self._allotted is None:
            proposals = self.propose(sequences, plan.length_counts)
        else:
            pairs = zip(self._allotted, plan.length_counts, strict=True)
            proposals = [proposal if n else NOTHING for proposal, n in pairs]
        self._proposed = proposals
        return CandidateBatch.of_lists([proposal.tokens for proposal in proposals], sequences.device, steps=1)

    @property
    def waits(self) -> bool:  # type: ignore[override] # while looks are worth it
        """Whether looks save enough for the device to wait for them."""
        return not self._pause and self._saved_share >= WAITING_SHARE

    def left_over(self, going_on: Tensor) -> CandidateBatch | None:
        """Offer what is left of each draft after its first token, to rows whose text goes on with that."""
        return self._left.offer(self._allotted or (), self.call.sequences, going_on)

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        num_matches: Sequence[int],
        drafted: Sequence[int],  # noqa: ARG002
    ) -> None:
        """Compare what stands with what the scores promised."""
        self.judge(self._proposed or [NOTHING] * len(num_matches), num_matches)
        self._proposed = ()

    def judge(self, drafts: Sequence[Continuation], accepted: Sequence[int]) -> None:
        """Learn from a round how much scores can be trusted, and whose texts are worth looking up.

        Args:
            drafts: Those that were verified, empty ones for rows that had none out of texts.
            accepted: Tokens of each that stand.
        """
        found, tried = set(self._found), [row for row, draft in enumerate(drafts) if draft.tokens]
        for row in self._looked:
            if drafts[row].tokens or row not in found:  # else nobody has tried what was found
                self._rests.learn(row, accepted[row] if drafts[row].tokens else 0, self._patience)
        self._looked = ()
        if not tried:
            return
        self._found = ()
        self._stragglers.learn(accepted)
        self._trust.learn([drafts[row] for row in tried], [accepted[row] for row in tried])

    def _read(self, row: int) -> Text:
        """Show a row's new tokens to what is kept of its text."""
        text = self._texts[row]
        if text is None:
            self._texts[row] = text = self.new_text()
        text.extend(self.call.sequences.host_text(row, first=len(text)))
        return text

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:  # noqa: ARG002
        """Read what texts have gone on with while they were not looked up, beside the target's pass; no step begins."""
        lengths, left = self.call.sequences.length_counts, READ_BESIDE
        for row, text in enumerate(self._texts):
            if left > 0 and text is not None and len(text) < lengths[row]:
                left -= lengths[row] - len(text)
                self._read(row)
        return None

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget the texts that are over."""
        self._left.forget()
        self._rests.begin(rows)
        self._stragglers.begin(rows)
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
