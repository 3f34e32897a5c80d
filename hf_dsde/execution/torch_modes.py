"""Modes of torch that a caller may have set: what of them reaches a model's passes, and what must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors inside that any later call may write to.

    Those made in `torch.inference_mode()` can be written to in that mode only, and the next call may be in another.
    """
    with torch.inference_mode(False), torch.no_grad():  # leaving inference mode turns gradients on
        yield


def version_of(tensor: torch.Tensor) -> int | None:
    """Return torch's count of writes to a tensor, without those through `data`; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Autocast:
    """Whether and to which dtype torch casts what a device computes with.

    Attributes:
        device_type: The kind of device.
        dtype: What operations such as products cast to; None where autocast is off.
    """

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def on(cls, device: torch.device) -> Autocast:
        """Return what is set now for a device."""
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind) if _casts(kind) else None)

    def held(self) -> AbstractContextManager[object]:
        """Set this inside of a `with` block, unless it is set already."""
        if Autocast.on(torch.device(self.device_type)) == self:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the dtypes that tensors have, for arithmetic that is no model's."""
    return Autocast(device.type, None).held() if _casts(device.type) else nullcontext()


def _casts(kind: str) -> bool:
    return _may_cast(kind) and torch.is_autocast_enabled(kind)


@cache
def _may_cast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)
