"""Which implementation of the fused ops a device gets."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LOWEST_CAPABILITY = (8, 0)
"""Compute capability that the kernels need: tensor cores for bfloat16, and copies that run ahead.

Triton 3.6 names 8.0 as the oldest that it supports. For 7.0 (V100) and 7.5 (T4) it does compile these kernels, but
products become sums on ordinary cores, in bfloat16 too, which these devices do not have at all. There the model's own
forward pass is recorded, which is torch's kernels in float16."""
OLDEST_TRITON = (3, 3)
"""The version that comes with the oldest torch that this package takes."""


@cache
def ops_for(device: torch.device) -> Any:
    """Return what has the fused ops as functions: Triton kernels where they run, plain torch elsewhere."""
    if device.type == "cuda" and why_no_kernels(device) is None:
        from hf_dsde.kernels import elementwise as kernels
        from hf_dsde.kernels.fitting import FittedOps

        return FittedOps(kernels)
    from hf_dsde.kernels import reference

    return reference


@cache
def why_no_kernels(device: torch.device) -> str | None:
    """Say why a CUDA device does not run the kernels; None where it does, and for other devices, which need none.

    Plain torch in their place would be right, and much slower than the model's own forward pass.
    """
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, LOWEST_CAPABILITY))
        return f"{device} has compute capability {found}, and the kernels need {needed}"
    version = _triton_version()
    if version is None:
        return "Triton, which the kernels are written in, cannot be imported"
    if version < OLDEST_TRITON:
        found, needed = (".".join(map(str, number)) for number in (version, OLDEST_TRITON))
        return f"Triton is {found}, and the kernels need {needed}"
    return None


def _triton_version() -> tuple[int, int] | None:
    try:
        import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
