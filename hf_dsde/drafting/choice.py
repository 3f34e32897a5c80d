"""Who drafts for a row in a round: a text, the model, or nobody. Plain numbers: no model, no tensor, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from hf_dsde.costs import BatchCosts
from hf_dsde.execution.pass_shapes import PassSizes
from hf_dsde.policies.goodput import ROW_PRIOR, ROW_TOKENS

FIRST_ACCEPTANCE = 0.7
"""What is thought of a model before anything was verified, as `goodput` does, ..."""
FIRST_TOKENS = 8.0
"""... and the tokens that this counts for."""
BATCH_TOKENS = 1000.0
"""Judged tokens of the batch that are remembered: what is older counts ever less."""
FORGETTING = 0.98
"""What is left of the batch's counts after a round in which the model was left out: what nobody tries is not known."""


class Offer(NamedTuple):
    """What could be drafted for a row: how many tokens, and how many of them are expected to stand."""

    tokens: int = 0
    gain: float = 0.0


class RoundPrices(NamedTuple):
    """What rounds take, by what they draft.

    Attributes:
        costs: Of the batch.
        sizes: Of the target's passes.
    """

    costs: BatchCosts
    sizes: PassSizes

    def seconds(self, draft_steps: int, tokens: int, longest: int) -> float:
        """Seconds of a round.

        Args:
            draft_steps: Draft steps of the round.
            tokens: Tokens of all rows in the target's pass.
            longest: Drafted tokens of the row that has most.
        """
        columns = self.sizes.tokens(tokens, 1 + longest) / self.sizes.rows
        return self.costs.draft_seconds(draft_steps) + self.costs.verify.at(columns) + self.costs.overhead


class Pace(NamedTuple):
    """What a round is expected to bring: tokens per second, and the seconds that it takes."""

    rate: float
    seconds: float

    def saved(self, other: Pace) -> float:
        """Seconds that its tokens would take longer in rounds of another pace."""
        return self.seconds * (self.rate / other.rate - 1)


class Taken(NamedTuple):
    """Rows that take the texts' drafts, with the pace of a round in which they do, and of one in which none does."""

    rows: frozenset[int]
    pace: Pace
    without: Pace


class Choice(NamedTuple):
    """Who drafts, and what texts are worth in this round.

    Attributes:
        texts: Rows that take the text's draft.
        model: Whether the model drafts for the others.
        saved: Seconds that the texts' drafts save; what it took to find them is not taken off.
        otherwise: Seconds of a round without them.
        usual: Tokens that such a round brings a row; of no interest where no row takes the text's draft.
        further: Seconds that the round takes longer with them.
    """

    texts: frozenset[int]
    model: bool
    saved: float = 0.0
    otherwise: float = math.inf
    usual: float = 1.0
    further: float = 0.0


@dataclass
class RunningShare:
    """Accepted tokens, and those that were judged: the first rejected one counts, those after it do not."""

    accepted: float = 0.0
    judged: float = 0.0

    def add(self, accepted: float, judged: float, most: float) -> None:
        """Add tokens; the past counts for `most` at most."""
        past = min(1.0, most / self.judged) if self.judged else 1.0
        self.accepted, self.judged = past * self.accepted + accepted, past * self.judged + judged

    def after(self, prior: float, tokens: float) -> float:
        """The share, if `tokens` of the share `prior` had been seen before."""
        return (self.accepted + prior * tokens) / (self.judged + tokens)


