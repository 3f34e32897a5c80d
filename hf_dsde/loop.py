"""The decoding loop: draft, verify, commit, observe. A round fits on one page; the rest is setting up and handing out.

The loop decides nothing about lengths (a policy does), proposals (a drafter), acceptance (`verification`) or endings
(`stopping`). It keeps one promise of its own: after drafting, a round waits for the device once, at its end. On a GPU
the next round's first pass is then under way already, beside the policy's arithmetic: the device does not wait for the
host either, nor the pass for lengths that it does not need yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_dsde import verification
from hf_dsde.candidate_pass import CandidatePass
from hf_dsde.config import SpeculationConfig
from hf_dsde.cost_measurement import live_costs, remember_costs
from hf_dsde.costs import LiveCosts
from hf_dsde.counts import RoundRecorder
from hf_dsde.drafting.base import CandidateBatch, Drafter, DraftRequest
from hf_dsde.graphs import RecordingCosts
from hf_dsde.outputs import Recording
from hf_dsde.overlap import SideStream, overlaps
from hf_dsde.plain_step import PlainStep
from hf_dsde.policies.base import BatchInfo, PhaseTimes, Signal, StoppingPolicy
from hf_dsde.recorded_function import function_recorder
from hf_dsde.round_outcome import FinishedRound, outcome_of
from hf_dsde.runner import ModelRunner
from hf_dsde.sampling import ScoreProcessor
from hf_dsde.sequences import SequenceBatch
from hf_dsde.spans import Span
from hf_dsde.stopping import Stopping
from hf_dsde.timing import PhaseClock, TimedPolicy
from hf_dsde.token_feed import TokenFeed
from hf_dsde.transfers import Download, upload
from hf_dsde.verification_pass import PassResult, VerificationPass

COST_PROBE_ROUND = 3
"""The round that runs without drafts to measure a plain step: late enough that everything is warm."""
DROPPED_SHARE = 0.25
"""Rows leave the models' passes when at least this share of the rows in them has finished."""
COST_PROBE_MIN_TOKENS = 64
"""Calls that may emit fewer tokens than this are not probed: a plain round would cost them too large a share."""


