"""Streams of texts whose passes are recorded: taken in any mode of torch, and with too little memory to record."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from resumed_job import generator, prompts

from hf_dsde.batch.engine import BatchSizeWarning
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.config import SpeculationConfig

ROWS = prompts()[:10]
MODES = {
    "plain": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def made(runner: str | None, policy: str = "goodput") -> BatchGenerator:
    config = SpeculationConfig(policy=policy, runner=runner)
    return generator(batch_size=4, speculation_policy=config)


def texts(results: Any) -> dict[int, list[int]]:
    return {result.index: result.token_ids for result in results}


@pytest.mark.parametrize("runner", ["eager", None])
def test_every_text_may_be_taken_in_another_mode(runner: str | None, recording: list[NotingCapture]) -> None:
    expected = texts(made("eager").stream(ROWS))
    jobs = made(runner)
    for _ in range(2):
        results, stream = [], jobs.stream(ROWS)
        for mode in ("inference", "plain") * len(ROWS):
            with MODES[mode]():
                results += [result for result in [next(stream, None)] if result is not None]
        assert texts(results) == expected
    assert bool(recording) == (runner is None)


@pytest.mark.parametrize("runner", ["eager", None])
@pytest.mark.usefixtures("recording")
def test_a_stream_stays_under_the_autocast_that_it_began_with(runner: str | None) -> None:
    jobs = made(runner, "static")
    for model in (jobs._model, jobs._draft):
        model.float()
    alone = copy.deepcopy(jobs)
    with MODES["autocast"]():
        expected = texts(alone.stream(ROWS[:4]))
    stream = jobs.stream(ROWS[:4])
    with MODES["autocast"]():
        results = [next(stream)]
    results += stream
    assert texts(results) == expected


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("call", [1, 3])
def test_memory_that_runs_out_while_a_pass_is_recorded_halves_the_batch(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts(made("eager", "static").stream(ROWS))
    calls = []
    original = NotingCapture.__call__

    def full(self: NotingCapture, *bodies: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, *bodies)

    monkeypatch.setattr(NotingCapture, "__call__", full)
    jobs = made(None, "static")
    with pytest.warns(BatchSizeWarning, match="Memory ran out with 4 rows, so the batch has 2 from now on"):
        assert texts(jobs.stream(ROWS)) == expected
    assert len(calls) > call, "the smaller batch is recorded"
