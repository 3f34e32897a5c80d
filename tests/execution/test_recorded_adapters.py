"""Adapters that are switched between calls: each state is recorded once, and none is replayed for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import QUIET, config_of
from tiny_heads import fitted_head
from tiny_models import noisy_copy, ragged_batch, tiny_model
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution.workspaces import workspaces

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.usefixtures("recording"),
]
INPUTS = ragged_batch([3, 7, 1])
PLAIN: dict[str, Any] = {**INPUTS, "do_sample": False, "max_new_tokens": 6}
NAMES = ("first", "second")


def lora(**settings: Any) -> Any:
    modules = {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**modules, **settings})


def adapted(base: PreTrainedModel) -> Any:
    """Wrap a model in two adapters that do something, of which the first is active."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        wrapper = peft.get_peft_model(base, lora(), adapter_name=NAMES[0])
        wrapper.add_adapter(NAMES[1], lora())
    return wrapper.eval()


def text(target: Any, drafter: Any, **settings: Any) -> torch.Tensor:
    call = {"assistant_model": drafter, "speculation_policy": "static", "speculation_config": config_of(**settings)}
    return hf_dsde.enable(target).generate(**PLAIN, **call)


def recorded_passes(recording: list[NotingCapture]) -> int:
    return sum(capture.recorded for capture in recording)


@pytest.mark.parametrize("where", ["target", "draft", "head"])
def test_adapters_that_are_switched_to_and_fro_are_recorded_once_each(
    where: str, recording: list[NotingCapture]
) -> None:
    base = tiny_model()
    wrapper = adapted(fitted_head(base) if where == "head" else noisy_copy(base, 0.05))
    target, drafter = (wrapper, noisy_copy(base, 0.05)) if where == "target" else (base, wrapper)
    counts, texts, drafted = [], {}, set()
    for name in (*NAMES, *NAMES):
        wrapper.set_adapter(name)
        texts.setdefault(name, target.generate(**PLAIN))
        before = recorded_passes(recording)
        output = hf_dsde.enable(target).generate(
            **PLAIN,
            assistant_model=drafter,
            speculation_policy="static",
            speculation_config=QUIET,
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, texts[name])
        drafted.add((name, output.speculation_statistics.accepted))
        counts.append(recorded_passes(recording) - before)
    assert min(counts[:2]) > 0
    assert counts[2:] == [0] * 2
    assert len(drafted) == 2, "the same call with the same adapter accepted another number of tokens"
    assert len(recording) == 2, "each has a cache and a pool of memory of its own"
    if where == "target":
        assert not torch.equal(*texts.values())


def test_no_state_of_adapters_is_taken_for_another(recording: list[NotingCapture]) -> None:
    """Merging, scaling and training change what an adapter does, under the same name."""
    target, drafter = adapted(tiny_model()), noisy_copy(tiny_model(), 0.05)
    layer = target.get_base_model().model.layers[0].self_attn.q_proj

    def unchanged() -> None:
        return None

    def train() -> None:
        for name, weight in target.named_parameters():
            if f"lora_B.{NAMES[0]}" in name:
                weight.data.mul_(-3.0)

    def replace() -> None:
        weight = layer.lora_B[NAMES[0]].weight
        weight.data = torch.ones_like(weight)

    def scale() -> None:
        layer.scaling[NAMES[0]] *= -4.0

    def both() -> None:
        target.base_model.set_adapter(list(NAMES))

    def first() -> None:
        target.set_adapter(NAMES[0])

    def reload() -> None:
        target.delete_adapter(NAMES[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            target.add_adapter(NAMES[1], lora())
        target.eval().set_adapter(NAMES[1])

    changes = (
        unchanged, train, replace, scale, target.merge_adapter, target.unmerge_adapter, both, first,
        target.base_model.disable_adapter_layers, target.base_model.enable_adapter_layers, reload,
    )  # fmt: skip
    seen = []
    for change in changes:
        change()
        expected = target.generate(**PLAIN)
        assert torch.equal(text(target, drafter), expected), change.__name__
        seen.append(tuple(expected.flatten().tolist()))
    assert len(set(seen)) >= 7, "these changes changed nothing"


def test_a_state_without_any_recording_left_is_forgotten() -> None:
    target, drafter = adapted(tiny_model()), noisy_copy(tiny_model(), 0.05)
    for factor in (1.0, 2.0, 3.0):
        target.get_base_model().model.layers[0].mlp.down_proj.scaling[NAMES[0]] = factor
        assert torch.equal(text(target, drafter, max_graphs=2), target.generate(**PLAIN))
    [workspace] = workspaces._idle[target.get_base_model()]
    assert len(workspace.passes) <= 2
    assert len(workspace.states) <= 3


def test_other_weights_under_the_adapters_free_what_was_recorded_before(recording: list[NotingCapture]) -> None:
    target, drafter = adapted(tiny_model()), noisy_copy(tiny_model(), 0.05)
    text(target, drafter)
    [old] = workspaces._idle[target.get_base_model()]
    embedding = target.get_base_model().get_input_embeddings()
    embedding.weight.data = embedding.weight.data.flip(0).clone()
    assert torch.equal(text(target, drafter), target.generate(**PLAIN))
    [new] = workspaces._idle[target.get_base_model()]
    assert new is not old
    assert len(new.states) == 1
