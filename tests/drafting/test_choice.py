"""Who drafts for a row, against trying everything out, and how often a model's tokens stand, against counting."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from hf_dsde.costs import BatchCosts, CostCurve
from hf_dsde.drafting import choice as choices
from hf_dsde.drafting.choice import (
    Choice,
    Offer,
    RoundPrices,
    RunningAcceptance,
    common_length,
    model_offer,
    shortened,
    survival,
    worthwhile,
)
from hf_dsde.execution.pass_shapes import PassSizes


def choose(
    model: list[Offer], texts: list[Offer], prices: BatchCosts, rows: int | None = None, padded: bool = False
) -> Choice:
    """Choose for passes that have the rows that go on, unless it is said how many there are."""
    return choices.choose(model, texts, RoundPrices(prices, TightSizes(rows or len(model), int, not padded, 0)))


class TightSizes(PassSizes):
    """Of passes that have no more tokens than they must, packed or padded to the longest row."""

    def tokens(self, tokens: int, width: int) -> int:
        return tokens if self.packs else self.rows * width


def costs(draft: float = 0.1, column: float = 0.0, overhead: float = 0.0) -> BatchCosts:
    """A plain step takes 1, each draft step `draft`, and each further column per row `column`."""
    return BatchCosts(CostCurve.line(draft, draft) if draft else None, CostCurve.line(1.0, column), overhead)


def rate(
    model: list[Offer],
    texts: list[Offer],
    taken: frozenset[int],
    runs: bool,
    prices: BatchCosts,
    padded: bool = False,
) -> float:
    """Tokens per second of a choice."""
    offers = [text if row in taken else other for row, (text, other) in enumerate(zip(texts, model, strict=True))]
    if not runs:
        offers = [texts[row] if row in taken else Offer() for row in range(len(texts))]
    steps = max(offer.tokens for offer in model) if runs else 0
    mean = 1 + sum(offer.tokens for offer in offers) / len(offers)
    if padded:
        mean = 1 + max(offer.tokens for offer in offers)
    seconds = prices.draft_seconds(steps) + prices.verify.at(mean) + prices.overhead
    return sum(1 + offer.gain for offer in offers) / seconds


def best_rate(model: list[Offer], texts: list[Offer], prices: BatchCosts) -> float:
    """The most tokens per second of any choice in which texts only draft where they promise more.

    Doing without the model is one if texts alone are worth their columns; else that is up to the policy.
    """

    def of_all(runs: bool) -> list[float]:
        rows = [row for row, text in enumerate(texts) if text.gain > (model[row].gain if runs else 0.0)]
        chosen = [frozenset(taken) for count in range(len(rows) + 1) for taken in combinations(rows, count)]
        return [rate(model, texts, taken, runs, prices) for taken in chosen]

    plain, *alone = of_all(False)
    return max([*of_all(True), *(each for each in alone if max(alone) > plain)])


def test_no_other_choice_brings_more_tokens_per_second() -> None:
    numbers = random.Random(0)
    seen: list[tuple[bool, bool, bool]] = []
    for _ in range(400):
        rows, k = numbers.randrange(1, 6), numbers.randrange(1, 6)
        prices = costs(numbers.choice([0.01, 0.1, 0.5]), numbers.choice([0.0, 0.05, 0.3]), numbers.choice([0.0, 0.2]))
        model = [model_offer(k, numbers.random()) for _ in range(rows)]
        texts = [Offer(n, numbers.random() * n) for n in (numbers.choice([0, 1, 4, 16]) for _ in range(rows))]
        choice = choose(model, texts, prices)
        if any(text.tokens for text in texts):
            chosen = rate(model, texts, choice.texts, choice.model, prices)
            assert chosen == pytest.approx(best_rate(model, texts, prices))
        else:
            assert (choice.texts, choice.model, choice.saved) == (frozenset(), True, 0.0)
        offered = {row for row, text in enumerate(texts) if text.tokens}
        assert choice.texts <= offered
        seen.append((choice.model, bool(choice.texts), choice.texts == offered))
    assert {(True, True, False), (False, True, True), (False, True, False), (True, False, False)} <= set(seen)


def test_a_row_takes_what_promises_more() -> None:
    model = [model_offer(4, 0.5)] * 4  # 0.9375 tokens
    texts = [Offer(8, 6.0), Offer(4, 0.9), Offer(1, 0.95), Offer()]
    assert choose(model, texts, costs(0.01))[:2] == (frozenset({0, 2}), True)
    assert choose(model, texts, costs(0.5))[:2] == (frozenset({0, 1, 2}), False)


def test_columns_have_a_price() -> None:
    model, texts = [Offer()] * 2, [Offer(10, 3.0), Offer(2, 1.5)]
    assert choose(model, texts, costs(column=0.01)).texts == {0, 1}
    assert choose(model, texts, costs(column=0.4)).texts == {1}
    assert choose(model, texts, costs(column=5.0)).texts == set()


def test_rounds_with_texts_have_a_price_of_their_own() -> None:
    model, texts = [Offer(2, 1.0)] * 2, [Offer(3, 3.0), Offer()]
    cheap = choose(model, texts, costs())
    assert cheap.texts == {0}
    dear = replace(costs(), texts=1.0)
    assert choose(model, texts, dear) == Choice(frozenset(), True, 0.0, cheap.otherwise)
    less = choose(model, texts, replace(costs(), texts=0.1))
    assert less.texts == {0}
    assert less.further == pytest.approx(cheap.further + 0.1)
    assert less.saved == pytest.approx(cheap.saved - 0.1)


def test_without_texts_the_policy_decides() -> None:
    """Also where the model loses: it may be a probe."""
    assert choose([model_offer(1, 0.01)], [Offer()], costs(9.0)) == Choice(frozenset(), True, 0.0, 10.0)
    dear = choose([model_offer(1, 0.01)], [Offer(5, 0.01)], costs(9.0, column=3.0))
    assert dear == Choice(frozenset(), True, 0.0, 13.0), "a text that is not worth its columns is as good as none"


def test_what_texts_save_is_what_their_tokens_take_without_them() -> None:
    """Without: two rows of a token each in 1.25 seconds. With: two and five tokens, in 1.25 + 2 columns of 0.1."""
    choice = choose([Offer()] * 2, [Offer(1, 1.0), Offer(3, 4.0)], costs(0.0, column=0.1, overhead=0.25))
    assert choice.texts == {0, 1}
    assert choice.saved == pytest.approx(7 * 1.25 / 2 - 1.45)
    assert choice.otherwise == pytest.approx(1.25)
    model = [model_offer(2, 1.0)] * 2
    both = choose(model, [Offer(8, 6.0), Offer()], costs(0.01, column=0.05))
    without, with_them = 0.02 + 1.1, 0.02 + 1 + 5 * 0.05
    assert both[:2] == (frozenset({0}), True)
    assert both.saved == pytest.approx(10 * without / 6 - with_them)
    alone = choose(model, [Offer(8, 8.0)] * 2, costs(0.5, column=0.05))
    assert alone[:2] == (frozenset({0, 1}), False)
    assert alone.saved == pytest.approx(18 * 2.1 / 6 - 1.4)
    assert alone.otherwise == pytest.approx(2.1)


def test_columns_are_counted_over_the_rows_of_the_pass() -> None:
    """Where half of them have finished, two tokens of each other row are as many as a column."""
    prices = BatchCosts(None, CostCurve((1, 2), (1.0, 9.0)))
    texts = [Offer(1, 0.5)] * 4
    assert choose([Offer()] * 4, texts, prices).texts == set()
    assert choose([Offer()] * 4, texts, prices, 8).texts == {0, 1, 2, 3}
    assert choose([Offer()] * 4, texts, prices, 8).otherwise == 1.0
    assert choose([Offer()] * 4, texts, prices, 6).texts == {0, 1}


def test_a_texts_draft_is_cut_where_its_tokens_bring_less_than_they_take() -> None:
    numbers = random.Random(0)
    cut = 0
    for _ in range(200):
        tokens = numbers.randrange(1, 33)
        gain = numbers.random() * tokens
        prices = costs(column=numbers.choice([0.0, 0.05, 0.3, 1.0]), overhead=0.1)
        seconds = [prices.round_seconds(0) + prices.verify.at(1 + n) - 1.0 for n in range(tokens + 1)]
        a = survival(tokens, round(10 * gain))
        assert sum(a**depth for depth in range(1, tokens + 1)) == pytest.approx(gain, abs=0.3)
        expected = [sum(a**depth for depth in range(n + 1)) for n in range(tokens + 1)]
        rates = [tokens_of / time for tokens_of, time in zip(expected, seconds, strict=True)]
        offer = worthwhile(Offer(tokens, gain), seconds)
        assert rates[offer.tokens] == pytest.approx(max(rates))
        if offer.tokens == tokens:
            assert offer.gain == gain
        else:
            assert offer.gain == pytest.approx(min(expected[offer.tokens] - 1, gain))
            cut += 1
    assert 50 < cut < 150
    assert worthwhile(Offer(), [1.0]) == Offer()


def test_what_a_model_offers() -> None:
    assert model_offer(3, 0.5) == Offer(3, 0.5 + 0.25 + 0.125)
    assert model_offer(0, 0.5) == Offer()
    assert model_offer(5, 1.0) == Offer(5, 5.0)


def test_the_acceptance_is_the_rows_own_where_enough_is_known() -> None:
    acceptance = RunningAcceptance(3)
    assert acceptance.of_rows() == pytest.approx([0.7] * 3)
    for _ in range(4):
        acceptance.learn([4, 4, 0], [4, 1, 0])  # of 4 and 2 that were judged
    batch = (20 + 8 * 0.7) / (24 + 8)
    assert acceptance.batch == pytest.approx(batch)
    rows = [(16 + 16 * batch) / (16 + 16), (4 + 16 * batch) / (8 + 16), batch]
    assert acceptance.of_rows() == pytest.approx(rows)
    acceptance.begin([0])
    assert acceptance.of_rows() == pytest.approx([batch, *rows[1:]])


def test_the_past_counts_ever_less() -> None:
    acceptance = RunningAcceptance(1)
    for _ in range(200):
        acceptance.learn([1], [0])
    assert acceptance.of_rows()[0] < 0.05
    for _ in range(100):
        acceptance.learn([1], [1])
    assert acceptance.of_rows()[0] > 0.6


def test_a_model_that_nobody_asks_is_forgotten() -> None:
    acceptance = RunningAcceptance(1)
    for _ in range(50):
        acceptance.learn([4], [0])
    assert acceptance.batch < 0.12
    for _ in range(300):
        acceptance.forget()
    assert acceptance.batch == pytest.approx(0.7, abs=0.02)


def test_in_a_padded_pass_drafts_no_longer_than_the_longest_are_free() -> None:
    numbers = random.Random(0)
    taken: list[bool] = []
    for _ in range(300):
        rows = numbers.randrange(1, 6)
        prices = costs(0.0, numbers.choice([0.02, 0.1, 0.3]), numbers.choice([0.0, 0.2]))
        nothing = [Offer()] * rows
        texts = [Offer(n, numbers.random() * n) for n in (numbers.choice([0, 1, 4, 16]) for _ in range(rows))]
        chosen = choose(nothing, texts, prices, padded=True).texts
        sets = [frozenset(each) for count in range(rows + 1) for each in combinations(range(rows), count)]
        best = max(rate(nothing, texts, each, False, prices, padded=True) for each in sets)
        assert rate(nothing, texts, chosen, False, prices, padded=True) == pytest.approx(best)
        taken.append(bool(chosen))
    assert 50 < sum(taken) < 250


def test_the_common_length_of_drafts_is_the_best_one() -> None:
    numbers = random.Random(0)
    lengths: set[int] = set()
    for _ in range(100):
        rows = numbers.randrange(1, 6)
        texts = [Offer(n, numbers.random() * n) for n in (numbers.choice([0, 1, 4, 16]) for _ in range(rows))]
        seconds = [1.0 + numbers.choice([0.02, 0.1, 0.3]) * n for n in range(max(text.tokens for text in texts) + 1)]
        length = common_length(texts, seconds, rows)

        def rate_at(most: int, texts: list[Offer] = texts, seconds: list[float] = seconds) -> float:
            return sum(1 + shortened(text, most).gain for text in texts) / seconds[most]

        assert rate_at(length) == pytest.approx(max(map(rate_at, range(len(seconds)))), rel=0.05)
        assert all(shortened(text, length).tokens == min(text.tokens, length) for text in texts)
        lengths.add(length)
    assert len(lengths) > 4
    assert shortened(Offer(4, 3.0), 4) == Offer(4, 3.0)
    assert shortened(Offer(4, 2.0), 1).gain == pytest.approx(survival(4, 20))