class SpeculativeLoop:
    """Generates a batch.

    Args:
        target: Runner of the target model.
        drafter: Proposes tokens.
        policy: Decides how many.
        sequences: The batch, with its prompts.
        process: Logits processors of the call.
        stopping: Knows where a text ends.
        statistics: Counts rounds.
        do_sample: Sample if True, decode greedily otherwise.
        config: Everything else that can be set.
        recording: Where scores and logits go, when the output shall have them.
        feed: Takes tokens as soon as they are certain.
    """

    def __init__(
        self,
        *,
        target: ModelRunner,
        drafter: Drafter,
        policy: StoppingPolicy,
        sequences: SequenceBatch,
        process: ScoreProcessor,
        stopping: Stopping,
        statistics: RoundRecorder,
        do_sample: bool,
        config: SpeculationConfig,
        recording: Recording,
        feed: TokenFeed,
    ) -> None:
        self._target = target
        self._pass = VerificationPass(target, config)
        self._drafter = drafter
        self._policy = TimedPolicy(policy)
        self._sequences = sequences
        self._process = process
        self._do_sample = do_sample
        self._config = config
        self._recording = recording
        self._feed = feed
        self._stopping = stopping
        self._statistics = statistics
        self._clock = PhaseClock(sequences.device)
        self._vocabulary_size = target.model.config.get_text_config(decoder=True).vocab_size
        self._times: PhaseTimes | None = None
        self._costs: LiveCosts | None = None
        self._rounds = 0
        self._passes_before = 0
        self._overlaps = overlaps(sequences.device)
        self._side = SideStream(sequences.device)
        self._plain = PlainStep(target, sequences)
        self._candidate_pass = CandidatePass(self._pass, sequences, policy)
        self._plain_rounds = 0
        self._postponed: Tensor | None = None
        self._resumes = False
        self._note: Callable[[], None] | None = None

    @property
    def probes_cost(self) -> bool:
        """Whether one round of this call runs without drafts, so that its statistics can judge what drafting brings."""
        return self._config.cost_probe and self._sequences.max_new_tokens >= COST_PROBE_MIN_TOKENS

    @property
    def _probes_next(self) -> bool:
        """Whether the round after those that have begun measures a plain step."""
        return self.probes_cost and self._rounds == COST_PROBE_ROUND

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording passes of both models has cost so far."""
        return self._target.recording_costs + self._drafter.recording_costs

    def run(self) -> tuple[Tensor, list[int]]:
        """Generate until every row has ended.

        Returns:
            Prompts and generated tokens as plain `generate` pads them, `[rows, width]`, int64; the number of generated
            tokens of each row.
        """
        try:
            with self._active():
                request = self._begin()
                while any(request.active_rows):
                    request = self._round(request)
                self._finish()
        except BaseException:
            self._feed.abort()
            raise
        lengths = self._stopping.final_lengths()
        self._feed.end()
        return self._sequences.text(lengths, max(lengths)), lengths

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Hold the models' settings, which are as before when the `with` block ends."""
        with self._target.active(), self._drafter.active():
            yield

    def _begin(self) -> DraftRequest:
        """Store the prompts and return what the first round shall draft."""
        self._prefill()
        self._start_policy()
        request = self._first_request()
        self._prefill_draft(request, wait=True)
        self._recorded_passes()  # those of measuring costs disturb no round
        return request

    def _finish(self) -> None:
        """Count the last round, and leave to later calls what they can use."""
        self._catch_up_on_notes()
        self._target.finish()
        self._drafter.finish()
        if self._costs is not None and self._config.cost_model is None:
            remember_costs(self._target, self._drafter, self._costs.learnt)

    def _round(self, request: DraftRequest) -> DraftRequest:
        """Draft, verify, commit, observe; return what the next round shall draft."""
        self._prefill_draft(request, wait=False)
        self._clock.start(seamless=self._overlaps)
        self._rounds += 1
        candidates = self._draft(request)
        self._clock.mark(again=self._plain.begun)
        passed = self._run_target(candidates, request)
        self._catch_up_on_notes()
        logits = passed.logits.to(self._sequences.device)
        scores = self._process(logits, self._sequences, self._columns(candidates, request))
        verified = verification.verify(scores, candidates.probs, candidates.tokens, candidates.lengths)
        self._clock.mark()
        new_tokens = verified.behind(candidates.tokens)
        counts = torch.where(request.active, verified.accepted + 1, 0)
        kept, ended = self._stopping.cut(new_tokens, counts)
        self._sequences.append(new_tokens, kept)
        done = FinishedRound(request, candidates, logits, scores, verified, passed.packed_tokens)
        going_on = request.active & ~ended
        if self._overlaps:
            self._clock.mark()
            longest = max(self._sequences.length_counts) + candidates.width + 1
            self._drafter.prepare(self._sequences, going_on, longest)
            if self._expects_plain(1):
                self._plain.prepare(going_on, longest)
            self._side.fork()
        lengths = self._bounded(self._ask(done), going_on)
        vectors = [self._sequences.generated, kept, ended, verified.accepted, candidates.lengths, lengths]
        download = Download(vectors, new_tokens)
        try:
            if self._overlaps:
                self._begin_next()
            values, host_tokens = download.wait()
        finally:  # also when memory runs out: what the pass writes to is not free before it has ended
            self._side.join()
        return self._request(lengths, self._settle(done, host_tokens, *values))

    def _draft(self, request: DraftRequest) -> CandidateBatch:
        """Ask the drafter, unless no row drafts: then the round is a step of plain decoding."""
        self._resumes = request.width > 0 and self._plain_rounds > 1
        self._plain_rounds = 0 if request.width > 0 else self._plain_rounds + 1
        if request.width > 0:
            expect = partial(self._candidate_pass.expect, request=request)
            return self._drafter.propose(self._sequences, request, self._policy, expect)
        return CandidateBatch.nothing(request.lengths, self._vocabulary_size, self._do_sample, self._policy.requires)

    def _run_target(self, candidates: CandidateBatch, request: DraftRequest) -> PassResult:
        """Run the last token and the draft tokens of every row."""
        if candidates.width:
            self._plain.forget()
        elif (ready := self._plain.take()) is not None:
            return PassResult(ready)
        return self._candidate_pass.run(candidates, request)

    def _ask(self, done: FinishedRound) -> Tensor:
        """Tell the policy of a round and return what it wants of the next, or else what it wanted of this in vain."""
        if self._postponed is not None:
            return self._postponed
        with self._policy.timed():
            outcome = outcome_of(done, self._policy.requires, self._times)
        self._policy.observe(outcome)
        return self._policy.draft_lengths()

    def _expects_plain(self, rounds: int) -> bool:
        """Say whether the next round is likely to draft nothing: as many `rounds` before it did not, or it is known."""
        likely = self._plain_rounds >= rounds and self._postponed is None
        return likely or self._probes_next

    def _begin_next(self) -> None:
        """Let the device begin the next round's first pass, before the host knows how this round ended.

        Behind two rounds without drafts it is the target's. Should the policy now want drafts, they come a round later.
        """
        if not self._probes_next:
            self._drafter.begin(self._side)
        # Behind the last token that any row may emit, no pass is needed.
        if self._expects_plain(2) and min(self._sequences.generated_counts) + 1 < self._sequences.max_new_tokens:
            self._plain.begin(self._side)

    def _columns(self, candidates: CandidateBatch, request: DraftRequest) -> list[int]:
        """Return how many columns of each row matter, if a logits processor is called position by position."""
        if not self._process.needs_counts:
            return []
        if not self._policy.stops_inside_round:
            return request.pass_counts  # the host knows them
        lengths = candidates.lengths.tolist()
        return [length + 1 if active else 0 for length, active in zip(lengths, request.active_rows, strict=True)]

    def _bounded(self, lengths: Tensor, active: Tensor) -> Tensor:
        """Lower the policy's lengths to what a row can use: the bonus token takes one of the tokens that remain."""
        lengths = torch.where(active, lengths.clamp(0, self._config.max_draft_length), 0)
        if self._config.fill_to_batch:
            lengths = torch.where(active, lengths.max(), 0)
        lengths = torch.minimum(lengths, (self._sequences.remaining - 1).clamp_min(0))
        room = self._drafter.room(self._sequences)
        return lengths if room is None else torch.minimum(lengths, room)

    def _settle(
        self,
        done: FinishedRound,
        new_tokens: Tensor,
        generated: list[int],
        emitted: list[int],
        ended: list[int],
        accepted: list[int],
        drafted: list[int],
        next_lengths: list[int],
    ) -> list[int]:
        """Take note of a round that is on the host now: end rows, hand out what became certain, learn and count.

        Returns:
            The next round's lengths, as they were given.
        """
        sequences, candidates = self._sequences, done.candidates
        sequences.synchronise(generated, new_tokens)
        self._drafter.observe(drafted, accepted)
        self._recording.add(done.scores, done.logits, emitted)
        self._stopping.advance([bool(end) for end in ended], self._recording.scores_until)
        self._feed.feed(sequences, self._stopping)
        if not self._overlaps:
            self._clock.mark()
        self._times = self._clock.read(self._policy.take_seconds())
        self._note = partial(
            self._take_note,
            self._times,
            self._charged_width(done),
            self._resumes,
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            active=done.request.active_rows,
            draft_steps=candidates.steps,
            pass_width=candidates.width + 1,
            pass_rows=len(self._target.live_rows),
            packed_tokens=done.packed_tokens,
            recorded_passes=self._recorded_passes(),
        )
        if not self._overlaps:
            self._catch_up_on_notes()
        return next_lengths

    def _take_note(
        self, times: PhaseTimes, charged_width: int, resumed: bool, *, recorded_passes: int, **counts: Any
    ) -> None:
        """Let the costs learn from a round, and count it."""
        if self._costs is not None and not recorded_passes:
            self._costs.observe(
                draft_steps=counts["draft_steps"],
                width=charged_width,
                draft=times.draft,
                verify=times.verify,
                overhead=times.bookkeeping,
                resumed=resumed,
            )
        self._statistics.record_round(times=times, recorded_passes=recorded_passes, **counts)

    def _catch_up_on_notes(self) -> None:
        """Do what nothing depends on until the next answer of the policy. On a GPU a pass is under way meanwhile."""
        note, self._note = self._note, None
        if note is not None:
            note()

    def _recorded_passes(self) -> int:
        """Return how many passes were recorded since the last call, which is what distorts a round's times."""
        total = self.recording_costs.passes
        new, self._passes_before = total - self._passes_before, total
        return new

    def _charged_width(self, done: FinishedRound) -> int:
        """Return the columns per row that a padded pass would have had for the tokens of this one."""
        if done.packed_tokens is None:
            return done.candidates.width + 1
        return max(round(done.packed_tokens / len(self._target.live_rows)), 1)

    def _request(self, lengths: Tensor, length_counts: Sequence[int]) -> DraftRequest:
        """Ask for `lengths`, of the rows that go on.

        Nobody drafts in the round that measures a plain step, nor in one whose pass has begun without drafts: that
        one the policy hears nothing of, and what it wanted is done behind it.
        """
        going_on = [not finished for finished in self._stopping.finished()]
        self._drop_finished_rows(going_on)
        probes = self._probes_next
        self._postponed = lengths if self._plain.begun and not probes and any(length_counts) else None
        plain = probes or self._plain.begun
        counts = [0 if plain or not on else n for n, on in zip(length_counts, going_on, strict=True)]
        active = upload(going_on, lengths.device)
        lengths = torch.zeros_like(lengths) if plain else torch.where(active, lengths, 0)
        return DraftRequest(lengths, counts, active, going_on)

    def _drop_finished_rows(self, going_on: Sequence[bool]) -> None:
        """Leave finished rows out of further passes, when enough of them are in to be worth moving the caches."""
        rows = [row for row, on in enumerate(going_on) if on]
        places = len(self._target.live_rows)
        if self._config.drop_finished_rows and rows and places - len(rows) >= places * DROPPED_SHARE:
            self._target.keep_rows(rows)
            self._drafter.keep_rows(rows)
            if self._costs is not None:
                self._costs.set_rows(len(self._target.live_rows))

    def _first_request(self) -> DraftRequest:
        everyone = torch.ones(self._sequences.rows, dtype=torch.bool, device=self._sequences.device)
        lengths = self._bounded(self._policy.draft_lengths(), everyone)
        return self._request(lengths, lengths.tolist())

    def _prefill(self) -> None:
        """Store prompts, but for their last tokens, in the target's cache; measure costs if the policy needs them."""
        sequences = self._sequences
        started = time.perf_counter()
        spans = [Span(row, 0, length - 1) for row, length in enumerate(sequences.prompt_lengths)]
        self._target.store(spans, sequences.tokens_at(spans))
        self._pass.measure(max(sequences.prompt_lengths))
        if Signal.COSTS in self._policy.requires:
            self._costs = live_costs(self._target, self._drafter, self._config, max(sequences.prompt_lengths))
        self._record_prefill(started, wait=True)

    def _prefill_draft(self, request: DraftRequest, *, wait: bool) -> None:
        """Let the drafter read the texts of rows that draft for the first time. Without drafts it reads none."""
        started = time.perf_counter()
        rows = [row for row, length in enumerate(request.length_counts) if length]
        if rows and self._drafter.prefill(self._sequences, rows):
            self._clock.restart()  # it is no part of the round
            self._record_prefill(started, wait=wait)

    def _record_prefill(self, started: float, *, wait: bool) -> None:
        """Count the time since `started`; that of the device too if somebody may wait for it."""
        if wait and self._sequences.device.type == "cuda":
            torch.cuda.synchronize(self._sequences.device)
        self._statistics.record_prefill(time.perf_counter() - started)

    def _start_policy(self) -> None:
        self._policy.start(
            BatchInfo(
                rows=self._sequences.rows,
                device=self._sequences.device,
                vocabulary_size=self._vocabulary_size,
                max_draft_length=self._config.max_draft_length,
                max_new_tokens=self._sequences.max_new_tokens,
                costs=self._costs,
                record=function_recorder(self._sequences.device, self._config),
            )
        )
