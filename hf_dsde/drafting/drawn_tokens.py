"""Draft tokens that are drawn without the host in between: from what the target would make of the draft's logits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding.draft_logits import DraftLogits
from hf_dsde.decoding.processing.scores_alone import ScoresAlone
from hf_dsde.decoding.verification import draw
from hf_dsde.execution.recorded_chain import LONGEST_CHAIN
from hf_dsde.execution.token_choice import Chosen, Proposable, SharedTokens, TokenChoice


@dataclass(frozen=True)
class DraftVocabulary:
    """Which of its tokens a draft may propose, and what each model calls them.

    Attributes:
        size: Of the target's vocabulary.
        last_id: The largest id that the draft has an embedding of. It is fed in place of larger ones, which costs
            acceptance and never exactness.
        proposable: The draft's tokens that the target has too: those below `size`, or those of another tokenizer.
        ids: The target's id of each of them, `[n]`, int64; None for the first n.
        to_draft: The draft's id of each of the target's tokens, `[size]`, int64; None where ids mean the same to both.
    """

    size: int
    last_id: int
    proposable: Proposable
    ids: Tensor | None = field(default=None, compare=False)
    to_draft: Tensor | None = field(default=None, compare=False)

    def known(self, logits: Tensor) -> DraftLogits:
        """Return a draft's logits, `[rows, width, its vocabulary]`, without those of tokens that only it has."""
        if isinstance(self.proposable, SharedTokens):
            logits = logits.index_select(-1, self.proposable.ids)
        else:
            logits = logits[..., : self.size]
        return DraftLogits(logits, self.ids, self.size)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return tokens of a text that the draft reads, `[...]`, int64, in place of such as it has no embedding of."""
        return tokens if self.last_id + 1 >= self.size else tokens.clamp_max(self.last_id)

    def fed(self, tokens: Tensor) -> Tensor:
        """Return tokens of the target's as the draft is fed them, `[...]`, int64."""
        return self.embedded(tokens) if self.to_draft is None else self.to_draft[tokens]


@dataclass(frozen=True)
class DrawnTokens(TokenChoice):
    """Draws from the softmax of processed scores over the target's vocabulary, as the target does.

    The token is one fresh draw from the very `probs` that are handed on, whatever was drawn before and whatever is
    drawn after it, in the verification too. So it may be drawn before anybody knows whether it is wanted, as long as
    that is decided without a look at it: the probabilities stay its law.

    Attributes:
        process: Makes scores of logits.
        vocabulary: What is proposed, and what is fed.
    """

    process: ScoresAlone
    vocabulary: DraftVocabulary

    @property
    def numbers(self) -> int:
        """The size of the target's vocabulary."""
        return self.vocabulary.size

    def __call__(self, model: PreTrainedModel, logits: Tensor, numbers: Tensor | None) -> Chosen:  # noqa: ARG002
        """Draw with the numbers that are given."""
        scores = self.process(self.vocabulary.known(logits[:, None].float()).over_target())
        probs = scores[:, 0].softmax(dim=-1)
        tokens = draw(probs, numbers)
        return Chosen(tokens, self.vocabulary.fed(tokens), probs)


class DraftNumbers:
    """Random numbers of a call's draft tokens: those of a token depend on the call's seed, its round and its place.

    Which draft steps begin early, or are begun for nothing, depends on what has been recorded before. If numbers were
    taken from one stream, one after another, so would the text of a seed.

    Args:
        device: Whose default generator decides the call's seed. It is asked for one number, so that the next call has
            another seed; nobody waits for that.
    """

    def __init__(self, device: torch.device) -> None:
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        torch.empty(1, device=device).exponential_()
        self._seed = int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "big")
        self._generator = torch.Generator(device)

    def fill(self, turn: int, numbers: Tensor, place: int) -> None:
        """Fill a tensor, float32, with exponential variables.

        Args:
            turn: Rounds with drafts before.
            numbers: Gets them.
            place: Tokens of a row in front of the one that they are for, less than `LONGEST_CHAIN`.
        """
        self._generator.manual_seed(self._seed + turn * LONGEST_CHAIN + place)
        numbers.exponential_(generator=self._generator)
