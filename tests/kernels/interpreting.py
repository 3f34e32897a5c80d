"""What files of tests under Triton's interpreter need: importing a fixture applies it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from triton.runtime import interpreter

GUARD = 512
"""Elements around each result."""


@pytest.fixture(autouse=True)
def loops_with_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 turns arrays of one element into bounds of loops in a way that numpy 2.4 no longer has."""
    patch = interpreter._patch_lang_tensor

    def patch_with_item(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_item)


@pytest.fixture(autouse=True)
def guarded_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Results, of two dimensions, start as NaN, and so does what lies around them, where it has to stay."""
    empty, whole = torch.empty, list[tuple[torch.Tensor, int]]()

    def guarded_empty(size, **options):
        count = size[0] * size[1]
        whole.append((empty(count + 2 * GUARD, **options).fill_(float("nan")), count))
        return whole[-1][0][GUARD : GUARD + count].view(size)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    yield whole
    for buffer, count in whole:
        assert buffer[:GUARD].isnan().all()
        assert not buffer[GUARD : GUARD + count].isnan().any()
        assert buffer[GUARD + count :].isnan().all()
