"""Recording a model's pass once and replaying it: CUDA graphs behind a small interface.

A *body* is a function without arguments that reads static input tensors, works on the device only, and returns its
output, a tensor or a tuple of tensors. Capturing runs it, or a shorter one that launches the same kernels, to warm up
(kernels are compiled and chosen then), runs it to record, and gives back a `Replay`: calling it does the same work on
whatever the input tensors hold by then, and its `output` is always the same tensors. What a body decided on the host
while it was recorded (shapes, branches) stays as it was. A replay knows addresses only: whoever records a body keeps
every tensor alive that it reads and did not make itself.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dsde.execution.torch_modes import lasting

Output = TypeVar("Output")


@dataclass(frozen=True)
class RecordingCosts:
    """What recording has cost.

    Attributes:
        passes: Passes recorded.
        seconds: Time it took, compilation of kernels included.
        bytes: Device memory that recorded passes hold in addition to the caches.
    """

    passes: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def __add__(self, other: RecordingCosts) -> RecordingCosts:
        return RecordingCosts(self.passes + other.passes, self.seconds + other.seconds, self.bytes + other.bytes)

    def __sub__(self, other: RecordingCosts) -> RecordingCosts:
        return RecordingCosts(self.passes - other.passes, self.seconds - other.seconds, self.bytes - other.bytes)


class Replay(Protocol[Output]):
    """Recorded work."""

    output: Output

    def __call__(self) -> None:
        """Do the work again; `output` then holds its result."""


class Capture(Protocol):
    """Records bodies on one device.

    Attributes:
        bytes: Device memory that everything recorded so far holds.
    """

    bytes: int

    def __call__(self, body: Callable[[], Output], warm_up: Callable[[], Any] | None = None) -> Replay[Output]:
        """Record `body`. Raises whatever it raises, or what the device says when it cannot be recorded.

        Args:
            body: What is recorded.
            warm_up: Another body that launches the same kernels, each at least once, and is run before; None for
                `body` itself. Whoever gives one has run the rest of `body` before: what modules make when they are
                first called must not lie in the memory of recordings.
        """


class CudaReplay(Generic[Output]):
    """A CUDA graph and the tensors it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Output) -> None:
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
        self._replays: WeakSet[CudaReplay[Any]] = WeakSet()
        self._stream = torch.cuda.Stream(device)
        self.bytes = 0

    def __call__(self, body: Callable[[], Output], warm_up: Callable[[], Any] | None = None) -> Replay[Output]:
        """Record `body` on a stream of its own; arguments as for any `Capture`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    replay = self._warmed_up(body, warm_up)
            finally:  # also when the body raises: whoever goes on must not overtake what it has launched
                current.wait_stream(self._stream)
        self._replays.add(replay)
        return replay

    def _warmed_up(self, body: Callable[[], Output], warm_up: Callable[[], Any] | None) -> CudaReplay[Output]:
        """Record `body` after a shorter one; if that was not enough, after all of it."""
        _warm_up(warm_up or body)
        try:
            return self._record(body)
        except Exception as failure:
            raise_out_of_memory(failure)
            if warm_up is None:
                raise
            _warm_up(body)
            return self._record(body)

    def _record(self, body: Callable[[], Output]) -> CudaReplay[Output]:
        """Record `body` in the current stream."""
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
        return CudaReplay(graph, output)

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


def _warm_up(body: Callable[[], Any]) -> None:
    """Run a body without letting it wait for the device; once more if it does so the first time only.

    Launching a pass takes the host as long as replaying several, so that it is not done more often than it must. For
    the same reason the body may be a shorter one than that which is recorded. What it leaves out is then not seen to
    wait: each layer that is left out runs the code of one that is not, and would wait where that does.
    """
    try:
        with NoWaiting(), _waiting_raises():
            body()
    except Exception as failure:  # noqa: BLE001 - what was only needed the first time has been done, or this raises it again
        raise_out_of_memory(failure)
        body()
        with NoWaiting(), _waiting_raises():
            body()


@contextmanager
def _waiting_raises() -> Iterator[None]:
    """Let torch raise where it waits for the device, also deep inside an operation, if that is nobody else's business.

    The mode is the whole process's: another thread would find that its own operations raise.
    """
    if threading.active_count() > 1:
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class NoWaiting(TorchDispatchMode):
    """Lets operations of this thread raise that wait for the device: capturing them would leave it in a bad state."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation unless it waits; of a quantised weight's, look at those that it is made of."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if _waits(func, args, kwargs or {}):
            raise RuntimeError(f"{func} waits for the device, which nothing that is recorded may do")
        return func(*args, **(kwargs or {}))


