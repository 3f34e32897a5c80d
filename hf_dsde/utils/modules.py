"""A model's modules by their own dictionaries: torch's iterators take several times as long, and every call asks."""

from __future__ import annotations

import torch
from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model's modules with their names, each once: those of `nn.Module.named_modules`, in its order."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = name, module
        prefix = f"{name}." if name else ""
        waiting += [(prefix + own, child) for own, child in reversed(module._modules.items()) if child is not None]
    return list(found.values())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules, each once, in any order."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def parameter_devices(model: nn.Module) -> set[torch.device]:
    """Return the devices of a model's parameters."""
    groups = (module._parameters.values() for module in modules_of(model))
    return {parameter.device for group in groups for parameter in group if parameter is not None}


def has_attribute(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, as `hasattr` says, which for most modules raises and catches to say no."""
    own = vars(module)
    if name in own or name in own["_parameters"] or name in own["_buffers"] or name in own["_modules"]:
        return True
    return hasattr(type(module), name)
