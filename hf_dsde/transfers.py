"""Small lists of host values on their way to a device, without making the host wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[bool], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`, int64 or bool, `[len(values)]`.

    To a CUDA device it goes through pinned memory, in the stream: a copy out of ordinary memory would wait until the
    device has done everything that was asked of it before.
    """
    tensor = torch.tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
