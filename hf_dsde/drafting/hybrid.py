"""Drafts out of texts where they repeat themselves, and a model's everywhere else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_dsde.costs import BatchCosts
from hf_dsde.decoding.candidates import CandidateBatch, Deterministic, Law, Sampled
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, Drafter, StagedStep
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.choice import Choice, Offer, RoundPrices, RunningAcceptance, choose, model_offer, unopposed
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.text_drafter import TextDrafter
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.spans import Span
from hf_dsde.policies import Signal


class HybridDrafter(Drafter):
    """In every round each row drafts out of texts or with the model, whichever is expected to bring more.

    A text's draft is as long as the text makes likely and its columns are worth, up to `max_draft_length` tokens,
    whatever the policy says (`choice.worthwhile`); the policy decides what the model drafts. A text promises
    `trusts[...] * score` tokens, and the model `a + a^2 + ... + a^k` of the `k` that the policy lets it draft, with
    the row's running acceptance `a`. `choice.choose` weighs both against the measured seconds of passes: the columns
    of the target's pass, and the draft steps, which the rows share. If the rows that are left are not worth the steps,
    the model sits the round out.
    A row that drafts out of texts takes part in no draft step; the model reads what it missed when it next drafts.

    Policies and listeners see the model's drafts alone: rows with a text's draft are rows that drafted nothing.

    Args:
        text: Drafts out of texts.
        model: Drafts with a model or a head.
    """

    requires: ClassVar[frozenset[Signal]] = frozenset({Signal.COSTS})

    def __init__(self, text: TextDrafter[Any], model: ChainDrafter) -> None:
        self.text = text
        self.model = model

    @property
    def provides(self) -> frozenset[Signal]:  # type: ignore[override] # the model's
        """The model's signals."""
        return self.model.provides

    def start(self, call: DraftCall) -> None:
        """Let both prepare for a call."""
        super().start(call)
        self.text.start(call)
        self.model.start(call)
        self._acceptance = RunningAcceptance(call.sequences.rows)
        # Of rows that drafts are taken from texts for.
        self._drafts: list[Continuation] = [NOTHING] * call.sequences.rows
        self._drafted: Sequence[Continuation] = ()  # those that are being verified

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:
        """Choose who drafts for each row; return how much."""
        assert costs is not None
        wanted = self.model.allot(wanted, most, costs)

        def judge(texts: Sequence[Offer], prices: RoundPrices, alone: bool) -> Choice:
            going_on = [row for row, bound in enumerate(most) if bound]
            if not any(text.tokens for text in texts):  # as in most rounds of most texts; offers would say the same
                return unopposed([wanted[row] for row in going_on], prices)
            acceptance = self._acceptance.of_rows()
            return choose([model_offer(wanted[row], acceptance[row]) for row in going_on], texts, prices, alone)

        self._drafts, choice = self.text.look(most, most, costs, judge, max(wanted))
        if choice is not None and not choice.model:
            if any(wanted):
                self._acceptance.forget()
            wanted = [0] * len(wanted)
        return [len(draft.tokens) or n for draft, n in zip(self._drafts, wanted, strict=True)]

    @property
    def looking_seconds(self) -> float:
        """The texts'."""
        return self.text.looking_seconds

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
    ) -> CandidateBatch:
        """Take the texts' drafts, and let the model draft for the other rows, if there are any that may."""
        if not any(draft.tokens for draft in self._drafts):
            self._drafted, self.model.others_width = (), 0
            return self.model.get_candidates(sequences, plan, monitor)
        self._drafted = [draft if n else NOTHING for draft, n in zip(self._drafts, plan.length_counts, strict=True)]
        copied = [bool(draft.tokens) for draft in self._drafted]
        counts = [0 if taken else n for n, taken in zip(plan.length_counts, copied, strict=True)]
        self.model.others_width = max(len(draft.tokens) for draft in self._drafted)
        if not any(copied):
            return self.model.get_candidates(sequences, plan, monitor)
        texts = CandidateBatch.of_lists([draft.tokens for draft in self._drafted], sequences.device, steps=0)
        if not any(counts):
            self.model.sit_out()
            nothing = CandidateBatch.nothing(plan.lengths, self.call.vocabulary_size, monitor.signals)
            return replace(texts, judged=nothing, unjudged=copied)
        union = _Union(texts)
        drafted = self.model.get_candidates(sequences, replace(plan, length_counts=counts), monitor.adding(union.of))
        return union.candidates(drafted, copied)

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Tell each what became of its own drafts."""
        texts = self._drafted
        self._drafted = ()
        self.text.judge(texts or [NOTHING] * len(drafted), num_matches)
        if not texts:
            self._acceptance.learn(drafted, num_matches)
            self.model.update_candidate_strategy(sequences, scores, num_matches, drafted)
            return
        own = [not draft.tokens for draft in texts]
        matches = [n * mine for n, mine in zip(num_matches, own, strict=True)]
        counts = [n * mine for n, mine in zip(drafted, own, strict=True)]
        self._acceptance.learn(counts, matches)
        self.model.update_candidate_strategy(sequences, scores, matches, counts)

    def read_texts(self, rows: Sequence[int]) -> None:
        """Look at the prompts for the first time, both of them."""
        self.text.read_texts(rows)
        self.model.read_texts(rows)

    def prefill(self, rows: Sequence[int]) -> bool:
        """Let the model read the texts of rows that it drafts for."""
        return self.model.prefill([row for row in rows if not self._drafts[row].tokens])

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Let both forget what is over."""
        self.text.begin_texts(rows)
        self.model.begin_texts(rows)
        self._acceptance.begin(rows)

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:
        """Use the host's time for the texts, and stage the model's step if it has drafted in this round."""
        self._acceptance.settle()
        self.text.stage_next(going_on, longest, foreseen)
        return self.model.stage_next(going_on, longest, foreseen)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave all other rows out."""
        self.text.keep_rows(rows)
        self.model.keep_rows(rows)

    def finish(self) -> None:
        """Let both give back what later calls can use."""
        self.text.finish()
        self.model.finish()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The model's."""
        return self.model.hidden_layers

    @property
    def reads_prompt_states(self) -> bool:  # type: ignore[override] # the model's
        """Whether the model does."""
        return self.model.reads_prompt_states

    def read_states(self, spans: Sequence[Span], hidden: tuple[Tensor, ...]) -> None:
        """Hand them to the model."""
        self.model.read_states(spans, hidden)

    def accept(self, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:
        """Hand the states of a round to the model, whoever has drafted its tokens."""
        self.model.accept(verified, hidden)

    def room(self) -> Tensor | None:
        """The model's: texts have no limit."""
        return self.model.room()

    def active(self) -> AbstractContextManager[None]:
        """Hold the model's attention setting."""
        return self.model.active()

    @property
    def depends_on_rows(self) -> bool:
        """Whether the model does."""
        return self.model.depends_on_rows

    @property
    def settings(self) -> Mapping[str, Any]:
        """The text drafter's, with its class; a job knows the model itself."""
        kind = type(self.text)
        return {"text": f"{kind.__module__}.{kind.__qualname__}", "settings": dict(self.text.settings)}

    @property
    def cost_owner(self) -> object:
        """The model."""
        return self.model.cost_owner

    @property
    def conditions(self) -> Hashable:
        """How the model's passes are run, and that it sits out of some rounds."""
        return type(self).__name__, self.model.conditions

    def step_seconds(self, longest: int) -> float:
        """Measure and return the seconds of one step of the model."""
        return self.model.step_seconds(longest)

    @property
    def recording_costs(self) -> RecordingCosts:
        """The model's."""
        return self.model.recording_costs


class _Union:
    """Puts the drafts of texts and those of a model into one block.

    Args:
        texts: Those of texts, with length 0 for the model's rows.
    """

    def __init__(self, texts: CandidateBatch) -> None:
        self._texts = texts
        self._copied = texts.lengths > 0
        self._last: tuple[Tensor, Tensor] | None = None

    def of(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and lengths of all rows, given the model's; of the same tokens, the same tensor again."""
        if self._last is None or self._last[0] is not tokens:
            width = max(tokens.shape[1], self._texts.width)
            block = torch.where(self._copied[:, None], _widened(self._texts.tokens, width), _widened(tokens, width))
            self._last = tokens, block
        return self._last[1], lengths + self._texts.lengths

    def candidates(self, model: CandidateBatch, copied: Sequence[bool]) -> CandidateBatch:
        """Return the candidates of all rows, given the model's.

        Args:
            model: The model's.
            copied: Rows that draft out of texts.
        """
        tokens, lengths = self.of(model.tokens, model.lengths)
        theirs, ours = model.host_lengths, self._texts.host_lengths
        assert ours is not None
        return CandidateBatch(
            tokens=tokens,
            lengths=lengths,
            law=self._law(model.law),
            host_lengths=None if theirs is None else [a + b for a, b in zip(theirs, ours, strict=True)],
            steps=model.steps,
            judged=model,
            unjudged=copied,
        )

    def _law(self, law: Law) -> Law:
        """Of tokens that were not drawn, a law in which they are certain: the ratio test takes them with `p(x)`."""
        if isinstance(law, Deterministic):
            return law
        width, tokens = max(law.probs.shape[1], self._texts.width), self._texts.tokens
        certain = torch.zeros_like(law.probs[:, :1]).expand(-1, tokens.shape[1], -1)
        certain = certain.scatter(2, tokens[:, :, None], 1.0)
        probs = torch.where(self._copied[:, None, None], _widened(certain, width), _widened(law.probs, width))
        return Sampled(probs)


def _widened(values: Tensor, width: int) -> Tensor:
    """Add columns of zeros, `[rows, width, ...]`."""
    columns = width - values.shape[1]
    return torch.nn.functional.pad(values, (*[0, 0] * (values.dim() - 2), 0, columns)) if columns else values
