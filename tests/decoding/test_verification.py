"""Verification against independent arithmetic: exact laws in float64, and a whole toy decoder in fractions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hf_dsde.decoding import verification
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.verification import (
    VerifiedBlock,
    draw,
    greedy,
    leading_run,
    residual_distribution,
    sample_and_match,
    speculative_sampling,
    verify,
)

DRAWS = 20_000
P_VALUE = 1e-4
"""Seeds are fixed, so a test either always passes or always fails; a right law fails one seed in ten thousand."""

Table = list[list[float]]
Outcome = tuple[int, int]
"""Accepted draft tokens, and the token after them."""


def exact_law(target: Table, draft: Table, tokens: Sequence[int]) -> dict[Outcome, float]:
    """The law of the outcome for given draft tokens, by the definition of speculative sampling, in float64."""
    law: dict[Outcome, float] = {}
    reached = 1.0
    for position, token in enumerate(tokens):
        p, q = target[position], draft[position]
        accepted = min(1.0, p[token] / q[token]) if q[token] > 0 else 1.0
        residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        for replacement, mass in enumerate(residual):
            if sum(residual) > 0:
                law[position, replacement] = reached * (1 - accepted) * mass / sum(residual)
        reached *= accepted
    for bonus, mass in enumerate(target[len(tokens)]):
        law[len(tokens), bonus] = reached * mass
    return law


def p_value(observed: dict[Outcome, int], law: dict[Outcome, float]) -> float:
    """Pearson's chi-squared test; outcomes too rare for it are put together, impossible ones end it."""
    total = sum(observed.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in observed):
        return 0.0
    common = [outcome for outcome, mass in law.items() if mass * total >= 5]
    counts = [observed.get(outcome, 0) for outcome in common]
    expected = [law[outcome] * total for outcome in common]
    if total - sum(expected) > 1e-3:
        counts.append(total - sum(counts))
        expected.append(total - sum(expected))
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    return float(stats.chi2.sf(statistic, max(len(counts) - 1, 1)))


Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], VerifiedBlock]


def matching(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> VerifiedBlock:
    """The rule for tokens of any origin, which is shown no distribution of theirs."""
    return verification.sample_and_match(target_probs, tokens, lengths)


def draw_outcomes(
    target: Table, draft: Table, tokens: Sequence[int], padding: int = 0, rule: Rule = speculative_sampling
) -> dict[Outcome, int]:
    """Outcomes of many rows with the same tables; `padding` columns of nonsense follow the draft."""
    width, vocabulary = len(tokens) + padding, len(target[0])
    target_probs = torch.full((DRAWS, width + 1, vocabulary), torch.nan)
    target_probs[:, : len(tokens) + 1] = torch.tensor(target[: len(tokens) + 1])
    draft_probs = torch.full((DRAWS, width, vocabulary), torch.nan)
    draft_tokens = torch.full((DRAWS, width), vocabulary - 1)
    if tokens:
        draft_probs[:, : len(tokens)] = torch.tensor(draft[: len(tokens)])
        draft_tokens[:, : len(tokens)] = torch.tensor(tokens)
    lengths = torch.full((DRAWS,), len(tokens))
    torch.manual_seed(0)
    verdict = rule(target_probs, draft_probs, draft_tokens, lengths)
    observed: dict[Outcome, int] = defaultdict(int)
    for outcome in zip(verdict.accepted.tolist(), verdict.next_tokens.tolist(), strict=True):
        observed[outcome] += 1
    return observed


TARGET = [[0.5, 0.2, 0.3, 0.0], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.9, 0.1]]
DRAFT = [[0.2, 0.4, 0.2, 0.2], [0.3, 0.3, 0.4, 0.0], [0.7, 0.0, 0.1, 0.2]]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("tokens", [[], [1], [0, 2], [1, 0, 0], [2, 2, 3], [1, 2, 0]], ids=str)
def test_outcomes_for_given_draft_tokens_follow_the_exact_law(tokens: list[int], padding: int) -> None:
    law = exact_law(TARGET, DRAFT, tokens)
    assert sum(law.values()) == pytest.approx(1.0)
    assert p_value(draw_outcomes(TARGET, DRAFT, tokens, padding), law) > P_VALUE


def certain(tokens: Sequence[int]) -> Table:
    """The law of a draft that is certain to propose these tokens."""
    return [[float(token == other) for other in range(len(TARGET[0]))] for token in tokens]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("tokens", [[], [1], [3], [0, 2], [1, 0, 0], [2, 1, 3], [1, 2, 0]], ids=str)
