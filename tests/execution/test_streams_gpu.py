"""On a GPU, the next round's first pass runs beside the arithmetic of the policy, and their memory stays apart."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, noisy_copy, ragged_batch, random_lengths, tiny_model
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.streams import SideStream
from hf_dsde.policies import BatchInfo, DraftStep, RoundOutcome, Signal, StaticPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
CUDA = torch.device("cuda", 0)
NEW_TOKENS = 48
LONG = 600_000_000
"""Cycles of the device, about a third of a second: hundreds of passes of a tiny model."""


class BusyPolicy(StaticPolicy):
    """Takes its time over each round, and as much memory in small pieces as others may have dropped meanwhile.

    It asks for whole distributions, and so is asked where they are.

    Args:
        cycles: What the device does nothing for, per round.
        num_draft_tokens: Draft length.
    """

    requires = frozenset({Signal.LOGITS})

    def __init__(self, cycles: int = 0, num_draft_tokens: int = 3) -> None:
        super().__init__(num_draft_tokens)
        self._cycles = cycles
        self.done: torch.cuda.Event | None = None

    def observe(self, outcome: RoundOutcome) -> None:
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        pieces = [torch.full((size,), -7, device=outcome.accepted.device) for size in (1, 8, 16, 64, 512, 4096) * 8]
        torch.stack([piece.sum() for piece in pieces]).sum()
        self.done = torch.cuda.current_stream().record_event()


class StopsInside(BusyPolicy):
    """Lets all rows stop after one to four tokens, by turns, and takes its time over each answer."""

    def start(self, batch: BatchInfo) -> None:
        super().start(batch)
        self._round, self._rows = 0, batch.rows

    def should_stop(self, step: DraftStep) -> torch.Tensor:
        torch.cuda._sleep(self._cycles)
        stop = step.position >= self._round % 4
        self._round += stop
        return torch.full((self._rows,), stop, device=step.tokens.device)


@functools.cache
def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_model(family).float()
    target.generation_config.eos_token_id = None
    return hf_dsde.enable(target.to(CUDA)), noisy_copy(tiny_model(family).float(), 0.05).to(CUDA)


def generate(family: str = "llama", policy: StaticPolicy | None = None) -> torch.Tensor:
    target, draft = pair(family)
    inputs = {name: tensor.to(CUDA) for name, tensor in ragged_batch(random_lengths(6)).items()}
    call: dict[str, Any] = {} if policy is None else {"assistant_model": draft, "speculation_policy": policy}
    text: torch.Tensor = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **call)
    return text


@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mixtral"])
def test_memory_that_the_policy_takes_is_not_that_of_the_pass(family: str, drafted: int) -> None:
    expected = generate(family)
    for cycles in (0, 0, LONG // 10):  # the first call records
        assert torch.equal(generate(family, BusyPolicy(cycles, drafted)), expected)


def test_the_target_s_pass_is_ready_when_a_policy_says_that_drafting_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[bool] = []
    original = RunAhead.run_target

    def run_target(self: RunAhead, candidates: CandidateBatch, plan: RoundPlan) -> PassOutput:
        ready.append(self.is_ready(candidates))
        return original(self, candidates, plan)

    monkeypatch.setattr(RunAhead, "run_target", run_target)
    expected = generate()
    for cycles in (0, LONG // 100, LONG // 100):  # the first call records
        ready.clear()
        assert torch.equal(generate(policy=StopsInside(cycles, 6)), expected)
    assert sum(ready) > len(ready) / 2, "all but those near the end of the text, which draft all that they may"


@pytest.mark.parametrize(("drafted", "begins"), [(3, "begin_draft"), (0, "begin_target")])
def test_the_pass_does_not_wait_for_the_policy(drafted: int, begins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = BusyPolicy(LONG, drafted)
    policy_was_done: list[bool] = []
    original = getattr(RunAhead, begins)
    sides: list[SideStream] = []
    original_fork = SideStream.fork

    def fork(self: SideStream) -> None:
        sides.append(self)
        original_fork(self)

    def begin(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        stream = sides[-1]._stream
        assert stream is not None
        stream.synchronize()
        assert policy.done is not None
        policy_was_done.append(policy.done.query())

    expected = generate()
    generate(policy=BusyPolicy(num_draft_tokens=drafted))  # records
    monkeypatch.setattr(SideStream, "fork", fork)
    monkeypatch.setattr(RunAhead, begins, begin)
    assert torch.equal(generate(policy=policy), expected)
    assert len(policy_was_done) > 8
    assert not any(policy_was_done)
