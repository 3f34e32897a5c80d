"""A call leaves nothing behind: no setting, no state of a policy, no tensor; also when it raised half-way.

Covers the kinds of transformers #40739 and #28759 (a length leaks into the next call) and vLLM #15506 (memory grows).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_calls import pair, plain, speculative
from tiny_models import AGREEMENT, noisy_copy, ragged_batch, tiny_model
from tiny_policies import RandomLengths
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_dsde
from hf_dsde import compat
from hf_dsde.integration import loop_builder
from hf_dsde.policies import RoundOutcome

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

INPUTS = ragged_batch([5, 1, 8])


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Return everything about a model that a call might change, weights aside."""
    configs = compat.attention_configs(model.config)
    return {
        "configs": [copy.deepcopy(config.to_dict()) for config in configs],
        "attributes of configs": [sorted(vars(config)) for config in configs],
        "attention": [compat.get_attention_setting(config) for config in configs],
        "implementations": [config._attn_implementation for config in configs],
        "generation config": copy.deepcopy(vars(model.generation_config)),
        "attributes": sorted(vars(model)),
        "class": type(model),
        "training": model.training,
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "buffers": {name: buffer.clone().tolist() for name, buffer in model.named_buffers()},
    }


class OnPurposeError(Exception):
    """Raised by the things below."""


