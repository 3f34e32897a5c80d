"""Models that a fused pass cannot stand for are named, and those that it can stand for are not."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import hf_dsde
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.fused_decoder import FusedDecoder
from hf_dsde.execution.fused_families import FAMILIES, why_not_fused
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.kernels import dispatch, reference


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_supported_models_are_supported(family: str) -> None:
    assert why_not_fused(tiny_model(family)) is None


def test_enabled_models_are_supported() -> None:
    model = hf_dsde.enable(tiny_model())
    assert type(model) is not modeling_llama.LlamaForCausalLM
    assert why_not_fused(model) is None


def test_setting_that_a_runner_holds_is_no_reason() -> None:
    model = tiny_model()
    runner: ModelRunner = EagerRunner(model, 2, 8, RuntimeOptions())
    with runner.active():
        assert why_not_fused(model) is None


def test_hooks_that_transformers_leaves_behind_are_no_reason() -> None:
    model = tiny_model()
    with torch.no_grad():
        model(torch.tensor([[3, 4]]), output_hidden_states=True, output_attentions=False)
    assert model.model.layers[0]._forward_hooks
    assert why_not_fused(model) is None


def test_a_hook_taken_off_again_is_no_reason() -> None:
    model = tiny_model()
    layer = model.model.layers[1]
    add_hook_to_module(layer, ModelHook())
    assert "accelerate" in str(why_not_fused(model)) or "replaced" in str(why_not_fused(model))
    remove_hook_from_module(layer)
    handle = layer.mlp.register_forward_hook(lambda *_: None)
    assert why_not_fused(model) is not None
    handle.remove()
    assert why_not_fused(model) is None
    assert why_not_fused(copy.deepcopy(model)) is None


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "gpt_neox", "opt", "phi3", "mixtral", "gpt_oss"])
def test_other_classes_are_refused(family: str) -> None:
    assert "its class is" in str(why_not_fused(tiny_model(family)))


def test_derived_classes_are_refused() -> None:
    class Derived(modeling_llama.LlamaForCausalLM):
        pass

    same_names = {"__module__": modeling_llama.__name__}
    for base in (Derived, type("LlamaForCausalLM", (modeling_llama.LlamaForCausalLM,), same_names)):
        model = tiny_model()
        model.__class__ = base
        assert "its class is" in str(why_not_fused(model))
    model = hf_dsde.enable(tiny_model())
    model.__class__ = type("FSDPLlama", (type(model),), {})
    assert "its class is" in str(why_not_fused(model))
    assert "its class is" in str(why_not_fused(nn.Linear(2, 2)))


BYPASSED = (
    "",
    "model",
    "model.norm",
    "model.layers.1",
    "model.layers.0.self_attn",
    "model.layers.1.mlp",
    "model.layers.1.mlp.act_fn",
    "model.layers.0.input_layernorm",
    "model.layers.1.post_attention_layernorm",
    "model.layers.1.self_attn.q_norm",
    "model.layers.0.self_attn.k_norm",
)


@pytest.mark.parametrize("name", BYPASSED)
@pytest.mark.parametrize(
    ("attach", "words"),
    [
        (lambda module: module.register_forward_hook(lambda *_: None), "forward hook"),
        (lambda module: module.register_forward_pre_hook(lambda *_: None), "forward hook"),
        (lambda module: module.register_forward_pre_hook(functools.partial(lambda *_: None)), "forward hook"),
        (lambda module: add_hook_to_module(module, ModelHook()), "replaced"),
        (lambda module: setattr(module, "_hf_hook", ModelHook()), "accelerate hook"),
        (lambda module: setattr(module, "forward", lambda *_, **__: None), "replaced"),
        (lambda module: setattr(module, "forward", functools.partial(module.forward)), "replaced"),
        (lambda module: setattr(module, "forward", types.MethodType(lambda *_: None, module)), "replaced"),
    ],
    ids=["hook", "pre-hook", "partial", "accelerate", "hf-hook", "forward", "partial-forward", "method"],
)
def test_attachments_to_modules_that_are_not_called_are_refused(
    name: str, attach: Callable[[nn.Module], object], words: str
) -> None:
    model = tiny_model("qwen3")
    attach(model.get_submodule(name))
    reason = why_not_fused(model)
    assert reason is not None
    assert words in reason
    assert (name or "the model").removeprefix("model.layers.1.") in reason


def test_module_of_another_class_is_refused() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return self.inner(*arguments, **options)

    for name in BYPASSED[1:]:
        model = tiny_model("qwen3")
        model.set_submodule(name, Wrapper(model.get_submodule(name)))
        assert "Wrapper" in str(why_not_fused(model))


def test_forward_replaced_on_a_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    assert "LlamaMLP.forward was replaced" in str(why_not_fused(model))


@pytest.mark.parametrize("activation", ["gelu", "relu", "swish"])
def test_activation_other_than_silu_is_refused(activation: str) -> None:
    reason = why_not_fused(tiny_model(hidden_act=activation))
    assert reason is None if activation == "swish" else "activation" in str(reason)


def test_settings_that_change_the_arithmetic_are_refused() -> None:
    for field, value in (("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("pretraining_tp", 2)):
        model = tiny_model()
        setattr(model.config, field, value)
        assert f"{field}={value}" in str(why_not_fused(model))
    assert "'eager'" in str(why_not_fused(tiny_model(attn_implementation="eager")))
    model = tiny_model(attention_dropout=0.1)
    assert why_not_fused(model) is None
    assert "dropout" in str(why_not_fused(model.train()))


def test_partial_rotation_is_refused() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert "turns 4 of 8 dimensions" in str(why_not_fused(tiny_model(rope_parameters=rope)))


def test_spread_models_are_refused() -> None:
    model = tiny_model()
    model._tp_size = 2
    assert "tensor parallel" in str(why_not_fused(model))
    model._tp_size = 1
    assert why_not_fused(model) is None
    model.lm_head.to("meta")
    assert "several devices (cpu, meta)" in str(why_not_fused(model))


class TestCudaDevices:
    """What kernels cannot do on a CUDA device; the model is on a CPU and says otherwise."""

    @pytest.fixture(autouse=True)
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(dispatch, "_triton_version", lambda: (3, 3))
        dispatch.why_no_kernels.cache_clear()
        dispatch.ops_for.cache_clear()
        yield
        dispatch.why_no_kernels.cache_clear()
        dispatch.ops_for.cache_clear()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_dtypes_that_kernels_compute_in(self, dtype: torch.dtype) -> None:
        assert why_not_fused(tiny_model().to(dtype)) is None

    def test_float64_stays_float64(self) -> None:
        assert "torch.float64" in str(why_not_fused(tiny_model()))

    def test_devices_before_ampere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        assert "cuda:0 has compute capability 7.5, and the kernels need 8.0" in str(why_not_fused(tiny_model().half()))

    @pytest.mark.parametrize(("version", "words"), [((3, 2), "Triton is 3.2.*need 3.3"), (None, "cannot be imported")])
    def test_without_a_triton_that_will_do(
        self, version: tuple[int, int] | None, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatch, "_triton_version", lambda: version)
        assert re.search(words, str(why_not_fused(tiny_model().half())))
        # What policies ask of a distribution is then plain torch.
        assert dispatch.ops_for(torch.device("cuda", 0)) is reference


def test_norms_of_another_dtype_are_refused() -> None:
    model = tiny_model().to(torch.bfloat16)
    assert why_not_fused(model) is None
    model.model.layers[1].post_attention_layernorm.float()
    assert "layers.1.post_attention_layernorm" in str(why_not_fused(model))


def test_decoder_names_the_reason() -> None:
    with pytest.raises(ValueError, match="MLP activation is GELU"):
        FusedDecoder(tiny_model(hidden_act="gelu"), reference)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_modules_of_the_stock_models_are_the_known_ones(family: str) -> None:
    """A release that adds a module to a layer, or takes one away, has to be looked at before it is trusted."""
    model = tiny_model(family)
    assert type(model).__module__ in FAMILIES
    assert {name for name, _ in model.named_children()} == {"model", "lm_head"}
    assert {name for name, _ in model.model.named_children()} == {"embed_tokens", "layers", "norm", "rotary_emb"}
    norms = {"self_attn.q_norm", "self_attn.k_norm"} if family == "qwen3" else set()
    for layer in model.model.layers:
        assert {name for name, _ in layer.named_modules() if name} == {
            "self_attn",
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            "mlp",
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
            "mlp.act_fn",
            "input_layernorm",
            "post_attention_layernorm",
            *norms,
        }
