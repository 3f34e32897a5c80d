"""Listeners hear of every round, with what they ask for, and change none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_calls import endless_model, pair, speculative
from tiny_models import ragged_batch
from tiny_rounds import Notes

from hf_dsde import StaticPolicy
from hf_dsde.decoding import lengths, run_ahead
from hf_dsde.policies import BatchInfo, DraftStep, RoundOutcome, Signal

INPUTS = ragged_batch((3, 5, 2), seed=0)


class Slow(StaticPolicy):
    """Takes seconds by a clock of its own: 1 for each answer before a round, 10 inside of one, 100 for learning."""

    def start(self, batch: BatchInfo) -> None:
        super().start(batch)
        self.costs, self.now = batch.costs, 0

    def draft_lengths(self) -> torch.Tensor:
        self.now += 1
        return super().draft_lengths()

    def should_stop(self, step: DraftStep) -> None:
        self.now += 10

    def observe(self, outcome: RoundOutcome) -> None:
        self.now += 100


def test_a_policys_seconds_are_all_that_its_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, notes = Slow(2), Notes(Signal.COSTS)
    monkeypatch.setattr(lengths, "time", SimpleNamespace(perf_counter=lambda: policy.now))
    speculative(*pair(), INPUTS, policy, max_new_tokens=12, speculation_listeners=[notes])
    expected = [1 + 10 * record.draft_steps + 100 + (record.index == 0) for record in notes.events]
    assert [record.times.policy for record in notes.events] == expected
    assert policy.costs is None, "only the listener asked for them"


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_is_told_while_the_device_is_busy(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, notes = run_ahead.RunAhead.run_target, Notes()

    def run_target(self: run_ahead.RunAhead, *arguments: Any) -> Any:
        notes.events.append("pass")
        return run(self, *arguments)

    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlaps)
    monkeypatch.setattr(run_ahead.RunAhead, "run_target", run_target)
    speculative(*pair(), INPUTS, "static", max_new_tokens=20, speculation_listeners=[notes])
    passes = [notes.events[: notes.events.index(event)].count("pass") for event in notes.events if event != "pass"]
    assert passes == [min(index + 1 + overlaps, len(passes)) for index in range(len(passes))]


def test_where_there_are_no_rounds_nobody_may_listen() -> None:
    with pytest.raises(ValueError, match="speculation_listeners"):
        endless_model().generate(**INPUTS, speculation_listeners=[Notes()])
