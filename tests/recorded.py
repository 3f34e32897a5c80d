"""Recording passes on a CPU: what a CUDA graph does, done by noting every tensor operation.

Replaying the notes is replaying a graph: shapes, branches and host numbers are those of the recording, and only the
contents of static tensors can make a difference. As with a graph, a replay knows where its tensors lay and does not
keep them alive, and what would have to wait for the device cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from hf_dsde.execution import create_runner as runners
from hf_dsde.execution.workspaces import workspaces

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operations whose result the host needs, or whose result's shape depends on data."""


class _Address:
    """A tensor's place in memory, which may be freed."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "the replay reads memory that nobody keeps: a graph would find something else there"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class _Result:
    """A tensor that an earlier operation of the same replay makes."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Notes(TorchDispatchMode):
    """Notes operations, and numbers the tensors they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.numbers: dict[int, int] = {}
        self._next = count()
        self._kept: list[Any] = []  # no id may be used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a graph has what a quantised weight's operations are made of
        if func in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        noted = [self._note(value) for value in args], {name: self._note(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        outputs = _leaves(result)
        for output in outputs:
            if isinstance(output, Tensor):
                self.numbers[id(output)] = next(self._next)
        self._kept.append((args, kwargs, result))
        numbers = [self.numbers.get(id(output)) for output in outputs]
        self.calls.append((func, *noted, numbers if isinstance(result, list | tuple) else numbers[0]))
        return result

    def _note(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.place(value)
        return [self._note(part) for part in value] if isinstance(value, list | tuple) else value

    def place(self, tensor: Tensor) -> _Result | _Address:
        number = self.numbers.get(id(tensor))
        return _Address(tensor) if number is None else _Result(number)

    def finish(self) -> None:
        self._kept.clear()


class _Call:
    """One noted operation. Which of its arguments are tensors is found out once and not in every replay.

    `numbers` are those of the tensors that it makes; a list of them where the operation gives several.
    """

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], numbers: Any) -> None:
        self._func, self._numbers = func, numbers
        self._args, self._kwargs = list(args), dict(kwargs)
        self._places: list[tuple[Any, Any, Any]] = [
            (values, key, place)
            for values, items in ((self._args, enumerate(args)), (self._kwargs, kwargs.items()))
            for key, place in items
            if any(isinstance(leaf, _Result | _Address) for leaf in _leaves(place))
        ]

    def __call__(self, made: dict[int, Tensor]) -> None:
        for values, key, place in self._places:
            # Most often, which is why it comes first.
            values[key] = made[place.number] if type(place) is _Result else _find(place, made)
        output = self._func(*self._args, **self._kwargs)
        if isinstance(self._numbers, list):
            made.update({n: out for n, out in zip(self._numbers, _leaves(output), strict=True) if n is not None})
        elif self._numbers is not None:
            made[self._numbers] = output
        for values, key, place in self._places:
            values[key] = place  # a replay keeps no tensor


def _leaves(value: Any) -> list[Any]:
    """What is in the lists and tuples that operations take and return; a general `tree_flatten` takes much longer."""
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list | tuple) else [value]


def _find(place: Any, made: dict[int, Tensor]) -> Any:
    if isinstance(place, _Result):
        return made[place.number]
    if isinstance(place, list | tuple):
        return [_find(part, made) for part in place]
    return place.tensor() if isinstance(place, _Address) else place


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def _unwritten(result: Tensor) -> Tensor:
    return torch.full_like(result, float("nan") if result.is_floating_point() else torch.iinfo(result.dtype).max)


class NotedReplay:
    def __init__(self, notes: _Notes, result: Any) -> None:
        self._calls = [_Call(*call) for call in notes.calls]
        self._results = [notes.place(tensor) for tensor in _tensors(result)]
        # A replay has to write everything it shows.
        self.output = tree_map_only(Tensor, _unwritten, result)
        notes.finish()

    def __call__(self) -> None:
        made: dict[int, Tensor] = {}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # what was noted has its casts in it
            for call in self._calls:
                call(made)
            for output, place in zip(_tensors(self.output), self._results, strict=True):
                output.copy_(_find(place, made))


class NotingCapture:
    """Counts what it recorded."""

    def __init__(self) -> None:
        self.recorded = 0
        self.bytes = 0

    def __call__(self, body: Callable[[], Any], warm_up: Callable[[], Any] | None = None) -> NotedReplay:
        with torch.no_grad():
            (warm_up or body)()
            with _Notes() as notes:
                result = body()
        self.recorded += 1
        return NotedReplay(notes, result)


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[NotingCapture]:
    """Let runners record on the CPU; the list gets what records, one for each cache and each recording policy."""
    captures: list[NotingCapture] = []
    # Models are shared by tests, and what others have recorded of them is kept for later calls.
    monkeypatch.setattr(workspaces, "_idle", WeakKeyDictionary())

    def capture_on(device: torch.device) -> NotingCapture:
        captures.append(NotingCapture())
        return captures[-1]

    monkeypatch.setattr(runners, "can_record", lambda device: True)
    monkeypatch.setattr(runners, "capture_on", capture_on)
    return captures
