"""Lossy rules of acceptance against the papers' formulas, written out in plain Python, and rules that are wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lossy_references import Reference, consultant, expected_end, law_of, typical
from recorded import NotingCapture
from scipy import stats
from torch import Tensor

from hf_dsde import Consultant, LossyAcceptance, TypicalAcceptance
from hf_dsde.decoding import verification
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.verification import VerifiedBlock, draw, leading_run, verify

VOCABULARY, WIDTH, ROWS = 7, 5, 12
P_VALUE = 1e-4
DRAWS = 20_000

RULES: dict[str, tuple[LossyAcceptance, Reference]] = {
    "consultant, as published": (Consultant(), lambda laws, tokens: consultant(laws, tokens, 2.0, 0.2)),
    "consultant, long memory": (Consultant(1.2, 0.7), lambda laws, tokens: consultant(laws, tokens, 1.2, 0.7)),
    "consultant, no memory": (Consultant(1.5, 0.0), lambda laws, tokens: consultant(laws, tokens, 1.5, 0.0)),
    "typical, as published": (TypicalAcceptance(), lambda laws, tokens: typical(laws, tokens, 0.09, 0.3)),
    "typical, by entropy": (TypicalAcceptance(1.0, 0.8), lambda laws, tokens: typical(laws, tokens, 1.0, 0.8)),
    "typical, by probability": (TypicalAcceptance(0.15, 50.0), lambda laws, tokens: typical(laws, tokens, 0.15, 50.0)),
}


@dataclass
class Block:
    """Scores of which some exclude tokens, drafted tokens of which some are excluded, and nonsense after rows' ends."""

    scores: Tensor
    tokens: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, seed: int) -> Block:
        generator = torch.Generator().manual_seed(seed)
        scores = 2.0 * torch.randn(ROWS, WIDTH + 1, VOCABULARY, generator=generator)
        scores[torch.rand(scores.shape, generator=generator) < 0.15] = -math.inf
        scores[:, :, 0] = scores[:, :, 0].clamp_min(-3.0)  # something is always allowed
        likely = scores.add(torch.randn(scores.shape, generator=generator)).argmax(dim=-1)[:, :-1]
        anything = torch.randint(VOCABULARY, likely.shape, generator=generator)
        tokens = torch.where(torch.rand(likely.shape, generator=generator) < 0.7, likely, anything)
        lengths = torch.randint(0, WIDTH + 1, (ROWS,), generator=generator)
        lengths[0], lengths[1] = 0, WIDTH
        after = torch.arange(WIDTH + 1) > lengths[:, None]
        scores[after] = math.nan
        return cls(scores, tokens, lengths)

    def verify(self, rule: LossyAcceptance, *, do_sample: bool = False) -> VerifiedBlock:
        candidates = CandidateBatch(self.tokens, self.lengths)
        return verify(self.scores, candidates, do_sample=do_sample, acceptance=rule)

    def row(self, row: int) -> tuple[list[list[float]], list[int]]:
        length = int(self.lengths[row])
        laws = [law_of(scores) for scores in self.scores[row, : length + 1].double().tolist()]
        return laws, self.tokens[row, :length].tolist()


def disagreements(rule: LossyAcceptance, reference: Reference, *, greedy: bool, seeds: int = 40) -> int:
    """Rows of random blocks that end otherwise than by the formula, or go on with another token."""
    wrong = known = 0
    for seed in range(seeds):
        block = Block.random(seed)
        torch.manual_seed(seed)
        verified = block.verify(rule, do_sample=not greedy)
        for row in range(ROWS):
            laws, tokens = block.row(row)
            accepted = expected_end(laws, reference(laws[:-1], tokens), tokens, greedy)
            if accepted is None:
                continue
            known += 1
            law, following = laws[accepted], int(verified.next_tokens[row])
            right = law[following] == max(law) if greedy else law[following] > 0
            wrong += int(verified.accepted[row]) != accepted or not right
    assert known > 0.9 * seeds * ROWS
    return wrong


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RULES)
def test_what_stands_is_what_the_formula_says(name: str, greedy: bool) -> None:
    assert disagreements(*RULES[name], greedy=greedy) == 0


@dataclass(frozen=True)
class Changed(LossyAcceptance):
    """A wrong rule."""

    name = "changed"
    function: Callable[[Tensor, Tensor], Tensor]

    def stands(self, scores: Tensor, tokens: Tensor) -> Tensor:
        return self.function(scores, tokens)


def surprises(scores: Tensor, tokens: Tensor) -> Tensor:
    return -scores.log_softmax(dim=-1).gather(2, tokens[:, :, None])[:, :, 0]


def averaged(surprise: Tensor, before: float, now: float, start: Tensor | float = 0.0) -> Tensor:
    columns, average = [], start
    for position in range(surprise.shape[1]):
        average = before * average + now * surprise[:, position]
        columns.append(average)
    return torch.stack(columns, dim=1)


