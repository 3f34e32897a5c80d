"""Logits processors of a call as one function of scores, which can be recorded and compared with another call's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

from hf_dsde.decoding.processing.block_function import ScoreFunction
from hf_dsde.decoding.processing.functions import block_functions

RECORDABLE = frozenset(
    {
        logits_process.EpsilonLogitsWarper,
        logits_process.LogitNormalization,
        logits_process.MinPLogitsWarper,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
    }
)
"""Classes whose functions look at scores alone, are decided by a few numbers, and bring nothing to the device."""

Settings = tuple[tuple[type[LogitsProcessor], tuple[tuple[str, object], ...]], ...]
"""Of each processor, its class and what is set in it."""


@dataclass(frozen=True)
class ScoresAlone:
    """What processors make of scores, whatever text they belong to. Equal ones make the same of the same scores.

    Attributes:
        settings: Of the processors.
        functions: Functions of this object alone, so that what they prepare stays where it is.
    """

    settings: Settings
    functions: tuple[ScoreFunction, ...] = field(compare=False)

    def __call__(self, scores: Tensor) -> Tensor:
        """Process a block, `[rows, width, vocabulary]`, float32; it is not changed."""
        for function in self.functions:
            scores = function(scores)
        return scores


def scores_alone(chains: Sequence[Sequence[LogitsProcessor]]) -> ScoresAlone | None:
    """Return what the processors of all rows make of scores; None if that is not all that matters, or not alike.

    Args:
        chains: The processors that serve all rows, or those of each row.
    """
    settings = _settings(chains[0])
    if settings is None or any(_settings(chain) != settings for chain in chains[1:]):
        return None
    first = chains[0]
    functions = [function for function, _ in block_functions([first], range(len(first)))] if first else []
    return ScoresAlone(settings, tuple(function for function in functions if isinstance(function, ScoreFunction)))


def _settings(chain: Sequence[LogitsProcessor]) -> Settings | None:
    """What decides the scores; None if it is more than a few numbers."""
    if not all(type(processor) in RECORDABLE for processor in chain):
        return None
    found = tuple((type(processor), tuple(sorted(vars(processor).items()))) for processor in chain)
    plain = all(isinstance(value, (bool, int, float, str, type(None))) for _, own in found for _, value in own)
    return found if plain else None
