"""Which models `FusedDecoder` can stand for, and what keeps it from standing for one.

Whatever somebody attached to a block that is not called would be lost silently, and settings may ask for arithmetic
that the fused pass does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation

from hf_dsde import compat
from hf_dsde.execution import attention
from hf_dsde.execution.torch_modes import Autocast
from hf_dsde.kernels.dispatch import why_no_kernels
from hf_dsde.utils.modules import has_attribute, parameter_devices


def _modeling_file(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


FAMILIES = {
    **{_modeling_file(name.lower()): name for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    _modeling_file("qwen2_vl"): "Qwen2VL",
    _modeling_file("qwen2_5_vl"): "Qwen2_5_VL",
    _modeling_file("qwen3_vl"): "Qwen3VLText",
}
"""Modeling file of each supported family of layers -> the prefix of its class names."""

AROUND_TEXT = {
    _modeling_file(name): (prefix, part)
    for name, prefix, part in (
        ("llava", "Llava", "language_model"),
        ("llava_next", "LlavaNext", "language_model"),
        ("llava_onevision", "LlavaOnevision", "language_model"),
        ("vipllava", "VipLlava", "language_model"),
        ("mistral3", "Mistral3", "language_model"),
        ("internvl", "InternVL", "language_model"),
        ("idefics2", "Idefics2", "text_model"),
        ("idefics3", "Idefics3", "text_model"),
        ("smolvlm", "SmolVLM", "text_model"),
        ("qwen2_vl", "Qwen2VL", "language_model"),
        ("qwen2_5_vl", "Qwen2_5_VL", "language_model"),
        ("qwen3_vl", "Qwen3VL", "language_model"),
    )
}
"""Modeling file of models that look at images -> the prefix of their class names, and where their text model is.

Once images have been read, these models add nothing to what their text models compute.
"""
_OTHER_NAMES = {
    "Qwen2VLMLP": "Qwen2MLP",
    "Qwen2_5_VLMLP": "Qwen2MLP",
    "Qwen2VLModel": "Qwen2VLTextModel",
    "Qwen2_5_VLModel": "Qwen2_5_VLTextModel",
}
"""Class of a part of a text model, as it would be called in most families -> its name where it is called otherwise."""

HEAD_FILE, HEAD, HEAD_LAYER = "hf_dsde.heads.eagle3", "Eagle3Head", "Eagle3FirstLayer"
"""Where the classes of draft heads are, and their names."""
HEAD_FAMILIES = {"llama": "Llama", "qwen3": "Qwen3"}
"""Type of a head's configuration -> the family that its layers are of."""

_LAYER_PARTS = {
    "": "DecoderLayer",
    ".self_attn": "Attention",
    ".mlp": "MLP",
    ".input_layernorm": "RMSNorm",
    ".post_attention_layernorm": "RMSNorm",
}
_QK_NORMS = {".self_attn.q_norm": "RMSNorm", ".self_attn.k_norm": "RMSNorm"}
_OTHER_ARITHMETIC = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "pretraining_tp": 1}
"""Fields that ask for other arithmetic unless they have this value, where a configuration has them."""
TRL_HEAD = ("trl.trainer.utils", "_fused_forward")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def decoder_body(model: nn.Module) -> Any:
    """What holds embeddings, layers and final norm: the text model inside a causal LM, a draft head itself."""
    if type(model).__module__ == HEAD_FILE:
        return model
    around = AROUND_TEXT.get(type(model).__module__)
    return model.model if around is None else getattr(model.model, around[1])


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers that the model's own `forward` would call."""
    body = decoder_body(model)
    return list(body.layers[: body.config.num_hidden_layers])


def attention_windows(model: nn.Module) -> list[int | None]:
    """How far each layer looks back. Only Qwen's layers differ; Llama's and those of Qwen3-VL never slide."""
    config: PretrainedConfig = decoder_body(model).config
    family = _family(model)
    sliding: int | None = getattr(config, "sliding_window", None)
    if family in ("Llama", "Qwen3VLText"):
        return [None] * config.num_hidden_layers
    if family == "Mistral":
        return [sliding] * config.num_hidden_layers
    return [sliding if kind == "sliding_attention" else None for kind in compat.layer_types(config)]


