"""How much of what scores promise stands."""

from __future__ import annotations

from collections.abc import Sequence

from hf_dsde.drafting.lookup.continuation import LONGEST_CLASS, Continuation, faded, match_class

FIRST_PROMISE = 16.0
"""Tokens that scores are thought to have promised before anything was verified, half of which stood."""
CLASS_PROMISE = 16.0
"""Promised tokens of a class of agreements up to which all classes together say more of it than itself."""


class ScoreTrust:
    """Accepted tokens per token that scores promised, over the last rounds.

    A score takes what was seen for all that there is, and so promises too much where little was seen. By how much
    depends on the text, and on how long an agreement it follows: see `of_classes`.
    """

    def __init__(self) -> None:
        self._promised, self._kept = FIRST_PROMISE, FIRST_PROMISE / 2
        self._by_class: Sequence[tuple[float, float]] = ((0.0, 0.0),) * (LONGEST_CLASS + 1)  # likewise, of each class

    @property
    def overall(self) -> float:
        """Of all scores."""
        return self._kept / self._promised

    @property
    def of_classes(self) -> list[float]:
        """The same by `match_class`: of a proposal, `of_classes[class] * score` tokens stand in the mean.

        In answers of a small model, a third of what agreements of one token promise stands, half of it after 2 to 7
        tokens, and four fifths after more. Of a class of which little was seen, `overall` is thought. None is above 1.
        """
        prior = CLASS_PROMISE * self.overall
        return [min((kept + prior) / (promised + CLASS_PROMISE), 1.0) for promised, kept in self._by_class]

    def learn(self, drafts: Sequence[Continuation], accepted: Sequence[int]) -> None:
        """Take note of drafts that were verified, and how many tokens of each stand."""
        by_class = list(self._by_class)
        kept = promised = 0.0
        for draft, stand in zip(drafts, accepted, strict=True):
            of = match_class(draft.match)
            promised, kept = promised + draft.score, kept + stand
            by_class[of] = by_class[of][0] + draft.score, by_class[of][1] + stand
        self._promised, self._kept = faded(self._promised + promised, self._kept + kept)
        self._by_class = [faded(*counts) for counts in by_class]
