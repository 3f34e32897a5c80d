"""The block functions of a chain of logits processors."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import LogitsProcessor

from hf_dsde.processing import by_length, by_scores, by_text  # noqa: F401 - their functions are registered
from hf_dsde.processing.block_function import BlockFunction, function_class


def block_functions(
    chains: Sequence[Sequence[LogitsProcessor]], places: Sequence[int]
) -> list[tuple[BlockFunction, list[int]]]:
    """Return the functions that stand for processors, each with the places in the chain of those it stands for.

    Args:
        chains: The processors of all rows, or those of each row; all of the same classes, each of which has a function.
        places: Where in the whole chain each of them is.
    """
    functions: list[tuple[BlockFunction, list[int]]] = []
    for place, processors in zip(places, zip(*chains, strict=True), strict=True):
        function = function_class(processors[0])
        assert function is not None
        functions.append((function([[processor] for processor in processors]), [place]))
    return functions


def serves_every_row(processor: LogitsProcessor) -> bool:
    """Whether `generate` makes the same processor of its arguments for every prompt, and it has a function."""
    function = function_class(processor)
    return function is not None and not function.differs_by_row
