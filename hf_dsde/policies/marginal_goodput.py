"""Draft one more token for the batch while what it is expected to add is worth more than the time it takes.

The batch drafts in lockstep, so the question is one for the batch: a further step costs every row a draft step and a
column of verification, and brings each row a token if all its drafts so far are accepted and the next one is. Both
probabilities are predicted from the draft's own distributions by `AcceptanceModel`, which learns from each verified
position what the target really thought of it. Time is measured; a token's price is the time the batch has needed per
token lately, so that the rule seeks the largest ratio of the two (Dinkelbach's method for fractional programmes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dsde.policies.acceptance_model import FIRST, NEXT, NOWCAST, PLAIN_NOWCAST, AcceptanceModel, logit
from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.cost_table import CostTable
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState
from hf_dsde.utils.checks import check_integer, check_number

RATE_PRIOR = 4.0
"""Rounds of (1 plain step, 1.5 tokens) to begin with."""
RATE_DECAY = 0.99
"""Decay per round of the running time and tokens of a round."""
LABEL_PRIOR = 3.0
"""Tested tokens, of which half were accepted, to begin with."""
LABEL_DECAY = 0.999
"""Decay per tested token of the batch's acceptance rate."""
ROW_PRIOR = 3.0
"""Tested tokens that the batch's acceptance rate counts for in a row's own."""
WARMUP_LENGTH = 4
"""Tokens that the first rounds draft at least."""
EXPLORATION = 2.0
"""Plain steps to spend on probes at the start, and again when a draft turns out better than was thought: a few samples
can mislead. A quarter of it in large batches, where a probe says more."""
SURPRISE_DECAY = 0.98
"""Per tested token ..."""
SURPRISE_LEAST_DECAY = 0.8
"""... and the least per round."""
SURPRISE_LIMIT = 3.0
"""Standard deviations between predicted and seen acceptance of late that mean another text, ..."""
SURPRISE_TOLERANCE = 0.02
"""... beyond an error of this much per token, which a model that is only nearly right may make."""


@dataclass
class _Rows(RowState):
    """What is remembered of each row: all `[rows]`, float32, but `active`, which is bool."""

    accepted: Tensor  # labels of tested tokens, decayed
    tested: Tensor  # how many, decayed
    residual: Tensor  # labels minus predictions, decayed
    next_entropy: Tensor  # of the target after the last token
    next_probability: Tensor  # of the last token under the target
    all_accepted: Tensor  # 1 where the last round's drafts were all accepted
    active: Tensor  # going on in the last round

    @classmethod
    def unknown(cls, rows: int, device: torch.device) -> _Rows:
        """Rows of which nothing has been seen."""
        zeros = torch.zeros(rows, device=device)
        return cls(zeros, zeros, zeros, zeros + 1.0, zeros + math.exp(-0.6), zeros, zeros == 0)


class _Round:
    """What is forecast in a round, from before its first token until it is verified.

    Attributes:
        row_logit: `logit` of each row's recent acceptance rate, shape `[rows]`, float32.
        bias: How much more was accepted of late than predicted, times 4, shape `[rows]`, float32.
        survival: Probability that all tokens drafted so far are accepted, shape `[rows]`, float32.
        draft: By token, its features, `[rows, FEATURES]`, float32.
        nowcasts: By token, the probability that it is accepted, `[rows]`, float32.
        ahead: By token, and for one more, the features that foretold it, `[rows, FEATURES]`, float32.
    """

    def __init__(self, rows: _Rows, acceptance_rate: Tensor, model: AcceptanceModel) -> None:
        weight = rows.tested + ROW_PRIOR
        self.row_logit = logit((rows.accepted + ROW_PRIOR * acceptance_rate) / weight)
        self.bias = 4 * (rows.residual / weight)
        first = model.first_features(
            self.row_logit, self.bias, rows.next_entropy, rows.next_probability, rows.all_accepted
        )
        self.survival = torch.ones_like(self.bias)
        self.draft: list[Tensor] = []
        self.nowcasts: list[Tensor] = []
        self.ahead = [first]

    def add(self, step: DraftStep, model: AcceptanceModel) -> None:
        """Judge a token that was drafted."""
        features = model.draft_features(step.top_probabilities, step.entropy, self.bias)
        nowcast = model.predict(NOWCAST, features)
        self.survival = nowcast * step.drafting * self.survival
        self.draft.append(features)
        self.nowcasts.append(nowcast)
        self.ahead.append(model.next_features(self.row_logit, features, nowcast))


