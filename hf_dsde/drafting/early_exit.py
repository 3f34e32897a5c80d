"""The target's own first layers as drafter: self-speculation with early exits.

A draft step is a pass of the target that ends after one of its layers, over the target's own cache. Of a text's tokens
that cache holds all but the last, so there is nothing to catch up. What a draft step stores for the tokens it is fed,
in its few layers, verification writes again in all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.costs import BatchCosts
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.drafter import DraftCall, StagedStep
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.exits import ExitStatistics
from hf_dsde.execution.cuda_graphs import RecordingCosts
from hf_dsde.execution.early_exit import ExitHead, why_no_exits
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.pass_seconds import pass_seconds
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.wrappers import unwrapped
from hf_dsde.policies.base import DraftStep
from hf_dsde.utils.checks import check_flag, check_number
from hf_dsde.utils.transfers import Download

MOST_EXITS = 8
"""Exits that are watched by default: each takes a product with the head for every verified token."""
SHADOWS_AT_ONCE = 256
"""Hidden states that go through the head together: it is read once for all of them, and their logits take memory."""

POSITIONS_PER_ROUND = 64
"""Positions that are looked at in a round, on average: of large batches, fewer rounds tell as much."""
QUIET_ROUNDS = 8
"""Of so many rounds in a row in which nobody drafts, one is looked at: exits that do not pay cost little."""


class EarlyExitDrafter(ChainDrafter):
    """Drafts with the first layers of the target, its final norm and its head (DEL, arXiv 2504.05598).

    It is for models that were trained to end early, such as LayerSkip's; the first layers of any other model guess
    next to nothing. Weights and cache are the target's own. After every round, each exit's shadow tokens are compared
    with what the target wrote, and the exit with the most tokens per layer (`exits.tokens_per_layer`) drafts next.

    With `own_lengths`, rows also draft no further than is best by the same measure, and stop after a token of which the
    exit is no surer than halfway between what it is of right and wrong shadow tokens. The policy's lengths are then a
    bound, and DEL itself is this drafter with `StaticPolicy(12)` or the like. Where no exit pays, nobody drafts.

    Args:
        model: The target of the calls.
        exit_layers: A layer that drafts end after, counted from 1 and before the last, or several to choose from; None
            for up to 8, evenly spaced over the first half of the layers.
        own_lengths: Whether rows draft as much as is best, within what the policy lets them.
        decay: What is left of earlier rounds' shadow tokens after a round, from 0 to 1.

    Raises:
        TypeError: If the model or a layer is none.
        ValueError: If a pass of the model cannot end early, if it has no such layer, or `decay` is out of range.
    """

    reads_prompt_states = False  # what stands there is not what the target would write

    def __init__(
        self,
        model: PreTrainedModel,
        exit_layers: int | Sequence[int] | None = None,
        *,
        own_lengths: bool = True,
        decay: float = 0.95,
    ) -> None:
        super().__init__(unwrapped("model", model))
        self.exit_layers = _checked_exits(self.model, exit_layers)
        self.own_lengths = check_flag("own_lengths", own_lengths)
        self.decay = check_number("decay", decay, 0.0, 1.0)
        self._layers = self.model.config.get_text_config(decoder=True).num_hidden_layers

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The exits, if there is anything to choose."""
        return self.exit_layers if self.own_lengths or len(self.exit_layers) > 1 else ()

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides the proposals."""
        return {"exit_layers": list(self.exit_layers), "own_lengths": self.own_lengths, "decay": self.decay}

    @property
    def exit_layer(self) -> int:
        """The layer that drafts end after now, in a call."""
        return self.exit_layers[self._exit]

    def start(self, call: DraftCall) -> None:
        """Know nothing of any exit yet.

        Raises:
            ValueError: If the target is another model.
        """
        super().start(call)
        rows = call.sequences.rows
        head = _head_in_layers(self.model)
        self._statistics = ExitStatistics(rows, self.exit_layers, self._layers, head, self.decay)
        self._head = ExitHead(self.model)
        self._shadows: tuple[list[int], Download] | None = None
        self._quiet = 0  # rounds without drafts since somebody has drafted
        self._owed = 0  # positions that were looked at, and that later rounds go without
        self._asked = 1  # the longest draft that the policy wants
        self._exit = self._best_exit()

    def _make_runner(self, call: DraftCall) -> ModelRunner:
        target = call.target
        if target is None or target.model is not self.model:
            other = "no model" if target is None else f"{type(target.model).__name__} {target.model.name_or_path!r}"
            msg = (
                f"assistant_model: this EarlyExitDrafter was made for {type(self.model).__name__} "
                f"{self.model.name_or_path!r}, and the target is {other}. Make one with EarlyExitDrafter(target)."
            )
            raise ValueError(msg)
        return target

    def finish(self) -> None:
        """Let go of the target's runner, which ends by itself."""
        del self._runner
        self.call = replace(self.call, target=None)
        self._staged = self._prepared = self._shadows = None

    def active(self) -> AbstractContextManager[None]:
        """Hold nothing: the target holds it."""
        return nullcontext()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Do nothing: the target's passes are without the others already."""

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Forget what rows have written."""
        super().begin_texts(rows)
        self._statistics.begin(rows)

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:  # noqa: ARG002
        """Return the rows' best lengths within what the policy wants, or just that."""
        self._asked = max(1, *wanted)
        if not self.own_lengths:
            return wanted
        return self._statistics.lengths(self._exit if self._prepared is not None else self._best_exit(), wanted)

    def _best_exit(self) -> int:
        """The number of the exit to draft with, as far as the host knows."""
        statistics = self._statistics
        return statistics.best_exit(self._asked) if self.own_lengths else statistics.exit_for(self._asked)

    def get_candidates(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
    ) -> CandidateBatch:
        """Draft up to `plan.width` tokens, one short pass each."""
        if self._prepared is None:  # what was begun goes on with the layers that it began with
            self._exit = self._best_exit()
        self._cached = [length - 1 for length in sequences.length_counts]
        threshold = self._statistics.threshold(self._exit) if self.own_lengths else 0.0
        if threshold > 0:
            monitor = monitor.stopping(lambda step: _unsure(step, threshold))
        return super().get_candidates(sequences, plan, monitor)

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:
        """Stage each row's last token, for the exit that was best a round ago: how this one ended is not known yet."""
        self._exit = self._best_exit()
        return super().stage_next(going_on, longest, foreseen)

    def accept(self, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        """Send each exit's shadow tokens on their way to the host."""
        rows, width, size = hidden[0].shape
        if not self._looks_at(rows, width):
            return
        states = torch.stack([layer.to(self._device) for layer in hidden])
        exits = len(states)
        tokens, confidence = [], []
        with torch.no_grad():
            for part in states.view(-1, size).split(SHADOWS_AT_ONCE):
                logits = self._head(part.to(self.model.dtype))
                best = logits.max(dim=-1)
                tokens.append(best.indices)
                confidence.append((best.values - logits.logsumexp(dim=-1)).exp())
        block = torch.cat(tokens).view(exits * rows, width)
        download = Download([], block, [torch.cat(confidence).view(exits, rows, width)])
        self._shadows = list(self.call.sequences.length_counts), download

    def _looks_at(self, rows: int, width: int) -> bool:
        """Take note of a round, and say whether its shadow tokens are worth their time."""
        self._quiet = self._quiet + 1 if width == 1 else 0
        self._owed = max(self._owed - POSITIONS_PER_ROUND, 0)
        if self._owed or (self._quiet and (self._quiet - 1) % QUIET_ROUNDS):
            return False
        self._owed = rows * width
        return True

    def update_candidate_strategy(  # type: ignore[override] # as in `Drafter`
        self, sequences: SequenceBatch, scores: Tensor, num_matches: Sequence[int], drafted: Sequence[int]
    ) -> None:
        """Compare shadow tokens with what has been written."""
        super().update_candidate_strategy(sequences, scores, num_matches, drafted)
        shadows, self._shadows = self._shadows, None
        if shadows is not None:
            before, download = shadows
            _, tokens, (confidence,) = download.wait()
            texts = [sequences.host_text(row, first=length) for row, length in enumerate(before)]
            self._statistics.learn(tokens.view(confidence.shape).numpy(), confidence.numpy(), texts)

    @property
    def conditions(self) -> Hashable:
        """Which layers are run; how, the target's conditions say."""
        return type(self).__name__, self.exit_layers, self.own_lengths

    @property
    def recording_costs(self) -> RecordingCosts:
        """None beside the target's."""
        return RecordingCosts()

    def step_seconds(self, longest: int) -> float:
        """Measure and return the seconds of one short pass of one token per row."""
        return pass_seconds(self._runner, 1, longest, self.exit_layer)

    def _text_block(self, width: int) -> RowBlock:
        return RowBlock(*self.call.sequences.tail(width), exit_layer=self.exit_layer)

    def _drafted_block(self, tokens: Tensor, places: Tensor, before: PassOutput) -> RowBlock:  # noqa: ARG002
        return RowBlock(tokens, places, exit_layer=self.exit_layer)

    def _store_missing(self, rows: Sequence[int]) -> bool:  # noqa: ARG002 - the target has stored all
        return False

    def _held(self, length: int, matches: int, drafted: int) -> int:  # noqa: ARG002
        """All but the last token, once the target has read it."""
        return length + matches

    def _fits_first_pass(self, width: int) -> bool:  # noqa: ARG002 - one token
        return True

    def _staged_width(self) -> int:
        return 1

    def _widest_gap(self) -> int:
        return 1  # whoever has drafted, the target has read it


def _unsure(step: DraftStep, threshold: float) -> Tensor:
    """Rows whose newest token came from a distribution without a token of that probability, `[rows]`, bool."""
    return step.top_probabilities[:, 0] < threshold


def _head_in_layers(model: PreTrainedModel) -> float:
    """Weights of the head as a multiple of a layer's: what a pass takes beside its layers, where both are only read."""
    head: Any = model.get_output_embeddings()
    body: Any = model.base_model
    layers = sum(weight.numel() for weight in body.layers.parameters()) / len(body.layers)
    return float(head.weight.numel() / layers)


def _checked_exits(model: PreTrainedModel, exit_layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return exits in ascending order, each once."""
    reason = why_no_exits(model)
    if reason is not None:
        msg = f"model: {type(model).__name__} {reason}. Use a draft model, or drafts out of texts ('suffix')."
        raise ValueError(msg)
    layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    if exit_layers is None:
        deepest = layers // 2
        count = min(MOST_EXITS, deepest)
        return tuple(deepest * number // count for number in range(1, count + 1))
    named: tuple[Any, ...] = tuple(exit_layers) if isinstance(exit_layers, Sequence) else (exit_layers,)
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in named):
        raise TypeError(f"exit_layers={exit_layers!r}: expected the number of a layer, or several.")
    if not named or not all(1 <= layer < layers for layer in named):
        msg = (
            f"exit_layers={exit_layers!r}: {type(model).__name__} can end after its layers 1 to {layers - 1}. Name at "
            "least one of them."
        )
        raise ValueError(msg)
    return tuple(sorted({*named}))
