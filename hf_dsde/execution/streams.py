"""Letting a CUDA device do two things at once, where neither needs the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def overlaps(device: torch.device) -> bool:
    """Whether work can be put into the device's stream that the host does not wait for."""
    return device.type == "cuda"


class SideStream:
    """A second stream, for one piece of work at a time: `fork`, `beside`, `join`, in this order.

    Between `fork` and `join` the current stream may be given anything that does not touch what the work reads or
    writes. The allocator takes memory for free as soon as the host drops it. So the work's inputs have to be kept until
    `join`, and the work must not drop memory of the current stream, as growing a cache would. What it makes itself may
    be used and dropped after `join`: the next work begins after the next `fork`.

    On other devices the work is done when `beside` is reached.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._forked: torch.cuda.Event | None = None

    def fork(self) -> None:
        """Let the work wait for what the current stream holds now, and for nothing that it is given later."""
        if self._stream is not None:
            self._forked = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Put what happens inside into the second stream."""
        if self._stream is None:
            yield
            return
        assert self._forked is not None  # there is something to wait for, or the inputs might not be there yet
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