@register("marginal_goodput")
class MarginalGoodputPolicy(StoppingPolicy):
    """All rows draft on while a further token is expected to pay; none drafts when the first would not.

    It asks the host after every draft token whether to go on.

    Args:
        num_draft_tokens: The longest draft.
        row_memory: Decay of a row's own record per tested token, in [0, 1].
        forgetting: Share of what was learnt that each tested token leaves, in (0, 1].
        probe_share: Share of the time spent on tokens that are expected to lose, to notice when they no longer do; a
            quarter of it in large batches, where a probe says more. A probe that is accepted gives its time back.
        warmup_tokens: Rounds at the start draft at least 4 tokens, as many of them as it takes for the batch to draft
            this many times: 4 rounds at batch 1, one at batch 4 and more.
        optimism: Standard deviations by which a forecast is raised: what is not known well is tried.
    """

    name = "marginal_goodput"
    requires = frozenset({Signal.COSTS, Signal.ACCEPTANCE, Signal.NEXT_TOKEN})

    def __init__(
        self,
        num_draft_tokens: int = 12,
        *,
        row_memory: float = 0.9,
        forgetting: float = 0.9995,
        probe_share: float = 0.006,
        warmup_tokens: int = 4,
        optimism: float = 1.0,
    ) -> None:
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 1)
        self.row_memory = check_number("row_memory", row_memory, 0.0, 1.0)
        self.forgetting = check_number("forgetting", forgetting, 0.0, 1.0, open_minimum=True)
        self.probe_share = check_number("probe_share", probe_share, 0.0, 1.0)
        self.warmup_tokens = check_integer("warmup_tokens", warmup_tokens, 0)
        self.optimism = check_number("optimism", optimism, 0.0)
        self._state: _Rows | None = None

    @property
    def _rows(self) -> _Rows:
        if self._state is None:
            raise RuntimeError("MarginalGoodputPolicy was used before `start(batch)`.")
        return self._state

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""

        def scalar(value: float) -> Tensor:
            return torch.full((), value, device=batch.device)

        novelty = 0.25 + 0.75 / batch.rows
        self._exploration = novelty * EXPLORATION  # the most time for probes, in rounds' time
        self._put_aside = novelty * self.probe_share
        self._longest = min(self.num_draft_tokens, batch.max_draft_length)
        self._table = CostTable(batch, self._longest)
        self._model = AcceptanceModel(batch.device, self.forgetting)
        self._state, self._fresh = _Rows.unknown(batch.rows, batch.device), _Rows.unknown(1, batch.device)
        self._rounds = 0
        self._warmup_rounds = math.ceil(self.warmup_tokens / batch.rows)
        # Of the batch, decayed: labels of tested tokens and how many they were; plain steps and tokens per row.
        self._label_sum, self._label_count = scalar(0.5 * LABEL_PRIOR), scalar(LABEL_PRIOR)
        self._time, self._tokens = scalar(RATE_PRIOR), scalar(1.5 * RATE_PRIOR)
        # Of tested tokens, decayed: labels minus nowcasts, the variance these had, and how many they were.
        self._deviation = self._variance = self._noticed = scalar(0.0)
        # Time for tokens that are expected to lose; what the round's probe took of it, and its place in the draft.
        self._budget, self._probe_price, self._probe_at = scalar(self._exploration), scalar(0.0), scalar(0.0)
        self._begin_round(was_drafted=True)

    def draft_lengths(self) -> Tensor:
        """The longest draft for every row, or 0 when not even the first token pays, shape `[rows]`, int64."""
        rows = len(self._rows.active)
        return self._length.expand(rows)

    def should_stop(self, step: DraftStep) -> Tensor:
        """All rows or none, shape `[rows]`, bool: whether a further token would cost more than it brings."""
        self._round.add(step, self._model)
        return ~self._goes_on(step.position + 1, NEXT, self._round.survival).expand_as(step.drafting)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn what the target thought of each tested token, and what the round took and brought."""
        if outcome.acceptance is None or outcome.next_entropy is None or outcome.next_probability is None:
            raise ValueError(
                "MarginalGoodputPolicy needs `outcome.acceptance`, `next_entropy` and `next_probability`, which the "
                "loop left out: they are `requires`d."
            )
        self._rounds += 1
        if self._round.draft:
            self._learn(outcome, outcome.acceptance)
        self._settle(outcome)
        rows, learning = self._rows, outcome.active & (outcome.drafted > 0)
        self._state = replace(
            rows,
            next_entropy=torch.where(learning, outcome.next_entropy, rows.next_entropy),
            next_probability=torch.where(learning, outcome.next_probability, rows.next_probability),
            all_accepted=torch.where(learning, (outcome.accepted >= outcome.drafted).float(), rows.all_accepted),
            active=outcome.active,
        )
        self._table.refresh()
        self._begin_round(was_drafted=bool(self._round.draft))

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)
        self._begin_round(was_drafted=bool(self._round.draft))

    def _begin_round(self, was_drafted: bool) -> None:
        """Decide whether anything is drafted. A probe that was announced for a round without drafts costs nothing."""
        if not was_drafted:
            self._budget = self._budget + self._probe_price
        self._probe_price = torch.zeros_like(self._budget)
        rows = self._rows
        self._round = _Round(rows, self._label_sum / self._label_count, self._model)
        self._value = self._token_value()  # stays until the round is verified
        self._length = self._longest * self._goes_on(0, FIRST, rows.active.float()).long()

    def _token_value(self) -> Tensor:
        """Plain steps that one token of one row has taken lately, scalar, float32."""
        return self._time / (self._tokens * self._rows.active.sum().clamp_min(1))

    def _goes_on(self, length: int, regression: int, survival: Tensor) -> Tensor:
        """Whether a token after `length` drafted ones is drafted, because it pays, or as a probe, scalar, bool."""
        forced = self._rounds < self._warmup_rounds and length < min(WARMUP_LENGTH, self._longest)
        if forced or length >= self._longest:
            return torch.full((), forced, device=survival.device)
        cost = self._table.time(length + 1) - self._table.time(length)
        pays = self._gain(regression, self._round.ahead[-1], survival) > cost
        probed = ~pays & (self._budget >= cost) & (self._probe_price == 0)
        price = cost * probed
        self._budget = self._budget - price
        self._probe_price = self._probe_price + price
        self._probe_at = torch.where(probed, float(length), self._probe_at)
        return pays | probed

    def _gain(self, regression: int, features: Tensor, survival: Tensor) -> Tensor:
        """Plain steps that a further token is expected to save, with the benefit of the doubt.

        What is not known well yet is taken to be `optimism` standard deviations better than predicted: a length that
        is never drafted would never be known better.
        """
        mass = survival.sum().clamp_min(1e-6)
        mean = (survival * self._model.predict(regression, features)).sum() / mass
        centre = (survival.unsqueeze(-1) * features).sum(0) / mass
        doubt = self.optimism * mean * (1 - mean) * self._model.uncertainty(regression, centre)
        return mass * (mean + doubt) * self._value

    def _learn(self, outcome: RoundOutcome, acceptance: Tensor) -> None:
        """Update the model, the rows' records and the batch's, from the tested positions."""
        rows, width = self._rows, min(len(self._round.draft), acceptance.shape[1])
        if not width:
            return
        position = torch.arange(width, device=acceptance.device)
        tested = torch.minimum(outcome.drafted, outcome.accepted + 1) * outcome.active
        is_tested = position < tested.unsqueeze(-1)
        counts = is_tested.float()
        labels = torch.where(is_tested, acceptance[:, :width].float(), 0.0)  # what was not tested may be no number
        draft, nowcasts, ahead = (
            torch.stack(values[:width], dim=1)
            for values in (self._round.draft, self._round.nowcasts, self._round.ahead)
        )
        plain = torch.nn.functional.pad(draft[..., :-1], (0, 1))
        residual = (labels - self._model.predict(PLAIN_NOWCAST, plain)) * counts
        firsts = counts * (position == 0)
        self._model.learn(
            torch.stack([plain, draft, ahead, ahead]).flatten(1, 2),
            labels.flatten(),
            torch.stack([counts, counts, firsts, counts - firsts]).flatten(1),
        )
        memory = self.row_memory ** (tested.unsqueeze(-1) - 1 - position).clamp_min(0).float() * counts
        kept = self.row_memory ** tested.float()
        self._state = replace(
            rows,
            accepted=kept * rows.accepted + (memory * labels).sum(1),
            tested=kept * rows.tested + memory.sum(1),
            residual=kept * rows.residual + (memory * residual).sum(1),
        )
        self._notice(labels, nowcasts, counts)

    def _notice(self, labels: Tensor, nowcasts: Tensor, counts: Tensor) -> None:
        """Follow the batch's acceptance, and distrust what was learnt when of late it lay far from what was predicted.

        Args:
            labels: What the target thought of the round's tokens, shape `[rows, width]`, float32.
            nowcasts: What was predicted, likewise.
            counts: 1 where a token was tested and 0 elsewhere, likewise.
        """
        total = counts.sum()
        kept = LABEL_DECAY**total
        label_sum = kept * self._label_sum + labels.sum()
        label_count = kept * self._label_count + total
        kept = (SURPRISE_DECAY**total).clamp_min(SURPRISE_LEAST_DECAY)
        deviation = kept * self._deviation + ((labels - nowcasts) * counts).sum()
        variance = kept * self._variance + (nowcasts * (1 - nowcasts) * counts).sum()
        noticed = kept * self._noticed + total
        surprised = deviation.abs() > SURPRISE_LIMIT * (variance + 0.25).sqrt() + SURPRISE_TOLERANCE * noticed
        self._model.unsettle(surprised)
        scale = torch.where(surprised, ROW_PRIOR / label_count.clamp_min(ROW_PRIOR), 1.0)
        self._label_sum, self._label_count = scale * label_sum, scale * label_count
        # A draft that has become better is worth trying at once; one that has become worse is not.
        self._budget = torch.where(surprised & (deviation > 0), self._exploration, self._budget)
        calm = ~surprised
        self._deviation, self._variance, self._noticed = calm * deviation, calm * variance, calm * noticed

    def _settle(self, outcome: RoundOutcome) -> None:
        """Take note of the round's time and tokens, and pay for probes."""
        accepted, active = outcome.accepted, outcome.active
        spent = self._table.time_of(outcome.drafted)
        self._time = RATE_DECAY * self._time + spent
        self._tokens = RATE_DECAY * self._tokens + ((accepted + 1) * active).sum() / active.sum().clamp_min(1)
        lucky = ((accepted > self._probe_at) * active).sum() * self._token_value()
        refund = torch.minimum(lucky, self._probe_price)  # the price is 0 when there was no probe
        budget = self._budget + refund + self._put_aside * spent
        self._budget = torch.minimum(budget, self._exploration * spent)
