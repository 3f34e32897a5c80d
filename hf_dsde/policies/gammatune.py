"""GammaTune and GammaTune+ (arXiv 2504.00030): lengthen after full acceptance, fall back to a mean after a rejection.

A row that accepts its whole draft drafts more at once. After a rejection it returns to a moving average of how many
tokens such rounds accept. GammaTune+ also ends a draft after a token that the draft model was unsure of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState
from hf_dsde.utils.checks import check_integer, check_number


@dataclass
class _State(RowState):
    length: Tensor  # [rows], int64: gamma, the next draft's length
    mean: Tensor  # [rows], float32: moving average of the accepted length, over rounds with a rejection


@register("gammatune")
class GammaTunePolicy(StoppingPolicy):
    """Draft lengths from a moving average of the accepted length, with growth after full acceptance (Algorithm 1).

    Args:
        initial_length: The first length and the first mean, brought between the two bounds.
        growth: delta, how many tokens more than it accepted a row drafts after full acceptance, at least 1.
        smoothing: eta, weight of a new accepted length in the mean, in (0, 1].
        min_length: The least length. Not 0: a row that drafts nothing accepts nothing and would never draft again.
        max_length: The greatest length, if the loop allows as many.
    """

    name = "gammatune"

    def __init__(
        self,
        initial_length: int = 3,
        growth: int = 2,
        smoothing: float = 0.3,
        min_length: int = 1,
        max_length: int = 10,
    ) -> None:
        self.initial_length = check_integer("initial_length", initial_length, 1)
        self.growth = check_integer("growth", growth, 1)
        self.smoothing = check_number("smoothing", smoothing, 0.0, 1.0, open_minimum=True)
        self.min_length = check_integer(
            "min_length", min_length, 1, way_out="A row that drafts nothing would never draft again."
        )
        self.max_length = check_integer(
            "max_length", max_length, self.min_length, way_out=f"`min_length` is {self.min_length}."
        )
        self._state: _State | None = None
        self._floor = self._ceiling = 0

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError(f"{type(self).__name__} was used before `start(batch)`.")
        return self._state

    @property
    def mean_accepted(self) -> Tensor:
        """Each row's moving average of the accepted length, gamma-bar, shape `[rows]`, float32, tokens."""
        return self._rows.mean

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._ceiling = min(self.max_length, batch.max_draft_length)
        self._floor = min(self.min_length, self._ceiling)
        self._state = self._initial(batch.rows, batch.device)
        self._fresh = self._initial(1, batch.device)

    def _initial(self, rows: int, device: torch.device) -> _State:
        length = min(max(self.initial_length, self._floor), self._ceiling)
        lengths = torch.full((rows,), length, dtype=torch.int64, device=device)
        return _State(length=lengths, mean=lengths.float())

    def draft_lengths(self) -> Tensor:
        """Each row's gamma, shape `[rows]`, int64."""
        return self._rows.length

    def observe(self, outcome: RoundOutcome) -> None:
        """Lengthen rows that accepted all they drafted, bring the others back to their mean.

        A row is judged by the first gamma tokens of its draft: where the loop made it draft more, to fill the batch,
        it learns what it would have learnt alone. Where its draft ended earlier, all of that draft counts as all.
        """
        state = self._rows
        drafted = torch.minimum(outcome.drafted, state.length)
        accepted = torch.minimum(outcome.accepted, state.length)
        full = accepted >= drafted
        learning = outcome.active & (drafted > 0)
        mean = self._next_mean(accepted)
        length = torch.where(full, self._longer(accepted), mean.ceil().long())
        self._state = _State(
            length=torch.where(learning, length, state.length),
            mean=torch.where(learning & ~full, mean, state.mean),
        )

    def _longer(self, accepted: Tensor) -> Tensor:
        """`accepted + delta` within the bounds; no fewer than before, as a draft that ended early asks for no fewer."""
        longer = (accepted + self.growth).clamp(self._floor, self._ceiling)
        return torch.maximum(longer, self._rows.length)

    def _next_mean(self, accepted: Tensor) -> Tensor:
        # `(1 - eta) mean + eta accepted` as an increment, which no rounding can carry past `accepted`: as the length is
        # the mean rounded up, a hair above an integer is one token more.
        mean = self._rows.mean
        return (mean + self.smoothing * (accepted - mean)).clamp(self._floor, self._ceiling)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)


@register("gammatune_plus")
class GammaTunePlusPolicy(GammaTunePolicy):
    """GammaTune that also stops inside the round, after a token of a distribution without a likely token.

    The rule looks at the greatest probability of the draft's raw distribution, not at the token drawn from it, and the
    token is verified.

    Args:
        threshold: tau, in [0, 1]: a draft ends after a token whose distribution's greatest probability lies below it.
        initial_length: See `GammaTunePolicy`, as for all others.
        growth: delta.
        smoothing: eta.
        min_length: The least length that a round is given; a round may stop earlier.
        max_length: The greatest length.
    """

    name = "gammatune_plus"

    def __init__(
        self,
        threshold: float = 0.4,
        initial_length: int = 3,
        growth: int = 2,
        smoothing: float = 0.3,
        min_length: int = 1,
        max_length: int = 10,
    ) -> None:
        super().__init__(initial_length, growth, smoothing, min_length, max_length)
        self.threshold = check_number("threshold", threshold, 0.0, 1.0)

    def should_stop(self, step: DraftStep) -> Tensor:
        """Rows whose newest token came from a distribution that favours no token enough, shape `[rows]`, bool."""
        return step.top_probabilities[:, 0] < self.threshold
