"""Noticing where the host waits for a device: on a GPU what waits, on a CPU what would."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import hf_dsde
from hf_dsde import BatchStreamer
from hf_dsde.decoding.sequences import SequenceBatch

PACKAGE = Path(hf_dsde.__file__).parent
LOOKS: set[Callable[..., Any]] = {
    Tensor.cpu,
    Tensor.tolist,
    Tensor.item,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.nonzero,
    Tensor.masked_select,
    Tensor.equal,
    torch.nonzero,
    torch.masked_select,
    torch.equal,
}
"""What needs a tensor's values on the host, or has a shape that depends on them."""


def place_of(frame: FrameType | None) -> str:
    """Return the innermost function of this package among the callers, as `file.py::function`."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE).as_posix()}::{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def noted_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count where the host waits for the device inside the `with` block.

    torch reports most operations that wait; it does not report events, which are noted here.
    """
    waits: Counter[str] = Counter()
    original = torch.cuda.Event.synchronize

    def synchronize(self: torch.cuda.Event) -> None:
        waits[place_of(sys._getframe(1))] += 1
        original(self)

    def note(*_: Any, **__: Any) -> None:
        waits[place_of(sys._getframe(1))] += 1

    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
        patch.setattr(torch.cuda.Event, "synchronize", synchronize)
        patch.setattr(warnings, "showwarning", note)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


class OnDevice(Tensor):
    """A tensor as if it lay on a device, like most of what is computed from it."""

    looks: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in LOOKS:
            return super().__torch_function__(func, types, args, kwargs)
        cls.looks[place_of(sys._getframe(1))] += 1
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Tensor).clone() if func is Tensor.cpu else result


@contextmanager
def noted_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count where the host looks at a batch's text or lengths, or at what comes of them, inside the `with` block.

    Passes of a model go through buffers of their own, so that nothing is seen of what is computed from logits alone.
    """
    original = SequenceBatch.__init__

    def begin(self: SequenceBatch, input_ids: Tensor, *arguments: Any, **named: Any) -> None:
        original(self, input_ids.as_subclass(OnDevice), *arguments, **named)
        for name in ("tokens", "padding", "generated", "limits"):
            setattr(self, name, getattr(self, name).as_subclass(OnDevice))

    OnDevice.looks = Counter()
    with monkeypatch.context() as patch:
        patch.setattr(SequenceBatch, "__init__", begin)
        yield OnDevice.looks


class RecordsRows(BatchStreamer):
    """Ours, checking the order of calls that it was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self.ended: list[int] = []
        self.ends = 0
        self.puts = 0

    def begin(self, prompt_ids: torch.LongTensor) -> None:
        assert not self.rows
        self.prompts = prompt_ids.tolist()
        self.rows = [[] for _ in prompt_ids]

    def put_tokens(self, row: int, tokens: torch.LongTensor) -> None:
        assert row not in self.ended, "a row that has ended got tokens"
        assert tokens.ndim == 1
        assert len(tokens) > 0
        assert tokens.dtype == torch.long
        self.puts += 1
        self.rows[row] += tokens.tolist()

    def end_row(self, row: int) -> None:
        assert row not in self.ended, "a row ended twice"
        self.ended.append(row)

    def end(self) -> None:
        assert sorted(self.ended) == list(range(len(self.rows)))
        self.ends += 1
        super().end()