def why_not_fused(model: nn.Module) -> str | None:
    """Say why `FusedDecoder` cannot stand for a model's own `forward`.

    Args:
        model: Any model.

    Returns:
        None when it can; otherwise the reason in words, fit to follow a colon.
    """
    # A class made by `enable` names the one it was made of; a class derived from that has no such entry of its own.
    own_class = type(model).__dict__.get("_hf_dsde_own_class", type(model))
    family = _family(model)
    if family is None or own_class is not getattr(sys.modules[own_class.__module__], _whole_class(model)):
        texts = [f"{name}ForCausalLM" for file, name in FAMILIES.items() if file not in AROUND_TEXT]
        images = [f"{prefix}ForConditionalGeneration" for prefix, _ in AROUND_TEXT.values()]
        supported = ", ".join([*texts, *images, HEAD])
        return f"its class is {own_class.__module__}.{own_class.__name__}, and supported are exactly {supported}"
    return next(_structural_reasons(model), None) or next(_arithmetic_reasons(model), None)


def _family(model: nn.Module) -> str | None:
    """The family whose layers a model or a draft head has; None if it is none that is known."""
    file = type(model).__module__
    if file == HEAD_FILE:
        return HEAD_FAMILIES.get(str(getattr(model.config, "model_type", None)))
    if file in AROUND_TEXT:
        file = type(getattr(getattr(model, "model", None), AROUND_TEXT[file][1], None)).__module__
    return FAMILIES.get(file)


def _whole_class(model: nn.Module) -> str:
    """Name that the class of a supported model would have."""
    file = type(model).__module__
    if file == HEAD_FILE:
        return HEAD
    return f"{AROUND_TEXT[file][0]}ForConditionalGeneration" if file in AROUND_TEXT else f"{_family(model)}ForCausalLM"


def _part(family: str | None, suffix: str) -> str:
    """Name of the class of a part of a family's text model."""
    name = f"{family}{suffix}"
    return _OTHER_NAMES.get(name, name)


def _bypassed(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, str]]]:
    """Modules whose `forward` is not called, parents first: name, module, and class and file that it has to be of."""
    family = _family(model)
    file = next(file for file, name in FAMILIES.items() if name == family)
    is_head = type(model).__module__ == HEAD_FILE
    body, own_file = "" if is_head else "model.", type(model).__module__
    yield "", model, (_whole_class(model), own_file)
    if is_head:
        yield "layers.0.hidden_norm", model.get_submodule("layers.0.hidden_norm"), (f"{family}RMSNorm", file)
    elif own_file in AROUND_TEXT:
        prefix, text = AROUND_TEXT[own_file]
        yield "model", model.get_submodule("model"), (f"{prefix}Model", own_file)
        yield f"model.{text}", decoder_body(model), (_part(family, "Model"), file)
        body = f"model.{text}."
    else:
        yield "model", model.get_submodule("model"), (f"{family}Model", file)
    yield f"{body}norm", model.get_submodule(f"{body}norm"), (f"{family}RMSNorm", file)
    parts = {**_LAYER_PARTS, **(_QK_NORMS if family in ("Qwen3", "Qwen3VLText") else {})}
    for index, layer in enumerate(decoder_layers(model)):
        for part, suffix in parts.items():
            first = is_head and not index and not part
            expected = (HEAD_LAYER, HEAD_FILE) if first else (_part(family, suffix), file)
            yield f"{body}layers.{index}{part}", layer.get_submodule(part[1:]), expected


