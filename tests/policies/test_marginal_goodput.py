"""`marginal_goodput` against a transcription in plain Python, and what it makes of texts that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_marginal_goodput import Reference, Row
from simulated_rounds import LIMIT, SimulatedStep, Simulation, batch_with_costs
from torch import Tensor

from hf_dsde.policies import MarginalGoodputPolicy, RoundOutcome, StaticPolicy
from hf_dsde.policies.acceptance_model import FIRST, NEXT, NOWCAST, PLAIN_NOWCAST, AcceptanceModel

SLOPE = [1 + 0.0301 * k for k in range(LIMIT + 1)]
"""An odd slope: with round numbers the time put aside for a probe comes out at exactly its price."""


class Pair:
    """The policy and its reference, fed with the same random rounds."""

    def __init__(self, rows: int, draft_cost: float, limit: int, seed: int, **knobs: Any) -> None:
        self.policy = MarginalGoodputPolicy(forgetting=1.0, **knobs)
        self.policy.start(batch_with_costs(rows, draft_cost, SLOPE, limit, refresh=False))
        self.reference = Reference(
            times=[k * draft_cost + SLOPE[k] for k in range(limit + 1)],
            rows=[Row() for _ in range(rows)],
            optimism=self.policy.optimism,
            probe_share=self.policy.probe_share,
            warmup_rounds=-(-self.policy.warmup_tokens // rows),
        )
        self.rows, self.limit = rows, limit
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def round(self, quality: float) -> bool:
        """Play one round; False once a decision was so close that rounding may have made it."""
        lengths = self.policy.draft_lengths()
        if self.reference.closest < 1e-4:
            return False
        assert bool((lengths > 0).all()) == self.reference.drafting
        active = self.random(self.rows) < 0.9
        drafting = active & (lengths > 0) & (self.random(self.rows) < 0.95)
        steps, drafted, hits = 0, torch.zeros_like(lengths), []
        while bool(drafting.any()):
            top = 0.1 + 0.89 * self.random(self.rows)
            step = SimulatedStep(steps, drafting, top)
            stops = self.policy.should_stop(step)
            pairs = [(float(a), float(b)) for a, b in step.top_probabilities]
            expected = self.reference.stops(pairs, step.entropy.tolist(), drafting.tolist())
            if self.reference.closest < 1e-4:
                return False
            assert stops.tolist() == [expected] * self.rows
            hits.append(self.random(self.rows) < quality * top)
            drafted, steps = drafted + drafting, steps + 1
            drafting = drafting & ~stops
        accepted = torch.zeros_like(drafted)
        if hits:
            accepted = torch.minimum(torch.stack(hits, 1).long().cumprod(1).sum(1), drafted)
        labels = quality * (0.7 + 0.3 * self.random(self.rows, steps))
        entropy, probability = 3 * self.random(self.rows), 0.05 + 0.9 * self.random(self.rows)
        self.policy.observe(
            RoundOutcome(
                drafted, accepted, active, acceptance=labels, next_entropy=entropy, next_probability=probability
            )
        )
        self.reference.observe(*(value.tolist() for value in (drafted, accepted, active, labels, entropy, probability)))
        return True


@pytest.mark.parametrize(
    ("rows", "draft_cost", "knobs"),
    [
        (1, 0.1, {}),
        (1, 0.3, {"optimism": 0.0, "probe_share": 0.0517}),
        (3, 0.1, {"warmup_tokens": 0}),
        (5, 0.3, {"optimism": 2.0}),
    ],
)
def test_decides_as_its_transcription(rows: int, draft_cost: float, knobs: dict[str, Any]) -> None:
    rounds = surprises = 0
    for seed in range(4):
        pair = Pair(rows, draft_cost, limit=6, seed=seed, **knobs)
        for number in range(90):
            # Good, bad, good again: so that the models are wrong at times, and surprise has its turn.
            if not pair.round(0.95 if number // 30 != 1 else 0.1):
                break
            rounds += 1
        surprises += pair.reference.surprises
        learnt = pair.policy._model.coefficients
        for index, name in ((PLAIN_NOWCAST, "plain"), (NOWCAST, "nowcast"), (FIRST, "first"), (NEXT, "next")):
            expected = torch.tensor(getattr(pair.reference, name).theta)
            torch.testing.assert_close(learnt[index], expected, atol=2e-3, rtol=2e-3)
        assert float(pair.policy._value) == pytest.approx(pair.reference.token_value(), rel=1e-4)
        assert float(pair.policy._budget) == pytest.approx(pair.reference.budget, abs=1e-3)
    assert rounds > 100  # most runs have to have got far
    assert surprises > 0 or rows < 5  # with fewer rows, 30 rounds bring too few tokens to be surprised by


def test_the_filter_finds_the_probabilities_of_a_stationary_text() -> None:
    """Two kinds of token, accepted nine times in ten and once in ten; labels are exact probabilities."""
    model = AcceptanceModel(torch.device("cpu"), forgetting=1.0)
    features = torch.zeros(4, 2, 7)
    features[..., 0] = 1.0
    features[:, 1, 1] = -2.0
    labels, counts = torch.tensor([0.9, 0.1]), torch.ones(4, 2)
    for _ in range(300):
        model.learn(features, labels, counts)
    for index in range(4):
        torch.testing.assert_close(model.predict(index, features[index]), labels, atol=0.02, rtol=0)


def test_doubt_shrinks_with_samples_and_returns_after_a_surprise() -> None:
    model = AcceptanceModel(torch.device("cpu"), forgetting=1.0)
    features = torch.ones(4, 1, 7)
    before = float(model.uncertainty(NEXT, features[NEXT, 0]))
    for _ in range(50):
        model.learn(features, torch.ones(1), torch.ones(4, 1))
    after = float(model.uncertainty(NEXT, features[NEXT, 0]))
    model.unsettle(torch.tensor(False))
    assert float(model.uncertainty(NEXT, features[NEXT, 0])) == pytest.approx(after)
    model.unsettle(torch.tensor(True))
    assert after < before / 2
    assert float(model.uncertainty(NEXT, features[NEXT, 0])) == pytest.approx(before)


@pytest.mark.parametrize("greedy", [True, False])
def test_for_a_single_sequence_it_beats_every_fixed_length(greedy: bool) -> None:
    """The draft knows which of its tokens are easy, and a fixed length does not."""
    fixed = [Simulation(StaticPolicy(k), 1, 0.1, greedy=greedy).play(800, 0.95).rate() for k in range(2, 7)]
    played = Simulation(MarginalGoodputPolicy(), 1, 0.1, greedy=greedy).play(800, 0.95)
    assert played.rate(100) > 1.02 * max(fixed)


def test_stops_for_the_whole_batch_at_once() -> None:
    policy = MarginalGoodputPolicy()
    policy.start(batch_with_costs(4, 0.2, limit=6))
    for position in range(6):
        stops = policy.should_stop(SimulatedStep(position, torch.ones(4, dtype=torch.bool), torch.full((4,), 0.9)))
        assert len(set(stops.tolist())) == 1
    assert stops.tolist() == [True] * 4  # nothing is drafted beyond the longest draft


def test_labels_of_untested_positions_are_not_read() -> None:
    """After a rejection the prefix never became text: what stands there must not be learnt."""
    lessons = []
    for beyond in (0.0, 1.0, float("nan")):
        policy = MarginalGoodputPolicy()
        policy.start(batch_with_costs(1, 0.1))
        for position in range(4):
            policy.should_stop(SimulatedStep(position, torch.tensor([True]), torch.tensor([0.8])))
        drafted, accepted, half = torch.tensor([4]), torch.tensor([1]), torch.tensor([0.5])
        labels = torch.tensor([[1.0, 0.0, beyond, beyond]])
        policy.observe(
            RoundOutcome(drafted, accepted, drafted > 0, acceptance=labels, next_entropy=half, next_probability=half)
        )
        lessons.append(policy._model.coefficients)
    assert torch.equal(lessons[0], lessons[1])
    assert torch.equal(lessons[0], lessons[2])
