"""Where the time of a round goes, measured without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from hf_dsde.policies import PhaseTimes


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
    """Marks the phases of a round: `start`, a `mark` at the end of each of the three phases, and `phases` at the end.

    On a CUDA device the marks are events in the stream, read only after the round's one synchronisation, so that
    measuring costs no further one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark_type = _CudaMark if device.type == "cuda" else _HostMark
        self._marks: list[_Mark] = []
        self._looks = [0.0] * 4  # by phase; the last ones are after all three

    def start(self, *, seamless: bool = False) -> None:
        """Begin a round: now, or `seamless`, where the last one ended."""
        follows = seamless and bool(self._marks)
        self._marks = self._marks[-1:] if follows else [self._mark_type(self._device)]
        self._looks = [self._looks[-1] if follows else 0.0, 0.0, 0.0, 0.0]

    def restart(self) -> None:
        """Let the next round begin when it is started, `seamless` or not: what lies in between is no part of it."""
        self._marks = []
        self._looks = [0.0] * 4

    def looked(self, seconds: float) -> None:
        """Take note of seconds that the host has just spent on looking texts up, in the phase that is under way.

        After the last phase, that is the first one of the next round if it is seamless, and of none otherwise.
        """
        self._looks[max(len(self._marks) - 1, 0)] += seconds

    @property
    def looks(self) -> PhaseTimes:
        """What of the phases marked since `start` the host has spent on looking texts up, in seconds."""
        draft, verify, bookkeeping, _ = self._looks
        return PhaseTimes(draft, verify, bookkeeping)

    def mark(self, *, again: bool = False) -> None:
        """End a phase: the draft first, then the target's pass with its verification, then the bookkeeping.

        Args:
            again: It ended where the last one did: the next one had begun by then.
        """
        self._marks.append(self._marks[-1] if again else self._mark_type(self._device))

    def phases(self, policy: float = 0.0) -> Callable[[], PhaseTimes]:
        """Return what reads the seconds of the phases marked since `start`, also when the next round has been started.

        Args:
            policy: Seconds of the policy.
        """
        begin, drafted, verified, ended = self._marks

        def read() -> PhaseTimes:
            return PhaseTimes(
                draft=begin.seconds_until(drafted),
                verify=drafted.seconds_until(verified),
                bookkeeping=verified.seconds_until(ended),
                policy=policy,
            )

        return read
