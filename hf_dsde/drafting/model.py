"""A smaller language model as drafter.

The draft keeps a ragged cache of its own. It is not rolled back and not kept in step with the target's: the first
forward pass of a round feeds the last tokens of every row, as many as the row that is furthest behind misses. Feeding a
token again writes the same key and value into the same slot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.decoding.candidates import CandidateBatch, Deterministic, Sampled
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, Drafter, StagedStep
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sampling import choose
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.model_runner import pass_seconds
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span
from hf_dsde.execution.wrappers import may_depend_on_rows
from hf_dsde.policies.base import DRAFT_SIGNALS, LOGIT_SIGNALS, DraftStep, Signal
from hf_dsde.utils.transfers import upload
from hf_dsde.utils.tuning import tuning_of

UNKNOWN_TOKEN_LOGIT = -1e4
"""Logit of ids that the draft lacks: probability 0 in float32. Finite, so that a logits processor which forbids
everything else leaves a distribution, and no NaN."""
RECORDED_WIDTHS = (1, 2, 8, 32, 64)
"""A draft is fed one token per row, two after a proposal, and more only when rounds without drafts came before it: any
number, which must not be another pass to record."""


@dataclass
class _Proposal:
    """What a round's draft steps bring, one entry per step."""

    tokens: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    _block: Tensor | None = None

    def add(self, step: DraftStep, probs: Tensor | None, signals_needed: frozenset[Signal]) -> None:
        """Keep a step's tokens, the law they were drawn from, and the signals that are asked for."""
        self.tokens.append(step.tokens)
        if probs is not None:
            self.probs.append(probs)
        if signals_needed & LOGIT_SIGNALS:
            self.logits.append(step.logits)
        if Signal.ENTROPY in signals_needed:
            self.entropy.append(step.entropy)
        if Signal.CONFIDENCE in signals_needed:
            self.confidence.append(step.confidence)

    def block(self, device: torch.device) -> Tensor:
        """All steps' tokens, `[rows, steps]`, on `device`; the same tensor again until another step is added."""
        if self._block is None or self._block.shape[1] != len(self.tokens):
            self._block = torch.stack(self.tokens, dim=1).to(device)
        return self._block