class Countdown:
    """Raises at its nth call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise OnPurposeError


class RaisingCriterion(StoppingCriteria):
    def __init__(self) -> None:
        self.count = Countdown(6)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingProcessor(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == INPUTS["input_ids"].shape[1] + 6:
            raise OnPurposeError
        return scores


class RaisingPolicy(RandomLengths):
    def observe(self, outcome: RoundOutcome) -> None:
        if not hasattr(self, "count"):
            self.count = Countdown(3)
        self.count()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("policy", ["dsde", "confidence"])
def test_models_are_as_before_after_a_call(family: str, policy: str) -> None:
    target, draft = pair(family)
    before = snapshot(target), snapshot(draft)
    for do_sample in (False, True):
        speculative(target, draft, INPUTS, policy, max_new_tokens=10, do_sample=do_sample, eos_token_id=[7, 8])
    assert (snapshot(target), snapshot(draft)) == before


def _call_with(**arguments: Any) -> None:
    target, draft = pair()
    speculative(target, draft, INPUTS, arguments.pop("policy", RandomLengths(3)), max_new_tokens=20, **arguments)


def _forward_raises(which: int) -> None:
    count = Countdown(5)
    hook = pair()[which].register_forward_pre_hook(lambda *_: count())
    try:
        _call_with()
    finally:
        hook.remove()


RAISING: dict[str, Callable[[], None]] = {
    "criterion": lambda: _call_with(stopping_criteria=StoppingCriteriaList([RaisingCriterion()])),
    "processor": lambda: _call_with(logits_processor=LogitsProcessorList([RaisingProcessor()])),
    "policy": lambda: _call_with(policy=RaisingPolicy(3)),
    "target": lambda: _forward_raises(0),
    "draft": lambda: _forward_raises(1),
}


@pytest.mark.parametrize("where", RAISING)
def test_models_are_as_before_after_a_call_that_raised(where: str) -> None:
    target, draft = pair()
    before = snapshot(target), snapshot(draft)
    with pytest.raises(OnPurposeError):
        RAISING[where]()
    assert (snapshot(target), snapshot(draft)) == before
    output = speculative(target, draft, INPUTS, "dsde", max_new_tokens=10)
    assert output.sequences.tolist() == plain(target, INPUTS, max_new_tokens=10).tolist()


def test_nested_configs_are_as_before() -> None:
    """A model with a text config inside keeps an attention setting at each level."""
    text = tiny_model()
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=text.config, image_token_index=9)
    model = hf_dsde.enable(LlavaForConditionalGeneration(config).double().eval())
    before = snapshot(model)
    assert len(before["attention"]) == 3
    draft = noisy_copy(text, AGREEMENT["half"])
    output = speculative(model, draft, INPUTS, "dsde", max_new_tokens=8, eos_token_id=50)
    assert snapshot(model) == before
    assert output.sequences.tolist() == plain(model, INPUTS, max_new_tokens=8, eos_token_id=50).tolist()


def test_arguments_are_as_before() -> None:
    target, draft = pair()
    generation_config = GenerationConfig(max_new_tokens=8, do_sample=False)
    criteria, processors = StoppingCriteriaList(), LogitsProcessorList()
    inputs = {name: tensor.clone() for name, tensor in INPUTS.items()}
    before = copy.deepcopy(vars(generation_config))
    target.generate(
        **inputs,
        generation_config=generation_config,
        stopping_criteria=criteria,
        logits_processor=processors,
        assistant_model=draft,
        speculation_policy="dsde",
    )
    assert vars(generation_config) == before
    assert len(criteria) == len(processors) == 0
    assert all(torch.equal(inputs[name], INPUTS[name]) for name in INPUTS)


def test_weights_are_as_before() -> None:
    target, draft = pair()
    before = copy.deepcopy(target.state_dict()), copy.deepcopy(draft.state_dict())
    speculative(target, draft, INPUTS, "dsde", max_new_tokens=6)
    for model, state in zip((target, draft), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_greedy_decoding_draws_no_random_numbers() -> None:
    target, draft = pair()
    before = torch.get_rng_state()
    speculative(target, draft, INPUTS, "dsde", max_new_tokens=10)
    assert torch.equal(torch.get_rng_state(), before)


def counts_of(output: hf_dsde.SpeculativeGenerateOutput) -> Any:
    """Return the statistics without what a clock measured."""
    statistics = output.speculation_statistics
    no_time = {f.name: 0.0 for f in dataclasses.fields(statistics.rounds[0]) if f.name.endswith("seconds")}
    rounds = tuple(dataclasses.replace(r, **no_time) for r in statistics.rounds)
    return dataclasses.replace(statistics, rounds=rounds, prefill_seconds=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "do_sample"), [("dsde", False), *((policy, True) for policy in hf_dsde.available_policies())]
)
def test_equal_calls_give_equal_text_and_equal_lengths(policy: str, do_sample: bool) -> None:
    """Also when one policy object serves both calls, with a call of another batch between them."""
    target, draft = pair()
    instance = hf_dsde.SpeculationConfig(policy=policy).build_policy()
    outputs = []
    for asked in (instance, instance, policy):
        torch.manual_seed(3)
        outputs.append(speculative(target, draft, INPUTS, asked, max_new_tokens=24, do_sample=do_sample))
        speculative(target, draft, ragged_batch([2, 2]), instance, max_new_tokens=6)
    assert len({str(output.sequences.tolist()) for output in outputs}) == 1
    assert counts_of(outputs[0]) == counts_of(outputs[1]) == counts_of(outputs[2])


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dsde", "confidence"])
def test_memory_is_flat_over_many_calls(policy: str) -> None:
    target, draft = pair("llama", "half", num_hidden_layers=1)
    inputs = ragged_batch([2, 1])
    for _ in range(5):
        speculative(target, draft, inputs, policy, max_new_tokens=2)
    tensors = _live_tensors()
    objects = len(gc.get_objects())
    for _ in range(120):
        speculative(target, draft, inputs, policy, max_new_tokens=2)
    assert _live_tensors() == tensors
    assert len(gc.get_objects()) - objects < 40, "less than one object in three calls"


@pytest.mark.parametrize("policy", ["dsde", "goodput"])
def test_nothing_of_a_call_waits_for_the_garbage_collector(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come at any time, as while a pass is recorded, when recorded passes of other calls must not go."""
    runners: list[weakref.ref[Any]] = []
    create = loop_builder.create_runner

    def watched(*arguments: Any, **options: Any) -> Any:
        runner = create(*arguments, **options)
        runners.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(loop_builder, "create_runner", watched)
    target, draft = pair("llama", "half", num_hidden_layers=1)
    gc.disable()
    try:
        speculative(target, draft, ragged_batch([2, 1]), policy, max_new_tokens=6)
        (runner,) = runners
        assert runner() is None
    finally:
        gc.enable()
