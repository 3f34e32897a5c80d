"""A batch's text as a drafter of text alone is shown it: without the tokens that stand for images.

Such tokens mean nothing to a language model, or are not in its vocabulary, and there may be hundreds of them in front
of a short question. Without them it reads what it was trained on: text (as in Gagrani et al., arXiv 2404.08856). A
position then counts the tokens that are shown; what is generated is shown as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.spans import Span, flat_places
from hf_dsde.utils.transfers import upload


class ShownText:
    """What a drafter asks of its sequences, about the text that it is shown.

    Args:
        sequences: The batch.
        left_out: Tokens of the prompts that are not shown, `[rows, prompt_width]`, bool; no row's last token.
    """

    def __init__(self, sequences: SequenceBatch, left_out: Tensor) -> None:
        self._sequences = sequences
        left_out = left_out.to(sequences.device)
        # Stable: shown tokens keep their order, and whatever is not shown gathers in front.
        order = torch.argsort((~left_out).byte(), dim=1, stable=True)
        self._prompts = sequences.tokens[:, : sequences.prompt_width].gather(1, order)
        self._left_out = left_out.sum(dim=1)
        self._padding = sequences.padding + self._left_out
        self._left_out_counts: list[int] = self._left_out.tolist()

    @property
    def lengths(self) -> Tensor:
        """As of `SequenceBatch`."""
        return self._sequences.lengths - self._left_out

    @property
    def length_counts(self) -> list[int]:
        """As of `SequenceBatch`."""
        counts = self._sequences.length_counts
        return [length - hidden for length, hidden in zip(counts, self._left_out_counts, strict=True)]

    def tail(self, width: int) -> tuple[Tensor, Tensor]:
        """As of `SequenceBatch`."""
        first = self._sequences.prompt_width - width
        steps = torch.arange(first, first + width, device=self._padding.device)
        columns = self._sequences.generated[:, None] + steps
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        return self._at(rows, columns.clamp_min(0)), columns - self._padding[:, None]

    def tokens_at(self, spans: Sequence[Span]) -> Tensor:
        """As of `SequenceBatch`."""
        rows, positions = upload(torch.stack(flat_places(spans)), self._padding.device)
        return self._at(rows, self._padding[rows] + positions)

    def _at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The tokens in some columns of the text, once what is not shown has left it."""
        prompt = self._prompts[rows, columns.clamp_max(self._prompts.shape[1] - 1)]
        return torch.where(columns < self._prompts.shape[1], prompt, self._sequences.tokens[rows, columns])


def shown_text(sequences: SequenceBatch) -> SequenceBatch | ShownText:
    """Return what a drafter of text alone is shown of a batch."""
    inputs = sequences.inputs
    return sequences if inputs is None else ShownText(sequences, inputs.stand_ins)
