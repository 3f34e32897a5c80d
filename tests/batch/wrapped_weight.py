"""A weight in eight bits with its scales, as quantisation libraries wrap them: a tensor made of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing


class ScaledInt8(Tensor):
    """Looks like the weight that it stands for; holds integers, one scale a row, and a number that changes results."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, exponent: int = 0) -> ScaledInt8:  # noqa: PYI034 - Self needs Python 3.11
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, exponent: int = 0) -> None:
        self.codes, self.scales, self.exponent = codes, scales, exponent

    @classmethod
    def of(cls, weight: Tensor) -> ScaledInt8:
        """The weight, rounded."""
        scales = weight.detach().abs().amax(dim=1, keepdim=True) / 127
        return cls((weight.detach() / scales).round().to(torch.int8), scales)

    def plain(self) -> Tensor:
        """What it stands for."""
        return self.codes * self.scales * 2.0**self.exponent

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["codes", "scales"], {"exponent": self.exponent}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: dict[str, int], *_: Any) -> ScaledInt8:
        return cls(parts["codes"], parts["scales"], context["exponent"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight = args[0]
            moved = cls(weight.codes, weight.scales, weight.exponent)
            return return_and_correct_aliasing(function, args, kwargs or {}, moved)
        if function in (torch.ops.aten.t.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return function(*(a.plain() if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        raise IndexError(f"{function} is not for tensors of this class")


def round_linear_layers(model: torch.nn.Module) -> None:
    """Put such weights into all linear layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(ScaledInt8.of(module.weight), requires_grad=False)
