"""Counting what the host launches one by one: tensor operations outside of recorded passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from recorded import NotedReplay, NotingCapture
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_dsde.drafting.chain import ChainDrafter

MADE_WITHOUT_KERNELS = ("aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::detach", "aten::_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel on a device: neither views nor what is replayed or recorded.

    Attributes:
        by_name: Operations of the block that was counted last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if not func.is_view and not name.startswith(MADE_WITHOUT_KERNELS):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def _uncounted(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return original(*arguments, **named)

    return call


def count_launches(monkeypatch: pytest.MonkeyPatch, kind: type[ChainDrafter]) -> list[Counter[str]]:
    """Let a list get the launches of each round that drafts: of the proposal, and of what comes of the verification.

    What begins the next round's first pass early is part of its round.
    """
    rounds: list[Counter[str]] = []
    launches = Launches()

    def counted(name: str) -> None:
        original = getattr(kind, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with launches:
                result = original(*arguments, **named)
            if name == "get_candidates":
                rounds.append(Counter())
            if rounds:
                rounds[-1] += launches.by_name
            launches.by_name.clear()
            return result

        monkeypatch.setattr(kind, name, call)

    for name in ("get_candidates", "accept", "stage_next", "_feed_staged", "update_candidate_strategy"):
        counted(name)
    for owner in (NotedReplay, NotingCapture):
        monkeypatch.setattr(owner, "__call__", _uncounted(owner.__call__))
    return rounds
