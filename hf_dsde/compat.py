"""The differences between transformers versions and between its models, and nothing else.

Supported: 5.17 to 5.24. Whatever a newer release renames is answered here, so that no other file asks for a version.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation import logits_process
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache argument of `forward`, newest first: `cache` since 5.24, `past_key_values` before."""


_parameters: WeakKeyDictionary[FunctionType, frozenset[str]] = WeakKeyDictionary()
"""Names of what forward passes take, by function."""


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of what `model.forward` takes; of a function, they are found once."""
    forward = getattr(model.forward, "__func__", model.forward)
    if not isinstance(forward, FunctionType):
        return frozenset(inspect.signature(forward).parameters)
    found = _parameters.get(forward)
    if found is None:
        found = _parameters[forward] = frozenset(inspect.signature(forward).parameters)
    return found


def cache_argument(model: nn.Module) -> str:
    """Return the name under which `model.forward` takes its key-value cache.

    Raises:
        ValueError: If `forward` takes no key-value cache under any known name.
    """
    parameters = forward_parameters(model)
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    msg = (
        f"model: {type(model).__name__}.forward takes none of {CACHE_ARGUMENTS}; batched assisted generation needs a "
        "decoder-only model with a key-value cache. Generate without `speculation_policy`."
    )
    raise ValueError(msg)


def given_cache(model_kwargs: dict[str, Any]) -> Any:
    """Return the cache object that `generate` prepared or the user passed, None when there is none."""
    return next((model_kwargs[name] for name in CACHE_ARGUMENTS if model_kwargs.get(name) is not None), None)


def is_users_cache(cache: Any) -> bool:
    """Whether a cache that has come through `generate` is the user's, as far as this version of transformers says."""
    return bool(getattr(cache, "_is_user_defined", False))


def chosen_option(generation_config: GenerationConfig | None, name: str) -> Any:
    """Return an option as the user set it in a config, None if it was left alone.

    Pipelines pass on a config in which every option has a value, up to some version; a default tells nothing there.
    """
    value = getattr(generation_config, name, None)
    if value is None:
        return None
    defaults = GenerationConfig._get_default_generation_params()
    given = [other for other, default in defaults.items() if default is not None]
    is_filled = all(getattr(generation_config, other, None) is not None for other in given)
    return None if is_filled and value == defaults.get(name) else value


def prompt_mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """Return the mask of the prompts, `[rows, width]`; since 5.24 `generate` drops it when nothing is padded.

    Beside an encoder's states, `attention_mask` is the one of its inputs.
    """
    beside = "encoder_outputs" in model_kwargs
    mask: Tensor | None = model_kwargs.get("decoder_attention_mask" if beside else "attention_mask")
    return torch.ones_like(input_ids) if mask is None else mask


def gives_up_cache(modules: Iterable[nn.Module]) -> bool:
    """Whether a model's forward pass drops its key-value cache now, as training with gradient checkpointing has it.

    Up to some version all layers did; later ones do so only where gradients are taken, which `generate` does not. The
    forward passes of some models go by the mode alone.

    Args:
        modules: All of the model's.
    """
    return any(
        module.training
        and getattr(module, "gradient_checkpointing", False)
        and (
            _checkpoints_by_mode(type(module).forward)
            or (isinstance(module, GradientCheckpointingLayer) and _layers_go_by_mode())
        )
        for module in modules
    )


@functools.cache
def _checkpoints_by_mode(forward: Callable[..., Any]) -> bool:
    """Whether a forward pass asks itself whether its model checkpoints."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "gradient_checkpointing" in code.co_names


@functools.cache
def _layers_go_by_mode() -> bool:
    """Whether transformers' layers checkpoint in training mode also where no gradients are taken."""
    return "is_grad_enabled" not in inspect.getsource(GradientCheckpointingLayer)


def only_records_outputs(hook: Any) -> bool:
    """Whether a module's hook is one that transformers leaves behind once hidden states were asked for."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def leaves_arithmetic_alone(hook: Any) -> bool:
    """Whether a hook does nothing in a pass without gradients.

    Those that record do not, nor do those that ask for gradients of the embeddings, as training adapters does.
    """
    package = (getattr(hook, "__module__", None) or "").partition(".")[0]
    asks = package in ("transformers", "peft") and hook.__name__ in GRADIENT_HOOKS
    return asks or only_records_outputs(hook)


GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")


def hidden_states_argument(layers: Sequence[int]) -> list[int] | bool:
    """Return what `output_hidden_states` has to be for the hidden states of some layers, and as few others as possible.

    What the model gives can be indexed by layer either way. Older versions count in a list otherwise, and know no
    number for the embeddings there: all layers' states are then kept for the length of the pass.

    Args:
        layers: At least one, 0 for the embeddings.
    """
    return list(layers) if hasattr(output_capturing, "resolve_hidden_states_indices") else True


CAPTURE_MARK = "_output_capturing_hooks_installed"
"""Attribute of a model that was once asked for hidden states. What it says changes no arithmetic."""


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether `forward` can be told to compute the logits of the last positions only."""
    return "logits_to_keep" in forward_parameters(model)


def reads_encoder(model: PreTrainedModel) -> bool:
    """Whether a model's decoder attends to an encoder's states: an encoder-decoder, or Whisper's decoder alone."""
    return bool(model.config.is_encoder_decoder) or "encoder_outputs" in forward_parameters(model)


