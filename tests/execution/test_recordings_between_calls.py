"""What one call leaves to the next is right for it, whatever was changed in between; what cannot be kept is let go."""

from __future__ import annotations

import contextlib
import copy
import gc
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import config_of
from tiny_models import fresh_pair, noisy_copy, ragged_batch, tiny_model
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution.create_runner import RunnerWarning, create_runner
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.recording_key import recording_key
from hf_dsde.execution.workspaces import workspaces

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
INPUTS = ragged_batch([3, 7, 1])
NEW_TOKENS = 7
Modes = {
    "plain": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def generate(target: PreTrainedModel, draft: PreTrainedModel, policy: str = "static", **settings: Any) -> torch.Tensor:
    hf_dsde.enable(target)
    return target.generate(
        **INPUTS,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=config_of(**settings),
    )


def plain(target: PreTrainedModel) -> torch.Tensor:
    return target.generate(**INPUTS, max_new_tokens=NEW_TOKENS, do_sample=False)


HARMLESS_DROPOUT = 1e-12
"""Makes training mode another one than evaluation and drops nothing."""


def with_dropout(model: PreTrainedModel, rate: float) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = rate
    return model


def recorded_passes(recording: list[NotingCapture]) -> int:
    return sum(capture.recorded for capture in recording)


@pytest.mark.parametrize("policy", ["dsde", "goodput", "marginal_goodput", "tapout", "svip"])
@pytest.mark.parametrize("order", ["inference plain inference no_grad", "plain inference no_grad"])
def test_calls_in_any_mode_follow_calls_in_any_other(policy: str, order: str) -> None:
    target, draft = fresh_pair()
    expected = plain(target)
    for round_, mode in enumerate(order.split()):
        with Modes[mode]():
            text = generate(target, draft, policy)
            assert torch.equal(text, expected)
            text += 0  # whoever called may write to it in the same mode
        if round_ == 1:
            hf_dsde.release_memory(target)


def test_caches_that_grow_may_be_written_to_in_any_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dsde.integration.generation.RESERVED_NEW_TOKENS", 1)
    monkeypatch.setattr("hf_dsde.execution.graph_runner.CAPACITY_STEP", 8)
    monkeypatch.setattr("hf_dsde.execution.graph_runner.MIN_REACH", 8)
    target, draft = fresh_pair()
    expected = plain(target)
    for mode in ("inference", "plain"):
        with Modes[mode]():
            assert torch.equal(generate(target, draft, max_draft_length=2), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("order", ["plain autocast plain", "autocast plain autocast"])
def test_autocast_comes_and_goes(fused: bool, order: str) -> None:
    target, draft = (model.float() for model in fresh_pair())
    expected = {}
    for mode in set(order.split()):
        with Modes[mode]():
            expected[mode] = generate(copy.deepcopy(target), copy.deepcopy(draft), runner="eager")
    for mode in order.split():
        with Modes[mode]():
            assert torch.equal(generate(target, draft, fused_layers=fused), expected[mode])


@pytest.mark.parametrize("policy", ["goodput", "dsde"])
def test_autocast_is_not_for_the_arithmetic_of_policies(policy: str) -> None:
    target, draft = (model.float() for model in fresh_pair())
    seen: list[torch.dtype] = []

    class Watching(type(hf_dsde.policies.create_policy(policy))):  # type: ignore[misc]
        def observe(self, outcome: Any) -> None:
            seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            seen.extend(value.dtype for value in (outcome.kld,) if value is not None)
            super().observe(outcome)

    with Modes["autocast"]():
        generate(target, draft, Watching())
    assert set(seen) == {torch.float32}


def test_weights_that_autocast_has_cast_are_not_what_a_recording_reads() -> None:
    """They are gone with the outermost block, and old when the weights change."""
    target, draft = (model.float() for model in fresh_pair())
    other = tiny_model(seed=7).float()
    with Modes["autocast"]():
        target(**INPUTS)  # casts and keeps them
        generate(target, draft, fused_layers=False)
        expected = generate(copy.deepcopy(other), copy.deepcopy(draft), runner="eager")
    target.load_state_dict(other.state_dict())
    with Modes["autocast"]():
        assert torch.equal(generate(target, draft, fused_layers=False), expected)


def test_a_model_that_accelerate_has_prepared_in_between() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of other tests of this process
    target, draft = (model.float() for model in fresh_pair())
    bare = generate(target, draft)
    prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(target)
    expected = generate(target, draft, runner="eager")
    for _ in range(2):
        assert torch.equal(generate(prepared, draft), expected)
    assert recording_key(target) is not None
    accelerate.utils.extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
    assert torch.equal(generate(target, draft), bare)


def scaled(module: torch.nn.Module, factor: float) -> None:
    """Replace a module's `forward`, as `scale` would with the factor."""
    old = module.forward
    module.forward = lambda *inputs: factor * old(*inputs)


def last_mlp(model: PreTrainedModel) -> torch.nn.Module:
    return model.model.layers[-1].mlp


def replace_activation(model: PreTrainedModel) -> None:
    last_mlp(model).act_fn = torch.nn.Tanh()
    if hasattr(last_mlp(model), "activation_fn"):
        last_mlp(model).activation_fn = torch.nn.Tanh()


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "forward of an instance": lambda model: scaled(last_mlp(model), -3.0),
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0),
    "epsilon": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 100.0),
    "activation": replace_activation,
    "rotary frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.3),
    "rotary scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    "new weights": lambda model: last_mlp(model).down_proj.weight.data.mul_(-3.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_arithmetic_that_was_replaced_between_calls_is_seen(change: Callable[[PreTrainedModel], Any]) -> None:
    target, draft = fresh_pair("phi3")
    before = plain(target)
    assert torch.equal(generate(target, draft), before)
    change(target)
    expected = plain(target)
    assert not torch.equal(expected, before)
    assert torch.equal(generate(target, draft), expected)


