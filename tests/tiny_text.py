"""A tokenizer for the tiny models' vocabulary, and stopping criteria that show how they are called."""

from __future__ import annotations

from functools import cache

import torch
from tiny_models import BOS, EOS, PAD, VOCABULARY
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria

SPECIAL = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"}


def tiny_vocabulary(size: int = VOCABULARY) -> list[str]:
    """Return the tokens: special ones, six letters, then pairs such as `Gh`, so that no two texts read the same.

    A text of pairs alternates capital and small letters: a stop string such as `hG` can only span two tokens.
    """
    pairs = [capital + small for capital in "GHIJKLMNOPQRSTU" for small in "ghijklmnopqrstu"]
    return [*(SPECIAL[index] for index in range(len(SPECIAL))), *"abcdef", *pairs][:size]


@cache
def tiny_tokenizer(size: int = VOCABULARY, *, swapped: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `size` tokens; two of them trade places when `swapped` names them."""
    tokens = tiny_vocabulary(size)
    if swapped is not None:
        first, second = swapped
        tokens[first], tokens[second] = tokens[second], tokens[first]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    core.decoder = decoders.Fuse()
    names = {"pad_token": SPECIAL[PAD], "bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS]}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **names)


@cache
def spelling_tokenizer(*tokens: str, decoder: str = "Fuse", holes: int = 0) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the letters `abcdef` and these tokens, in this order, unused numbers before the last one.

    Args:
        tokens: As they stand in the vocabulary.
        decoder: `Fuse`, `ByteLevel`, or `ByteFallback`: what becomes of them in a text. Of `WithoutX` no x is left, so
            that a token may be empty.
        holes: How many numbers are unused.
    """
    numbers = {token: index for index, token in enumerate(dict.fromkeys([*"abcdef", *tokens]))}
    numbers[next(reversed(numbers))] += holes
    core = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    known = {
        "Fuse": decoders.Fuse(),
        "ByteLevel": decoders.ByteLevel(),
        "ByteFallback": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        "WithoutX": decoders.Sequence([decoders.Replace("x", ""), decoders.Fuse()]),
    }
    core.decoder = known[decoder]
    return PreTrainedTokenizerFast(tokenizer_object=core)


class StopsRowOn(StoppingCriteria):
    """Stops each row at one of its tokens: an answer per row."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self._tokens)


class StopsAllWhenRow(StoppingCriteria):
    """Stops the whole batch once one row emits a token: a single bool, from a look across rows."""

    def __init__(self, row: int, token: int) -> None:
        self._row, self._token = row, token

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> bool:
        return bool(input_ids[self._row, -1] == self._token)


class StopsAfterCalls(StoppingCriteria):
    """Stops everything at its n-th call: right only if it is called once per step."""

    def __init__(self, calls: int) -> None:
        self._calls, self.seen = calls, 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> bool:
        self.seen += 1
        return self.seen >= self._calls


class StopsWhenSure(StoppingCriteria):
    """Stops a row at a step whose best score is above a threshold."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...], **kwargs: object) -> torch.Tensor:
        return scores[-1].amax(dim=-1) > self._threshold


class Witness(StoppingCriteria):
    """Never stops anything and keeps all it is shown."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []
        self.scores: list[tuple[torch.Tensor, ...] | None] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: object
    ) -> torch.Tensor:
        self.texts.append(input_ids.tolist())
        self.scores.append(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)