def decoder_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the part that writes text, with the number of its own layers and heads."""
    config = model.config
    if not reads_encoder(model):
        return config.get_text_config(decoder=True)
    if not config.is_encoder_decoder:  # its fields are named as in the model with the encoder all the same
        config = copy.copy(config)
        config.is_encoder_decoder = True
    decoder = config.get_text_config(decoder=True)  # a copy
    layers = getattr(decoder, "num_decoder_layers", None)
    if layers is not None:
        decoder.num_hidden_layers = layers
    return decoder


def context_length(model: PreTrainedModel) -> int | None:
    """Return how many tokens a text may have, its prompt included.

    Args:
        model: The model; of several configurations inside its own, that of the text decoder counts.

    Returns:
        The number of its positions; None when its configuration sets no limit.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_target_positions")  # the latter is Whisper's
    limits: list[int | None] = [getattr(config, name, None) for name in names]
    return next((limit for limit in limits if limit is not None), None)


def layer_types(config: PretrainedConfig) -> list[str]:
    """Return the attention type of each decoder layer, such as `full_attention` or `sliding_attention`.

    Older configurations carry no `layer_types`; there, a `sliding_window` means that every layer slides. GPT-Neo calls
    its list otherwise, and masks its local layers itself.
    """
    declared = getattr(config, "layer_types", None)
    if declared is not None:
        return list(declared)
    if getattr(config, "attention_layers", None) is not None:
        return ["full_attention" if kind == "global" else f"{kind}_attention" for kind in config.attention_layers]
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * config.num_hidden_layers
    return ["full_attention"] * config.num_hidden_layers


def attention_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return `config` and its nested configurations: each holds an attention setting of its own."""
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(sub for sub in nested if isinstance(sub, PretrainedConfig))]


IMAGE_MODEL_TYPES = frozenset(
    {
        "aya_vision", "gemma3", "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision",
        "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava",
    }
)  # fmt: skip
"""Models whose texts are tokens at counted positions once the first pass has read their images."""
VISION_CONFIG = "vision_config"
"""Where the configuration of a model that takes images holds that of what looks at them."""
STAND_INS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields of a configuration that name a token which stands for a part of an image or a video."""
IMAGE_SIZES = (
    "image_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "scale_factor", "downsample_factor",
    "downsample_ratio", "mm_tokens_per_image", "image_grid_pinpoints", "vision_feature_select_strategy",
)  # fmt: skip
"""Fields, of a configuration or of that of what looks at images, that say how many tokens stand for an image."""
POSITION_MEMORY = "rope_deltas"
"""Attribute in which some models keep how positions went on after the last prompts. Passes that are given positions do
not read it."""


def takes_images(model: nn.Module) -> bool:
    """Whether a model looks at images beside tokens."""
    return getattr(getattr(model, "config", None), VISION_CONFIG, None) is not None


def look_alike(one: PretrainedConfig, other: PretrainedConfig) -> bool:
    """Whether models of these configurations take the same images, as far as kind and sizes tell."""
    return one.model_type in IMAGE_MODEL_TYPES and _image_inputs(one) == _image_inputs(other)


def _image_inputs(config: PretrainedConfig) -> list[Any]:
    """What a configuration says of images and the tokens that stand for them."""
    parts = (config, getattr(config, VISION_CONFIG, None))
    sizes = [getattr(part, name, None) for part in parts for name in IMAGE_SIZES]
    return [config.model_type, stand_in_tokens(config), *sizes]


def last_positions(position_ids: Tensor) -> Tensor:
    """Return the positions of the last tokens, `[rows]`, where those of all axes are one and the same.

    Args:
        position_ids: `[rows, width]`, or with axes in front, of which the first may count tokens as all models do.
    """
    last = position_ids[..., -1]
    return last[-1] if last.dim() > 1 else last


def stand_in_tokens(config: PretrainedConfig) -> set[int]:
    """Return the ids of tokens whose embeddings a model replaces by parts of images."""
    ids = (getattr(config, name, None) for name in STAND_INS)
    return {token for token in ids if token is not None}


def get_attention_setting(config: PretrainedConfig) -> Any:
    """Return the attention implementation stored in `config`, as `set_attention_setting` takes it back."""
    return config.__dict__.get("_attn_implementation_internal")


def set_attention_setting(config: PretrainedConfig, value: Any) -> None:
    """Store an attention implementation in `config` alone: the public setter would touch nested ones as well."""
    config.__dict__["_attn_implementation_internal"] = value


@functools.cache
def decay_spares_infinities() -> bool:
    """Say whether `ExponentialDecayLengthPenalty` leaves an infinite score as it is; older ones make it NaN."""
    decay = logits_process.ExponentialDecayLengthPenalty((0, 2.0), 0, 0)
    return not bool(decay(torch.zeros(1, 1).long(), torch.tensor([[float("-inf"), 0.0]])).isnan().any())


@functools.cache
def prompt_penalty_repeats_rows() -> bool:
    """Say whether `EncoderRepetitionPenaltyLogitsProcessor` serves several rows per prompt; older ones know one."""
    penalty = logits_process.EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.LongTensor([[0]]))
    scores = penalty(torch.zeros(2, 1).long(), torch.ones(2, 2))
    return bool((scores[:, 0] == scores[0, 0]).all())


@functools.cache
def bias_spares_tokens() -> int:
    """Return how many tokens `SequenceBiasLogitsProcessor` wants in a text beyond those that come before the biased."""
    bias = logits_process.SequenceBiasLogitsProcessor([[[1, 1], 1.0]])
    return int(bias(torch.ones(1, 1).long(), torch.zeros(1, 2))[0, 1] == 0)
