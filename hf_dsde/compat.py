"""The differences between transformers versions and between its models, and nothing else.

Supported: 5.17 to 5.24. Whatever a newer release renames is answered here, so that no other file asks for a version.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation import logits_process
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache argument of `forward`, newest first: `cache` since 5.24, `past_key_values` before."""


def cache_argument(model: nn.Module) -> str:
    """Return the name under which `model.forward` takes its key-value cache.

    Raises:
        ValueError: If `forward` takes no key-value cache under any known name.
    """
    parameters = inspect.signature(model.forward).parameters
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
    """Return the mask of the prompts, `[rows, width]`; since 5.24 `generate` drops it when nothing is padded."""
    mask: Tensor | None = model_kwargs.get("attention_mask")
    return torch.ones_like(input_ids) if mask is None else mask


def gives_up_cache(model: PreTrainedModel) -> bool:
    """Whether the model's forward pass drops its key-value cache now, as training with gradient checkpointing has it.

    Up to some version all layers did; later ones do so only where gradients are taken, which `generate` does not. The
    forward passes of some models go by the mode alone.
    """
    return any(
        getattr(module, "gradient_checkpointing", False)
        and module.training
        and (
            _checkpoints_by_mode(type(module).forward)
            or (isinstance(module, GradientCheckpointingLayer) and _layers_go_by_mode())
        )
        for module in model.modules()
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
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def context_length(model: PreTrainedModel) -> int | None:
    """Return how many tokens a text may have, its prompt included.

    Args:
        model: The model; of several configurations inside its own, that of the text decoder counts.

    Returns:
        The number of its positions; None when its configuration sets no limit.
    """
    limit: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit


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