def test_tokens_of_any_origin_are_judged_as_if_they_were_certain_to_be_drafted(tokens: list[int], padding: int) -> None:
    law = exact_law(TARGET, certain(tokens), tokens)
    assert p_value(draw_outcomes(TARGET, DRAFT, tokens, padding, matching), law) > P_VALUE


def accept_the_likely(target_probs: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> VerifiedBlock:
    """Mutant: compares with the target's best token, and draws only what follows."""
    accepted = leading_run(tokens == target_probs[:, :-1].argmax(-1), lengths)
    return VerifiedBlock(accepted, draw(target_probs[torch.arange(len(tokens)), accepted]))


def draw_again(target_probs: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> VerifiedBlock:
    """Mutant: replaces a token that was not drawn by another draw, which may be that very token."""
    accepted = sample_and_match(target_probs, tokens, lengths).accepted
    return VerifiedBlock(accepted, draw(target_probs[torch.arange(len(tokens)), accepted]))


@pytest.mark.parametrize("mutant", [accept_the_likely, draw_again])
def test_wrong_rules_for_tokens_of_any_origin_are_noticed(mutant: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "sample_and_match", mutant)
    tokens = [1, 2, 0]
    law = exact_law(TARGET, certain(tokens), tokens)
    assert p_value(draw_outcomes(TARGET, DRAFT, tokens, 0, matching), law) < P_VALUE / 100


def test_the_rule_follows_from_the_law_and_from_whether_text_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("greedy", "speculative_sampling", "sample_and_match"):
        monkeypatch.setattr(verification, name, lambda *_, name=name: called.append(name))
    scores, tokens, lengths = torch.zeros(2, 3, 4), torch.zeros(2, 2, dtype=torch.long), torch.tensor([2, 1])
    for law in ({}, {"law": Sampled(torch.full((2, 2, 4), 0.25))}):
        for do_sample in (False, True):
            verify(scores, CandidateBatch(tokens, lengths, **law), do_sample=do_sample)
    assert called == ["greedy", "sample_and_match", "greedy", "speculative_sampling"]


def test_first_token_follows_the_target_whatever_the_draft_is() -> None:
    target, draft = torch.tensor(TARGET[0]), torch.tensor(DRAFT[0])
    torch.manual_seed(0)
    tokens = torch.multinomial(draft, DRAWS, replacement=True)[:, None]
    target_probs = torch.stack([target, torch.tensor(TARGET[1])]).expand(DRAWS, -1, -1)
    verdict = speculative_sampling(
        target_probs, draft.expand(DRAWS, 1, -1), tokens, torch.ones(DRAWS, dtype=torch.long)
    )
    first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.next_tokens)
    counts = torch.bincount(first, minlength=4).tolist()
    observed = {(0, token): count for token, count in enumerate(counts) if count}
    assert p_value(observed, {(0, token): mass for token, mass in enumerate(TARGET[0])}) > P_VALUE
    # Acceptance is one minus the total variation distance of the two laws.
    expected = sum(min(p, q) for p, q in zip(TARGET[0], DRAFT[0], strict=True))
    assert float(verdict.accepted.double().mean()) == pytest.approx(expected, abs=4 * (0.25 / DRAWS) ** 0.5)


def test_each_row_keeps_to_its_own_length() -> None:
    rows = 4 * DRAWS
    lengths = torch.arange(rows) % 4
    tokens = torch.tensor([1, 2, 0]).expand(rows, -1)
    torch.manual_seed(0)
    verdict = speculative_sampling(
        torch.tensor(TARGET).expand(rows, -1, -1), torch.tensor(DRAFT).expand(rows, -1, -1), tokens, lengths
    )
    for length in range(4):
        mine = lengths == length
        outcomes = zip(verdict.accepted[mine].tolist(), verdict.next_tokens[mine].tolist(), strict=True)
        observed: dict[Outcome, int] = defaultdict(int)
        for outcome in outcomes:
            observed[outcome] += 1
        assert p_value(observed, exact_law(TARGET, DRAFT, [1, 2, 0][:length])) > P_VALUE


def test_impossible_tokens_are_never_accepted_and_never_emitted() -> None:
    # The draft proposes token 3, which the target rules out; the target's residual then has to come from the others.
    outcomes = draw_outcomes([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], [[0.25, 0.0, 0.25, 0.5]], [3])
    assert set(outcomes) == {(0, 0), (0, 1)}


def test_tokens_that_the_target_likes_at_least_as_much_are_always_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(DRAWS, 1, 6, generator=generator).softmax(dim=-1)
    p = q.clone()
    p[:, :, 0] *= 1 + torch.rand(DRAWS, 1, generator=generator)
    tokens = torch.zeros(DRAWS, 1, dtype=torch.long)
    target = torch.cat([p, p], dim=1)
    for draft in (q, p):
        verdict = speculative_sampling(target, draft, tokens, torch.ones(DRAWS, dtype=torch.long))
        assert verdict.accepted.tolist() == [1] * DRAWS


def test_the_largest_uniform_draw_accepts_equal_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    # u * q must not round up to q, for any float32 q: then p == q would be rejected, with nothing in the residual.
    largest = 1 - 2**-24
    monkeypatch.setattr(torch, "rand_like", lambda p: torch.full_like(p, largest))
    q = torch.rand(1000, 1, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    q[0, 0], q[1, 0], q[2, 0] = torch.eye(3)[0], torch.tensor([0.5, 0.5, 0]), torch.tensor([2**-30, 1, 0])
    verdict = speculative_sampling(
        torch.cat([q, q], dim=1), q, torch.zeros(1000, 1, dtype=torch.long), torch.ones(1000, dtype=torch.long)
    )
    assert verdict.accepted.all()


def test_smallest_uniform_draw_does_not_accept_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    verdict = speculative_sampling(
        torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[0.5, 0.5]]]), torch.tensor([[0]]), torch.tensor([1])
    )
    assert verdict.accepted.tolist() == [0]
    assert verdict.next_tokens.tolist() == [1]


