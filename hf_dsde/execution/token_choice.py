"""How the tokens of a recorded draft step are chosen: the best ones, or whatever else a drafter brings along."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.heads.head import DraftHead


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """What a draft of another tokenizer may propose. It is compared by identity: a recorded step reads this tensor.

    Attributes:
        ids: The draft's ids of tokens that the target has too, `[shared]`, int64, on the draft's device.
    """

    ids: Tensor


Proposable = int | SharedTokens
"""The size of the target's vocabulary, below which ids mean the same to both; or which tokens they share."""

FillNumbers = Callable[[Tensor, int], None]
"""Fills a tensor, float32, with the random numbers of a draft token, of which the first is number 0."""


class Chosen(NamedTuple):
    """The tokens of a draft step.

    Attributes:
        tokens: `[rows]`, int64; drawn ones as the target knows them, others as the draft is fed them.
        fed: The same as the draft is fed them, `[rows]`, int64.
        probs: What they were drawn from, `[rows, vocabulary]`, float32, over the target's vocabulary; None if they were
            not drawn.
    """

    tokens: Tensor
    fed: Tensor
    probs: Tensor | None = None


class TokenChoice(ABC):
    """What a recorded step does with its logits; equal ones do the same, and one's recording serves the other.

    A recorded step keeps it as long as it may be replayed. So it holds the tensors that it reads, and no model, whose
    weights would stay as long.
    """

    @property
    def numbers(self) -> int:
        """Random numbers that it takes of each row, exponential ones; 0 if none."""
        return 0

    @abstractmethod
    def __call__(self, model: PreTrainedModel, logits: Tensor, numbers: Tensor | None) -> Chosen:
        """Choose on the device alone.

        Args:
            model: The draft.
            logits: Its own, `[rows, its vocabulary]`, any float dtype.
            numbers: `[rows, self.numbers]`, float32; None if it takes none.
        """


@dataclass(frozen=True)
class BestTokens(TokenChoice):
    """The most likely ones.

    Attributes:
        vocabulary: What may be proposed: nothing that only the draft has.
    """

    vocabulary: Proposable

    def __call__(self, model: PreTrainedModel, logits: Tensor, numbers: Tensor | None = None) -> Chosen:  # noqa: ARG002
        """Return what the draft is fed: the target's ids, unless the draft has a vocabulary of its own."""
        tokens = best_tokens(model, logits, self.vocabulary)
        return Chosen(tokens, tokens)


def best_tokens(model: PreTrainedModel, logits: Tensor, vocabulary: Proposable) -> Tensor:
    """Return the best tokens as the draft is fed them, `[...]`, int64.

    These are the target's ids, unless the draft has a vocabulary of its own.

    Args:
        model: The draft.
        logits: Its own, `[..., its vocabulary]`.
        vocabulary: What may be proposed: nothing that only the draft has.
    """
    if isinstance(vocabulary, SharedTokens):
        return vocabulary.ids[logits.index_select(-1, vocabulary.ids).argmax(dim=-1)]
    best = logits[..., :vocabulary].argmax(dim=-1)
    ids = model.draft_ids if isinstance(model, DraftHead) else None
    return best if ids is None else ids[best]
