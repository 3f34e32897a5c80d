"""What is in the way of faster passes is looked for once for each state of a model, and again in every other state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from hf_dsde.execution import obstacles as module
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.obstacles import Obstacles, obstacles, why_not_recorded
from hf_dsde.execution.recording_key import recording_key


def found(model: PreTrainedModel) -> Obstacles:
    return obstacles(model, recording_key(model))


def looked_at_everything(model: PreTrainedModel) -> Obstacles:
    return Obstacles(why_not_fused(model), why_not_recorded(model))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """Models whose modules were all looked at, in order."""
    seen: list[PreTrainedModel] = []

    def look(model: PreTrainedModel) -> str | None:
        seen.append(model)
        return why_not_fused(model)

    monkeypatch.setattr(module, "why_not_fused", look)
    return seen


def test_a_state_is_looked_at_once(looks: list[PreTrainedModel]) -> None:
    model, other = tiny_model("qwen3"), tiny_model("qwen3")
    assert [found(model) for _ in range(3)] == [Obstacles(None, None)] * 3
    assert looks == [model]
    found(other)
    assert looks == [model, other]


def test_states_that_alternate_are_remembered(looks: list[PreTrainedModel]) -> None:
    model = tiny_model("qwen3", attention_dropout=0.1)
    for _ in range(3):
        assert found(model.train()).recording is not None
        assert found(model.eval()).recording is None
    assert len(looks) == 2


def test_a_model_that_nothing_can_tell_is_looked_at_every_time(looks: list[PreTrainedModel]) -> None:
    model = tiny_model("qwen3")
    model.model.layers[1].mlp.act_fn = type("Elsewhere", (nn.SiLU,), {"__module__": "elsewhere"})()
    assert recording_key(model) is None
    assert [found(model).fusing for _ in range(2)] == ["its MLP activation is Elsewhere, not silu"] * 2
    assert len(looks) == 2


@contextmanager
def hook(model: Any, where: str, register: str = "register_forward_hook") -> Iterator[None]:
    handle = getattr(model.get_submodule(where), register)(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def accelerate_hook(model: Any, where: str) -> Iterator[None]:
    add_hook_to_module(model.get_submodule(where), ModelHook())
    yield
    remove_hook_from_module(model.get_submodule(where))


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)  # classes outlive the test


@contextmanager
def dropout(model: Any) -> Iterator[None]:
    with attribute(model.model.layers[0].self_attn, "attention_dropout", 0.1):
        model.train()
        yield
        model.eval()


@contextmanager
def elsewhere(model: Any) -> Iterator[None]:
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(weight.detach().to("meta"))
    yield
    model.lm_head.weight = weight


@contextmanager
def other_norm(model: Any) -> Iterator[None]:
    norm = model.model.norm
    norm.float()
    yield
    norm.to(model.dtype)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: hook(model, "model.layers.1.mlp"),
    "hook on a linear map": lambda model: hook(model, "model.layers.0.self_attn.q_proj"),
    "pre-hook": lambda model: hook(model, "", "register_forward_pre_hook"),
    "accelerate": lambda model: accelerate_hook(model, "model.layers.0"),
    "class forward": lambda _: attribute(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: x),
    "activation": lambda model: attribute(model.model.layers[0].mlp, "act_fn", nn.GELU()),
    "capping": lambda model: attribute(model.config, "pretraining_tp", 2),
    "attention": lambda model: attribute(model.config, "_attn_implementation", "eager"),
    "dropout": dropout,
    "devices": elsewhere,
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "dtype": other_norm,
}
"""What may come and go between two calls, each of which is in the way of something."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_comes_and_goes_is_seen(change: Callable[[Any], Any]) -> None:
    model = tiny_model("qwen3")
    model.config.pretraining_tp = 1
    free = found(model)
    assert free == Obstacles(None, None)
    with change(model):
        assert found(model) == looked_at_everything(model) != free
    assert found(model) == looked_at_everything(model)


def test_a_hook_in_another_place_is_another_state() -> None:
    model = tiny_model("qwen3")
    names = ("model.layers.0.mlp", "model.layers.1.mlp")
    for name in names:
        with hook(model, name):
            assert f"'{name}'" in str(found(model).recording)


def test_nothing_keeps_a_model_alive() -> None:
    model = tiny_model("qwen3", num_hidden_layers=3)
    found(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
