"""Letting a kernel be set up before the one in front of it has ended.

A pass over few tokens is a chain of hundreds of kernels of a few microseconds each, and between two of them a device
does little: the last programs of one end, those of the next are set up. With programmatic dependent launch (CUDA 12,
compute capability 9.0 and later) the next kernel's programs are set up as soon as there is room for them, and wait
inside for the end of the one in front.

The rule for a kernel of this package: every program of it calls `await_inputs` before it returns anywhere and before it
touches anything that another kernel has written or reads; weights are neither. Then the end of a kernel implies the end
of all in front of it, so that whatever comes next, also a kernel that knows nothing of this, finds everything in place.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

import torch
import triton
import triton.language as tl

OLDEST_DRIVER = 12040
"""The first CUDA version, 12.4, whose graphs are sure to keep how a kernel was launched."""


@cache
def chaining(device: torch.device) -> dict[str, bool]:
    """Return arguments for a kernel: whether it waits inside, and that it is launched accordingly."""
    able = (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(tl.extra.cuda, "gdc_wait")
        and _driver_version() >= OLDEST_DRIVER
    )
    return {"chained": True, "launch_pdl": True} if able else {"chained": False}


@triton.jit
def await_inputs(chained: tl.constexpr) -> None:
    """Wait until all kernels in front have ended and what they wrote can be read; let the next one be set up."""
    if chained:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def _driver_version() -> int:
    """The newest CUDA version that the driver knows, in its own notation: 12040 is 12.4. 0 where it cannot be asked."""
    version = ctypes.c_int()
    with suppress(OSError):  # the library has another name on Windows
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value
