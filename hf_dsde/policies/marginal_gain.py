"""The arithmetic of `marginal_goodput`: what a further token is worth, and what a round teaches.

Functions of tensors. What is decided on the host, such as the position in a round, comes as a tensor too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dsde.policies import acceptance_model as model
from hf_dsde.policies.row_history import RowState

ROW_PRIOR = 3.0
"""Tested tokens that the batch's acceptance rate counts for in a row's own."""
RATE_DECAY = 0.99
"""Decay per round of the running time and tokens of a round."""
LABEL_DECAY = 0.999
"""Decay per tested token of the batch's acceptance rate."""
SURPRISE_DECAY = 0.98
"""Per tested token ..."""
SURPRISE_LEAST_DECAY = 0.8
"""... and the least per round."""
SURPRISE_LIMIT = 3.0
"""Standard deviations between predicted and seen acceptance of late that mean another text, ..."""
SURPRISE_TOLERANCE = 0.02
"""... beyond an error of this much per token, which a model that is only nearly right may make."""


@dataclass
class RowRecord(RowState):
    """What is remembered of each row.

    Attributes:
        accepted: Labels of tested tokens, decayed, shape `[rows]`, float32.
        tested: How many, decayed, shape `[rows]`, float32.
        residual: Labels minus predictions, decayed, shape `[rows]`, float32.
        next_entropy: Of the target after the last token, shape `[rows]`, float32.
        next_probability: Of the last token under the target, shape `[rows]`, float32.
        all_accepted: 1 where the last round's drafts were all accepted, shape `[rows]`, float32.
        active: Rows that were going on in the last round, shape `[rows]`, bool.
    """

    accepted: Tensor
    tested: Tensor
    residual: Tensor
    next_entropy: Tensor
    next_probability: Tensor
    all_accepted: Tensor
    active: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the fields in order."""
        return tuple(vars(self).values())


class Probes(NamedTuple):
    """Time to spend on tokens that are expected to lose, and the probe of this round; scalars, float32."""

    budget: Tensor
    price: Tensor
    at: Tensor


class Tally(NamedTuple):
    """What is remembered of the batch: decayed sums, scalars, float32."""

    label_sum: Tensor
    label_count: Tensor
    time: Tensor
    tokens: Tensor
    deviation: Tensor
    variance: Tensor
    noticed: Tensor


class Outlook(NamedTuple):
    """What a round starts from. All but `survival` stays as it is until the round is verified.

    Attributes:
        row_logit: `logit` of each row's recent acceptance rate, shape `[rows]`, float32.
        bias: How much more was accepted of late than predicted, times 4, shape `[rows]`, float32.
        first: Features of the first draft token, shape `[rows, FEATURES]`, float32.
        token_value: Plain steps that one token of one row has taken lately, scalar, float32.
        length: Tokens that the round drafts at most, scalar, int64.
        survival: Probability that all tokens drafted so far are accepted, shape `[rows]`, float32.
    """

    row_logit: Tensor
    bias: Tensor
    first: Tensor
    token_value: Tensor
    length: Tensor
    survival: Tensor


class Verified(NamedTuple):
    """What a round brought, as in `RoundOutcome`."""

    drafted: Tensor
    accepted: Tensor
    active: Tensor
    next_entropy: Tensor
    next_probability: Tensor


@dataclass
class Knowledge:
    """All that outlives a round."""

    rows: RowRecord
    regressions: model.AcceptanceModel
    tally: Tally
    probes: Probes

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all of it, flat."""
        return (*self.rows.tensors(), *self.regressions.tensors(), *self.tally, *self.probes)

    def holding(self, tensors: Iterator[Tensor]) -> Knowledge:
        """Return knowledge of the same form that takes its tensors from `tensors`."""
        return Knowledge(
            RowRecord(*islice(tensors, 7)),
            self.regressions.holding(*islice(tensors, 3)),
            Tally(*islice(tensors, 7)),
            Probes(*islice(tensors, 3)),
        )


