"""Where the time of a round goes, and what the policy takes of it, measured without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from hf_dsde.execution.torch_modes import without_autocast
from hf_dsde.policies import BatchInfo, DraftStep, PhaseTimes, RoundOutcome, Signal, StoppingPolicy


class _Mark(Protocol):
    def seconds_until(self, later: _Mark) -> float: ...


class _HostMark:
    def __init__(self, _device: torch.device) -> None:
        self._time = time.perf_counter()

    def seconds_until(self, later: _Mark) -> float:
        assert isinstance(later, _HostMark)
        return later._time - self._time


class _CudaMark:
    """A point in the device's stream. Its time is known once the host has waited for something after it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: _Mark) -> float:
        assert isinstance(later, _CudaMark)
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1000


class PhaseClock:
    """Marks the phases of a round: `start`, a `mark` at the end of each of the three phases, and `read` at the end.

    On a CUDA device the marks are events in the stream, read only after the round's one synchronisation, so that
    measuring costs no further one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark_type = _CudaMark if device.type == "cuda" else _HostMark
        self._marks: list[_Mark] = []

    def start(self, *, seamless: bool = False) -> None:
        """Begin a round: now, or `seamless`, where the last one ended."""
        self._marks = self._marks[-1:] if seamless and self._marks else [self._mark_type(self._device)]

    def restart(self) -> None:
        """Let the next round begin when it is started, `seamless` or not: what lies in between is no part of it."""
        self._marks = []

    def mark(self, *, again: bool = False) -> None:
        """End a phase: the draft first, then the target's pass with its verification, then the bookkeeping.

        Args:
            again: It ended where the last one did: the next one had begun by then.
        """
        self._marks.append(self._marks[-1] if again else self._mark_type(self._device))

    def read(self, policy: float = 0.0) -> PhaseTimes:
        """Return the seconds of the phases marked since `start`, with the given seconds of the policy."""
        begin, drafted, verified, ended = self._marks
        return PhaseTimes(
            draft=begin.seconds_until(drafted),
            verify=drafted.seconds_until(verified),
            bookkeeping=verified.seconds_until(ended),
            policy=policy,
        )


class TimedPolicy(StoppingPolicy):
    """A policy that counts the seconds it takes on the host.

    On a CUDA device these are the seconds to launch its work, not those the device needs for it.
    """

    name = "timed"

    def __init__(self, policy: StoppingPolicy) -> None:
        self._policy = policy
        self._seconds = 0.0
        self._device = torch.device("cpu")

    @property
    def requires(self) -> frozenset[Signal]:  # type: ignore[override] # may change when the policy starts
        """The signals the loop has to compute for the policy."""
        return self._policy.requires

    @property
    def stops_inside_round(self) -> bool:
        """Whether the loop has to ask `should_stop` after every draft token."""
        return self._policy.stops_inside_round

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what happens inside as the policy's time: computing the signals that it asked for.

        Autocast, which is for models, does not reach its arithmetic.
        """
        started = time.perf_counter()
        try:
            with without_autocast(self._device):
                yield
        finally:
            self._seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def start(self, batch: BatchInfo) -> None:
        """Hand over."""
        self._device = batch.device
        with without_autocast(self._device):
            self._policy.start(batch)

    def draft_lengths(self) -> Tensor:
        """Hand over, timed."""
        with self.timed():
            return self._policy.draft_lengths()

    def should_stop(self, step: DraftStep) -> Tensor | None:
        """Hand over, timed."""
        with self.timed():
            return self._policy.should_stop(step)

    def observe(self, outcome: RoundOutcome) -> None:
        """Hand over, timed."""
        with self.timed():
            self._policy.observe(outcome)

    def select_rows(self, index: Tensor) -> None:
        """Hand over, timed."""
        with self.timed():
            self._policy.select_rows(index)
