"""Playing a policy over a trace: rounds of a lockstep batch whose finished rows are refilled at once.

The policy is the real one, with the state and the calls it has in the decoding loop. What the loop would get from two
models, the replay looks up in a `Realization`. Nothing here knows what a round costs, unless the policy asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_dsde.policies import BatchInfo, DraftStep, PhaseTimes, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.replay.draws import SequenceQueue
from hf_dsde.replay.pricing import RoundPrices
from hf_dsde.replay.trace_tables import Integers
from hf_dsde.utils.checks import check_integer

VOCABULARY_SIZE = 49152
"""What policies are told; traces hold scalars, so that nothing else depends on it."""
BY_POSITION = (Signal.KLD, Signal.REVERSE_KLD, Signal.ENTROPY, Signal.CONFIDENCE, Signal.ACCEPTANCE)
PRICED = frozenset({Signal.COSTS, Signal.TIMINGS})
"""Signals by which a policy learns what rounds cost, so that it plays differently at other prices."""


class Ground(Protocol):
    """What a replay is played on; see `Realization`."""

    max_draft_length: int
    run: Integers
    remaining: Integers
    next_entropy: Tensor
    next_probability: Tensor

    def block(self, signal: str) -> Tensor:
        """A signal of whole blocks, `[positions, max_draft_length]`, float32."""


@dataclass(frozen=True)
class RoundLog:
    """What happened, round by round; enough to price a run under any costs.

    Attributes:
        rows: Rows of the batch.
        steps: Draft steps, which is what the longest row drafted, `[rounds]`, int64.
        drafted: Tokens drafted by all rows together, `[rounds]`, int64.
        accepted: How many of them were accepted, `[rounds]`, int64.
        emitted: Tokens of text that came out, `[rounds]`, int64.
        lengths: What each row drafted, `[rounds, rows]`, int64. None unless it was to be recorded.
    """

    rows: int
    steps: Integers
    drafted: Integers
    accepted: Integers
    emitted: Integers
    lengths: Integers | None = None

    def time(self, prices: RoundPrices) -> float:
        """Time of all rounds, in plain steps."""
        return float(prices.rounds(self.steps, self.drafted).sum())

    def speed(self, prices: RoundPrices) -> float:
        """Tokens per row and plain step: how many times faster than plain decoding, which gives one."""
        return float(self.emitted.sum()) / (self.rows * self.time(prices))


class RecordedStep(DraftStep):
    """A draft step whose signals come from a trace.

    Args:
        position: Index of the token inside the round's block, from 0.
        drafting: Rows that really drafted this token, shape `[rows]`, bool.
        block: Signals of the round's blocks.
    """

    def __init__(self, position: int, drafting: Tensor, block: _Block) -> None:
        self.position = position
        self.drafting = drafting
        self._block = block

    @property
    def logits(self) -> NoReturn:  # type: ignore[override]
        """Traces hold no logits."""
        self._refuse("logits")

    @property
    def tokens(self) -> NoReturn:  # type: ignore[override]
        """Replayed drafts hold no tokens."""
        self._refuse("tokens")

    def _refuse(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"`DraftStep.{name}` is not available in a replay: a trace holds scalars of the distributions only. Use "
            "`entropy`, `confidence` or `top_probabilities`, or try the policy on the models themselves."
        )

    @property
    def confidence(self) -> Tensor:
        """Probability of the drafted token under the draft's processed scores, shape `[rows]`, float32."""
        return self._block.signal("confidence")[:, self.position]

    @property
    def entropy(self) -> Tensor:
        """Entropy of the draft's raw distribution at temperature 1, shape `[rows]`, float32, nats."""
        return self._block.signal("entropy")[:, self.position]

    @property
    def top_probabilities(self) -> Tensor:
        """The two largest raw probabilities at temperature 1, largest first, shape `[rows, 2]`, float32."""
        return self._block.signal("top_probabilities")[:, self.position]

    def to(self, device: torch.device) -> DraftStep:  # noqa: ARG002 - the signature of DraftStep
        """Return this step: a replay runs on the CPU alone."""
        return self


class _Block:
    """Signals of one round's blocks, looked up when they are first asked for."""

    def __init__(self, ground: Ground, places: Tensor) -> None:
        self._ground = ground
        self._places = places
        self._found: dict[str, Tensor] = {}

    def signal(self, name: str) -> Tensor:
        if name not in self._found:
            self._found[name] = self._ground.block(name).index_select(0, self._places)
        return self._found[name]