def test_arithmetic_that_was_replaced_on_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = fresh_pair("phi3")
    generate(target, draft)
    kind = type(last_mlp(target))
    original = kind.forward
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: -3.0 * original(self, x))
        assert torch.equal(generate(target, draft), plain(target))
    assert torch.equal(generate(target, draft), plain(target))


def test_arithmetic_that_was_replaced_in_a_modeling_file_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.phi3 import modeling_phi3

    target, draft = fresh_pair("phi3")
    generate(target, draft)
    monkeypatch.setattr(modeling_phi3, "apply_rotary_pos_emb", lambda q, k, *_, **__: (k.repeat(1, 2, 1, 1) + q, k))
    assert torch.equal(generate(target, draft), plain(target))


class FakeLora(torch.nn.Module):
    """As an adapter's layer is: which of them are added, and how much, say its attributes."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.active, self.scaling = base, ["a"], {"a": 2.0, "b": -1.0}
        self.lora = torch.nn.ModuleDict({name: copy.deepcopy(base) for name in "ab"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = [self.scaling[name] * self.lora[name](x) for name in self.active]
        return self.base_layer(x) + sum(added)


def test_adapters_are_recorded_once_for_each_of_their_states(recording: list[NotingCapture]) -> None:
    target, draft = fresh_pair()
    mlp = last_mlp(target)
    adapter = mlp.down_proj = FakeLora(mlp.down_proj)
    for active, factor in ((["a"], 2.0), (["b"], 2.0), ([], 2.0), (["a"], -5.0)):
        adapter.active, adapter.scaling["a"] = active, factor
        for call in range(2):
            before = recorded_passes(recording)
            assert torch.equal(generate(target, draft), plain(target))
            assert (recorded_passes(recording) == before) == (call == 1)


def test_recordings_that_are_not_kept_leave_their_memory_to_the_next(recording: list[NotingCapture]) -> None:
    target, draft = fresh_pair()
    scaled(last_mlp(target), -3.0)
    for _ in range(3):
        assert torch.equal(generate(target, draft, fused_layers=False), plain(target))
    assert len(recording) == 2, "each capture has a pool of memory"
    [workspace] = workspaces._idle[target]
    assert len(workspace.passes) == 0
    assert not workspace.cache.is_allocated


def test_no_function_or_model_is_kept_alive_by_a_key() -> None:
    target, draft = fresh_pair()
    target.forward = types.MethodType(type(target).forward, target)
    key = recording_key(target)
    generate(target, draft)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert key != recording_key(tiny_model())


def test_fewer_passes_may_be_kept_than_were() -> None:
    target, draft = fresh_pair()
    generate(target, draft)
    assert len(workspaces._idle[target][0].passes) > 1
    generate(target, draft, max_graphs=1)
    assert len(workspaces._idle[target][0].passes) == 1


class TestMemory:
    def test_nothing_stays_when_nothing_may(self) -> None:
        target, draft = fresh_pair()
        generate(target, draft)
        cache = weakref.ref(workspaces._idle[target][0].cache)
        assert torch.equal(generate(target, draft, keep_memory=False), plain(target))
        gc.collect()
        assert cache() is None
        assert not workspaces._idle.get(target)
        assert not workspaces._idle.get(draft)

    def test_training_frees_what_calls_have_kept_for_both_models(self) -> None:
        target, draft = fresh_pair()
        generate(target, draft)
        target.eval()
        assert workspaces._idle.get(target)
        assert workspaces._idle.get(draft)
        target.train()
        assert not workspaces._idle.get(target)
        assert not workspaces._idle.get(draft)

    @pytest.mark.parametrize("dropout", [0.0, HARMLESS_DROPOUT])
    @pytest.mark.filterwarnings("ignore::hf_dsde.RunnerWarning")
    def test_a_call_in_training_mode_leaves_nothing_unless_it_is_to(self, dropout: float) -> None:
        target, draft = fresh_pair()
        hf_dsde.enable(target)
        with_dropout(target, dropout)
        generate(target, draft, keep_memory=True)
        target.train()
        generate(target, draft, keep_memory=True)
        assert workspaces._idle.get(target)
        generate(target, draft)
        if not dropout:
            assert not workspaces._idle.get(target)
            assert not workspaces._idle.get(draft)

    def test_another_targets_training_frees_nothing(self) -> None:
        target, draft = fresh_pair()
        generate(target, draft)
        hf_dsde.enable(tiny_model()).train()
        assert workspaces._idle.get(target)
        assert workspaces._idle.get(draft)

    def test_an_installation_hears_of_training_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = fresh_pair()
        hf_dsde.install()
        try:
            target.generate(
                **INPUTS, max_new_tokens=4, do_sample=False, assistant_model=draft, speculation_policy="static"
            )
            assert workspaces._idle.get(target)
            target.train()
            assert not workspaces._idle.get(target)
        finally:
            hf_dsde.uninstall()

    def test_a_wrapper_names_the_model_inside(self) -> None:
        target = tiny_model()
        generate(target, noisy_copy(target, 0.05))
        hf_dsde.release_memory(torch.compile(target))
        assert not workspaces._idle.get(target)


class TestReasonsThatPass:
    """A model is recorded again as soon as it can be."""

    @pytest.mark.filterwarnings("ignore::hf_dsde.RunnerWarning")
    @pytest.mark.parametrize("reason", ["train", "hook"])
    def test_and_is_recorded_again(self, reason: str) -> None:
        target, draft = fresh_pair()
        expected = plain(target)
        for _ in range(2):
            handle = None
            if reason == "train":
                with_dropout(target, HARMLESS_DROPOUT).train()
            else:
                handle = last_mlp(target).register_forward_hook(lambda *_: None)
            assert torch.equal(generate(target, draft), expected)
            assert type(create_runner(target, 3, 16, RuntimeOptions())) is EagerRunner
            target.eval()
            if handle is not None:
                handle.remove()
            assert torch.equal(generate(target, draft), expected)
            assert isinstance(create_runner(target, 3, 16, RuntimeOptions()), GraphRunner)

    def test_each_is_told_once(self) -> None:
        target, draft = fresh_pair()
        with_dropout(target, HARMLESS_DROPOUT)
        with pytest.warns(RunnerWarning, match=r"training mode, in which '\S+self_attn' \(attention_dropout=1e-12\)"):
            generate(target.train(), draft)
        handle = target.eval().register_forward_hook(lambda *_: None)
        with pytest.warns(RunnerWarning, match="hooks"):
            generate(target, draft)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RunnerWarning)
            generate(target, draft)
            handle.remove()
            generate(target.train(), draft)

    @pytest.mark.parametrize(
        "failure",
        [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling create")],
        ids=["torch", "cublas"],
    )
    def test_memory_that_ran_out_while_recording_is_raised(
        self, failure: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, draft = fresh_pair()

        def full(*_: Any) -> None:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(NotingCapture, "__call__", full)
            with pytest.raises(torch.OutOfMemoryError):
                generate(target, draft)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RunnerWarning)
            assert torch.equal(generate(target, draft), plain(target))
        assert workspaces._idle.get(target)

    def test_a_fused_pass_that_cannot_be_recorded_leaves_the_models_own(
        self, recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, draft = fresh_pair()
        with monkeypatch.context() as patch:

            def broken(*_: Any) -> None:
                raise ValueError("out of resources: shared memory")

            patch.setattr("hf_dsde.kernels.reference.ragged_attention", broken)
            with pytest.warns(RunnerWarning, match="out of resources"):
                assert torch.equal(generate(target, draft), plain(target))
            before = recorded_passes(recording)
            assert torch.equal(generate(target, draft), plain(target))
            assert recorded_passes(recording) > before
        [workspace] = workspaces._idle[target]
        assert workspace.key is not None
        fused = workspace.key[1]
        assert not fused
        hf_dsde.release_memory(target)
        generate(target, draft)
        [workspace] = workspaces._idle[target]
        assert workspace.key is not None
        assert workspace.key[1]