def entropies(scores: Tensor) -> Tensor:
    return torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1)


def likelihoods(scores: Tensor, tokens: Tensor) -> Tensor:
    return (-surprises(scores, tokens)).exp()


WRONG_CONSULTANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights the wrong way round": lambda s, t: averaged(surprises(s, t), 0.8, 0.2) <= 2.0,
    "begins with the first surprise": lambda s, t: (
        averaged(surprises(s, t), 0.2, 0.8, start=surprises(s, t)[:, 0]) <= 2.0
    ),
    "a sum that decays": lambda s, t: averaged(surprises(s, t), 0.2, 1.0) <= 2.0,
    "without memory": lambda s, t: surprises(s, t) <= 2.0,
    "a mean": lambda s, t: surprises(s, t).cumsum(1) / torch.arange(1, WIDTH + 1) <= 2.0,
    "in bits": lambda s, t: averaged(surprises(s, t), 0.2, 0.8) / math.log(2) <= 2.0,
    "of raw scores": lambda s, t: averaged(-s.gather(2, t[:, :, None])[:, :, 0], 0.2, 0.8) <= 2.0,
    "of the best token": lambda s, t: averaged(surprises(s, s.argmax(-1)), 0.2, 0.8) <= 2.0,
    "of the law one further on": lambda s, t: averaged(surprises(s.roll(-1, 1), t), 0.2, 0.8) <= 2.0,
}
WRONG_TYPICALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the larger of the two": lambda s, t: likelihoods(s, t) > (0.3 * (-entropies(s)).exp()).clamp_min(0.09),
    "entropy with the wrong sign": lambda s, t: likelihoods(s, t) > (0.3 * entropies(s).exp()).clamp_max(0.09),
    "entropy in bits": lambda s, t: likelihoods(s, t) > (0.3 * (-entropies(s) / math.log(2)).exp()).clamp_max(0.09),
    "threshold and share exchanged": lambda s, t: likelihoods(s, t) > (0.09 * (-entropies(s)).exp()).clamp_max(0.3),
    "no entropy": lambda s, t: likelihoods(s, t) > 0.09,
    "entropy to all of the block": lambda s, t: (
        likelihoods(s, t) > (0.3 * (-entropies(s).mean(dim=1, keepdim=True)).exp()).clamp_max(0.09)
    ),
}


@pytest.mark.parametrize("name", WRONG_CONSULTANTS)
def test_wrong_consultants_are_noticed(name: str) -> None:
    wrong = Changed(WRONG_CONSULTANTS[name])
    assert disagreements(wrong, RULES["consultant, as published"][1], greedy=False) > 0


@pytest.mark.parametrize("name", WRONG_TYPICALS)
def test_wrong_typical_rules_are_noticed(name: str) -> None:
    wrong = Changed(WRONG_TYPICALS[name])
    assert disagreements(wrong, RULES["typical, as published"][1], greedy=False) > 0


def counts_all_that_stands(stands: Tensor, lengths: Tensor) -> Tensor:
    return (stands & (torch.arange(stands.shape[1]) < lengths[:, None])).long().sum(dim=1)


def forgets_lengths(stands: Tensor, lengths: Tensor) -> Tensor:
    return leading_run(stands, torch.full_like(lengths, stands.shape[1]))


@pytest.mark.parametrize("mutant", [counts_all_that_stands, forgets_lengths])
def test_wrong_counts_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, reference = RULES["typical, as published"]
    # After a row's end anything may stand, which must not count.
    lenient = Changed(lambda scores, tokens: rule.stands(scores, tokens) | scores[:, :, 0].isnan())
    assert disagreements(lenient, reference, greedy=True) == 0
    monkeypatch.setattr(verification, "leading_run", mutant)
    assert disagreements(lenient, reference, greedy=True) > 0


# The token after the accepted ones, when sampling: drawn from the target's whole law.

SCORES = torch.tensor([[0.5, 0.2, 0.25, 0.05], [0.1, 0.6, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1]]).log()


def next_token_p_value(tokens: list[int], accepted: int) -> float:
    """Draw many times after a fixed block, and compare with the target's law."""
    scores = SCORES[: len(tokens) + 1].expand(DRAWS, -1, -1)
    block = torch.tensor(tokens, dtype=torch.long).expand(DRAWS, -1)
    lengths = torch.full((DRAWS,), len(tokens))
    q = torch.full((DRAWS, len(tokens), 4), 0.25)
    torch.manual_seed(0)
    candidates = CandidateBatch(block, lengths, Sampled(q))
    verified = verify(scores, candidates, do_sample=True, acceptance=Consultant(1.4, 0.0))
    assert verified.accepted.tolist() == [accepted] * DRAWS
    counts = Counter(verified.next_tokens.tolist())
    law = SCORES[accepted].double().softmax(dim=-1).tolist()
    return float(stats.chisquare([counts[token] for token in range(4)], [DRAWS * mass for mass in law]).pvalue)


