"""The decoding loop: draft, verify, commit, observe. A round fits on one page; the rest is setting up and handing out.

The loop decides nothing about lengths (a policy does), proposals (a drafter), acceptance (`verification`) or endings
(`stopping`). What passes from one round to the next is a `RoundPlan`, which does not change, and what `RunAhead` has
let begin. After drafting, a round waits for the device once, at its end. On a GPU the next round's first pass is under
way by then, beside the policy's arithmetic: the device does not wait for the host either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import LiveCosts
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.cost_measurement import CostLearner, live_costs, remember_costs
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.lengths import DraftLengths
from hf_dsde.decoding.outcome import Fetched, FinishedRound
from hf_dsde.decoding.plan import RoundPlan, next_plan
from hf_dsde.decoding.prefill import Prefill
from hf_dsde.decoding.recording import Recording
from hf_dsde.decoding.round_log import RoundLog
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.decoding.sampling import ScoreProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stopping import Stopping
from hf_dsde.decoding.target_pass import VerificationPass
from hf_dsde.decoding.token_feed import TokenFeed
from hf_dsde.decoding.verification import verify
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.measurement.clock import PhaseClock
from hf_dsde.measurement.rounds import RoundListener, RoundRecorder
from hf_dsde.policies.base import Signal, StoppingPolicy
from hf_dsde.utils.transfers import Download

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
        recording: Where scores and logits go, when the output is to have them.
        feed: Takes tokens as soon as they are certain.
        listeners: Hear of every round that is over, as the statistics do.
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
        listeners: Sequence[RoundListener] = (),
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._sequences = sequences
        self._process = process
        self._do_sample = do_sample
        self._config = config
        self._by_chance = do_sample and config.acceptance is None
        self._recording = recording
        self._feed = feed
        self._stopping = stopping
        self._statistics = statistics
        self._clock = PhaseClock(sequences.device)
        self._prefill = Prefill(target, drafter, sequences, statistics, self._clock)
        self._vocabulary_size = target.model.config.get_text_config(decoder=True).vocab_size
        self._lengths = DraftLengths(policy, drafter, sequences, self._vocabulary_size, config, listeners)
        self._costs: LiveCosts | None = None
        self._ahead = RunAhead(VerificationPass(target), drafter, sequences)
        self._log = RoundLog([statistics, *listeners], self._clock, overlaps=self._ahead.overlaps)

    @property
    def probes_cost(self) -> bool:
        """Whether one round of this call runs without drafts, so that its statistics can judge what drafting brings."""
        return self._config.options.cost_probe and self._sequences.max_new_tokens >= COST_PROBE_MIN_TOKENS

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
            with self._target.active(), self._drafter.active():
                plan = self._begin()
                while any(plan.active_rows):
                    plan = self._round(plan)
                self._finish()
        except BaseException:
            self._feed.abort()
            raise
        lengths = self._stopping.final_lengths()
        self._feed.end()
        return self._sequences.text(lengths, max(lengths)), lengths

    def _begin(self) -> RoundPlan:
        """Store the prompts and plan the first round."""
        longest = max(self._sequences.prompt_lengths)
        with self._prefill.timed():
            self._prefill.store_prompts()
            if Signal.COSTS in self._lengths.requires:
                self._costs = live_costs(self._target, self._drafter, self._config, longest)
                self._log.listeners.append(CostLearner(self._costs))
        self._lengths.start(self._costs)
        plan = self._next_plan(None, self._lengths.first([True] * self._sequences.rows))
        self._prefill.read_draft(plan, wait=True)
        self._log.skip_recordings(self.recording_costs.passes)  # those of measuring costs disturb no round
        return plan

    def _finish(self) -> None:
        """Count the last round, and leave to later calls what they can use."""
        self._log.flush()
        self._target.finish()
        self._drafter.finish()
        if self._costs is not None and self._config.cost_model is None:
            remember_costs(self._target, self._drafter, self._costs.learnt)

    def _round(self, plan: RoundPlan) -> RoundPlan:
        """Draft, verify, commit, observe; return the plan of the next round."""
        ahead, sequences = self._ahead, self._sequences
        self._prefill.read_draft(plan, wait=False)
        self._clock.start(seamless=ahead.overlaps)
        candidates = self._draft(plan)
        self._clock.mark(again=ahead.begun)
        passed = ahead.run_target(candidates, plan)
        self._log.flush()
        self._lengths.learn()
        logits = passed.logits.to(sequences.device)
        scores = self._scores(logits, candidates, plan)
        verified = verify(scores, candidates, do_sample=self._do_sample, acceptance=self._config.acceptance)
        self._clock.mark()
        new_tokens = verified.with_next_token(candidates.tokens)
        kept, ended = self._stopping.cut(new_tokens, (verified.accepted + 1) * plan.active)
        if passed.hidden:
            self._drafter.accept(verified, passed.hidden)
        sequences.append(new_tokens, kept)
        done = FinishedRound(plan, candidates, logits, scores, verified, self._by_chance, passed.packed_tokens)
        going_on = plan.active & ~ended
        probes = self._probes(plan.index + 1)
        if ahead.overlaps:
            self._clock.mark()
            ahead.stage(plan, going_on, candidates.width, self._lengths.foreseen, probes=probes)
        pending = self._lengths.after(done, self._log.times)
        vectors = [sequences.generated, kept, ended, verified.accepted, candidates.lengths, *pending.vectors]
        download = Download(vectors, new_tokens, pending.signals)
        # No pass is needed after the last token that any row may emit.
        more = min(sequences.generated_counts) + 1 < sequences.max_new_tokens
        with ahead.running(draft=not probes, target=more and (probes or plan.overtaken or plan.foretells_plain(2))):
            (generated, emitted, ends, accepted, drafted, *lengths), host_tokens, signals = download.wait()
        sequences.synchronise(generated, host_tokens)
        self._drafter.update_candidate_strategy(sequences, scores, accepted, drafted)
        self._hand_out(done, emitted, ends)
        stays = [on and not end for on, end in zip(plan.active_rows, ends, strict=True)]
        counts = self._lengths.settle(pending, Fetched(drafted, accepted, stays, lengths, signals))
        self._log.add(
            done,
            pending.outcome,
            drafted,
            accepted,
            emitted,
            policy_seconds=self._lengths.take_seconds(),
            pass_rows=len(self._target.live_rows),
            recorded=self.recording_costs.passes,
            looking_seconds=self._drafter.looking_seconds,
        )
        return self._next_plan(plan, counts)

    def _draft(self, plan: RoundPlan) -> CandidateBatch:
        """Ask the drafter, unless no row drafts: then the round is a step of plain decoding."""
        if plan.drafts:
            monitor = self._lengths.monitor(partial(self._ahead.expect, plan=plan))
            return self._drafter.get_candidates(self._sequences, plan, monitor)
        return self._ahead.unused or CandidateBatch.nothing(plan.lengths, self._vocabulary_size, self._lengths.requires)

    def _scores(self, logits: Tensor, candidates: CandidateBatch, plan: RoundPlan) -> Tensor:
        """Process the target's logits, each position with the drafts before it, whoever has made them."""
        if self._process.needs_history:
            self._sequences.write_drafts(candidates.tokens)
        columns = plan.pass_counts(candidates.counts) if self._process.needs_counts else []
        return self._process(logits, self._sequences, columns)

    def _probes(self, index: int) -> bool:
        """Whether this round measures a plain step."""
        return self.probes_cost and index == COST_PROBE_ROUND

    def _hand_out(self, done: FinishedRound, emitted: list[int], ends: Sequence[int]) -> None:
        """End rows, and give scores and tokens that became certain to whoever wants them."""
        self._recording.add(done.scores, done.logits, emitted)
        self._stopping.advance([bool(end) for end in ends], self._recording.scores_until)
        self._feed.feed(self._sequences, self._stopping)

    def _next_plan(self, previous: RoundPlan | None, length_counts: Sequence[int]) -> RoundPlan:
        """Plan the round after `previous` with what the policy wants, after rows that have ended have left."""
        going_on = [not finished for finished in self._stopping.finished()]
        self._drop_finished_rows(going_on)
        return next_plan(
            previous,
            length_counts,
            going_on,
            self._sequences.device,
            probes=self._probes(0 if previous is None else previous.index + 1),
            plain_begun=self._ahead.plain_begun,
            hurried=not self._drafter.waits,
        )

    def _drop_finished_rows(self, going_on: Sequence[bool]) -> None:
        """Leave finished rows out of further passes, when enough of them are in to be worth moving the caches."""
        rows = [row for row, on in enumerate(going_on) if on]
        places = len(self._target.live_rows)
        if self._config.options.drop_finished_rows and rows and places - len(rows) >= places * DROPPED_SHARE:
            self._target.keep_rows(rows)
            self._drafter.keep_rows(rows)
            if self._costs is not None:
                self._costs.set_rows(len(self._target.live_rows))
