"""Recording a model's pass once and replaying it: CUDA graphs behind a small interface.

A *body* is a function without arguments that reads static input tensors, works on the device only, and returns its
output. Capturing runs it to warm up (kernels are compiled and chosen then), once more to record, and gives back a
`Replay`: calling it does the same work on whatever the input tensors hold by then, and its `output` is always the same
tensor. What a body decided on the host while it was recorded (shapes, branches) stays as it was. A replay knows
addresses only: whoever records a body keeps every tensor alive that it reads and did not make itself.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

Body = Callable[[], Tensor]


@dataclass(frozen=True)
class RecordingCosts:
    """What recording has cost.

    Attributes:
        passes: Passes recorded.
        seconds: Time it took, compilation of kernels included.
        bytes: Device memory that recorded passes hold besides the caches.
    """

    passes: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def __add__(self, other: RecordingCosts) -> RecordingCosts:
        return RecordingCosts(self.passes + other.passes, self.seconds + other.seconds, self.bytes + other.bytes)

    def __sub__(self, other: RecordingCosts) -> RecordingCosts:
        return RecordingCosts(self.passes - other.passes, self.seconds - other.seconds, self.bytes - other.bytes)


class Replay(Protocol):
    """Recorded work."""

    output: Tensor

    def __call__(self) -> None:
        """Do the work again; `output` then holds its result."""


class Capture(Protocol):
    """Records bodies on one device.

    Attributes:
        bytes: Device memory that everything recorded so far holds.
    """

    bytes: int

    def __call__(self, body: Body) -> Replay:
        """Record `body`. Raises whatever it raises, or what the device says when it cannot be recorded."""


class CudaReplay:
    """A CUDA graph and the tensor it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def __call__(self) -> None:
        """Put the graph into the current stream."""
        self._graph.replay()


class CudaCapture:
    """Captures CUDA graphs which share one memory pool.

    They may, because they are replayed one at a time and each one's output is copied before the next is replayed. A
    pool is gone with the last of its graphs.

    cuBLAS keeps a workspace per stream and lets go of all of them whenever somebody asks, as torch.compile does. One
    that was made outside of a capture would then be somebody else's memory, and a graph would go on writing to it. So
    they are cleared before each capture: it makes its own, inside the pool.

    Args:
        device: The CUDA device of everything that the bodies touch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._replays: WeakSet[CudaReplay] = WeakSet()
        self._stream = torch.cuda.Stream(device)
        self.bytes = 0

    def __call__(self, body: Body) -> Replay:
        """Record `body` on a stream of its own."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                _warm_up(body)
                if not self._replays:
                    self._pool = torch.cuda.graph_pool_handle()
                torch._C._cuda_clearCublasWorkspaces()
                # Not `torch.cuda.graph`, which empties the allocator's cache before every capture; and other threads,
                # such as those of a data loader, may go on allocating.
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                before = torch.cuda.memory_reserved()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = body()
                except BaseException:
                    with suppress(RuntimeError):  # it says again what the body has said already
                        graph.capture_end()
                    self._release_generator()
                    raise
                graph.capture_end()
                torch._C._cuda_clearCublasWorkspaces()
                self.bytes += torch.cuda.memory_reserved() - before
            current.wait_stream(self._stream)
        replay = CudaReplay(graph, output)
        self._replays.add(replay)
        return replay

    def _release_generator(self) -> None:
        """Let random numbers be drawn again after a capture that failed, by one that does not.

        torch marks the device's generator as captured when a capture begins, and takes the mark away only at the end
        of one that went well. With the mark left on it, nothing could be drawn on the device ever again.
        """
        graph = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):  # what the body raised says more
            graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)  # torch warns of empty graphs
            graph.capture_end()


def _warm_up(body: Body) -> None:
    """Run a body without letting it wait for the device; once more if it does so the first time only.

    Launching a pass takes the host as long as replaying several, so that it is not done more often than it must.
    """
    try:
        with _waiting_raises():
            body()
    except Exception:  # noqa: BLE001 - what was only needed the first time has been done, or this raises it again
        body()
        with _waiting_raises():
            body()


@contextmanager
def _waiting_raises() -> Iterator[None]:
    """Let operations raise that wait for the device: inside of a capture they would also leave it in a bad state."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


Entry = TypeVar("Entry")


class CapturedPasses(Generic[Entry]):
    """What has been recorded, by key; the entry that was used least recently goes when there are too many.

    Args:
        limit: The most entries that are kept.

    Attributes:
        seconds: Time that recording has taken so far.
        captures: Passes recorded so far, those included that have been thrown away.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.captures = 0
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable, record: Callable[[], Entry]) -> Entry:
        """Return the entry of `key`, recording it first if there is none."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        started = time.perf_counter()
        while len(self._entries) >= self.limit:
            self._entries.popitem(last=False)
        entry = self._entries[key] = record()
        self.seconds += time.perf_counter() - started
        self.captures += 1
        return entry

    def entries(self) -> list[Entry]:
        """Return what is recorded."""
        return list(self._entries.values())

    def clear(self) -> None:
        """Throw everything away, as addresses have changed."""
        self._entries.clear()
