"""Drafting with the first layers of the target on a GPU: exact text, recorded once, and no wait beyond a round's end.

Run with `tests/gpu.sh` on a machine with a CUDA device; elsewhere the file is skipped.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from tiny_calls import config_of
from tiny_exits import settled_model
from tiny_models import ragged_batch, random_lengths
from tiny_policies import RandomLengths
from torch import Tensor
from transformers import PreTrainedModel
from waits import noted_waits

import hf_dsde
from hf_dsde.drafting.early_exit import EarlyExitDrafter
from hf_dsde.execution.cuda_graphs import CudaCapture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
RUNNERS: dict[str, dict[str, Any]] = {"fused": {}, "recorded": {"fused_layers": False}, "eager": {"runner": "eager"}}


@functools.cache
def target(family: str) -> PreTrainedModel:
    return hf_dsde.enable(copy.deepcopy(settled_model(family=family)).float().to("cuda"))


def batch() -> dict[str, Tensor]:
    return {name: tensor.to("cuda") for name, tensor in ragged_batch(random_lengths(6)).items()}


@functools.cache
def plain(family: str) -> Tensor:
    return target(family).generate(**batch(), max_new_tokens=40, do_sample=False)


def call(family: str, policy: Any, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    return target(family).generate(
        **batch(),
        assistant_model=EarlyExitDrafter(target(family), [1, 2, 3], **more),
        speculation_policy=policy,
        speculation_config=config_of(cost_probe=False, **(settings or {})),
        max_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("chosen", ["at random", "by DEL"])
@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_text_equals_plain_generate_in_float32(
    family: str, settings: dict[str, Any], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = random.Random(0)
    if chosen == "at random":
        monkeypatch.setattr(EarlyExitDrafter, "_best_exit", lambda self: numbers.randrange(len(self.exit_layers)))
    for policy in (RandomLengths(5, stop_probability=0.1), hf_dsde.StaticPolicy(4)):
        output = call(family, policy, settings, own_lengths=chosen == "by DEL")
        assert torch.equal(output.sequences, plain(family))
        counts = output.speculation_statistics
        # By DEL, random layers draft next to nothing.
        assert counts.accepted > 0 if chosen == "at random" else counts.drafted > 0


@pytest.mark.parametrize("settings", [{}, {"fused_layers": False}], ids=["fused", "recorded"])
def test_a_second_call_records_nothing(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    original = CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda self, *bodies: passes.append(1) or original(self, *bodies))
    hf_dsde.release_memory(target("llama"))
    for turn in range(2):
        call("llama", hf_dsde.StaticPolicy(4), settings)
        assert bool(passes) == (turn == 0)
        passes.clear()


@pytest.mark.parametrize("policy", ["static", "dsde", "svip", "goodput"])
def test_a_round_waits_for_the_device_at_its_end(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shadow tokens have arrived by then; whoever stops inside a round asks after each token."""
    call("llama", policy)
    with noted_waits(monkeypatch) as waits:
        output = call("llama", policy)
    assert torch.equal(output.sequences, plain("llama"))
    assert waits.pop("utils/transfers.py::wait") <= 2 * len(output.speculation_statistics.rounds)
    inside = waits.pop("decoding/stop_flag.py::nobody_drafts", 0)
    assert inside <= output.speculation_statistics.draft_steps
    assert not {place: count for place, count in waits.items() if place.startswith(("drafting", "execution"))}
