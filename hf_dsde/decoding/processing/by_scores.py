"""Logits processors that look at scores alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

from hf_dsde.decoding.processing.block_function import ScoreFunction, stands_for, token_mask
from hf_dsde.decoding.processing.by_length import FORBIDDEN
from hf_dsde.kernels import reference
from hf_dsde.kernels.dispatch import ops_for

MOST_BEST = 1024
"""Of the best tokens, so many fit into the kernel that finds their nucleus."""


def _entropy(logarithms: Tensor, probs: Tensor) -> Tensor:
    """Return the entropy of a distribution of which both are known, `[rows, width, 1]`.

    The logarithm of an excluded token is -inf, and 0 * -inf is not a number.
    """
    return -(logarithms.clamp_min(torch.finfo(probs.dtype).min) * probs).sum(2, keepdim=True)


@stands_for(
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
class AsItIs(ScoreFunction):
    """A processor that works on any number of rows at once, without a wait: it is shown every column as a row."""

    def _make(self, device: torch.device, vocabulary: int) -> None:  # noqa: ARG002
        self._no_tokens = torch.empty(1, 0, dtype=torch.long, device=device)

    def _process(self, scores: Tensor) -> Tensor:
        flat: Tensor = self._processors[0](self._no_tokens, scores.flatten(0, 1))
        return flat.view(scores.shape)


@stands_for(logits_process.TemperatureLogitsWarper)
class Temperature(ScoreFunction):
    """Divides by the temperature."""

    def _process(self, scores: Tensor) -> Tensor:
        return scores / self._processors[0].temperature


@stands_for(logits_process.TopKLogitsWarper)
class TopK(ScoreFunction):
    """Keeps the k best scores and all that equal the last of them."""

    def _process(self, scores: Tensor) -> Tensor:
        own = self._processors[0]
        least = scores.topk(min(own.top_k, scores.shape[2])).values[:, :, -1:]
        return scores.masked_fill(scores < least, own.filter_value)


@stands_for(logits_process.TopPLogitsWarper)
class TopP(ScoreFunction):
    """Leaves out the least likely tokens that have `1 - top_p` of the probability together, as far as they are many."""

    def _process(self, scores: Tensor) -> Tensor:
        own = self._processors[0]
        ascending, places = scores.sort(dim=2)
        excluded = ascending.softmax(2).cumsum(2) <= 1 - own.top_p
        excluded[:, :, -own.min_tokens_to_keep :].fill_(False)
        return scores.masked_fill(excluded.scatter(2, places, excluded), own.filter_value)


@stands_for(logits_process.MinPLogitsWarper)
class MinP(AsItIs):
    """Keeps what has at least a share of the best token's probability."""

    def _process(self, scores: Tensor) -> Tensor:
        own = self._processors[0]
        if own.min_tokens_to_keep > 1:
            return super()._process(scores)
        probs = scores.softmax(2)
        return scores.masked_fill(probs < own.min_p * probs.amax(2, keepdim=True), own.filter_value)


@stands_for(logits_process.EtaLogitsWarper)
class Eta(ScoreFunction):
    """Keeps what has a probability of at least `min(epsilon, sqrt(epsilon) * exp(-H))`, H the entropy."""

    def _make(self, device: torch.device, vocabulary: int) -> None:  # noqa: ARG002
        self._epsilon = self._processors[0].epsilon.to(device)
        self._root = self._epsilon.sqrt()

    def _process(self, scores: Tensor) -> Tensor:
        own = self._processors[0]
        probs = scores.softmax(2)
        entropy = _entropy(scores.log_softmax(2), probs)
        least = torch.minimum(self._epsilon, self._root * (-entropy).exp())
        best = scores.topk(min(own.min_tokens_to_keep, scores.shape[2])).values[:, :, -1:]
        return scores.masked_fill((probs < least) & (scores < best), own.filter_value)


@stands_for(logits_process.TopHLogitsWarper)
class TopH(ScoreFunction):
    """Keeps the best tokens up to a share of the entropy of the `top_n` best.

    What transformers computes with a distribution that checks its arguments, for which the host would wait.
    """

    def _process(self, scores: Tensor) -> Tensor:
        own = self._processors[0]
        best, places = scores.topk(min(own.top_n, scores.shape[2]))
        probs = best.softmax(2)
        entropy = _entropy(best.log_softmax(2), probs)
        kept = (-probs * probs.log()).cumsum(2) <= entropy * own.top_h
        kept[:, :, 0] = True
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, places, kept)
        return scores.masked_fill(mask.logical_not_(), own.filter_value)


@stands_for(logits_process.SuppressTokensLogitsProcessor)
class SuppressTokens(ScoreFunction):
    """Forbids some tokens."""

    def _make(self, device: torch.device, vocabulary: int) -> None:
        self._tokens = token_mask(self._processors[0].suppress_tokens, device, vocabulary)

    def _process(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._tokens, FORBIDDEN)


class Nucleus(ScoreFunction):
    """Top-p after top-k: of the k best scores, the most likely ones."""

    def __init__(self, chains: Sequence[Sequence[LogitsProcessor]]) -> None:
        super().__init__(chains)
        own: Any = chains[0][1]
        self._top_p = float(own.top_p)

    @staticmethod
    def stands_for(first: LogitsProcessor, second: LogitsProcessor) -> bool:
        """Whether two processors that follow each other are served faster as one."""
        return (
            type(first) is logits_process.TopKLogitsWarper
            and type(second) is logits_process.TopPLogitsWarper
            and first.top_k <= MOST_BEST
            and second.min_tokens_to_keep == 1
            and first.filter_value == second.filter_value == FORBIDDEN
        )

    def _process(self, scores: Tensor) -> Tensor:
        flat = scores.flatten(0, 1)
        best = flat.topk(min(self._processors[0].top_k, flat.shape[1])).values
        ops = ops_for(scores.device) if scores.dtype is torch.float32 else reference
        kept: Tensor = ops.nucleus(flat, best, self._top_p)
        return kept.view(scores.shape)
