"""What becomes of a kernel that a device cannot run: plain torch computes in its place, and nothing else changes.

Launches are planned within what a device says of itself, but what a kernel takes is known only when Triton has compiled
it: registers spill, a version of Triton reads further ahead, or the compiler fails at a size that nobody has met. That
shows at the first launch, which is never one that is being recorded. From then on this one operation, on tensors of
that device, dtype and size, is plain torch's; the first of them is told in a warning.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_dsde.kernels import reference
from hf_dsde.kernels.attention_plan import LaunchPlan
from hf_dsde.kernels.padded_attention import padded_attention

IN_TORCH: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(reference, name)
        for name in (
            "add_low_rank", "add_rms_norm", "entropy_and_top", "four_bit_linear", "gated_linear", "gated_low_rank",
            "kl_divergence", "linears", "nucleus", "rms_norm", "rotate_and_store", "silu_mul",
        )
    },
    "ragged_attention": padded_attention,
}  # fmt: skip
"""Operations by name, as torch computes them on a GPU."""

Result = TypeVar("Result")
_Size = tuple[str, torch.device, torch.dtype, tuple[int, ...]]

_MISFITS = frozenset({"OutOfResources", "PTXASError", "CompilationError", "CompileTimeAssertionFailure"})
"""Errors of Triton's that say that a kernel cannot be run as it is."""
_PASSES_FAILED = ("PassManager::run failed", "failed to translate module")
"""What Triton's compiler says, in no error of its own, where it fails at a device that it was not made for."""

_lock = threading.Lock()
_left_out: set[_Size] = set()
_warned: set[tuple[str, torch.device]] = set()
_smaller: dict[tuple[Any, ...], LaunchPlan] = {}


class KernelWarning(UserWarning):
    """A device cannot run one of the kernels, and plain torch computes in its place, which is slower."""


def does_not_fit(failure: BaseException) -> bool:
    """Whether an error says that a device cannot run a kernel, and not that the kernel or its caller went wrong."""
    named = (kind for kind in type(failure).__mro__ if kind.__module__.partition(".")[0] == "triton")
    return any(kind.__name__ in _MISFITS for kind in named) or (
        isinstance(failure, RuntimeError) and any(words in str(failure) for words in _PASSES_FAILED)
    )


class FittedOps:
    """The operations of a module, each with torch's in its place where a device cannot run its kernel.

    Args:
        kernels: Has the operations of `IN_TORCH`; whatever else it has is passed on as it is.
    """

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        for name, plain in IN_TORCH.items():
            setattr(self, name, _fitted(name, getattr(kernels, name), plain))

    def __getattr__(self, name: str) -> Any:
        """What is no kernel."""
        if name.startswith("_"):  # whoever copies objects asks those that are not made yet
            raise AttributeError(name)
        return getattr(self._kernels, name)


def _fitted(name: str, kernel: Callable[..., Result], plain: Callable[..., Result]) -> Callable[..., Result]:
    """An operation that goes over to `plain` for sizes at which its kernel cannot be run."""

    @wraps(kernel)
    def operation(first: Tensor, /, *arguments: Any, **named: Any) -> Result:
        size = (name, first.device, first.dtype, tuple(first.shape[1:]))
        if size not in _left_out:
            try:
                return kernel(first, *arguments, **named)
            except Exception as failure:
                if not does_not_fit(failure):
                    raise
                _leave_out(size, failure)
        return plain(first, *arguments, **named)

    return operation


def _leave_out(size: _Size, failure: Exception) -> None:
    name, device, dtype, _ = size
    with _lock:
        _left_out.add(size)
        told = (name, device) in _warned
        _warned.add((name, device))
    if not told:
        words = " ".join(str(failure).split())[:300]
        warnings.warn(
            f"{device} cannot run the kernel {name} for {dtype}, and plain torch computes in its place, which is "
            f"slower; all other kernels stay: {type(failure).__name__}: {words}",
            KernelWarning,
            stacklevel=4,
        )


def launch_that_fits(
    device: torch.device, sizes: tuple[Any, ...], plan: LaunchPlan, launch: Callable[[LaunchPlan], Result]
) -> Result:
    """Launch as planned, or smaller where the device cannot run that.

    Args:
        device: Of all tensors.
        sizes: What else a kernel is compiled for.
        plan: The first that is tried.
        launch: Launches a plan.

    Raises:
        Exception: What the smallest launch raised.
    """
    key = (device, sizes, plan)
    while True:
        chosen = _smaller.get(key, plan)
        try:
            return launch(chosen)
        except Exception as failure:
            smaller = smaller_launch(chosen)
            if smaller is None or not does_not_fit(failure):
                raise
            _smaller[key] = smaller


def smaller_launch(plan: LaunchPlan) -> LaunchPlan | None:
    """A plan that takes less of a device for the same work; None where there is none."""
    if plan.stages > 1:
        return replace(plan, stages=plan.stages - 1)
    if plan.block_m > 16:
        return replace(plan, block_m=plan.block_m // 2, query_blocks=2 * plan.query_blocks)
    if plan.block_n > 16:
        return replace(plan, block_n=plan.block_n // 2)
    return None