_WAITING = frozenset(
    {
        "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero",
        "aten::nonzero_numpy", "aten::masked_select", "aten::unique_dim", "aten::unique_consecutive",
        "aten::unique_dim_consecutive", "aten::_unique", "aten::_unique2", "aten::bincount", "aten::linalg_eig",
        "aten::_linalg_check_errors", "aten::segment_reduce",
    }
)  # fmt: skip
"""Operations whose result the host needs, or whose result's shape depends on data."""


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes the host wait for a CUDA device; on a CPU, whether it would."""
    name = func.name().partition(".")[0]
    if name in _WAITING or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
        return True
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return by_mask and not (name != "aten::index" and args[2].numel() == 1 and args[2].device.type == "cpu")
    if name == "aten::where":  # a number in a CPU's tensor is brought to the device
        return {value.device.type for value in args if isinstance(value, Tensor)} == {"cpu", "cuda"}
    if name == "aten::_to_copy":
        target = kwargs.get("device") or args[0].device
        return not kwargs.get("non_blocking") and {args[0].device.type, torch.device(target).type} == {"cpu", "cuda"}
    if name == "aten::copy_":
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        return not non_blocking and {args[0].device.type, args[1].device.type} == {"cpu", "cuda"}
    return False


def raise_out_of_memory(failure: Exception) -> None:
    """Raise `torch.OutOfMemoryError` if that is what a failed recording comes to; CUDA's libraries say it otherwise."""
    if isinstance(failure, torch.OutOfMemoryError):
        raise failure
    words = str(failure).lower()
    if isinstance(failure, RuntimeError) and ("out of memory" in words or "alloc_failed" in words):
        raise torch.OutOfMemoryError(str(failure)) from failure


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
        self._charged: Counter[Hashable] = Counter()  # what other entries in its place have cost, by key

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
        with lasting():
            entry = self._entries[key] = record()
        self.seconds += time.perf_counter() - started
        self.captures += 1
        return entry

    def lend(self, key: Hashable, charge: int, most: int, *, used: bool = True) -> bool:
        """Return whether another entry is to do in place of `key`'s: until that has cost as much as recording.

        Args:
            key: Of the entry that is missing.
            charge: What it costs to use the other one.
            most: What recording costs, in the same unit.
            used: Whether it is used, and charged for.
        """
        if self._charged[key] + charge > most:
            return False
        if used:
            self._charged[key] += charge
        return True

    def limit_to(self, limit: int) -> None:
        """Keep no more than so many entries from now on."""
        self.limit = limit
        while len(self._entries) > limit:
            self._entries.popitem(last=False)

    def places(self) -> list[Any]:
        """Return what it is recorded under."""
        return list(self._entries)

    def entries(self) -> list[Entry]:
        """Return what is recorded, what was used last at the end."""
        return list(self._entries.values())

    def drop(self, unwanted: Callable[[Entry], bool]) -> None:
        """Throw some entries away."""
        for key in [key for key, entry in self._entries.items() if unwanted(entry)]:
            del self._entries[key]

    def clear(self) -> None:
        """Throw everything away, as addresses have changed."""
        self._entries.clear()
