"""How long a model's pass takes, by running it where nothing is kept."""

from __future__ import annotations

import time
from statistics import median

import torch

from hf_dsde import compat
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.row_block import RowBlock

TIMED_PASSES = 3
"""Timed passes of each shape on a GPU, after one that warms up; the median counts."""


def pass_seconds(runner: ModelRunner, width: int, longest: int, exit_layer: int | None = None) -> float:
    """Seconds of a pass of `width` columns per row over caches of up to `longest` tokens.

    The passes write after every row's text, where nothing is kept. On a CPU there is one; rounds correct what it says.

    Args:
        runner: With prompts of up to `longest` tokens stored, each without its last token.
        width: Columns.
        longest: Tokens of the longest row.
        exit_layer: Where the pass ends, as in `RowBlock`.
    """
    tokens = torch.zeros(runner.rows, width, dtype=torch.long, device=runner.device)
    positions = torch.arange(longest - 1, longest - 1 + width, device=runner.device).expand_as(tokens)
    context = compat.context_length(runner.model)
    if context is not None:
        positions = positions.masked_fill(positions >= context, -1)
    size = runner.state_size
    states = None if size is None else torch.zeros(*tokens.shape, size, dtype=runner.model.dtype, device=runner.device)

    def timed() -> float:
        started = time.perf_counter()
        runner.forward(RowBlock(tokens, positions, states=states, exit_layer=exit_layer), longest - 1 + width)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        return time.perf_counter() - started

    first = timed()
    return first if runner.device.type == "cpu" else median(timed() for _ in range(TIMED_PASSES))
