"""Reading texts before they are continued: the target's at once, the draft's when a row first drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.spans import Span
from hf_dsde.measurement.clock import PhaseClock
from hf_dsde.measurement.rounds import RoundRecorder


class Prefill:
    """Stores texts in the caches of both models, and counts the seconds that this takes.

    Args:
        target: Runner of the target model.
        drafter: Drafts.
        sequences: The text.
        statistics: Are told the seconds.
        clock: Measures rounds, of which reading texts is no part.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        sequences: SequenceBatch,
        statistics: RoundRecorder,
        clock: PhaseClock,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._sequences = sequences
        self._statistics = statistics
        self._clock = clock

    def store_prompts(self) -> None:
        """Let the target read all prompts, but for their last tokens."""
        spans = [Span(row, 0, length - 1) for row, length in enumerate(self._sequences.prompt_lengths)]
        inputs = self._sequences.inputs
        if inputs is None:
            self.store(spans)
            return
        real = inputs.mask.bool().clone()  # which a mask of booleans is itself
        real[:, -1] = False
        self._hand_on(spans, tuple(layer[real.to(layer.device)] for layer in self._target.store_prompts(inputs)))

    def store(self, spans: Sequence[Span]) -> None:
        """Let the target read texts, and hand the drafter what it wants of their hidden states."""
        self._hand_on(spans, self._target.store(spans, self._sequences.tokens_at(spans)))

    def _hand_on(self, spans: Sequence[Span], hidden: tuple[Tensor, ...]) -> None:
        """Let the drafter know what the target has read, and what came out of it."""
        if hidden:
            self._drafter.read_states(spans, hidden)
        self._drafter.read_texts([span.row for span in spans])

    def read_draft(self, plan: RoundPlan, *, wait: bool) -> None:
        """Let the drafter read the texts of rows that draft for the first time. Without drafts it reads none.

        Args:
            plan: Says which rows draft.
            wait: Count the device's seconds, not only the host's.
        """
        started = time.perf_counter()
        rows = [row for row, length in enumerate(plan.length_counts) if length]
        if rows and self._drafter.prefill(rows):
            self._clock.restart()
            self._record(started, wait=wait)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds of the `with` block, the device's included."""
        started = time.perf_counter()
        yield
        self._record(started, wait=True)

    def _record(self, started: float, *, wait: bool) -> None:
        if wait and self._sequences.device.type == "cuda":
            torch.cuda.synchronize(self._sequences.device)
        self._statistics.record_prefill(time.perf_counter() - started)
