"""After which layer drafts end, and how far they go: DEL's rule. Plain numbers: no model, no clock.

DEL (Entezari Zarch et al., arXiv 2504.05598) looks at what every layer would have proposed where the target has just
written a token: final norm and head of the layer's states there give the layer's shadow token. A layer is accepted as
often as its shadow tokens are the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FIRST_ACCEPTANCE = 0.5
"""What is thought of a layer before anything was verified, ..."""
FIRST_TOKENS = 2.0
"""... and the tokens that this counts for."""
ROW_PRIOR = 16.0
"""Tokens that the batch's acceptance counts for in that of a row."""


def tokens_per_layer(acceptance: float, layer: float, layers: float, length: int) -> float:
    """Tokens that a round brings for each layer that it runs: `(1 - a^(d+1)) / (1 - a) / (d l + L)`.

    Args:
        acceptance: a, the probability that a drafted token stands if those before it do, from 0 to 1.
        layer: l, layers of a draft step.
        layers: L, layers of the target's pass.
        length: d, drafted tokens; 0 is plain decoding with its `1 / L`.
    """
    return sum(acceptance**depth for depth in range(length + 1)) / (length * layer + layers)


@lru_cache(4096)
def best_length(acceptance: float, layer: float, layers: float, longest: int) -> tuple[int, float]:
    """Return the length, from 0 to `longest`, with the most tokens per layer, the shortest among equals; and those."""
    tokens = stands = 1.0
    best, value = 0, 1 / layers
    for length in range(1, longest + 1):
        stands *= acceptance
        tokens += stands
        if tokens / (length * layer + layers) > value:
            best, value = length, tokens / (length * layer + layers)
    return best, value


class ExitStatistics:
    """How often each exit's shadow tokens are the target's own, and how sure it is of those that are and are not.

    All sums are multiplied by `decay` once a round, so that the past counts ever less: the acceptance of an exit is
    `sum_r decay^(R-r) matched_r / sum_r decay^(R-r) judged_r` over the rounds. The batch has sums of its own; a row's
    are its own text's, and its acceptance is `(matched + 16 a) / (judged + 16)` with the batch's `a`.

    Args:
        rows: Rows of the batch.
        exits: Layers that drafts may end after, ascending.
        layers: Layers of the target.
        head: Layers that the head takes as long as; both a draft step and the target's pass run it.
        decay: What is left of the past after a round, from 0 to 1.
    """

    def __init__(self, rows: int, exits: Sequence[int], layers: int, head: float, decay: float) -> None:
        self._costs = [exit_layer + head for exit_layer in exits]
        self._whole = layers + head
        self._decay = decay
        self._matched = np.zeros((rows, len(exits)))
        self._judged = np.zeros(rows)
        self._batch_matched = np.zeros(len(exits))
        self._batch_judged = 0.0
        self._tokens = np.zeros((2, len(exits)))  # those that did not match, and those that did
        self._confidence = np.zeros((2, len(exits)))

    def begin(self, rows: Sequence[int]) -> None:
        """Let rows begin other texts."""
        self._matched[rows], self._judged[rows] = 0.0, 0.0

    def learn(
        self, shadows: NDArray[np.int64], confidence: NDArray[np.float32], texts: Sequence[Sequence[int]]
    ) -> None:
        """Learn from a round.

        Args:
            shadows: Each exit's token after each column of the round, `[exits, rows, width]`.
            confidence: Its probability, likewise.
            texts: What the target has written after a row's first columns: nothing where a row has finished.
        """
        counts = np.array([len(text) for text in texts])
        written = np.full(shadows.shape[1:], -1)
        for row, text in enumerate(texts):
            written[row, : len(text)] = text
        judged = np.arange(shadows.shape[2]) < counts[:, None]
        matched = (shadows == written) & judged
        active = counts > 0
        past = np.where(active, self._decay, 1.0)
        by_row = matched.sum(axis=2).T
        self._matched = past[:, None] * self._matched + by_row
        self._judged = past * self._judged + counts
        self._batch_matched = self._decay * self._batch_matched + by_row.sum(axis=0)
        self._batch_judged = self._decay * self._batch_judged + counts.sum()
        for kind, which in enumerate((judged & ~matched, matched)):
            self._tokens[kind] = self._decay * self._tokens[kind] + which.sum(axis=(1, 2))
            sums = (confidence.astype(np.float64) * which).sum(axis=(1, 2))
            self._confidence[kind] = self._decay * self._confidence[kind] + sums

    def acceptance(self, place: int) -> float:
        """The batch's, of exit number `place`."""
        prior = FIRST_ACCEPTANCE * FIRST_TOKENS
        return float((self._batch_matched[place] + prior) / (self._batch_judged + FIRST_TOKENS))

    def row_acceptance(self, place: int) -> list[float]:
        """That of each row."""
        prior = ROW_PRIOR * self.acceptance(place)
        values: list[float] = ((self._matched[:, place] + prior) / (self._judged + ROW_PRIOR)).tolist()
        return values

    def threshold(self, place: int) -> float:
        """The confidence below which a row stops drafting: halfway between the means of both kinds of tokens.

        0, which stops nobody, while one kind has not been seen, or where an exit is no surer of what matches.
        """
        if not self._tokens[:, place].all():
            return 0.0
        unmatched, matched = self._confidence[:, place] / self._tokens[:, place]
        return float((unmatched + matched) / 2) if matched > unmatched else 0.0

    def best_exit(self, longest: int) -> int:
        """The number of the exit with the most tokens per layer, at its own best length up to `longest`."""
        values = [best_length(self.acceptance(n), cost, self._whole, longest)[1] for n, cost in enumerate(self._costs)]
        return values.index(max(values))

    def exit_for(self, length: int) -> int:
        """The number of the exit with the most tokens per layer when so many are drafted."""
        values = [tokens_per_layer(self.acceptance(n), cost, self._whole, length) for n, cost in enumerate(self._costs)]
        return values.index(max(values))

    def lengths(self, place: int, most: Sequence[int]) -> list[int]:
        """Return each row's best length up to a bound of its own, with exit number `place`."""
        rows = zip(self.row_acceptance(place), most, strict=True)
        return [best_length(value, self._costs[place], self._whole, bound)[0] for value, bound in rows]
