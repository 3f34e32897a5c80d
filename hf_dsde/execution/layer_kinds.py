"""Which layers of a model launch the same kernels, so that one of them can stand for the others in a warm-up.

Kernels are compiled and chosen by types, shapes, strides and dtypes, by numbers on the host, and by whether addresses
are aligned. Two layers that agree in all of these run the same code. What is not known to be alike counts as different:
that costs the launch of a layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from hf_dsde.execution.recording_key import BOOKKEEPING, digest
from hf_dsde.utils.modules import modules_of

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel separately for addresses that are no multiple of them."""

NAME_IN_MODEL = "target_name"
"""PEFT keeps it with what a module was made with; nothing is computed from it."""


def kind_of(modules: Sequence[nn.Module], values: Sequence[Any]) -> Hashable:
    """Return what is equal for layers that launch the same kernels.

    Args:
        modules: What a layer calls. Adapters and quantised weights count, with what they are told: which adapters are
            active, their scaling, sizes of blocks.
        values: Other numbers and tensors that it reads.
    """
    parts = [part for module in modules for part in modules_of(module)]
    numbers: dict[int, Any] = {id(part): number for number, part in enumerate(parts)}  # a weight may know its module
    return tuple(_module_kind(part, numbers) for part in parts), digest(list(values), numbers, _alignment)


def _alignment(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def _module_kind(module: nn.Module, numbers: dict[int, Any]) -> Hashable:
    """What a module says of itself, its children by their numbers."""
    own = vars(module)
    said = (
        own["_modules"],
        {**own["_parameters"], **own["_buffers"]},
        {name: _without_name(value) for name, value in own.items() if name not in BOOKKEEPING},
        [list(own[name].values()) for name in ("_forward_hooks", "_forward_pre_hooks")],
    )
    return type(module), digest(said, numbers, _alignment)


def _without_name(value: Any) -> Any:
    """An attribute of a module without the place that it has in the model."""
    return {key: each for key, each in value.items() if key != NAME_IN_MODEL} if type(value) is dict else value
