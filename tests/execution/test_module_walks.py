"""Walks over a model's modules find what torch's own iterators find."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from hf_dsde.utils.modules import has_attribute, modules_of, named_modules, parameter_devices


def shared() -> nn.Module:
    """A model that has a module twice, and a place without one."""
    twice = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": nn.Sequential(twice, nn.ReLU()), "again": twice})
    model.register_module("nothing", None)
    return model


@pytest.mark.parametrize("model", [tiny_model(), tiny_model("gpt_oss"), shared()], ids=["llama", "gpt_oss", "shared"])
def test_walks_find_each_module_once(model: nn.Module) -> None:
    assert named_modules(model) == list(model.named_modules())
    assert {*map(id, modules_of(model))} == {*map(id, model.modules())}
    assert len(modules_of(model)) == len(list(model.modules()))


def test_devices_are_those_of_all_parameters() -> None:
    model = shared()
    assert parameter_devices(model) == {torch.device("cpu")}
    model.again.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    assert parameter_devices(model) == {torch.device("cpu"), torch.device("meta")}


def test_attributes_are_those_that_hasattr_finds() -> None:
    model = nn.BatchNorm1d(2)
    model.own, model.part = 1, nn.ReLU()
    for name in ("own", "part", "weight", "running_mean", "forward", "training", "_hf_hook", "sinks"):
        assert has_attribute(model, name) == hasattr(model, name), name
