"""Drafting one token after another with a model: a chain of recorded steps, or steps with the host in between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding.candidates import CandidateBatch, Deterministic, Sampled
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, StagedStep
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sampling import choose
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.cached_model import CachedModel, only_rows
from hf_dsde.drafting.drawn_tokens import DraftVocabulary
from hf_dsde.drafting.proposal import Drafted, Prepared, Proposal, tokens_of
from hf_dsde.drafting.token_choices import TokenChoices
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.recorded_chain import Chain, DraftedChain
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.token_choice import BestTokens, Chosen, TokenChoice, best_tokens
from hf_dsde.policies.base import DRAFT_SIGNALS, LOGIT_SIGNALS, DraftStep


class ChainDrafter(CachedModel):
    """Drafts with a model: a pass for each token of the rows' drafts, over what the model's cache holds of their texts.

    Args:
        model: The draft.

    Attributes:
        others_width: The longest draft that rows have in this round from somebody else.
    """

    provides = DRAFT_SIGNALS
    others_width = 0

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._nobody_looks = False

    @abstractmethod
    def _drafted_block(self, tokens: Tensor, places: Tensor, before: PassOutput) -> RowBlock:
        """Return the tokens of a step as the draft is fed them.

        Args:
            tokens: `[rows, 1]`, int64.
            places: Their positions in what the draft reads, `[rows, 1]`, int64; below 0 where a row has none.
            before: Of the pass that they were chosen after.
        """

    def _make_vocabulary(self, size: int, last_id: int) -> DraftVocabulary:
        """Return what may be proposed, as `DraftVocabulary` has it: by default, ids mean the same to both models."""
        return DraftVocabulary(size, last_id, size)

    def start(self, call: DraftCall) -> None:
        """Make a cache for the batch, or take over an earlier call's."""
        super().start(call)
        own_size = self.model.config.get_text_config(decoder=True).vocab_size
        self._vocabulary = self._make_vocabulary(call.vocabulary_size, own_size - 1)
        # The draft samples through the call's processors, as it should resemble the target.
        self._process = call.process if self._device == call.sequences.device else call.process.on(self._device)
        self._choices = TokenChoices(self.model, self._process, self._vocabulary, do_sample=call.do_sample)
        self._staged: Callable[[], PassOutput] | None = None
        self._choice: TokenChoice | None = None  # of the last round's chain, ...
        self._steps = 0  # and how many steps it had, or the next one will have

    @property
    def exit_layer(self) -> int | None:
        """The layer that passes end after, if not all are run."""
        return None

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
    ) -> CandidateBatch:
        """Draft up to `plan.width` tokens, one forward pass each."""
        asked = monitor.stops_inside_round or monitor.signals & (DRAFT_SIGNALS - LOGIT_SIGNALS)
        self._choice = None if asked else self._choices.choice(recorded=self._runner.replays)
        self._keeps_logits, self._steps = bool(monitor.signals & LOGIT_SIGNALS), 0
        self._nobody_looks = isinstance(self._choice, BestTokens) and not self._keeps_logits
        begun = self._catch_up(plan)
        candidates = None if self._choice is None else self._chained(plan, begun, self._choice)
        self._choices.turn += 1
        return candidates or self._step_by_step(sequences, plan, monitor, begun.output)

    def _chained(self, plan: RoundPlan, begun: Prepared, choice: TokenChoice) -> CandidateBatch | None:
        """Draft after the first pass; None if the runner needs the host for that."""
        device, output, first, drafted = self.call.sequences.device, begun.output, begun.first, begun.drafted
        if first is None or begun.choice != choice:
            first, drafted = self._choices.first(choice, output.logits[:, 0]), None
        if drafted is not None and not self._stands(drafted):
            drafted = None
        ran = 0 if drafted is None else drafted.width - 1
        self._steps = plan.width - 1
        if drafted is None or self._steps > ran:
            longest = max(self._texts.length_counts)
            lengths = plan.lengths.to(self._device)
            drafted = self._draft_on(choice, output, first, lengths, longest, self._runner.chain, goes_on=ran > 0)
            if drafted is None:
                self._steps = 0
                return None
        _, tokens, probs, logits = drafted.begin(plan.width)
        return CandidateBatch(
            tokens.to(device),
            plan.lengths,
            law=Deterministic() if probs is None else Sampled(probs.to(device)),
            host_lengths=plan.length_counts,
            steps=1 + max(self._steps, ran),
            logits=None if logits is None else self._vocabulary.known(logits).to(device),
        )

    def _stands(self, drafted: Drafted) -> bool:
        """Whether what was drafted ahead has all that is asked for, and the same rows: they draw numbers together."""
        kept = drafted.logits is not None or not self._keeps_logits
        return kept and drafted.rows == len(self._runner.live_rows)

    def _draft_on(
        self,
        choice: TokenChoice,
        output: PassOutput,
        first: Callable[[], Chosen],
        lengths: Tensor,
        longest: int,
        run: Callable[[Chain], DraftedChain | None],
        *,
        goes_on: bool = False,
    ) -> Drafted | None:
        """Draft `self._steps` tokens of each row after its first one; return all of them.

        Args:
            choice: As in `Chain`.
            output: Of the first pass.
            first: Gives the tokens that were chosen after it.
            lengths: As in `Chain`.
            longest: A bound on the rows' lengths.
            run: Runs the chain of what follows, or nothing and returns None.
            goes_on: As in `Chain`.

        Returns:
            `[rows, 1 + self._steps]` tokens; None if `run` has done nothing.
        """

        def first_block() -> RowBlock:
            places = self._texts.lengths[:, None].to(self._device)
            return self._drafted_block(first().fed[:, None], places, output)

        drafted = None
        if self._steps:
            chain = Chain(
                first_block,
                lengths,
                steps=self._steps,
                longest=longest + self._steps,
                choice=choice,
                exit_layer=self.exit_layer,
                keeps_logits=self._keeps_logits,
                goes_on=goes_on,
                fill=self._choices.fill(choice),
            )
            drafted = run(chain)
            if drafted is None:
                return None
        tokens, probs = tokens_of(first, drafted)
        logits = None
        if self._keeps_logits:
            steps = [] if drafted is None or drafted.logits is None else [drafted.logits]
            logits = torch.cat([output.logits, *steps], dim=1)
        own = self._of_target(tokens) if probs is None else tokens
        return Drafted(len(self._runner.live_rows), own, probs, logits)

    def _step_by_step(
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor, output: PassOutput
    ) -> CandidateBatch:
        """Draft after the first pass, with the host in between."""
        lengths = plan.lengths.to(self._device)
        drafted = torch.zeros_like(lengths)
        drafting = lengths > 0
        proposal = Proposal()
        ends = self._texts.lengths.to(self._device)
        following: Callable[[], PassOutput] | None = None
        for position in range(plan.width):
            if following is not None:
                output = following()
            step, probs = self._chosen(output.logits[:, 0], plan, position, drafting)
            if self._process.needs_history:
                sequences.write_drafts(step.tokens[:, None].to(sequences.device), offset=position)
            proposal.add(step, probs, monitor.signals)
            drafted = drafted + drafting
            drafting = monitor.after(step, drafting & (lengths > position + 1))
            if position + 1 == plan.width:
                break
            # Whatever follows is ready before the host waits for the answer, so that the device gets it at once.
            monitor.ask(drafting)
            following = self._stage(ends, step.tokens, position + 1, drafting, output)
            if monitor.nobody_drafts(partial(_proposed, proposal, drafted, sequences.device)):
                break
        host_lengths = None if monitor.stops_inside_round else plan.length_counts
        return proposal.candidates(drafted, host_lengths, sequences.device)

    def _chosen(
        self, logits: Tensor, plan: RoundPlan, position: int, drafting: Tensor
    ) -> tuple[DraftStep, Tensor | None]:
        """Choose the tokens of a step; return them with what they were chosen from, and the law if they were drawn.

        Args:
            logits: The draft's, `[rows, its vocabulary]`, float32.
            plan: The round.
            position: Tokens that were drafted before.
            drafting: Rows that take part, `[rows]`, bool.
        """
        if self._nobody_looks:  # the best tokens alone need no distributions over the target's vocabulary
            tokens = self._of_target(self._best(logits))
            return DraftStep(position, tokens, logits, logits, drafting), None
        logits = self._vocabulary.known(logits).over_target()
        counts = [int(position < length) for length in plan.length_counts]
        scores = self._process(logits[:, None], self.call.sequences, counts, offset=position)[:, 0]
        tokens, probs = choose(scores, self.call.do_sample)
        return DraftStep(position, tokens, logits, scores, drafting), probs

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:
        """Stage the last tokens of each row: after a proposal, no row that drafted misses more."""
        self._staged = self._prepared = None
        fits = self._context is None or longest <= self._context
        if self._device != self.call.sequences.device or not fits or not self._caught_up:
            return None
        width = self._widest_gap()
        self._staged = self._runner.stage(only_rows(self._text_block(width), going_on), longest, keep=1)
        if foreseen is not None:
            self._steps = max(foreseen - 1, 0)
        return StagedStep(partial(self._feed_staged, width, going_on, longest), beside=self._runner.replays)

    def sit_out(self) -> None:
        """Draft nothing in this round."""
        self._prepared = None

    def _widest_gap(self) -> int:
        """Return how many tokens the next proposal may have to feed first."""
        # Rows that somebody else has drafted for may miss as much, and are left out where that is too much.
        gap = self.others_width + 1
        return max(self._staged_width(), gap if self._fits_first_pass(gap) else min(gap, self._tuning.long_gap))

    def _feed_staged(self, width: int, going_on: Tensor, longest: int) -> Tensor | None:
        """Run the first pass, and the steps foreseen, or else as many as the last round had: it rarely needs fewer."""
        staged, self._staged = self._staged, None
        assert staged is not None
        choice, output = self._choice, staged()
        self._prepared = Prepared(output, width)
        fits = self._context is None or longest + self._steps <= self._context
        if choice is None or not fits:
            return None
        first = self._choices.first(choice, output.logits[:, 0])
        lengths = going_on * (self._steps + 1)
        drafted = self._draft_on(choice, output, first, lengths, longest, self._runner.begin_chain)
        if drafted is None:
            return None
        self._prepared = Prepared(output, width, choice, first, drafted)
        return drafted.tokens

    def _stage(
        self, ends: Tensor, tokens: Tensor, position: int, drafting: Tensor, before: PassOutput
    ) -> Callable[[], PassOutput]:
        """Get a draft step ready that feeds the tokens of the one before."""
        places = (ends + position - 1).masked_fill(~drafting, -1)
        longest = max(self._texts.length_counts) + position
        block = self._drafted_block(self._vocabulary.fed(tokens)[:, None], places[:, None], before)
        return self._runner.stage(block, longest, keep=1)

    def _best(self, logits: Tensor) -> Tensor:
        """Return the best tokens as the draft is fed them, `[...]`, int64."""
        return best_tokens(self.model, logits, self._vocabulary.proposable)

    def _of_target(self, tokens: Tensor) -> Tensor:
        """Return tokens that the draft may be fed as the target knows them."""
        return tokens


def _proposed(proposal: Proposal, drafted: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is proposed if no row drafts on."""
    return proposal.block(device), drafted.to(device)
