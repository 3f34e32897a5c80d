"""Small lists of values between host and device, without one waiting for the other longer than it must."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[float] | Sequence[bool] | Tensor, device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`: int64, float32 or bool, as the values are, or like the CPU tensor given.

    To a CUDA device it goes through pinned memory, in the stream: a copy out of ordinary memory would wait until the
    device has done everything that was asked of it before.
    """
    tensor = torch.as_tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Vectors with one entry per row on their way to the host, in one transfer.

    Args:
        vectors: Each `[rows]`, int64 or bool, all on one device.
    """

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        stacked = torch.stack([vector.long() for vector in vectors])
        self._event: torch.cuda.Event | None = None
        self._copy = stacked
        if stacked.device.type == "cuda":
            self._copy = stacked.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(stacked.device))

    def wait(self) -> list[list[int]]:
        """Return the vectors' values. What was put into the device's stream later is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        values: list[list[int]] = self._copy.tolist()
        return values