@pytest.mark.parametrize(("tokens", "accepted"), [([], 0), ([3, 1], 0), ([0, 0], 1), ([2, 1], 2)], ids=str)
def test_the_token_after_them_is_drawn_from_the_targets_law(tokens: list[int], accepted: int) -> None:
    assert next_token_p_value(tokens, accepted) > P_VALUE


def drawn_without_the_rejected(weights: Tensor) -> Tensor:
    """Mutant: takes what the exact rule takes, a residual without the drafted token 3."""
    return draw(weights * (torch.arange(4) != 3))


def best(weights: Tensor) -> Tensor:
    """Mutant: the best token where one is to be drawn."""
    return weights.argmax(dim=-1)


@pytest.mark.parametrize("mutant", [drawn_without_the_rejected, best])
def test_wrong_draws_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "draw", mutant)
    assert next_token_p_value([3, 1], 0) < P_VALUE / 100


# Corners.


def test_how_tokens_were_drafted_makes_no_difference() -> None:
    block = Block.random(3)
    for rule, _ in RULES.values():
        verdicts = []
        for law in ({}, {"law": Sampled(torch.full((ROWS, WIDTH, VOCABULARY), 1 / VOCABULARY))}):
            torch.manual_seed(1)
            candidates = CandidateBatch(block.tokens, block.lengths, **law)
            verdicts.append(verify(block.scores, candidates, do_sample=True, acceptance=rule))
        assert torch.equal(verdicts[0].accepted, verdicts[1].accepted)
        assert torch.equal(verdicts[0].next_tokens, verdicts[1].next_tokens)


def test_a_token_without_surprise_stands_at_the_strictest_threshold() -> None:
    scores, tokens = torch.tensor([[[0.0, -math.inf]]]), torch.tensor([[0]])
    assert Consultant(threshold=0.0).stands(scores, tokens).all()


def test_a_token_exactly_at_the_threshold_is_not_typical() -> None:
    scores, tokens = torch.zeros(1, 1, 2), torch.tensor([[0]])
    assert not TypicalAcceptance(0.5, 50.0).stands(scores, tokens).any()
    assert TypicalAcceptance(0.4999, 50.0).stands(scores, tokens).all()


@pytest.mark.parametrize("rule", [Consultant(1e30, 0.0), Consultant(1e30, 0.9), TypicalAcceptance(1e-30, 1e-30)])
def test_a_token_that_is_excluded_never_stands(rule: LossyAcceptance) -> None:
    scores = torch.tensor([[0.0, -math.inf, -60.0]]).expand(1, 3, -1)
    stands = rule.stands(scores, torch.tensor([[2, 1, 2]]))
    assert stands[0, :2].tolist() == [True, False]
    assert rule.stands(scores, torch.tensor([[2, 2, 2]])).all()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_block_without_drafts_is_a_plain_step(name: str, do_sample: bool) -> None:
    scores, lengths = torch.randn(3, 1, 5), torch.zeros(3, dtype=torch.long)
    nothing = CandidateBatch.nothing(lengths, 5, frozenset())
    torch.manual_seed(0)
    verified = verify(scores, nothing, do_sample=do_sample, acceptance=RULES[name][0])
    assert verified.accepted.tolist() == [0, 0, 0]
    torch.manual_seed(0)
    expected = draw(scores[:, 0].softmax(-1)) if do_sample else scores[:, 0].argmax(-1)
    assert torch.equal(verified.next_tokens, expected)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_verification_can_be_recorded_and_replayed_over_other_blocks(name: str, do_sample: bool) -> None:
    """What waits for a device cannot be recorded; what has a block's numbers in it shows in the next one."""
    blocks = [Block.random(seed) for seed in range(3)]
    for block in blocks:
        block.lengths = torch.full_like(block.lengths, WIDTH)
        block.scores = block.scores.nan_to_num(0.0, neginf=-math.inf)
    rule = RULES[name][0]
    static = Block(*(part.clone() for part in (blocks[0].scores, blocks[0].tokens, blocks[0].lengths)))
    replay = NotingCapture()(lambda: tuple(static.verify(rule, do_sample=do_sample)))
    for block in blocks[1:]:
        static.scores.copy_(block.scores)
        static.tokens.copy_(block.tokens)
        torch.manual_seed(0)
        replay()
        torch.manual_seed(0)
        expected = block.verify(rule, do_sample=do_sample)
        assert all(torch.equal(*pair) for pair in zip(replay.output, expected, strict=True))
