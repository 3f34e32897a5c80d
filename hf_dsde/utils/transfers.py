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
    if device.type != "cuda":
        return torch.as_tensor(values).to(device)
    pinned = values.pin_memory() if isinstance(values, Tensor) else torch.tensor(values, pin_memory=True)
    return pinned.to(device, non_blocking=True)


class Download:
    """What the host learns of a round, on its way there in one transfer.

    Args:
        vectors: One entry per row: each `[rows]`, int64 or bool, all on one device.
        block: Any number of entries per row: `[rows, width]`, int64, on the same device.
        others: Any tensors on the same device.
    """

    def __init__(self, vectors: Sequence[Tensor], block: Tensor, others: Sequence[Tensor] = ()) -> None:
        joined = torch.cat([*(vector.long()[:, None] for vector in vectors), block], dim=1)
        self._vectors = len(vectors)
        self._event: torch.cuda.Event | None = None
        self._copy = joined.to("cpu", non_blocking=True)
        self._others = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in others]
        if joined.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(joined.device))

    def wait(self) -> tuple[list[list[int]], Tensor, list[Tensor]]:
        """Return the vectors' values, and the block and the other tensors on the host.

        What was put into the device's stream later is not waited for.
        """
        if self._event is not None:
            self._event.synchronize()
        joined = self._copy.cpu()
        values: list[list[int]] = joined[:, : self._vectors].T.tolist()
        return values, joined[:, self._vectors :], self._others
