"""The target's pass is ready when a policy says that drafting is over; if it goes on, nothing of that shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import QUIET, config_of
from tiny_models import AGREEMENT, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.decoding.stop_flag import StopFlag
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.policies import BatchInfo, DraftStep, StoppingPolicy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
ROWS = 5


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every answer take as long as a GPU's."""
    monkeypatch.setattr(StopFlag, "answered", False)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The width of each round's candidates, and whether their pass was ready."""
    passes: list[tuple[int, bool]] = []
    original = RunAhead.run_target

    def run_target(self: RunAhead, candidates: CandidateBatch, plan: RoundPlan) -> PassOutput:
        passes.append((candidates.width, self.is_ready(candidates)))
        return original(self, candidates, plan)

    monkeypatch.setattr(RunAhead, "run_target", run_target)
    return passes


class StopsAfter(StoppingPolicy):
    """All rows may draft `longest` tokens, and stop together after the next number of a list."""

    name = "stops-after"

    def __init__(self, lengths: list[int], longest: int) -> None:
        self._lengths, self._longest = lengths, longest

    def start(self, batch: BatchInfo) -> None:
        self._rows, self._round = batch.rows, -1

    def draft_lengths(self) -> torch.Tensor:
        self._round += 1
        return torch.full((self._rows,), self._longest)

    def should_stop(self, step: DraftStep) -> torch.Tensor:
        stop = self._lengths[self._round % len(self._lengths)] <= step.position + 1
        return torch.full((self._rows,), stop)


def generate(
    target: PreTrainedModel, policy: StoppingPolicy, noise: float = 0.0, runner: str = "graph", **call: Any
) -> Any:
    hf_dsde.enable(target)
    return target.generate(
        **ragged_batch(random_lengths(ROWS)),
        **{"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **call},
        assistant_model=noisy_copy(target, noise),
        speculation_policy=policy,
        speculation_config=config_of(QUIET, runner=runner),
        return_dict_in_generate=True,
    )


@pytest.mark.usefixtures("recording")
def test_a_pass_that_is_recorded_is_ready_when_drafting_ends_early(used: list[tuple[int, bool]]) -> None:
    generate(tiny_model(), StopsAfter([2, 3], longest=5), noise=3.0, eos_token_id=None)
    drafted = [(width, ready) for width, ready in used[:-3] if width]
    assert [width for width, _ in drafted] == [2, 3] * (len(drafted) // 2) + [2] * (len(drafted) % 2)
    assert [ready for _, ready in drafted] == [False, False] + [True] * (len(drafted) - 2), "recorded at its first use"


@pytest.mark.usefixtures("recording")
def test_a_draft_of_the_full_length_is_not_asked_about(used: list[tuple[int, bool]]) -> None:
    generate(tiny_model(), StopsAfter([3], longest=3), noise=3.0, eos_token_id=None)
    assert {ready for width, ready in used if width == 3} == {False}


def test_nothing_is_recorded_for_a_proposal_that_goes_on(
    recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes_recorded() -> int:
        before = sum(capture.recorded for capture in recording)
        generate(tiny_model(), StopsAfter([4], longest=6), noise=3.0, eos_token_id=None)
        return sum(capture.recorded for capture in recording) - before

    recorded = passes_recorded()
    monkeypatch.setattr(RunAhead, "expect", lambda *_, **__: None)
    assert recorded == passes_recorded() > 0


@pytest.mark.parametrize(
    ("runner", "family", "agreement"),
    [("graph", "llama", "half"), ("graph", "qwen3", "never"), ("graph", "gpt2", "full"), ("eager", "llama", "half")],
)
@pytest.mark.usefixtures("recording")
def test_the_text_is_that_of_plain_decoding(
    runner: str, family: str, agreement: str, used: list[tuple[int, bool]]
) -> None:
    target = tiny_model(family)
    plain = target.generate(**ragged_batch(random_lengths(ROWS)), max_new_tokens=40, do_sample=False, pad_token_id=0)
    policy = RandomLengths(stop_probability=0.4)
    for _ in range(2):  # at the second call, everything is recorded
        assert torch.equal(generate(target, policy, AGREEMENT[agreement], runner).sequences, plain)
    assert any(ready for _, ready in used) == (runner == "graph")


@pytest.mark.usefixtures("recording")
def test_sampled_text_is_the_same_as_without(used: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model()

    def sampled() -> torch.Tensor:
        torch.manual_seed(5)
        policy = RandomLengths(stop_probability=0.4)
        output: torch.Tensor = generate(target, policy, 0.05, do_sample=True, temperature=0.9).sequences
        return output

    sampled()
    text = sampled()
    assert any(ready for _, ready in used)
    monkeypatch.setattr(RunAhead, "expect", lambda *_, **__: None)
    assert torch.equal(sampled(), text)


@pytest.mark.usefixtures("recording")
def test_a_host_that_need_not_wait_prepares_nothing(
    used: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopFlag, "answered", True)
    for _ in range(2):
        generate(tiny_model(), StopsAfter([2], longest=5), noise=3.0, eos_token_id=None)
    assert {ready for _, ready in used} == {False}