def test_residual_without_mass_falls_back_to_the_target() -> None:
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    residual = residual_distribution(p, p[:, :1], accepted=torch.tensor([0]), lengths=torch.tensor([1]))
    assert residual.tolist() == [[0.25, 0.75]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_residual_is_the_positive_part_of_the_difference(rows: int, width: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(rows, width + 1, vocabulary, generator=generator).softmax(dim=-1)
    draft = torch.rand(rows, width, vocabulary, generator=generator).softmax(dim=-1)
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    accepted = (torch.rand(rows, generator=generator) * (lengths + 1)).long()
    residual = residual_distribution(target, draft, accepted, lengths)
    for row in range(rows):
        at = int(accepted[row])
        p = target[row, at].tolist()
        if at < int(lengths[row]):
            expected = [max(0.0, a - b) for a, b in zip(p, draft[row, at].tolist(), strict=True)]
        else:
            expected = p
        assert residual[row].tolist() == pytest.approx(expected, abs=1e-7)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_leading_run_counts_until_the_first_failure(data: st.DataObject) -> None:
    width = data.draw(st.integers(0, 5))
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4))
    lengths = [data.draw(st.integers(0, width)) for _ in rows]
    expected = [len(list(itertools.takewhile(bool, row[:length]))) for row, length in zip(rows, lengths, strict=True)]
    stands = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    assert leading_run(stands, torch.tensor(lengths)).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_greedy_accepts_the_targets_own_choices_and_adds_its_next(data: st.DataObject) -> None:
    width, vocabulary = data.draw(st.integers(0, 4)), 3
    choice = st.integers(0, vocabulary - 1)
    rows = data.draw(st.integers(1, 3))
    target = [data.draw(st.lists(choice, min_size=width + 1, max_size=width + 1)) for _ in range(rows)]
    draft = [data.draw(st.lists(choice, min_size=width, max_size=width)) for _ in range(rows)]
    lengths = [data.draw(st.integers(0, width)) for _ in range(rows)]
    tokens = torch.tensor(draft, dtype=torch.long).reshape(rows, width)
    verdict = greedy(torch.tensor(target), tokens, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        accepted = 0
        while accepted < length and draft[row][accepted] == target[row][accepted]:
            accepted += 1
        assert int(verdict.accepted[row]) == accepted
        assert int(verdict.next_tokens[row]) == target[row][accepted]


# Why a policy can say "stop after this token" and nothing more: a decoder over three tokens, in fractions, with every
# history enumerated. A law is the exact distribution of the first three output tokens.

OUTPUT_TOKENS = 3
Law = dict[tuple[int, ...], Fraction]
FractionTable = dict[int, tuple[Fraction, ...]]


def fractions(*rows: str) -> FractionTable:
    """Distributions by last token; token 0 also stands in front of the text."""
    return {last: tuple(Fraction(entry) for entry in row.split()) for last, row in enumerate(rows)}


TOY_TARGET = fractions("1/2 1/3 1/6", "1/5 3/5 1/5", "1/4 1/4 1/2")
TOY_DRAFT = fractions("1/3 1/3 1/3", "1/10 3/10 3/5", "1/2 3/10 1/5")


def next_law(table: FractionTable, text: tuple[int, ...]) -> tuple[Fraction, ...]:
    return table[text[-1] if text else 0]


@pytest.fixture(params=[2, 3], ids=lambda longest: f"longest={longest}")
def longest(request: pytest.FixtureRequest) -> int:
    return int(request.param)


StopRule = Callable[[tuple[Fraction, ...], int], bool]
"""Takes the draft's distribution and the token drawn from it."""


def blocks(
    text: tuple[int, ...], room: int, before: Callable[[tuple[Fraction, ...]], bool], after: StopRule, drops: bool
) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every block that can be drafted after `text`, with its probability."""
    q = next_law(TOY_DRAFT, text)
    if room == 0 or before(q):
        yield (), Fraction(1)
        return
    for token, mass in enumerate(q):
        if after(q, token):
            yield (() if drops else (token,)), mass
            continue
        for rest, probability in blocks((*text, token), room - 1, before, after, drops):
            yield (token, *rest), mass * probability


def verified(text: tuple[int, ...], block: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    """Every text that verification can make of a block, with its probability."""
    p, q = next_law(TOY_TARGET, text), next_law(TOY_DRAFT, text)
    if not block:
        for bonus, mass in enumerate(p):
            yield (*text, bonus), mass
        return
    accepted = min(Fraction(1), p[block[0]] / q[block[0]])
    for longer, mass in verified((*text, block[0]), block[1:]):
        yield longer, accepted * mass
    residual = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    if accepted < 1:
        for token, mass in enumerate(residual):
            yield (*text, token), (1 - accepted) * mass / sum(residual)


def decoder_law(
    longest: int,
    *,
    before: Callable[[tuple[Fraction, ...]], bool] = lambda q: False,
    after: StopRule = lambda q, token: False,
    drops: bool = False,
) -> Law:
    """The law of a speculative decoder that stops drafting before a token, after it, or by dropping it."""
    finished: Law = defaultdict(Fraction)
    growing: Law = {(): Fraction(1)}
    while growing:
        grown: Law = defaultdict(Fraction)
        for text, probability in growing.items():
            for block, drawn in blocks(text, longest, before, after, drops):
                for longer, kept in verified(text, block):
                    place = finished if len(longer) >= OUTPUT_TOKENS else grown
                    place[longer[:OUTPUT_TOKENS]] += probability * drawn * kept
        growing = grown
    return finished


def distance_to_target(law: Law) -> Fraction:
    """Total variation to the target's own law."""
    total = Fraction(0)
    for text in itertools.product(range(3), repeat=OUTPUT_TOKENS):
        own = Fraction(1)
        for position, token in enumerate(text):
            own *= next_law(TOY_TARGET, text[:position])[token]
        total += abs(own - law.get(text, Fraction(0)))
    return total / 2


def unsure(q: tuple[Fraction, ...], token: int) -> bool:
    return q[token] < Fraction(2, 5)


def test_a_fixed_length_keeps_the_law(longest: int) -> None:
    assert distance_to_target(decoder_law(longest)) == 0


def test_stopping_by_the_distribution_keeps_the_law(longest: int) -> None:
    assert distance_to_target(decoder_law(longest, before=lambda q: max(q) < Fraction(1, 2))) == 0


def test_stopping_after_a_token_because_of_it_keeps_the_law(longest: int) -> None:
    assert distance_to_target(decoder_law(longest, after=unsure)) == 0


def test_dropping_a_token_because_of_it_changes_the_law(longest: int) -> None:
    assert distance_to_target(decoder_law(longest, after=unsure, drops=True)) == Fraction(182, 1875)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_token_is_drawn_as_torch_draws_it_from_the_same_seed(dtype: torch.dtype) -> None:
    weights = torch.rand(50, 300, generator=torch.Generator().manual_seed(0), dtype=dtype).pow(8)
    weights[:, ::3] = 0
    for seed in range(5):
        torch.manual_seed(seed)
        expected = torch.multinomial(weights, num_samples=1)[:, 0]
        torch.manual_seed(seed)
        assert torch.equal(draw(weights), expected)


def test_tokens_are_drawn_in_proportion_to_their_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 4.0, 2.0, 0.01], dtype=torch.float64)
    torch.manual_seed(0)
    counts = torch.bincount(draw(weights.expand(DRAWS, -1)), minlength=5)
    assert counts[1] == 0
    drawn = weights > 0
    assert stats.chisquare(counts[drawn], (DRAWS * weights / weights.sum())[drawn]).pvalue > P_VALUE


@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_what_is_no_law_is_refused(bad: float) -> None:
    weights = torch.rand(3, 5)
    weights[1] = bad
    with pytest.raises(RuntimeError, match="not numbers, or all are 0"):
        draw(weights)
