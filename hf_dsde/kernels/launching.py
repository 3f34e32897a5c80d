"""What a launch has to know of the device that its tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

HOPPER_SHARED_MEMORY = 227 * 1024
"""Bytes that a program of an H100 can have; where kernels are only interpreted, launches are planned for one."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_its_device(
    launch: Callable[Concatenate[Tensor, Arguments], Result],
) -> Callable[Concatenate[Tensor, Arguments], Result]:
    """Let a function launch kernels on the device of its first argument.

    Triton launches on torch's current device, wherever the tensors are.
    """

    @wraps(launch)
    def guarded(first: Tensor, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        with torch.cuda.device_of(first):
            return launch(first, *arguments, **named)

    return guarded


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on a device."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
