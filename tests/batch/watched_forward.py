"""Counts the passes of a model, and lets chosen ones fail as those of a device do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Passes:
    """Passes of a model since `watch`."""

    calls: int = 0
    failures: int = 0


def watch(
    model: PreTrainedModel,
    error: Callable[[], BaseException] | None = None,
    fails: Callable[[int, Tensor], bool] = lambda *_: True,
) -> Passes:
    """Replace the model's `forward` by one that is counted.

    Args:
        model: Changed in place.
        error: Makes what is raised by the passes that fail; None if none does.
        fails: Tells from a pass's number, from 1, and its tokens, `[rows, columns]`, whether it does.
    """
    passes, forward = Passes(), model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        passes.calls += 1
        if error is not None and fails(passes.calls, kwargs["input_ids"]):
            passes.failures += 1
            raise error()
        return forward(*args, **kwargs)

    model.forward = watched
    return passes
