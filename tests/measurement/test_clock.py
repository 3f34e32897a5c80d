"""The phase clock with clocks that are wound by hand: no test here depends on how fast a machine is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_dsde.measurement import clock as timing
from hf_dsde.measurement.clock import PhaseClock
from hf_dsde.policies.base import PhaseTimes

CPU = torch.device("cpu")


def wind(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Iterator[float]:
    ticks = iter(seconds)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    return ticks


def time_a_round(clock: PhaseClock, *, seamless: bool = False) -> PhaseTimes:
    clock.start(seamless=seamless)
    for _ in range(3):
        clock.mark()
    return clock.phases()()


def test_phases_come_in_the_order_draft_verify_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    wind(monkeypatch, 10.0, 11.0, 13.0, 17.0)
    times = time_a_round(PhaseClock(CPU))
    assert times == PhaseTimes(draft=1.0, verify=2.0, bookkeeping=4.0)
    assert times.total == 7.0


def test_a_round_starts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes between two rounds belongs to neither, and marks of an abandoned round are forgotten."""
    wind(monkeypatch, 0.0, 1.0, 2.0, 3.0, 50.0, 90.0, 100.0, 101.0, 101.0, 101.0)
    clock = PhaseClock(CPU)
    assert time_a_round(clock) == PhaseTimes(1.0, 1.0, 1.0)
    clock.start()
    clock.mark()
    assert time_a_round(clock) == PhaseTimes(1.0, 0.0, 0.0)


def test_a_seamless_round_begins_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    wind(monkeypatch, 0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 50.0, 51.0, 52.0, 53.0)
    clock = PhaseClock(CPU)
    times = [time_a_round(clock, seamless=seamless) for seamless in (True, True, False)]
    assert times == [PhaseTimes(1.0, 1.0, 1.0), PhaseTimes(2.0, 1.0, 1.0), PhaseTimes(1.0, 1.0, 1.0)]


def test_looks_at_texts_belong_to_the_phase_that_they_are_made_in() -> None:
    clock = PhaseClock(CPU)
    clock.looked(9.0)  # before any round
    clock.start(seamless=True)
    clock.mark()
    clock.mark()
    clock.looked(0.5)
    clock.looked(0.25)
    clock.mark()
    assert clock.looks == PhaseTimes(0.0, 0.0, 0.75)
    for seamless, restarted, draft in ((True, False, 2.0), (False, False, 0.0), (True, True, 0.0)):
        clock.looked(2.0)
        if restarted:
            clock.restart()
        clock.start(seamless=seamless)
        for _ in range(3):
            clock.mark()
        assert clock.looks == PhaseTimes(draft, 0.0, 0.0)


def test_reading_does_not_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = wind(monkeypatch, 0.0, 1.0, 2.0, 3.0, 99.0)
    clock = PhaseClock(CPU)
    time_a_round(clock)
    assert clock.phases()() == clock.phases()()
    assert list(ticks) == [99.0]


def test_real_phases_are_never_negative() -> None:
    times = time_a_round(PhaseClock(CPU))
    assert min(times.draft, times.verify, times.bookkeeping) >= 0
    assert times.total == times.draft + times.verify + times.bookkeeping


class Stream:
    """Stands in for a CUDA stream: work is queued, and its events have times once somebody has waited."""

    milliseconds = 0.0
    waits = 0


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None
        self.waited = False

    def record(self, stream: type[Stream]) -> None:
        self.at = stream.milliseconds
        stream.milliseconds += 250.0

    def synchronize(self) -> None:
        self.waited = True
        Stream.waits += 1

    def elapsed_time(self, later: Event) -> float:
        assert later.waited
        assert self.at is not None
        assert later.at is not None
        return later.at - self.at


def test_a_cuda_round_is_measured_by_events_in_the_stream_and_waits_only_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(Stream, "waits", 0)
    clock = PhaseClock(torch.device("cuda", 0))
    clock.start()
    for _ in range(3):
        clock.mark()
    assert Stream.waits == 0
    assert clock.phases()() == PhaseTimes(0.25, 0.25, 0.25)
