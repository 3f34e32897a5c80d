"""What other libraries put around a model, inside it and on its methods, and which of it the loop can follow.

The loop calls the transformers model itself: it makes the inputs, and lays rows of a batch into passes of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.utils.modules import modules_of

INPUT_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill")
"""Methods by which a model decides what plain decoding feeds it. The loop does not call them."""
PARALLEL_WRAPPERS = ("DataParallel", "DistributedDataParallel")
"""Wrappers of torch whose `module` holds all weights: a pass of it is a pass of the wrapper, gradients aside."""
PER_ROW_HOOKS = ("_adapter_names_pre_forward_hook", "PolyModel._register_pre_hooks.<locals>.pre_hook")
"""Hooks of PEFT that hand a module something for each row of the batch, whatever tokens the row has in a pass."""


def unwrapped(argument: str, model: Any) -> PreTrainedModel:
    """Return the transformers model inside what wraps it, whose passes are those of the wrapper.

    Taken off are `torch.compile`'s wrapper (`generate` of it does not run the compiled pass either), data parallelism,
    and PEFT's around adapters that sit in the model's layers.

    Args:
        argument: Name of the argument, for errors.
        model: A model or a wrapper of one.

    Raises:
        TypeError: If there is no transformers model inside whose weights are all there.
        ValueError: If the wrapper does what the model inside it does not.
    """
    return _peeled(argument, model, _inside)


def innermost(argument: str, wrapper: Any) -> PreTrainedModel:
    """Return the transformers model inside a wrapper, whatever else the wrapper does.

    Raises:
        TypeError: If there is none.
    """
    return _peeled(argument, wrapper, lambda _, inner: _content(inner))


def _peeled(argument: str, model: Any, inside: Callable[[str, Any], Any]) -> PreTrainedModel:
    inner = model
    while not isinstance(inner, PreTrainedModel):
        following = inside(argument, inner)
        if following is None:
            msg = (
                f"{argument}: expected a causal language model of transformers, got {type(model).__name__}. Pass the "
                "model inside it, if a pass of that alone gives the same logits."
            )
            raise TypeError(msg)
        inner = following
    return inner


def _content(wrapper: Any) -> Any:
    """Return what a wrapper holds; None if it is of no kind that is known."""
    if not isinstance(wrapper, torch.nn.Module):
        return None
    name = type(wrapper).__name__
    if name == "OptimizedModule":
        return wrapper._modules.get("_orig_mod")
    if name in PARALLEL_WRAPPERS:
        return wrapper._modules.get("module")
    adapted: Any = wrapper
    return adapted.get_base_model() if _is_of_peft(wrapper) else None


def _is_of_peft(wrapper: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(wrapper, (peft.PeftModel, peft.PeftMixedModel))


def _inside(argument: str, wrapper: Any) -> Any:
    """Return what a wrapper holds, if a pass of that is a pass of the wrapper."""
    kind = _beyond_layers(wrapper) if _is_of_peft(wrapper) else None
    if kind is not None:
        msg = (
            f"{argument} ({type(wrapper).__name__}) with {kind} does more than the model inside it, and only that "
            "would run. Use an adapter that sits in the model's layers, such as LoRA, or leave out "
            "`speculation_policy` in `model.generate` to decode it the stock way."
        )
        raise ValueError(msg)
    return _content(wrapper)


def _beyond_layers(wrapper: Any) -> str | None:
    """Name what a PEFT model does in calls of its own, beside what its layers do; None if that is nothing."""
    configs = [wrapper.peft_config[name] for name in _active_adapters(wrapper)]
    for config in configs:
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning and not getattr(wrapper, "_adapters_disabled", False):
            return f"prompt learning ({kind})"
        if getattr(config, "alora_invocation_tokens", None):
            return "activated LoRA (alora_invocation_tokens)"
        if not config.is_prompt_learning and hasattr(type(wrapper.base_model), "generate"):
            return kind
    return None


def _active_adapters(wrapper: Any) -> list[str]:
    active: Any = getattr(wrapper, "active_adapters", None) or wrapper.active_adapter
    return [active] if isinstance(active, str) else list(active)


def foreign_input_method(model: PreTrainedModel) -> str | None:
    """Name the method that feeds the model in a way of its own; None if transformers' alone decide.

    What transformers' model classes override concerns their caches and inputs beside text. Whatever somebody else
    overrides, on the class or on the object, may add to the inputs or change them, as prompt learning of PEFT does.
    """
    for name in INPUT_METHODS:
        own = getattr(type(model), name, None)
        patched = vars(model).get(name)
        if patched is not None and not _is_bound_to(patched, own, model):
            return f"{name} of {_origin(patched)[1]}"
        module, qualified = _origin(own)
        if own is not None and not module.startswith("transformers."):
            return f"{name} of {qualified}"
    return None


def _is_bound_to(method: Any, function: Any, model: PreTrainedModel) -> bool:
    """Whether a method that was put on the object is that of its class, as PEFT puts it back after a call."""
    return getattr(method, "__self__", None) is model and getattr(method, "__func__", None) is function


def _origin(function: Any) -> tuple[str, str]:
    """Return the module and the qualified name of what is called in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return getattr(named, "__module__", None) or "", named.__qualname__


def foreign_hook(model: PreTrainedModel) -> str | None:
    """Name a hook of PEFT by which tokens are treated by their place in a pass of plain decoding; None without one."""
    for _, hook in _hooks(model):
        module, name = _origin(hook)
        if module.startswith("peft.") and name not in PER_ROW_HOOKS:
            return f"{module}.{name}"
    return None


def may_depend_on_rows(model: PreTrainedModel) -> bool:
    """Whether something is hooked into the model's passes, which then may hold a value for each row of the batch."""
    return next(_hooks(model), None) is not None


def _hooks(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, Callable[..., Any]]]:
    """Yield the hooks of forward passes, but for those that do nothing there."""
    for module in modules_of(model):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not compat.leaves_arithmetic_alone(hook):
                yield module, hook
