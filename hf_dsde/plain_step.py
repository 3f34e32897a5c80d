"""The target's pass of a round without drafts, made ready or begun before the host knows how the last round ended."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_dsde.overlap import SideStream
from hf_dsde.runner import ModelRunner
from hf_dsde.sequences import SequenceBatch


class PlainStep:
    """A pass over each row's last token, which needs nothing but the text.

    Args:
        target: Runs it.
        sequences: The text.
    """

    def __init__(self, target: ModelRunner, sequences: SequenceBatch) -> None:
        self._target = target
        self._sequences = sequences
        self._staged: Callable[[], Tensor] | None = None
        self._logits: Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether the pass is under way."""
        return self._logits is not None

    def prepare(self, going_on: Tensor, longest: int) -> None:
        """Get the pass ready.

        Args:
            going_on: Rows that take part, `[rows]`, bool.
            longest: A bound on the rows' lengths.
        """
        last, position = self._sequences.tail(1)
        self._staged = self._target.stage(last, position.masked_fill(~going_on[:, None], -1), longest)

    def begin(self, side: SideStream) -> None:
        """Run what was prepared, if it is a recorded pass, which drops no memory of the current stream.

        Args:
            side: Forked behind `prepare`; to be joined before the result is taken.
        """
        if self._staged is None or not self._target.replays or self._target.device != self._sequences.device:
            return
        with side.beside():
            self._logits = self._staged()

    def take(self) -> Tensor | None:
        """Return the logits, `[rows, 1, vocabulary]`, float32, running the pass if it is only ready; then forget it.

        None if nothing was prepared.
        """
        logits = self._logits if self._staged is None or self.begun else self._staged()
        self.forget()
        return logits

    def forget(self) -> None:
        """Do without: the next round drafts, or some row has another text."""
        self._staged = self._logits = None
