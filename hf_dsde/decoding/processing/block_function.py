"""What a logits processor is over a block of positions, and which class has such a function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_dsde.decoding.processing.block_text import BlockText
from hf_dsde.utils.transfers import upload


class BlockFunction(ABC):
    """One logits processor of transformers over all columns of a block at once, without a wait for the device.

    Args:
        chains: The processor that serves all rows, or those of each row, in lists of as many processors as one function
            stands for. They come from the same arguments of `generate`: what is not a matter of prompt or limits is the
            same for all rows, and read off the first.

    Attributes:
        reads_tokens: Whether it looks at the tokens of the text.
        differs_by_row: Whether prompt or limits decide what `generate` makes of its arguments.
    """

    reads_tokens: ClassVar[bool] = False
    differs_by_row: ClassVar[bool] = False

    def __init__(self, chains: Sequence[Sequence[LogitsProcessor]]) -> None:
        self._processors: list[Any] = [chain[0] for chain in chains]
        self._made_for: tuple[torch.device, int] | None = None
        self._rows_made = False

    def renew(self, chains: Sequence[Sequence[LogitsProcessor]]) -> None:
        """Take over the processors of rows of which some have begun another text."""
        self._processors = [chain[0] for chain in chains]
        self._rows_made = False

    def __call__(self, scores: Tensor, text: BlockText) -> Tensor:
        """Process a block.

        Args:
            scores: `[rows, width, vocabulary]`, floating point; not changed.
            text: What the columns have in front of them.

        Returns:
            Scores, shaped like `scores`.
        """
        target = (scores.device, scores.shape[-1])
        if self._made_for != target:
            self._make(*target)
            self._made_for, self._rows_made = target, False
        if not self._rows_made:
            self._make_rows(scores.device)
            self._rows_made = True
        return self._apply(scores, text)

    def _make(self, device: torch.device, vocabulary: int) -> None:  # noqa: B027 - there may be nothing to make
        """Prepare tensors that serve all rows."""

    def _make_rows(self, device: torch.device) -> None:  # noqa: B027 - there may be nothing to make
        """Prepare tensors with an entry for each row."""

    @abstractmethod
    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:
        """Process a block."""

    def _column(self, values: Sequence[int], device: torch.device) -> Tensor:
        """Return a number for each processor as a column: it broadcasts over rows if one processor serves them all."""
        return upload(values, device)[:, None]


class ScoreFunction(BlockFunction):
    """One that looks at scores alone."""

    def __call__(self, scores: Tensor, text: BlockText | None = None) -> Tensor:
        """Process a block, whatever is in front of it."""
        return super().__call__(scores, text)  # type: ignore[arg-type] # nobody looks at it

    def _apply(self, scores: Tensor, text: BlockText) -> Tensor:  # noqa: ARG002 - see above
        return self._process(scores)

    @abstractmethod
    def _process(self, scores: Tensor) -> Tensor:
        """Process a block."""


Function = TypeVar("Function", bound=type[BlockFunction])
_functions: dict[type[LogitsProcessor], type[BlockFunction]] = {}


def stands_for(*processors: type[LogitsProcessor]) -> Callable[[Function], Function]:
    """Register a function for classes of transformers."""

    def register(function: Function) -> Function:
        _functions.update(dict.fromkeys(processors, function))
        return function

    return register


def function_class(processor: LogitsProcessor) -> type[BlockFunction] | None:
    """Return the block function that stands for a processor. A subclass may do anything: none stands for it."""
    return _functions.get(type(processor))


def token_mask(tokens: Tensor, device: torch.device, vocabulary: int) -> Tensor:
    """Return which tokens are among `tokens`, `[vocabulary]`, bool; ids that have no score are none of them."""
    ids = tokens.to(device).reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < vocabulary), ids, vocabulary)
    return torch.zeros(vocabulary + 1, dtype=torch.bool, device=device).index_fill_(0, ids, True)[:vocabulary]
