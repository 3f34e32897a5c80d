"""Rollouts between optimizer steps: they are the new weights' own, and nothing is recorded for them again."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import QUIET, config_of
from tiny_models import fresh_pair, ragged_batch
from tiny_rounds import Notes
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.costs import CostModel
from hf_dsde.decoding.cost_measurement import live_costs
from hf_dsde.execution.workspaces import workspaces
from hf_dsde.measurement.rounds import RoundRecord

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
PROMPTS = ragged_batch([3, 7, 1])
NEW_TOKENS = 9


def policy_gradient_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: torch.Tensor) -> None:
    """Make the tokens of the rollouts likelier where they are even, as a reward would."""
    mask = torch.nn.functional.pad(PROMPTS["attention_mask"], (0, rollouts.shape[1] - 7), value=1)
    logits = model(rollouts, attention_mask=mask).logits[:, 6:-1]
    log_probs = logits.log_softmax(-1).gather(2, rollouts[:, 7:, None])[..., 0]
    advantages = 1.0 - 2.0 * (rollouts[:, 7:] % 2)
    optimizer.zero_grad()
    (-advantages * log_probs).mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("mode", "fused"), [("trainer", True), ("trainer", False), ("checkpointing", True), ("own loop", False)]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rollouts_are_right_after_every_step_and_recorded_once(
    mode: str, fused: bool, recording: list[NotingCapture]
) -> None:
    """A trainer leaves the model in training mode; a loop of one's own may put it into evaluation for the rollouts.

    With checkpointing of activations, trainers of adapters also hook the embeddings, and switch it off for rollouts.
    """
    target, draft = fresh_pair()
    if mode == "checkpointing":
        target.enable_input_require_grads()
        target.gradient_checkpointing_enable({"use_reentrant": False})
    config = config_of(QUIET, keep_memory=True, fused_layers=fused)
    hf_dsde.enable(target, assistant_model=draft, speculation_policy="static", speculation_config=config)
    call: dict[str, Any] = {**PROMPTS, "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    optimizer = torch.optim.AdamW(target.parameters(), lr=0.01)
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_dsde.RunnerWarning)
        for _ in range(3):
            target.train(mode != "own loop")
            if mode == "checkpointing":
                target.gradient_checkpointing_disable()
            rollouts = target.generate(**call)
            assert torch.equal(rollouts, target.generate(**call, speculation_policy=None))
            texts.append(rollouts.tolist())
            kept = [workspace.passes for model in (target, draft) for workspace in workspaces._idle[model]]
            assert sum(capture.recorded for capture in recording) == sum(map(len, kept)) > 0
            assert len(recording) == 2, "one for each model, whatever its weights"
            target.train()
            if mode == "checkpointing":
                target.gradient_checkpointing_enable({"use_reentrant": False})
            policy_gradient_step(target, optimizer, rollouts)
    assert all(before != after for before, after in pairwise(texts))


def test_a_rollout_leaves_no_memory_to_a_training_step_by_default(recording: list[NotingCapture]) -> None:
    target, draft = fresh_pair()
    hf_dsde.enable(target, assistant_model=draft, speculation_policy="static", speculation_config=QUIET)
    for _ in range(2):
        target.eval()
        target.generate(**PROMPTS, max_new_tokens=4)
        assert workspaces._idle.get(target)
        target.train()
        assert not workspaces._idle.get(target)
        assert not workspaces._idle.get(draft)


class Spoiling(Notes):
    """Makes a draft bad after some rounds, as a target that has moved on does."""

    def __init__(self, draft: PreTrainedModel, after: int) -> None:
        super().__init__()
        self._draft, self._after = draft, after

    def on_round(self, record: RoundRecord) -> None:
        super().on_round(record)
        if record.index == self._after:
            with torch.no_grad():
                for weight in self._draft.parameters():
                    weight.copy_(torch.randn_like(weight) * weight.std())


def drafted_per_row(rounds: list[RoundRecord]) -> float:
    return sum(sum(record.drafted) for record in rounds) / sum(sum(record.active) for record in rounds)


@pytest.mark.parametrize("policy", ["auto", "dsde"])
def test_a_draft_that_has_become_bad_is_asked_for_less(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dsde.decoding.loop.live_costs", live_costs)
    torch.manual_seed(0)
    target, draft = fresh_pair(noise=0.01)
    spoiling = Spoiling(draft, after=12)
    costs = CostModel.relative(0.15, [1.0 + 0.02 * width for width in range(1, 33)]).to_dict()
    hf_dsde.enable(target)
    inputs = ragged_batch([3, 7, 1, 4])
    call: dict[str, Any] = {**inputs, "max_new_tokens": 120, "do_sample": False, "eos_token_id": None}
    text = target.generate(
        **call,
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=config_of(QUIET, costs=costs, refresh_costs=False),
        speculation_listeners=[spoiling],
    )
    assert torch.equal(text, target.generate(**call))
    good, bad = spoiling.events[4:12], spoiling.events[-20:]
    assert len(spoiling.events) > 50
    before, after = drafted_per_row(good), drafted_per_row(bad)
    assert before > 2
    assert after < before / 4
