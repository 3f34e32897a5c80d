"""Rounds without models: text whose every position has an acceptance probability that the draft half knows.

At each position the draft's top probability is drawn, and the target accepts with a probability that follows it: in
`good` text nearly as sure as the draft is, in `bad` text hardly ever. Time is what the cost table says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_dsde.costs import CostModel, LiveCosts
from hf_dsde.policies import BatchInfo, DraftStep, RoundOutcome, StoppingPolicy

LIMIT = 12
VERIFY = [1 + 0.025 * k for k in range(LIMIT + 1)]


def batch_with_costs(
    rows: int,
    draft_cost: float,
    verify: list[float] = VERIFY,
    limit: int = LIMIT,
    resumption: float = 0.0,
    refresh: bool = True,
) -> BatchInfo:
    """A batch that knows what passes cost, in plain steps."""
    relative = CostModel.relative(draft_cost, verify, rows)
    model = CostModel({rows: replace(relative.at(rows), resumption=resumption)})
    return BatchInfo(rows, torch.device("cpu"), 50, limit, 1000, LiveCosts(model, rows, refresh=refresh))


class SimulatedStep(DraftStep):
    """A draft step that knows its signals instead of logits."""

    def __init__(self, position: int, drafting: Tensor, top: Tensor) -> None:
        nothing = torch.empty(len(top), 0)
        super().__init__(position, torch.zeros(len(top), dtype=torch.int64), nothing, nothing, drafting)
        second = (1 - top) * 0.7
        self.top_probabilities = torch.stack([top, second], dim=1)
        rest = (1 - top - second).clamp_min(1e-6)
        self.entropy = -(top * top.log() + second * second.log() + rest * (rest / 20).log())
        self.confidence = top


@dataclass
class Played:
    """What came of it: one entry per round."""

    lengths: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def rate(self, start: int = 0) -> float:
        """Tokens per plain step."""
        return sum(self.tokens[start:]) / sum(self.times[start:])


class Simulation:
    """A policy in a batch of endless texts.

    Args:
        policy: What decides.
        rows: Batch size.
        draft_cost: A draft step, in plain steps.
        seed: Of the text. Two simulations of one seed see the same text, whatever is drafted, as long as they draft
            the same.
        greedy: Labels are 0 or 1 if True, the acceptance probability itself otherwise.
        resumption: What the costs say of drafting after rounds without drafts.
        fixed: What drafting costs in addition in a round with drafts, in plain steps.
        believed: What a draft step is thought to cost at first, if that has to be learnt from the rounds.
    """

    def __init__(
        self,
        policy: StoppingPolicy,
        rows: int,
        draft_cost: float,
        seed: int = 0,
        greedy: bool = True,
        resumption: float = 0.0,
        fixed: float = 0.0,
        believed: float | None = None,
    ) -> None:
        self._policy, self._rows, self._draft_cost, self._greedy = policy, rows, draft_cost, greedy
        self._fixed = fixed
        self._generator = torch.Generator().manual_seed(seed)
        known = draft_cost if believed is None else believed
        batch = batch_with_costs(rows, known, resumption=resumption, refresh=believed is not None)
        self._costs = batch.costs
        policy.start(replace(batch, refilled=True))  # where no text ends, none makes the others wait

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator)

    def play(self, rounds: int, quality: float) -> Played:
        """Go on for some rounds; `quality` scales how often the target accepts."""
        played = Played()
        for _ in range(rounds):
            # Half of all positions are easy: the draft is sure there, and right to be.
            top = torch.where(self._random(self._rows, LIMIT) < 0.5, 0.97, 0.35 + 0.3 * self._random(self._rows, LIMIT))
            acceptance = quality * top
            hits = self._random(self._rows, LIMIT) < acceptance
            self._round(played, top, acceptance, hits)
        return played

    def _round(self, played: Played, top: Tensor, acceptance: Tensor, hits: Tensor) -> None:
        lengths = self._policy.draft_lengths()
        drafting = lengths > 0
        drafted = torch.zeros_like(lengths)
        steps = 0
        while bool(drafting.any()):
            drafted = drafted + drafting
            stops = self._policy.should_stop(SimulatedStep(steps, drafting, top[:, steps]))
            steps += 1
            drafting = drafting & (lengths > steps)
            if stops is not None:
                drafting = drafting & ~stops
        accepted = torch.minimum(hits.long().cumprod(1).sum(1), drafted)
        labels = hits.float() if self._greedy else acceptance
        draft = self._draft_cost * steps + self._fixed * (steps > 0)
        assert self._costs is not None
        self._costs.observe(draft_steps=steps, width=steps + 1, draft=draft, verify=VERIFY[steps], overhead=0.0)
        self._policy.observe(
            RoundOutcome(
                drafted=drafted,
                accepted=accepted,
                active=torch.ones(self._rows, dtype=torch.bool),
                acceptance=labels[:, :steps],
                next_entropy=torch.ones(self._rows),
                next_probability=torch.full((self._rows,), 0.5),
            )
        )
        played.lengths.append(steps)
        played.times.append(draft + VERIFY[steps])
        played.tokens.append(int((accepted + 1).sum()))
