"""Every option shows in what a call does, and none is left behind for the next call.

Options that silently do nothing, and lengths that leak into the next call, are known from transformers #40739 and
#28759.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from small_batch import ARGUMENTS, BATCH, draft, model, plain_text
from tiny_policies import ScriptedLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde import RuntimeOptions, SpeculationConfig
from hf_dsde.execution import model_runner

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


class Watch:
    """Sees how a model is called, not through a hook, which would keep rows that have ended in the passes."""

    def __init__(self, watched: PreTrainedModel) -> None:
        self.rows: list[int] = []
        self.widths: list[int] = []
        self.views: list[int] = []
        self.attention: list[str] = []
        forward = watched.forward

        @functools.wraps(forward)
        def seen(*positional: Any, **named: Any) -> Any:
            self._see(watched, named)
            return forward(*positional, **named)

        watched.forward = seen

    def _see(self, watched: PreTrainedModel, named: dict[str, Any]) -> None:
        self.rows.append(named["input_ids"].shape[0])
        self.widths.append(named["input_ids"].shape[1])
        self.views.append(named["attention_mask"].shape[-1])
        self.attention.append(watched.config._attn_implementation)


def statistics_of(target: PreTrainedModel, **arguments: Any) -> hf_dsde.SpeculationStatistics:
    arguments = {
        "assistant_model": target,
        "speculation_policy": None,
        "eos_token_id": None,
        **ARGUMENTS,
        **arguments,
        "return_dict_in_generate": True,
    }
    return target.generate(**arguments).speculation_statistics


def test_the_policys_arguments_show() -> None:
    target = hf_dsde.enable(model())
    for tokens in (0, 1, 3):
        config = SpeculationConfig(policy="static", policy_arguments={"num_draft_tokens": tokens})
        assert len(statistics_of(target, speculation_config=config).drafted_by_position) == tokens
    for first in (2, 6):
        config = SpeculationConfig(policy="heuristic", policy_arguments={"initial_length": first})
        assert statistics_of(target, speculation_config=config).rounds[0].drafted == first * 3


def test_max_draft_length_shows() -> None:
    target = hf_dsde.enable(model())
    for longest in (1, 4):
        config = SpeculationConfig(policy="static", max_draft_length=longest)
        assert len(statistics_of(target, speculation_config=config).drafted_by_position) == longest


def test_fill_to_batch_shows() -> None:
    target = hf_dsde.enable(model())
    for fills, drafted in ((False, 0 + 4 + 1), (True, 3 * 4)):
        counts = statistics_of(
            target,
            speculation_policy=ScriptedLengths([[0, 4, 1]]),
            speculation_config=SpeculationConfig(fill_to_batch=fills),
        )
        assert counts.rounds[0].drafted == drafted


def test_cost_probe_shows() -> None:
    target = hf_dsde.enable(model())
    for probes in (True, False):
        config = SpeculationConfig(policy="static", options=RuntimeOptions(cost_probe=probes))
        counts = statistics_of(target, speculation_config=config, max_new_tokens=66)
        assert any(entry.is_plain for entry in counts.rounds) is probes
        assert (counts.predicted_speedup is not None) is probes


def test_buckets_and_chunks_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "WIDTH_BUCKETS", (3, 9))
    target = hf_dsde.enable(model())
    watch = Watch(target)
    statistics_of(
        target,
        assistant_model=draft(),
        speculation_config=SpeculationConfig("static", options=RuntimeOptions(view_bucket=5, prefill_chunk=2)),
    )
    assert set(watch.widths) == {3, 9}
    assert {view % 5 for view in watch.views} == {0}
    longest_prompt = int(BATCH["attention_mask"].sum(dim=1).max())
    assert watch.widths[: -(-(longest_prompt - 1) // 2)] == [3] * -(-(longest_prompt - 1) // 2)


def test_drop_finished_rows_shows() -> None:
    for drops in (True, False):
        target = hf_dsde.enable(model())
        watch = Watch(target)
        first_of_row = plain_text()[1][BATCH["input_ids"].shape[1]]
        config = SpeculationConfig(policy="static", options=RuntimeOptions(drop_finished_rows=drops))
        statistics_of(target, assistant_model=draft(), speculation_config=config, eos_token_id=first_of_row)
        assert max(watch.rows) == 3
        assert (watch.rows[-1] < 3) is drops


def test_packed_attention_shows() -> None:
    for packed in (True, False):
        target = hf_dsde.enable(model())
        watch = Watch(target)
        statistics_of(target, speculation_config=SpeculationConfig(options=RuntimeOptions(packed_attention=packed)))
        assert len(set(watch.attention)) == 1
        assert (watch.attention[0] != "sdpa") is packed
