"""The contract between the decoding loop and whatever proposes draft tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import BatchCosts
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sampling import ScoreProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.spans import Span
from hf_dsde.policies import Signal


@dataclass(frozen=True)
class DraftCall:
    """What a drafter may know when a call begins.

    Attributes:
        sequences: The batch it will draft for, with its prompts.
        vocabulary_size: Size of the target's vocabulary.
        process: The call's logits processors. Who samples through them resembles the target more.
        do_sample: Whether the target samples. A drafter may choose its tokens in any way all the same.
        capacity: Tokens per row that a cache had better have room for from the start.
        cache_limit: Tokens per row up to which a cache may grow ahead of need; None for no limit.
        config: How passes are run.
        target: Runs the target, whose passes can end after a layer (`RowBlock.exit_layer`). None where there is none.
        encoded: What rows bring along for a draft that reads an encoder's states; None for other drafts.
    """

    sequences: SequenceBatch
    vocabulary_size: int
    process: ScoreProcessor
    do_sample: bool
    capacity: int
    cache_limit: int | None
    config: SpeculationConfig
    target: ModelRunner | None = None
    encoded: EncoderStates | None = None


@dataclass(frozen=True)
class StagedStep:
    """A drafter's first step of the next round, made ready from what the device alone knows.

    Attributes:
        run: Begins it. Returns the tokens of the proposal that comes of it if that is as long as the last one,
            `[rows, width]`, int64, which are then the tokens of its candidates; None where that is not known.
        beside: Whether it may run in a second stream, beside work that it does not need: it must drop no memory of the
            current one.
    """

    run: Callable[[], Tensor | None]
    beside: bool


class Drafter(CandidateGenerator, ABC):
    """Proposes tokens for every row of a batch: transformers' `CandidateGenerator`, for batches.

    What it proposes is never wrong, only worth more or less: the target decides. Only `get_candidates` has to be
    written; all else has defaults that fit a drafter without a model, which looks at the text alone. One instance
    serves one call of `generate` at a time, and may serve many one after another.

    Args of `get_candidates` and `update_candidate_strategy` stand for those of transformers' class: the batch for
    `input_ids`, and matches per row.
    """

    requires: ClassVar[frozenset[Signal]] = frozenset()
    """`Signal.COSTS`, if it wants to know in `allot` what passes cost, whatever the policy asks for."""
    provides: ClassVar[frozenset[Signal]] = frozenset()
    """Signals of its distributions that it puts into its candidates when `monitor.signals` asks for them. Whoever
    provides any asks the monitor after each token as well."""

    waits = True
    """Whether the device waits for what the host may find after a round. If not, the target's next pass begins before,
    and what is found by then waits a round: see `left_over`."""

    reads_prompt_states = True
    """Whether it wants hidden states of prompts too, in `read_states`, if it names any `hidden_layers`."""

    def start(self, call: DraftCall) -> None:
        """Prepare for a call. Whatever an earlier call has left is over."""
        self.call = call

    @abstractmethod
    def get_candidates(  # type: ignore[override] # a batch in place of one row's tokens
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
    ) -> CandidateBatch:
        """Draft.

        Args:
            sequences: The text: `host_text(row)` and `length_counts` on the host, `tokens` on the device. Where logits
                processors look at it, draft tokens are also written after it.
            plan: How much the rows may draft, `length_counts` on the host and `lengths` on the device; at least one
                row may.
            monitor: Is asked after each token which rows go on, by drafters that have distributions to show.
        """

    def update_candidate_strategy(  # type: ignore[override] # counts per row
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Learn what became of the last round, also of one without drafts.

        Args:
            sequences: The text, with the round's tokens.
            scores: The target's processed scores, `[rows, width + 1, vocabulary]`, float32.
            num_matches: Draft tokens of each row that the target accepted.
            drafted: Tokens that each row drafted.
        """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads, numbered as in `PassOutput`. They cost copies."""
        return ()

    def read_states(self, spans: Sequence[Span], hidden: tuple[Tensor, ...]) -> None:
        """Get the target's hidden states of texts that it has read, if any layer was named and they are wanted.

        Args:
            spans: Where the tokens stand: all of a prompt but its last token.
            hidden: Of each layer, those of all spans, one after another, `[sum of counts, H]`.
        """

    def accept(self, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:
        """Get the target's hidden states of a round, if any layer was named, before the host knows how it ended.

        The texts do not have the round's tokens yet: a row's last token, which the first column is of, has the position
        `sequences.lengths - 1`.

        Args:
            verified: Which of the candidates stand.
            hidden: Of each layer, those of each row's last token and candidates, `[rows, width + 1, H]`. Of a row, the
                first `accepted + 1` belong to its text.
        """

    def read_texts(self, rows: Sequence[int]) -> None:
        """Look at prompts that the target has just been given: the sequences hold them, and no round is under way."""

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:  # noqa: ARG002
        """Return how much each row drafts next: what the policy wants, or anything else.

        The host knows the texts by then. Of rows that have ended in the meantime, the plan says 0; a round may also be
        run without any drafts first, and then it is asked again.

        Args:
            wanted: What the policy wants, within `room`.
            most: The most tokens of each row; 0 of rows that have finished.
            costs: What passes cost, if the policy, a listener or `requires` asks for it.
        """
        return wanted

    @property
    def looking_seconds(self) -> float:
        """Host seconds that the last `allot` has spent on looking texts up: no draft step is charged with them."""
        return 0.0

    def prefill(self, rows: Sequence[int]) -> bool:  # noqa: ARG002 - who reads nothing need not look
        """Read the texts of rows that are about to draft for the first time in their text; return whether any were."""
        return False

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Learn that these rows have other texts from now on. The sequences still hold those that are over."""

    def room(self) -> Tensor | None:
        """The most tokens that the policy can let each row draft next, `[rows]`, int64; None for no limit."""
        return None

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:  # noqa: ARG002
        """Make the first step of the next proposal ready, before the host knows how this round ended.

        The texts have this round's tokens on the device already; their host copies lack them still.

        Args:
            going_on: Rows that may draft next, `[rows]`, bool.
            longest: A bound on the rows' lengths.
            foreseen: The most tokens that the policy will let a row draft; None where it has not answered yet.

        Returns:
            What begins it; None if there is nothing to begin. The loop asks for nothing else before it has ended.
        """
        return None

    def left_over(self, going_on: Tensor) -> CandidateBatch | None:  # noqa: ARG002
        """Return what the next round may draft of this round's proposal, if a plain step has overtaken it.

        The target's pass over it begins before the host knows the step's token. If that is the first one of a row's
        draft, the others may follow, and else nothing; `allot` has to say the same afterwards.

        Args:
            going_on: Rows that may draft next, `[rows]`, bool.

        Returns:
            Candidates with lengths on the device; their `host_lengths` are upper bounds. None if there is nothing.
        """
        return None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave all other rows out from now on; they have finished."""

    def active(self) -> AbstractContextManager[None]:
        """Hold whatever settings drafting needs for the duration of a `with` block."""
        return nullcontext()

    def finish(self) -> None:
        """Give back what later calls can use: this one is done."""

    @property
    def depends_on_rows(self) -> bool:
        """Whether a row's place in the batch may matter to a pass, so that finished rows have to stay in."""
        return False

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides its proposals, in the types of JSON: a job whose drafter has others is another job."""
        return {}

    @property
    def cost_owner(self) -> object:
        """Whatever measured costs belong to: they are kept as long as it lives, and found again by it."""
        return self

    @property
    def conditions(self) -> Hashable:
        """What decides how long a draft step takes, apart from its rows and their tokens."""
        return None

    def step_seconds(self, longest: int) -> float:  # noqa: ARG002
        """Measure and return the seconds of one draft step, with texts of up to `longest` tokens.

        Returns:
            0 if that is not worth measuring before the rounds show it.
        """
        return 0.0

    @property
    def recording_costs(self) -> RecordingCosts:
        """What recording passes of the draft has cost so far."""
        return RecordingCosts()
