"""Which implementation of the fused ops a device gets."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch


@cache
def ops_for(device: torch.device) -> ModuleType:
    """Return the module whose functions are the fused ops: Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from hf_dsde.fused import kernels

        return kernels
    from hf_dsde.fused import reference

    return reference
