"""What every file of tests under Triton's interpreter needs: importing the fixture applies it."""

from __future__ import annotations

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def loops_with_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 turns arrays of one element into bounds of loops in a way that numpy 2.4 no longer has."""
    patch = interpreter._patch_lang_tensor

    def patch_with_item(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_item)
