"""The rows that a batch waits for: where nothing takes the place of a text that ends, it ends with its last row.

Tokens of rows that are ahead make later passes smaller there, which brings far less than a pass less. Plain numbers: no
model, no tensor, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from hf_dsde.drafting.choice import Choice

AHEAD = 32
"""Tokens that a row has to have more than the one that has fewest to be ahead of it."""
FIRST_GAIN = 0.5
"""Drafted tokens of a row that are thought to stand in a round with drafts out of texts, before any was seen, ..."""
GAIN_RATE = 0.1
"""... and the weight of a new round in that."""
FORGETTING = 0.99
"""What is left of what is known of gains after a look whose drafts nobody tried: what was not tried is not known."""


class Stragglers:
    """Knows which rows have the fewest tokens, and what drafts out of texts bring them.

    Args:
        rows: Rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._gains = [FIRST_GAIN] * rows

    def among(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return those of some rows that are not ahead of the one that has fewest tokens.

        Args:
            rows: Rows that go on.
            tokens: Generated tokens of all rows.
        """
        bound = AHEAD + min((tokens[row] for row in rows), default=0)
        return [row for row in rows if tokens[row] <= bound]

    def judged(self, choice: Choice, stragglers: Sequence[int], expected: Mapping[int, float]) -> Choice:
        """Let drafts save no more time than most stragglers get on faster; if that is none, nobody takes any.

        By the median: a few rows that repeat themselves do not wait for the others. What most gain is what they gained
        in the last rounds, or what is expected in this one if that is more. In `t` seconds, in which a row gets on by
        `u` tokens without the texts' drafts, one that gets `g` drafted tokens with them saves `((1 + g) / u - 1) t`
        less what the round takes longer.

        Args:
            choice: By what all rows gain.
            stragglers: At least one row.
            expected: Drafted tokens that are expected to stand, of each row that takes a text's draft.
        """
        if not choice.texts:
            return choice
        others = choice.usual - 1 if choice.model else 0.0
        now = median(expected.get(row, others) for row in stragglers)
        gain = max(now, median(self._gains[row] for row in stragglers))
        saved = min(choice.saved, ((1 + gain) / choice.usual - 1) * choice.otherwise - choice.further)
        if saved >= 0:
            return choice._replace(saved=saved)
        self._gains = [FIRST_GAIN + FORGETTING * (gain - FIRST_GAIN) for gain in self._gains]
        return Choice(frozenset(), True, 0.0, choice.otherwise)

    def learn(self, accepted: Sequence[int]) -> None:
        """Take note of a round with drafts out of texts.

        Args:
            accepted: Drafted tokens of each row that stand, whoever drafted them.
        """
        pairs = zip(self._gains, accepted, strict=True)
        self._gains = [gain + GAIN_RATE * (stand - gain) for gain, stand in pairs]

    def begin(self, rows: Sequence[int]) -> None:
        """Let rows begin other texts."""
        for row in rows:
            self._gains[row] = FIRST_GAIN
