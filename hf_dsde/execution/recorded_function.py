"""Recording a function of tensors, such as a policy's arithmetic, and replaying it in place of its many launches.

A hundred small operations take the host far longer to launch than the device to run. Recorded, they are one launch,
beside one for the arguments of each dtype and one for all the results.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import prod

import torch
from torch import Tensor

from hf_dsde.config import SpeculationConfig
from hf_dsde.execution import create_runner as runners
from hf_dsde.execution.create_runner import RunnerWarning
from hf_dsde.execution.cuda_graphs import Capture, Replay, raise_out_of_memory
from hf_dsde.execution.torch_modes import lasting, without_autocast
from hf_dsde.policies.base import Recorder, TensorFunction, as_it_is

KEPT_FUNCTIONS = 16
"""Functions that are kept for later calls: a policy has up to three for a number of rows."""


class RecordedFunction:
    """A function that is recorded at its first call and replayed from then on.

    Arguments are copied into static tensors, which the recording reads. All results leave it as one tensor of bytes, so
    that a single copy frees them from the memory that other recordings share.

    Args:
        function: Takes tensors of one device and returns a tuple of tensors; a function of its arguments only, which
            writes to none of them and never asks the host about values. Other tensors that it reads have to be its own.
        capture: Records it; called whenever the shapes or dtypes of arguments are new.
        on_failure: Called with the exception when recording fails; the function is then run as it is.
    """

    def __init__(
        self,
        function: TensorFunction,
        capture: Capture,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._function = function
        self._capture = capture
        self._on_failure = on_failure
        self._failed = False
        self._signature: list[tuple[torch.Size, torch.dtype]] = []
        self._arguments: list[Tensor] = []
        self._results: list[tuple[torch.Size, torch.dtype]] = []
        self._replay: Replay[Tensor] | None = None

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Return what the function returns, in tensors that nothing else writes to."""
        if self._failed:
            return self._function(*arguments)
        signature = [(argument.shape, argument.dtype) for argument in arguments]
        if self._replay is None or signature != self._signature:
            try:
                with lasting(), without_autocast(arguments[0].device):
                    self._record(arguments, signature)
            except Exception as failure:  # noqa: BLE001 - whatever the function or the device has against recording
                raise_out_of_memory(failure)
                self._failed, self._replay = True, None
                self._on_failure(failure)
                return self._function(*arguments)
        assert self._replay is not None
        _copy_all(self._arguments, arguments)
        self._replay()
        return self._unpacked(self._replay.output.clone())

    def _record(self, arguments: tuple[Tensor, ...], signature: list[tuple[torch.Size, torch.dtype]]) -> None:
        self._replay = None
        static = [argument.clone(memory_format=torch.contiguous_format) for argument in arguments]

        def body() -> Tensor:
            results = self._function(*static)
            self._results = [(result.shape, result.dtype) for result in results]
            return torch.cat([_bytes_of(results[place]) for place in _widest_first(self._results)])

        self._replay = self._capture(body)
        self._arguments, self._signature = static, signature

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Return views of `packed` that have the results' shapes and dtypes."""
        results: dict[int, Tensor] = {}
        start = 0
        for place in _widest_first(self._results):
            shape, dtype = self._results[place]
            size = prod(shape) * dtype.itemsize
            results[place] = packed[start : start + size].view(dtype).view(shape)
            start += size
        return tuple(results[place] for place in range(len(results)))


def _widest_first(signature: list[tuple[torch.Size, torch.dtype]]) -> list[int]:
    """Order places by the size of their dtype: then each result begins at a multiple of it."""
    return sorted(range(len(signature)), key=lambda place: -signature[place][1].itemsize)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # any stride counts as contiguous for a single entry
    return flat.view(torch.uint8)


def _copy_all(targets: list[Tensor], sources: tuple[Tensor, ...]) -> None:
    """Copy each source into its target, with one launch for those of a dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = by_dtype.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(_laid_out_as(target, source))
    for into, out_of in by_dtype.values():
        torch._foreach_copy_(into, out_of)


def _laid_out_as(target: Tensor, source: Tensor) -> Tensor:
    """Return `source` with the strides of `target`, which is contiguous.

    A single pair of other strides, be it of a dimension of size 1, makes torch copy all pairs one by one.
    """
    if source.stride() == target.stride():
        return source
    return source.contiguous().as_strided(target.size(), target.stride())


class _Memory:
    """What records functions on a device, and those of them that later calls may ask for; for one call at a time.

    Something recorded stays in it, or else every call would get a new pool of memory: torch frees that of a pool
    without graphs only when the device has run out of it.

    Args:
        device: Where the functions' tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._capture = runners.capture_on(device)
        with lasting():
            self._anchor = self._capture(lambda: torch.zeros(1, device=device))
        self._kept: OrderedDict[Hashable, RecordedFunction] = OrderedDict()
        self.warned = False

    def recorded(self, function: TensorFunction, key: Hashable) -> RecordedFunction:
        """Return the function that is kept under `key`, or else `function`, to be recorded at its first call."""
        found = self._kept.pop(key, None) or RecordedFunction(function, self._capture, self._fall_back)
        if key is not None:
            self._kept[key] = found
            while len(self._kept) > KEPT_FUNCTIONS:
                self._kept.popitem(last=False)
        return found

    def _fall_back(self, failure: Exception) -> None:
        """Warn once a call. The next one tries again."""
        self._kept.clear()
        if self.warned:
            return
        self.warned = True
        warnings.warn(
            f"The policy's arithmetic is run operation by operation, which is slower: recording failed with "
            f"{type(failure).__name__}: {failure}. SpeculationConfig(runner='eager') records nothing.",
            RunnerWarning,
            stacklevel=2,
        )


class _Memories:
    """Memories by device that nobody uses at the moment; calls in several threads never share one."""

    def __init__(self) -> None:
        self._idle: dict[torch.device, list[_Memory]] = {}
        self._lock = threading.RLock()  # what is given back may be so in the middle of taking, by garbage collection

    def take(self, device: torch.device) -> _Memory:
        """Return an idle memory, or a new one."""
        with self._lock:
            idle = self._idle.get(device)
            if idle:
                return idle.pop()
        return _Memory(device)

    def give_back(self, device: torch.device, memory: _Memory) -> None:
        """Keep a memory for later calls."""
        memory.warned = False
        with self._lock:
            self._idle.setdefault(device, []).append(memory)


_memories = _Memories()


class FunctionRecorder:
    """Records the functions of one call of `generate`; a `Recorder`.

    Args:
        device: Where the functions' tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: _Memory | None = None

    def __call__(self, function: TensorFunction, key: Hashable = None) -> TensorFunction:
        """Return a function that is recorded when it is first called, unless one of that key has been."""
        recorded: RecordedFunction | None = None

        def call(*arguments: Tensor) -> tuple[Tensor, ...]:
            nonlocal recorded
            if recorded is None:
                recorded = self._own_memory().recorded(function, key)
            return recorded(*arguments)

        return call

    def _own_memory(self) -> _Memory:
        if self._memory is None:
            self._memory = _memories.take(self._device)
            # Every function holds this recorder: when it has gone, none can be replayed any more.
            weakref.finalize(self, _memories.give_back, self._device, self._memory).atexit = False
        return self._memory


def function_recorder(device: torch.device, config: SpeculationConfig) -> Recorder:
    """Return what `BatchInfo.record` shall be: it records where passes of models are recorded.

    Args:
        device: Where the policy's tensors live.
        config: Names the runner.
    """
    if config.runner == "eager" or not runners.can_record(device):
        return as_it_is
    return FunctionRecorder(device)