class ModelDrafter(Drafter):
    """Drafts with a causal language model over the target's vocabulary.

    Ids that only the draft has are never proposed; ids that only the target has are proposed when a logits processor
    leaves nothing else, and fed as the draft's last id.

    Args:
        model: The draft.
    """

    provides = DRAFT_SIGNALS

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def start(self, call: DraftCall) -> None:
        """Make a cache for the batch, or take over an earlier call's."""
        super().start(call)
        model, sequences = self.model, call.sequences
        self._runner = create_runner(
            model, sequences.rows, call.capacity, call.config.options, call.config.runner, RECORDED_WIDTHS
        )
        self._runner.cache.limit = call.cache_limit
        self._device = self._runner.device
        self._tuning = tuning_of(self._device)
        self._vocabulary_size = call.vocabulary_size
        self._last_id = model.config.get_text_config(decoder=True).vocab_size - 1
        # The draft samples through the call's processors, as it should resemble the target.
        self._process = call.process if self._device == sequences.device else call.process.on(self._device)
        self._context = compat.context_length(model)
        self._cached = [0] * sequences.rows
        self._caught_up: list[int | None] = []
        self._staged: Callable[[], PassOutput] | None = None
        self._prepared: Tensor | None = None

    @property
    def depends_on_rows(self) -> bool:
        """Whether hooks in the draft may hold something for each row."""
        return may_depend_on_rows(self.model)

    @property
    def cost_owner(self) -> object:
        """The draft."""
        return self.model

    @property
    def conditions(self) -> Hashable:
        """How the draft's passes are run."""
        return self._runner.conditions

    @property
    def cache(self) -> RaggedCache:
        """The draft's keys and values."""
        return self._runner.cache

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording passes of the draft has cost so far."""
        return self._runner.recording_costs

    def active(self) -> AbstractContextManager[None]:
        """Hold the draft's attention setting."""
        return self._runner.active()

    def prefill(self, rows: Sequence[int]) -> bool:
        """Store what rows hold that have drafted nothing yet, but for their last tokens."""
        stored = self._store_missing(self.call.sequences, [row for row in rows if not self._cached[row]])
        if stored:
            self._prepared = None  # that pass did not see what is stored now
        return stored

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget what the cache holds of these rows, and the pass that was begun for their old texts."""
        self._prepared = None
        for row in rows:
            self._cached[row] = 0

    def finish(self) -> None:
        """Let later calls have the cache."""
        self._runner.finish()

    def room(self) -> Tensor | None:
        """A row can draft until it has filled the draft's context."""
        return None if self._context is None else (self._context - self.call.sequences.lengths).clamp_min(0)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave all other rows out of the draft's passes."""
        self._runner.keep_rows(rows)

    def step_seconds(self, longest: int) -> float:
        """Measure and return the seconds of one forward pass of one token per row."""
        return pass_seconds(self._runner, 1, longest)

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
    ) -> CandidateBatch:
        """Draft up to `plan.width` tokens, one forward pass each."""
        lengths = plan.lengths.to(self._device)
        drafted = torch.zeros_like(lengths)
        drafting = lengths > 0
        proposal = _Proposal()
        logits = self._catch_up(sequences, plan)
        ends = sequences.lengths.to(self._device)
        following: Callable[[], PassOutput] | None = None
        for position in range(plan.width):
            if following is not None:
                logits = self._align(following().logits[:, 0])
            counts = [int(position < length) for length in plan.length_counts]
            scores = self._process(logits[:, None], sequences, counts, offset=position)[:, 0]
            tokens, probs = choose(scores, self.call.do_sample)
            if self._process.needs_history:
                sequences.write_drafts(tokens[:, None].to(sequences.device), offset=position)
            step = DraftStep(position, tokens, logits, scores, drafting)
            proposal.add(step, probs, monitor.signals)
            drafted = drafted + drafting
            drafting = monitor.after(step, drafting & (lengths > position + 1))
            if position + 1 == plan.width:
                break
            # Whatever follows is ready before the host waits for the answer, so that the device gets it at once.
            monitor.ask(drafting)
            following = self._stage(sequences, ends, tokens, position + 1, drafting)
            if monitor.nobody_drafts(partial(_proposed, proposal, drafted, sequences.device)):
                break
        host_lengths = None if monitor.stops_inside_round else plan.length_counts
        return self._candidates(proposal, drafted, host_lengths, sequences.device)

    def stage_next(self, going_on: Tensor, longest: int) -> StagedStep | None:
        """Stage each row's last two tokens: after a proposal, no row that drafted misses more."""
        sequences = self.call.sequences
        self._staged = self._prepared = None
        fits = self._context is None or longest <= self._context
        if self._device != sequences.device or not fits or not self._caught_up:
            return None
        tokens, positions = sequences.tail(2)
        positions = positions.masked_fill(~going_on[:, None], -1)
        self._staged = self._runner.stage(RowBlock(self._clamp_to_vocabulary(tokens), positions), longest, keep=1)
        return StagedStep(self._feed_staged, beside=self._runner.replays)

    def _feed_staged(self) -> None:
        staged, self._staged = self._staged, None
        assert staged is not None
        self._prepared = self._align(staged().logits[:, 0])

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self,
        sequences: SequenceBatch,  # noqa: ARG002
        scores: Tensor,  # noqa: ARG002
        num_matches: Sequence[int],
        drafted: Sequence[int],
    ) -> None:
        """Note how much of each row's cache holds text: what was caught up, and the draft tokens that were accepted.

        The last draft token of a row was proposed but never fed.
        """
        for row, length in enumerate(self._caught_up):
            if length is not None:
                self._cached[row] = length + min(num_matches[row], max(drafted[row] - 1, 0))
        self._caught_up = []

    def _catch_up(self, sequences: SequenceBatch, plan: RoundPlan) -> Tensor:
        """Feed what each row misses up to its last token; return the logits after it, `[rows, vocabulary]`."""
        lengths = sequences.length_counts
        missing = [length - cached for length, cached in zip(lengths, self._cached, strict=True)]
        fits = [
            drafts > 0
            or (active and gap <= self._tuning.long_gap and (self._context is None or length <= self._context))
            for drafts, active, gap, length in zip(plan.length_counts, plan.active_rows, missing, lengths, strict=True)
        ]
        self._caught_up = [length if fit else None for length, fit in zip(lengths, fits, strict=True)]
        prepared, self._prepared = self._prepared, None
        rows = [row for row, fit in enumerate(fits) if fit]
        if prepared is not None and max(missing[row] for row in rows) <= 2:
            return prepared
        if not self._fits_first_pass(max(missing[row] for row in rows)):
            self._store_missing(sequences, [row for row in rows if missing[row] > self._tuning.long_gap])
        width = max(lengths[row] - self._cached[row] for row in rows)
        tokens, positions = sequences.tail(width)
        if not all(fits):
            positions = positions.masked_fill(~upload(fits, positions.device)[:, None], -1)
        return self._last_logits(tokens, positions, max(lengths[row] for row in rows))

    def _fits_first_pass(self, width: int) -> bool:
        """Whether catching up can share the first draft pass."""
        tokens = len(self._runner.live_rows) * self._runner.padded_width(width)
        return width <= RECORDED_WIDTHS[-1] and tokens <= self._tuning.wide_pass_tokens

    def _store_missing(self, sequences: SequenceBatch, rows: Sequence[int]) -> bool:
        """Store all that rows miss but their last tokens, which the next step feeds; return whether there was any."""
        spans = []
        for row in rows:
            end = sequences.length_counts[row] - 1
            end = end if self._context is None else min(end, self._context)
            spans.append(Span(row, self._cached[row], end - self._cached[row]))
        spans = [span for span in spans if span.count > 0]
        if not spans:
            return False
        self._runner.store(spans, self._clamp_to_vocabulary(sequences.tokens_at(spans)))
        for span in spans:
            self._cached[span.row] = span.end
        return True

    def _stage(
        self, sequences: SequenceBatch, ends: Tensor, tokens: Tensor, position: int, drafting: Tensor
    ) -> Callable[[], PassOutput]:
        """Get a draft step ready that feeds the tokens of the one before."""
        slots = (ends + position - 1).masked_fill(~drafting, -1)
        longest = max(sequences.length_counts) + position
        return self._runner.stage(RowBlock(self._clamp_to_vocabulary(tokens[:, None]), slots[:, None]), longest, keep=1)

    def _last_logits(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Run a block; return the logits after each row's last token, `[rows, vocabulary]`."""
        block = RowBlock(self._clamp_to_vocabulary(tokens), positions)
        return self._align(self._runner.forward(block, longest, keep=1).logits[:, 0])

    def _clamp_to_vocabulary(self, tokens: Tensor) -> Tensor:
        """Map ids outside the draft's vocabulary to its last id. That costs acceptance, never exactness."""
        return tokens.clamp_max(self._last_id)

    def _align(self, logits: Tensor) -> Tensor:
        """Bring logits to the target's vocabulary: ids the draft lacks get no probability, ids only it has are cut."""
        missing = self._vocabulary_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=UNKNOWN_TOKEN_LOGIT)
        return logits[..., : self._vocabulary_size]

    def _candidates(
        self, proposal: _Proposal, drafted: Tensor, host_lengths: Sequence[int] | None, device: torch.device
    ) -> CandidateBatch:
        """Stack the steps and bring them to the sequences' device, once per round."""

        def stacked(steps: Sequence[Tensor]) -> Tensor | None:
            return torch.stack(list(steps), dim=1).to(device) if steps else None

        probs = stacked(proposal.probs)
        return CandidateBatch(
            tokens=proposal.block(device),
            lengths=drafted.to(device),
            law=Deterministic() if probs is None else Sampled(probs),
            host_lengths=host_lengths,
            steps=len(proposal.tokens),
            logits=stacked(proposal.logits),
            entropy=stacked(proposal.entropy),
            confidence=stacked(proposal.confidence),
        )


def _proposed(proposal: _Proposal, drafted: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is proposed if no row drafts on."""
    return proposal.block(device), drafted.to(device)