class RunningAcceptance:
    """The probability that the target accepts a model's token, of the batch and of each row.

    A row's is `(accepted + 16 a) / (judged + 16)` over its last tokens, with the batch's `a`: its own where enough is
    known, the batch's where nothing is.

    Args:
        rows: Rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._batch = RunningShare()
        self._rows = [RunningShare() for _ in range(rows)]
        self._waiting: list[tuple[Sequence[int], Sequence[int]]] = []

    @property
    def batch(self) -> float:
        """That of the batch."""
        self.settle()
        return self._batch.after(FIRST_ACCEPTANCE, FIRST_TOKENS)

    def of_rows(self) -> list[float]:
        """Those of all rows."""
        batch = self.batch
        return [row.after(batch, ROW_PRIOR) for row in self._rows]

    def learn(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take note of what a model has drafted in a round; 0 for rows that it did not draft for."""
        self._waiting.append((drafted, accepted))

    def settle(self) -> None:
        """Learn from what was noted. Whoever asks need not call it; whoever has time may."""
        for drafted, accepted in self._waiting:
            judged = [min(stand + 1, n) for n, stand in zip(drafted, accepted, strict=True)]
            self._batch.add(sum(accepted), sum(judged), BATCH_TOKENS)
            for row, stand, n in zip(self._rows, accepted, judged, strict=True):
                row.add(stand, n, ROW_TOKENS)
        self._waiting.clear()

    def forget(self) -> None:
        """Trust less in what is known of the batch, after a round in which the model was not asked."""
        self.settle()
        self._batch = RunningShare(FORGETTING * self._batch.accepted, FORGETTING * self._batch.judged)

    def begin(self, rows: Sequence[int]) -> None:
        """Let rows begin other texts."""
        self.settle()
        for row in rows:
            self._rows[row] = RunningShare()


def model_offer(tokens: int, acceptance: float) -> Offer:
    """What a model offers that drafts `tokens`, each accepted with the same probability: `a + a^2 + ... + a^tokens`."""
    if acceptance >= 1.0:
        return Offer(tokens, float(tokens))
    return Offer(tokens, acceptance * (1.0 - acceptance**tokens) / (1.0 - acceptance))


@lru_cache(4096)
def survival(tokens: int, tenths: int) -> float:
    """Return the probability `a` with which a text's tokens stand one after another.

    So that `a + a^2 + ... + a^tokens` is what is expected of them; by bisection, to a thousandth.

    Args:
        tokens: How many there are.
        tenths: Tenths of tokens that are expected to stand.
    """
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if middle * (1 - middle**tokens) / (1 - middle) < tenths / 10:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def shortened(text: Offer, tokens: int) -> Offer:
    """Return the beginning of a text's draft, if it has more tokens than so many."""
    if text.tokens <= tokens:
        return text
    a = survival(text.tokens, round(10 * text.gain))
    return Offer(tokens, min(sum(a**depth for depth in range(1, tokens + 1)), text.gain))


def worthwhile(text: Offer, seconds: Sequence[float]) -> Offer:
    """Cut a text's draft where its tokens bring less than their columns take.

    A long draft stands to its end less often than its first tokens do, as if each stood with the same probability
    (`survival`). It is cut to the number of tokens `m` for which `(1 + a + ... + a^m) / seconds[m]` is largest.

    Args:
        text: All of it.
        seconds: Of a round in which rows have so many drafted tokens, without draft steps.
    """
    a = survival(text.tokens, round(10 * text.gain))
    expected = stands = best = 1.0
    # Most drafts of texts that hardly repeat themselves are worth no column.
    if (1 + text.tokens * a) * seconds[0] <= min(seconds[1 : text.tokens + 1], default=math.inf):
        return Offer()
    rate, length = 1.0 / seconds[0], 0
    for tokens in range(1, text.tokens + 1):
        stands *= a
        expected += stands
        if expected / seconds[tokens] > rate:
            rate, length, best = expected / seconds[tokens], tokens, expected
    return text if length == text.tokens else Offer(length, min(best - 1.0, text.gain))


def common_length(texts: Sequence[Offer], seconds: Sequence[float], rows: int) -> int:
    """Return how long drafts may be where a pass has as many columns for every row: of all, the best bound.

    Args:
        texts: All of the texts' drafts.
        seconds: As for `worthwhile`.
        rows: Rows that go on.
    """
    gains = [float(rows), *[0.0] * (len(seconds) - 1)]  # by the number of a token in its draft; 0 is the target's own
    for text in texts:
        stands, a = 1.0, survival(text.tokens, round(10 * text.gain)) if text.tokens else 0.0
        for length in range(1, text.tokens + 1):
            stands *= a
            gains[length] += stands
    rates = [tokens / time for tokens, time in zip(accumulate(gains), seconds, strict=True)]
    return rates.index(max(rates))


