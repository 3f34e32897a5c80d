"""The block functions of a chain of logits processors."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import LogitsProcessor

from hf_dsde.decoding.processing import by_length, by_scores, by_text  # noqa: F401 - functions are registered there
from hf_dsde.decoding.processing.block_function import BlockFunction, function_class


def block_functions(
    chains: Sequence[Sequence[LogitsProcessor]], places: Sequence[int]
) -> list[tuple[BlockFunction, list[int]]]:
    """Return the functions that stand for processors, each with the places in the chain of those it stands for.

    Args:
        chains: The processors of all rows, or those of each row; all of the same classes, each of which has a function.
        places: Where in the whole chain each of them is.
    """
    functions: list[tuple[BlockFunction, list[int]]] = []
    first, count = chains[0], 0
    for number in range(len(places)):
        if number < count:  # the function before stands for it
            continue
        function, count = function_class(first[number]), number + 1
        if count < len(first) and by_scores.Nucleus.stands_for(*first[number : count + 1]):
            function, count = by_scores.Nucleus, count + 1
        assert function is not None
        members = [chain[number:count] for chain in chains]
        functions.append((function(members), list(places[number:count])))
    return functions


def serves_every_row(processor: LogitsProcessor) -> bool:
    """Whether `generate` makes the same processor of its arguments for every prompt, and it has a function."""
    function = function_class(processor)
    return function is not None and not function.differs_by_row