class MarginalGain(NamedTuple):
    """What `MarginalGoodputPolicy` computes.

    Attributes:
        form: Knowledge whose tensors are not looked at.
        features: Puts together what the regressions read.
        positions: `0 .. longest - 1`, int64.
        longest: The longest draft.
        optimism: As in the policy.
        row_memory: As in the policy.
        exploration: The largest budget for probes, in rounds' time, scalar, float32.
        put_aside: Share of time that is put aside for probes.
    """

    form: Knowledge
    features: model.Features
    positions: Tensor
    longest: int
    optimism: float
    row_memory: float
    exploration: Tensor
    put_aside: float

    def step(
        self,
        top: Tensor,
        entropy: Tensor,
        drafting: Tensor,
        survival: Tensor,
        cost: Tensor,
        length: Tensor,
        coefficients: Tensor,
        covariance: Tensor,
        row_logit: Tensor,
        bias: Tensor,
        token_value: Tensor,
        *probes: Tensor,
    ) -> tuple[Tensor, ...]:
        """Judge a draft token and whether another is worth it.

        Args:
            top: As in `Features.draft`.
            entropy: As in `Features.draft`.
            drafting: Rows that drafted the token, shape `[rows]`, bool.
            survival: Probability that all tokens before it are accepted, shape `[rows]`, float32.
            cost: Plain steps that another token takes, scalar, float32; minus infinity where it is drafted anyway.
            length: Tokens drafted by now, scalar, float32.
            coefficients: As in `AcceptanceModel`.
            covariance: As in `AcceptanceModel`.
            row_logit: As in `Outlook`.
            bias: As in `Outlook`.
            token_value: As in `Outlook`.
            probes: `Probes`.

        Returns:
            Whether rows stop, shape `[rows]`, bool; the token's features, `[rows, FEATURES]`; its survival, `[rows]`;
            `Probes`.
        """
        regressions = self.form.regressions.holding(coefficients, covariance, covariance)
        features = self.features.draft(top, entropy, bias)
        nowcast = regressions.predict(model.NOWCAST, features)
        survival = nowcast * drafting * survival
        ahead = self.features.next(row_logit, features, nowcast)
        gain = self._gain(regressions, model.NEXT, ahead, survival, token_value)
        goes_on, left = _decide(gain, cost, length, Probes(*probes))
        return (~goes_on).expand_as(drafting), features, survival, *left

    def end_round(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take note of a round without drafts; see `learn_and_end_round`, whose last arguments these are."""
        return self._end_round(iter(tensors), was_drafted=False)

    def learn_and_end_round(
        self, acceptance: Tensor, draft: Tensor, row_logit: Tensor, first: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Learn from a round and begin the next one.

        Args:
            acceptance: As in `RoundOutcome`, shape `[rows, width]`: read where a token was tested.
            draft: Features of the draft tokens, shape `[rows, width, FEATURES]`, finite.
            row_logit: Of the round's `Outlook`.
            first: Of the round's `Outlook`.
            tensors: `times` and the cost of a first token, both as in `CostTable`, then those of `Verified` and of
                `Knowledge`.

        Returns:
            The tensors of `Knowledge` and of `Outlook`.
        """
        return self._end_round(iter(tensors), True, acceptance, draft, row_logit, first)

    def begin_round(self, known: Knowledge, first_cost: Tensor, was_drafted: bool) -> tuple[Knowledge, Outlook]:
        """Decide whether anything is drafted.

        Args:
            known: What is known.
            first_cost: As the cost in `step`.
            was_drafted: Whether the round before drafted: else a probe that it had announced is not paid for.
        """
        rows, tally, probes = known.rows, known.tally, known.probes
        overall = tally.label_sum / tally.label_count
        weight = rows.tested + ROW_PRIOR
        row_logit = model.logit((rows.accepted + ROW_PRIOR * overall) / weight)
        bias = 4 * (rows.residual / weight)
        first = self.features.first(row_logit, bias, rows.next_entropy, rows.next_probability, rows.all_accepted)
        value = _token_value(rows.active, tally)
        gain = self._gain(known.regressions, model.FIRST, first, rows.active.float(), value)
        budget = probes.budget if was_drafted else probes.budget + probes.price
        zero = self.features.zero
        goes_on, probes = _decide(gain, first_cost, zero, Probes(budget, zero, probes.at))
        length = self.longest * goes_on.long()
        outlook = Outlook(row_logit, bias, first, value, length, survival=self.features.one.expand_as(bias))
        return Knowledge(rows, known.regressions, tally, probes), outlook

    def _gain(
        self, regressions: model.AcceptanceModel, regression: int, features: Tensor, survival: Tensor, value: Tensor
    ) -> Tensor:
        """Plain steps that a further token is expected to save, with the benefit of the doubt.

        What is not known well yet is taken to be `optimism` standard deviations better than predicted: a length that
        is never drafted would never be known better.
        """
        mass = survival.sum().clamp_min(1e-6)
        mean = (survival * regressions.predict(regression, features)).sum() / mass
        centre = (survival.unsqueeze(-1) * features).sum(0) / mass
        doubt = self.optimism * mean * (1 - mean) * regressions.uncertainty(regression, centre)
        return mass * (mean + doubt) * value

    def _end_round(self, tensors: Iterator[Tensor], was_drafted: bool, *lesson: Tensor) -> tuple[Tensor, ...]:
        times, first_cost = islice(tensors, 2)
        verified = Verified(*islice(tensors, 5))
        known = self.form.holding(tensors)
        if was_drafted:
            self._learn(known, verified, *lesson)
        self._settle(known, verified, times)
        learning = verified.active & (verified.drafted > 0)
        full = (verified.accepted >= verified.drafted).float()
        rows = known.rows
        known.rows = RowRecord(
            accepted=rows.accepted,
            tested=rows.tested,
            residual=rows.residual,
            next_entropy=torch.where(learning, verified.next_entropy, rows.next_entropy),
            next_probability=torch.where(learning, verified.next_probability, rows.next_probability),
            all_accepted=torch.where(learning, full, rows.all_accepted),
            active=verified.active,
        )
        known, outlook = self.begin_round(known, first_cost, was_drafted)
        return (*known.tensors(), *outlook)

    def _learn(
        self, known: Knowledge, verified: Verified, acceptance: Tensor, draft: Tensor, row_logit: Tensor, first: Tensor
    ) -> None:
        """Update the models, the rows' records and the batch's, from the tested positions."""
        position = self.positions[: acceptance.shape[1]]
        tested = torch.minimum(verified.drafted, verified.accepted + 1) * verified.active
        is_tested = position < tested.unsqueeze(-1)
        labels = torch.where(is_tested, acceptance.float(), self.features.zero)
        counts = is_tested.float()
        plain = torch.nn.functional.pad(draft[..., :-1], (0, 1))
        residual = (labels - known.regressions.predict(model.PLAIN_NOWCAST, plain)) * counts
        nowcast = known.regressions.predict(model.NOWCAST, draft)
        behind = self.features.next(row_logit.unsqueeze(-1).expand_as(nowcast), draft, nowcast)
        ahead = torch.cat([first.unsqueeze(1), behind], dim=1)[:, : draft.shape[1]]

        is_first = (position == 0).float()
        features = torch.stack([plain, draft, ahead, ahead]).flatten(1, 2)
        firsts = counts * is_first
        samples = torch.stack([counts, counts, firsts, counts - firsts]).flatten(1)
        known.regressions.learn(features, labels.flatten(), samples)

        rows, tally = known.rows, known.tally
        memory = self.row_memory ** (tested.unsqueeze(-1) - 1 - position).clamp_min(0).float() * counts
        kept = self.row_memory ** tested.float()
        known.rows = RowRecord(
            kept * rows.accepted + (memory * labels).sum(1),
            kept * rows.tested + memory.sum(1),
            kept * rows.residual + (memory * residual).sum(1),
            *rows.tensors()[3:],
        )
        total = counts.sum()
        forgotten = LABEL_DECAY**total
        kept = (SURPRISE_DECAY**total).clamp_min(SURPRISE_LEAST_DECAY)
        known.tally = tally._replace(
            label_sum=forgotten * tally.label_sum + labels.sum(),
            label_count=forgotten * tally.label_count + total,
            deviation=kept * tally.deviation + ((labels - nowcast) * counts).sum(),
            variance=kept * tally.variance + (nowcast * (1 - nowcast) * counts).sum(),
            noticed=kept * tally.noticed + total,
        )
        self._notice(known)

    def _notice(self, known: Knowledge) -> None:
        """Distrust what was learnt when acceptance has lately lain far from what was predicted."""
        tally, probes, zero = known.tally, known.probes, self.features.zero
        limit = SURPRISE_LIMIT * (tally.variance + 0.25).sqrt() + SURPRISE_TOLERANCE * tally.noticed
        surprised = tally.deviation.abs() > limit
        known.regressions.unsettle(surprised)
        scale = torch.where(surprised, ROW_PRIOR / tally.label_count.clamp_min(ROW_PRIOR), self.features.one)
        # A draft that has become better is worth trying at once; one that has become worse is not.
        known.probes = probes._replace(
            budget=torch.where(surprised & (tally.deviation > 0), self.exploration, probes.budget)
        )
        known.tally = tally._replace(
            label_sum=scale * tally.label_sum,
            label_count=scale * tally.label_count,
            deviation=torch.where(surprised, zero, tally.deviation),
            variance=torch.where(surprised, zero, tally.variance),
            noticed=torch.where(surprised, zero, tally.noticed),
        )

    def _settle(self, known: Knowledge, verified: Verified, times: Tensor) -> None:
        """Take note of the round's time and tokens, and pay for probes."""
        active, probes = verified.active, known.probes
        spent = times.take(verified.drafted.max().clamp_max(self.longest))
        gained = ((verified.accepted + 1) * active).sum() / active.sum().clamp_min(1)
        known.tally = known.tally._replace(
            time=RATE_DECAY * known.tally.time + spent, tokens=RATE_DECAY * known.tally.tokens + gained
        )
        lucky = ((verified.accepted > probes.at) * active).sum() * _token_value(known.rows.active, known.tally)
        refund = torch.minimum(lucky, probes.price)  # the price is 0 when there was no probe
        budget = torch.minimum(probes.budget + refund + self.put_aside * spent, self.exploration * spent)
        known.probes = probes._replace(budget=budget)


def padded_block(features: Sequence[Tensor], width: int) -> Tensor:
    """Stack the features of draft tokens and fill up with zeros, `[rows, width, FEATURES]`."""
    missing = [torch.zeros_like(features[0])] * (width - len(features))
    return torch.stack([*features[:width], *missing], dim=1)


def _decide(gain: Tensor, cost: Tensor, length: Tensor, probes: Probes) -> tuple[Tensor, Probes]:
    """Whether a token after `length` drafted ones is drafted, because it pays, or as a probe; and the probes then."""
    pays = gain > cost
    probed = ~pays & (probes.budget >= cost) & (probes.price == 0)
    return pays | probed, Probes(
        budget=torch.where(probed, probes.budget - cost, probes.budget),
        price=torch.where(probed, cost, probes.price),
        at=torch.where(probed, length, probes.at),
    )


def _token_value(active: Tensor, tally: Tally) -> Tensor:
    """Plain steps that one token of one row has taken lately, scalar, float32."""
    return tally.time / (tally.tokens * active.sum().clamp_min(1))
