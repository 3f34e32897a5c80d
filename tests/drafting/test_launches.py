"""How many operations a draft round launches one by one: each takes the host longer than the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launches import count_launches
from tiny_calls import QUIET, config_of, endless_model, speculative
from tiny_heads import tiny_head
from tiny_models import AGREEMENT, noisy_copy, ragged_batch
from tiny_policies import ScriptedLengths
from transformers import PreTrainedModel

from hf_dsde.decoding import run_ahead
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.model import ModelDrafter

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
DRAFTS: dict[str, tuple[type[ChainDrafter], Callable[[PreTrainedModel], PreTrainedModel], int]] = {
    "head": (HeadDrafter, lambda target: tiny_head(target, draft_vocabulary=60), 32),
    "normed head": (HeadDrafter, lambda target: tiny_head(target, draft_vocabulary=60, fc_norm=True), 50),
    "model": (ModelDrafter, lambda target: noisy_copy(target, AGREEMENT["half"]), 16),
}
"""Drafter, draft, and the most operations of a round, whatever its length. A norm is six on a CPU, and one on a GPU."""


@pytest.mark.parametrize("runner", [{}, {"fused_layers": False}], ids=["fused", "recorded"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_round_launches_little_and_no_more_for_longer_drafts(
    name: str, runner: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, make, most = DRAFTS[name]
    target = endless_model()
    draft = make(target)
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    rounds = count_launches(monkeypatch, drafter)
    config = config_of(QUIET, runner="graph", **runner)
    for steps in (2, 5):
        rounds.clear()
        inputs, policy = ragged_batch([5, 3, 7]), ScriptedLengths([[steps] * 3])
        speculative(target, draft, inputs, policy, config, max_new_tokens=40)
        usual = sorted(rounds, key=lambda launches: launches.total())[len(rounds) // 2]
        assert usual.total() <= most, (usual.total(), most, dict(usual))
