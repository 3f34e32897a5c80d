"""What a model in training mode computes: whether it is what it computes in evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hf_dsde.utils.modules import named_modules

RANDOM_WORDS = ("drop", "jitter", "noise")
"""What modules of transformers and PEFT call the rates of what is random in training, where these are attributes."""


def acts_in_training(model: nn.Module) -> str | None:
    """Name what makes a model in training mode compute anything else than in evaluation; None if nothing known does.

    Trainers leave a model in training mode while it generates. Without dropout its passes are the same.
    """
    return next((found for name, module in named_modules(model) for found in _acting(name, module)), None)


def _acting(name: str, module: nn.Module) -> Iterator[str]:
    if not module.training:
        return
    where = name or "the model itself"
    if isinstance(module, _DropoutNd):
        if module.p:
            yield f"{where!r} (p={module.p:g})"
    elif isinstance(module, _BatchNorm):
        yield repr(where)
    for attribute, value in vars(module).items():
        if type(value) is float and value and any(word in attribute for word in RANDOM_WORDS):
            yield f"{where!r} ({attribute}={value:g})"