def choose(model: Sequence[Offer], texts: Sequence[Offer], prices: RoundPrices, alone: bool = True) -> Choice:
    """Choose what brings most tokens per second.

    A row's round brings `1 + gain` tokens, of `n` drafted ones, and all rows together take

        T = draft(steps) + verify(sum(1 + n) / rows of the pass) + overhead

    seconds: the draft's steps are those of the longest draft of the model, the tokens those of the pass that is run,
    padding included. A round with drafts out of texts takes `costs.texts` more. Twice, the texts' drafts are found that
    make `sum(1 + gain) / T` largest: with the model, which drafts for the other rows what is wanted of it, and without.
    The better one is chosen. Where no text's draft is worth its columns, the model does what the policy wants.

    In each case, a row takes the text's draft if its gain is larger than what it has otherwise, and the further gain
    is worth the further tokens: rows are asked in the order of further gain per further token, and the best beginning
    of this order is taken (`with_texts`).

    Args:
        model: What the model offers each row that goes on.
        texts: What the texts offer, likewise.
        prices: Of the batch.
        alone: Whether rows without a text's draft may do without the model's.
    """
    if not any(offer.tokens for offer in texts):
        return unopposed([offer.tokens for offer in model], prices)
    steps = max(offer.tokens for offer in model)
    both = with_texts(model, texts, prices, steps, steps)
    if alone:
        single = with_texts([Offer()] * len(model), texts, prices, 0, 0)
        if single.rows and single.pace.rate > both.pace.rate:
            return chosen(single, both.without, len(model), model=False)
    return chosen(both, both.without, len(model), model=True)


def chosen(taken: Taken, without: Pace, rows: int, *, model: bool) -> Choice:
    """Return the choice of some rows that take the texts' drafts.

    Args:
        taken: Which.
        without: Of a round in which none does.
        rows: Rows that go on.
        model: Whether the model drafts for the others.
    """
    if not taken.rows:
        return Choice(frozenset(), model, 0.0, without.seconds)
    further = taken.pace.seconds - without.seconds
    usual = without.rate * without.seconds / rows
    return Choice(taken.rows, model, taken.pace.saved(without), without.seconds, usual, further)


def unopposed(model: Sequence[int], prices: RoundPrices) -> Choice:
    """Return the choice where texts have nothing to offer: the model does what the policy wants.

    Args:
        model: Tokens that it drafts for each row that goes on.
        prices: Of the batch.
    """
    steps = max(model)
    return Choice(frozenset(), True, 0.0, prices.seconds(steps, len(model) + sum(model), steps))


def with_texts(
    otherwise: Sequence[Offer], texts: Sequence[Offer], prices: RoundPrices, steps_without: int, steps: int
) -> Taken:
    """Return the rows that take the texts' drafts so that most tokens come per second.

    Args:
        otherwise: What each row has if it does not.
        texts: The texts' drafts.
        prices: Of the batch.
        steps_without: Draft steps of a round in which no row takes a text's draft.
        steps: Those of any other round.
    """
    rows = len(otherwise)
    tokens, gain = (rows + sum(column) for column in zip(*otherwise, strict=True))
    further = [
        (row, text.tokens - other.tokens, text.gain - other.gain)
        for row, (text, other) in enumerate(zip(texts, otherwise, strict=True))
        if text.gain > other.gain
    ]
    if not prices.sizes.packs:  # as long drafts as the longest have their columns anyway
        further.sort(key=lambda entry: texts[entry[0]].tokens)
    else:
        further.sort(key=lambda entry: entry[2] / entry[1] if entry[1] > 0 else math.inf, reverse=True)
    longest = max(other.tokens for other in otherwise)
    time = prices.seconds(steps_without, tokens, longest)
    best = without = Pace(gain / time, time)
    taken = 0
    for count, (row, more_tokens, more_gain) in enumerate(further, start=1):
        tokens, gain = tokens + more_tokens, gain + more_gain
        longest = max(longest, texts[row].tokens)
        time = prices.seconds(steps, tokens, longest) + prices.costs.texts
        if gain / time > best.rate:
            best, taken = Pace(gain / time, time), count
    return Taken(frozenset(row for row, _, _ in further[:taken]), best, without)