def _structural_reasons(model: nn.Module) -> Iterator[str]:
    """Modules that are not what they should be, or to which somebody attached something."""
    for name, module, (expected, file) in _bypassed(model):
        found = type(module)
        if (found.__name__, found.__module__) != (expected, file):
            yield f"`{name}` is a {found.__module__}.{found.__name__}, not a {expected}"
        owner = next(each for each in found.__mro__ if "forward" in vars(each))
        if found.forward.__module__ != owner.__module__:
            yield f"{found.__name__}.forward was replaced by one of {found.forward.__module__}"
        yield from _attachments(name or "the model", module)
    for layer in decoder_layers(model):
        activation: Any = layer.get_submodule("mlp.act_fn")
        if type(activation) not in (nn.SiLU, SiLUActivation):
            yield f"its MLP activation is {type(activation).__name__}, not silu"
        yield from _attachments("mlp.act_fn", activation)


def _is_own_forward(module: nn.Module, function: Any) -> bool:
    """Whether a function is a module's own `forward`, also inside what TRL puts around it.

    That computes log-probabilities without logits where a call asks for them, and hands every other call on.
    """
    own = type(module).forward
    code = getattr(function, "__code__", None)
    hands_on = code is not None and (getattr(function, "__globals__", {}).get("__name__"), code.co_name) == TRL_HEAD
    return function is own or (hands_on and getattr(function, "__wrapped__", None) is own)


def _attachments(name: str, module: nn.Module) -> Iterator[str]:
    """What would happen around a module's `forward` if it were called."""
    replaced = module.__dict__.get("forward")
    # Taking off an accelerate hook leaves the module's own method as an attribute, which changes nothing.
    if replaced is not None and not _is_own_forward(module, getattr(replaced, "__func__", replaced)):
        yield f"`forward` of {name} was replaced, and a fused pass does not call it"
    if has_attribute(module, "_hf_hook"):
        yield f"{name} has an accelerate hook, which a fused pass would not run"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not all(map(compat.leaves_arithmetic_alone, hooks)):
        yield f"{name} has a forward hook, which a fused pass would not run"


def _arithmetic_reasons(model: Any) -> Iterator[str]:
    """Settings under which the model's own modules compute, or are placed, otherwise."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        yield f"it is split over {model._tp_size} devices (tensor parallel)"
    devices = sorted(map(str, parameter_devices(model)))
    if len(devices) > 1:
        yield f"its parameters are on several devices ({', '.join(devices)})"
    if (reason := why_no_kernels(model.device)) is not None:
        yield reason
    if model.device.type == "cuda" and model.dtype not in _KERNEL_DTYPES:
        yield f"its weights are {model.dtype}, and the kernels sum in float32"
    if (dtype := Autocast.on(model.device).dtype) is not None:
        yield f"autocast makes some of its operations {dtype}, and a fused pass takes the dtypes that tensors have"
    body = decoder_body(model)
    fields = {name: getattr(body.config, name, usual) for name, usual in _OTHER_ARITHMETIC.items()}
    for name, value in fields.items():
        if value not in (None, _OTHER_ARITHMETIC[name]):
            yield f"its configuration sets {name}={value}"
    if not attention.reproduces_attention(model):
        yield f"its attention is set to {model.config._attn_implementation!r}, which stays as it is"
    head_dim = body.layers[0].self_attn.head_dim
    turned = 2 * body.rotary_emb.inv_freq.shape[-1]
    if turned != head_dim:
        yield f"its rotary embedding turns {turned} of {head_dim} dimensions of a head"
    yield from _state_reasons(model)


def _state_reasons(model: PreTrainedModel) -> Iterator[str]:
    """What may differ from layer to layer of one model."""
    dtype = model.dtype
    for name, bypassed, (expected, _) in _bypassed(model):
        module: Any = bypassed
        # Of another dtype than the states, a norm's weight would change the dtype of everything after it.
        if expected.endswith("RMSNorm") and module.weight.dtype != dtype:
            yield f"`{name}` has weights of {module.weight.dtype}, but the model is {dtype}"
        if expected.endswith("Attention") and module.training and module.attention_dropout:
            yield "it is in training, with attention dropout; call model.eval()"