class Replay:
    """One run of a policy.

    Args:
        policy: Plays; it is started here.
        ground: What it plays on.
        queue: Gives the sequences, in order.
        rows: Rows of the batch, at least 1.
        fill_to_batch: Whether every row drafts as many tokens as the longest asks for.
        prices: What rounds cost. Needed by policies that require costs or timings, ignored by others.
        record_lengths: Whether the log tells the rows apart.
    """

    def __init__(
        self,
        policy: StoppingPolicy,
        ground: Ground,
        queue: SequenceQueue,
        *,
        rows: int,
        fill_to_batch: bool = False,
        prices: RoundPrices | None = None,
        record_lengths: bool = False,
    ) -> None:
        self._rows = check_integer("rows", rows, 1)
        needed = sorted(signal.value for signal in policy.requires & PRICED)
        if needed and prices is None:
            raise ValueError(
                f"`prices` is None, but the policy {policy.name!r} requires {' and '.join(needed)}: pass the prices of "
                "the setting it is to be judged by."
            )
        if Signal.LOGITS in policy.requires:
            raise ValueError(f"policy: {policy.name!r} requires logits, which a trace does not have; run it on models.")
        self._policy = policy
        self._ground = ground
        self._queue = queue
        self._fill_to_batch = fill_to_batch
        self._prices = prices
        self._limit = ground.max_draft_length
        self._everyone = torch.ones(rows, dtype=torch.bool)
        self._depth = torch.arange(self._limit)
        self._times: PhaseTimes | None = None
        self._rounds: list[tuple[int, int, int, int]] = []
        self._lengths: list[Integers] | None = [] if record_lengths else None
        self._places = queue.take(rows)
        policy.start(
            BatchInfo(
                rows=rows,
                device=torch.device("cpu"),
                vocabulary_size=VOCABULARY_SIZE,
                max_draft_length=self._limit,
                max_new_tokens=int(ground.remaining.max()),
                costs=None if prices is None or Signal.COSTS not in policy.requires else prices.live(self._limit),
                refilled=True,
            )
        )

    @torch.inference_mode()
    def run(self, tokens: int) -> None:
        """Play rounds until at least `tokens` further tokens have been emitted."""
        check_integer("tokens", tokens, 1)
        while tokens > 0:
            tokens -= self._round()

    def change_queue(self, queue: SequenceQueue, shift: int = 0) -> None:
        """Take further sequences from another queue; with `shift`, rows move to that far a place of the ground now."""
        self._queue = queue
        self._places = self._places + shift

    @property
    def rounds(self) -> int:
        """Rounds played so far."""
        return len(self._rounds)

    def log(self) -> RoundLog:
        """What has happened so far."""
        steps, drafted, accepted, emitted = np.array(self._rounds, dtype=np.int64).reshape(-1, 4).T
        lengths = None if self._lengths is None else np.array(self._lengths, dtype=np.int64).reshape(-1, self._rows)
        return RoundLog(self._rows, steps, drafted, accepted, emitted, lengths)

    def _round(self) -> int:
        """Draft, verify, observe, refill; return the tokens that came out."""
        places, remaining = self._places, self._ground.remaining[self._places]
        block = _Block(self._ground, torch.from_numpy(places))
        drafted = self._draft(self._bounded(self._policy.draft_lengths()), block)
        accepted = np.minimum(drafted, self._ground.run[places])
        emitted = np.minimum(accepted + 1, remaining)
        self._policy.observe(self._outcome(drafted, accepted, remaining, block))
        counts = (int(drafted.max()), int(drafted.sum()), int(accepted.sum()), int(emitted.sum()))
        self._rounds.append(counts)
        if self._lengths is not None:
            self._lengths.append(drafted)
        if Signal.TIMINGS in self._policy.requires:
            self._times = self._timed(counts[0], counts[1])
        self._places = places + emitted
        self._refill(emitted == remaining)
        return counts[3]

    def _bounded(self, lengths: Tensor) -> Integers:
        """The policy's lengths as the loop bounds them, but for the budget: a trace does not say what it was."""
        bounded: Integers = lengths.numpy().clip(0, self._limit)
        return np.full(self._rows, bounded.max()) if self._fill_to_batch else bounded

    def _draft(self, lengths: Integers, block: _Block) -> Integers:
        """Tokens each row drafts, `[rows]`: its length, or less where the policy stops it on the way."""
        if not self._policy.stops_inside_round:
            return lengths
        drafted = np.zeros_like(lengths)
        drafting = lengths > 0
        for position in range(int(lengths.max())):
            stops = self._policy.should_stop(RecordedStep(position, torch.from_numpy(drafting), block))
            drafted += drafting
            drafting = drafting & (lengths > position + 1)
            if stops is not None:
                drafting &= ~stops.numpy()
            if not drafting.any():
                break
        return drafted

    def _outcome(self, drafted: Integers, accepted: Integers, remaining: Integers, block: _Block) -> RoundOutcome:
        """What the policy may learn; places that were not drafted hold no number, so that none can leak."""
        required = self._policy.requires
        width = int(drafted.max())
        by_name: dict[str, Tensor] = {}
        undrafted = None if int(drafted.min()) == width else self._depth[:width] >= torch.from_numpy(drafted)[:, None]
        for signal in BY_POSITION:
            if signal in required:
                values = block.signal(signal.value)[:, :width]
                by_name[signal.value] = values if undrafted is None else values.masked_fill(undrafted, torch.nan)
        if Signal.NEXT_TOKEN in required:
            # Behind the end of a text there is no token; its last one stands for it, and the row is gone anyway.
            places = torch.from_numpy(self._places + np.minimum(accepted, remaining - 1))
            by_name["next_entropy"] = self._ground.next_entropy[places]
            by_name["next_probability"] = self._ground.next_probability[places]
        return RoundOutcome(
            drafted=torch.from_numpy(drafted),
            accepted=torch.from_numpy(accepted),
            active=self._everyone,
            timings=self._times if Signal.TIMINGS in required else None,
            **by_name,
        )

    def _timed(self, steps: int, drafted: int) -> PhaseTimes:
        assert self._prices is not None
        total = float(self._prices.rounds(np.array([steps]), np.array([drafted]))[0])
        draft = float(self._prices.draft[steps])
        return PhaseTimes(draft, total - draft - self._prices.overhead, self._prices.overhead)

    def _refill(self, ended: np.typing.NDArray[np.bool_]) -> None:
        """Give ended rows their next sequences, in row order, and tell the policy."""
        count = int(np.count_nonzero(ended))
        if count:
            self._places[ended] = self._queue.take(count)
            self._policy.select_rows(torch.from_numpy(np.where(ended, -1, np.arange(self._rows))))
