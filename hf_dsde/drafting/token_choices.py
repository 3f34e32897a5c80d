"""How a call's draft tokens are chosen where nobody asks the host after each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding.sampling import ScoreProcessor
from hf_dsde.drafting.drawn_tokens import DraftNumbers, DraftVocabulary, DrawnTokens
from hf_dsde.execution.token_choice import BestTokens, Chosen, FillNumbers, TokenChoice


class TokenChoices:
    """Gives a call's choice of draft tokens, and what it takes for each proposal.

    Args:
        model: The draft.
        process: The call's logits processors, on the draft's device.
        vocabulary: What may be proposed.
        do_sample: Whether tokens are drawn.

    Attributes:
        turn: Proposals made so far.
    """

    def __init__(
        self, model: PreTrainedModel, process: ScoreProcessor, vocabulary: DraftVocabulary, *, do_sample: bool
    ) -> None:
        self.turn = 0
        self._model = model
        self._process = process
        self._vocabulary = vocabulary
        self._do_sample = do_sample
        self._numbers: DraftNumbers | None = None

    def choice(self, *, recorded: bool) -> TokenChoice | None:
        """Return how tokens are chosen; None where processors need more than scores.

        Args:
            recorded: Whether steps are recorded. Else nothing is gained by drawing tokens as they do.
        """
        if not self._do_sample:
            return BestTokens(self._vocabulary.proposable) if self._process.changes_nothing else None
        process = self._process.of_scores_alone if recorded else None
        if process is None:
            return None
        if self._numbers is None:
            self._numbers = DraftNumbers(self._model.device)
        return DrawnTokens(process, self._vocabulary)

    def fill(self, choice: TokenChoice) -> FillNumbers | None:
        """Return what gives the random numbers of the proposal that is made next; None if the choice takes none."""
        return partial(self._numbers.fill, self.turn) if choice.numbers and self._numbers is not None else None

    def first(self, choice: TokenChoice, logits: Tensor) -> Callable[[], Chosen]:
        """Return what gives the first tokens of the proposal that is made next: chosen once, when they are needed.

        Args:
            choice: Chooses them.
            logits: The draft's, `[rows, its vocabulary]`, float32.
        """
        fill = self.fill(choice)

        @cache
        def first() -> Chosen:
            if fill is None:
                return choice(self._model, logits, None)
            numbers = torch.empty(len(logits), choice.numbers, device=logits.device)
            fill(numbers, 0)
            return choice(self._model, logits, numbers)

        return first
