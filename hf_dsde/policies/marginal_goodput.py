"""Draft one more token for the batch while what it is expected to add is worth more than the time it takes.

The batch drafts in lockstep, so the question is one for the batch: a further step costs every row a draft step and a
column of verification, and brings each row a token if all its drafts so far are accepted and the next one is. Both
probabilities are predicted from the draft's own distributions by `AcceptanceModel`, which learns from each verified
position what the target really thought of it. Time is measured; a token's price is the time the batch has needed per
token lately, so that the rule seeks the largest ratio of the two (Dinkelbach's method for fractional programmes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.argument_checks import check_integer, check_number
from hf_dsde.policies import acceptance_model as model
from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.cost_table import CostTable
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState

ROW_PRIOR = 3.0
"""Tested tokens that the batch's acceptance rate counts for in a row's own."""
RATE_DECAY = 0.99
"""Decay per round of the running time and tokens of a round."""
RATE_PRIOR = 4.0
"""Rounds of (1 plain step, 1.5 tokens) to begin with."""
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
class _State(RowState):
    accepted: Tensor  # [rows], float32: labels of tested tokens, decayed
    tested: Tensor  # [rows], float32: how many, decayed
    residual: Tensor  # [rows], float32: labels minus predictions, decayed
    next_entropy: Tensor  # [rows], float32: of the target behind the last token
    next_probability: Tensor  # [rows], float32: of the last token under the target
    all_accepted: Tensor  # [rows], float32: 1 where the last round's drafts were all accepted
    active: Tensor  # [rows], bool


class _Block:
    """What is known and remembered of a round while it is drafted.

    Attributes:
        row_mean: Each row's recent acceptance rate, shape `[rows]`.
        row_bias: How much more was accepted of late than predicted, shape `[rows]`.
        draft: Features of each drafted token, `[rows, FEATURES]` each.
        ahead: What each token was forecast from, one entry more.
        survival: Probability that all tokens so far are accepted, shape `[rows]`.
    """

    def __init__(self, row_mean: Tensor, row_bias: Tensor) -> None:
        self.row_mean, self.row_bias = row_mean, row_bias
        self.draft: list[Tensor] = []
        self.ahead: list[Tensor] = []
        self.survival: Tensor | None = None


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
            this many times: 24 rounds at batch 1, 3 at batch 8.
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
        warmup_tokens: int = 24,
        optimism: float = 1.0,
    ) -> None:
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 1)
        self.row_memory = check_number("row_memory", row_memory, 0.0, 1.0)
        self.forgetting = check_number("forgetting", forgetting, 0.0, 1.0, open_minimum=True)
        self.probe_share = check_number("probe_share", probe_share, 0.0, 1.0)
        self.warmup_tokens = check_integer("warmup_tokens", warmup_tokens, 0)
        self.optimism = check_number("optimism", optimism, 0.0)
        self._state: _State | None = None

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("MarginalGoodputPolicy was used before `start(batch)`.")
        return self._state

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._longest = min(self.num_draft_tokens, batch.max_draft_length)
        self._table = CostTable(batch, self._longest)
        self._warmup_rounds = math.ceil(self.warmup_tokens / batch.rows)
        self._rounds = 0
        novelty = 0.25 + 0.75 / batch.rows
        self._exploration, self._put_aside = novelty * EXPLORATION, novelty * self.probe_share
        self._model = model.AcceptanceModel(batch.device, self.forgetting)
        self._state = self._initial(batch.rows, batch.device)
        self._fresh = self._initial(1, batch.device)

        def scalar(value: float) -> Tensor:
            return torch.full((), value, device=batch.device)

        self._label_sum, self._label_count = scalar(0.5 * ROW_PRIOR), scalar(ROW_PRIOR)
        self._time, self._tokens = scalar(RATE_PRIOR), scalar(1.5 * RATE_PRIOR)
        self._deviation, self._variance, self._noticed = scalar(0.0), scalar(0.0), scalar(0.0)
        self._budget = scalar(self._exploration)
        self._probe_price = scalar(0.0)
        self._probe_at = scalar(0.0)
        self._drafted = False
        self._begin_round()

    def _initial(self, rows: int, device: torch.device) -> _State:
        zeros = torch.zeros(rows, device=device)
        return _State(
            accepted=zeros,
            tested=zeros,
            residual=zeros,
            next_entropy=zeros + 1.0,
            next_probability=zeros + math.exp(-0.6),
            all_accepted=zeros,
            active=zeros == 0,
        )

    def draft_lengths(self) -> Tensor:
        """The longest draft for every row, or 0 when not even the first token pays, shape `[rows]`, int64."""
        rows = len(self._rows.active)
        return self._length.expand(rows)

    def should_stop(self, step: DraftStep) -> Tensor:
        """All rows or none, shape `[rows]`, bool: whether a further token would cost more than it brings."""
        state, block = self._rows, self._block
        features = model.draft_features(step.top_probabilities, step.entropy)
        bias = block.row_bias
        with_bias = model.with_bias(features, bias)
        nowcast = self._model.predict(model.NOWCAST, with_bias)
        survival = nowcast * step.drafting
        if block.survival is not None:
            survival = survival * block.survival
        ahead = model.next_features(block.row_mean, bias, features, nowcast)
        block.draft.append(with_bias)
        block.ahead.append(ahead)
        block.survival = survival
        self._drafted = True
        length = step.position + 1
        if length >= self._longest:
            return torch.ones_like(state.active)
        gain = self._gain(model.NEXT, ahead, survival)
        return ~self._goes_on(gain, length).expand_as(state.active)

    def _gain(self, regression: int, features: Tensor, survival: Tensor) -> Tensor:
        """Plain steps that a further token is expected to save, with the benefit of the doubt.

        What is not known well yet is taken to be `optimism` standard deviations better than predicted: a length that
        is never drafted would never be known better.
        """
        mass = survival.sum().clamp_min(1e-6)
        mean = (survival * self._model.predict(regression, features)).sum() / mass
        centre = (survival.unsqueeze(-1) * features).sum(0) / mass
        doubt = self.optimism * mean * (1 - mean) * self._model.uncertainty(regression, centre)
        return mass * (mean + doubt) * self._token_value()

    def _goes_on(self, gain: Tensor, length: int) -> Tensor:
        """Whether a token behind `length` drafted ones is drafted: because it pays, to learn, or as a probe."""
        if self._rounds < self._warmup_rounds and length < WARMUP_LENGTH:
            return torch.ones_like(gain, dtype=torch.bool)
        cost = self._table.times[length + 1] - self._table.times[length]
        pays = gain > cost
        probes = ~pays & (self._budget >= cost) & (self._probe_price == 0)
        self._budget = self._budget - torch.where(probes, cost, 0.0)
        self._probe_price = torch.where(probes, cost, self._probe_price)
        self._probe_at = torch.where(probes, float(length), self._probe_at)
        return pays | probes

    def _begin_round(self) -> None:
        """Decide whether anything is drafted."""
        state = self._rows
        if not self._drafted:
            self._budget = self._budget + self._probe_price  # announced, and then nothing was drafted
        self._drafted = False
        self._probe_price = torch.zeros_like(self._probe_price)
        overall = self._label_sum / self._label_count
        block = self._block = _Block(
            row_mean=(state.accepted + ROW_PRIOR * overall) / (state.tested + ROW_PRIOR),
            row_bias=state.residual / (state.tested + ROW_PRIOR),
        )
        first = model.first_features(
            block.row_mean, block.row_bias, state.next_entropy, state.next_probability, state.all_accepted
        )
        block.ahead.append(first)
        gain = self._gain(model.FIRST, first, state.active.float())
        self._length = torch.where(self._goes_on(gain, 0), self._longest, 0)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn what the target thought of each tested token, and what the round took and brought."""
        if outcome.acceptance is None or outcome.next_entropy is None or outcome.next_probability is None:
            raise ValueError(
                "MarginalGoodputPolicy needs `outcome.acceptance`, `next_entropy` and `next_probability`, which the "
                "loop left out: they are `requires`d."
            )
        self._rounds += 1
        width = min(len(self._block.draft), outcome.acceptance.shape[1])
        if width:
            self._learn(outcome, width)
        self._settle(outcome)
        state = self._rows
        learning = outcome.active & (outcome.drafted > 0)
        full = (outcome.accepted >= outcome.drafted).float()
        self._state = _State(
            accepted=state.accepted,
            tested=state.tested,
            residual=state.residual,
            next_entropy=torch.where(learning, outcome.next_entropy, state.next_entropy),
            next_probability=torch.where(learning, outcome.next_probability, state.next_probability),
            all_accepted=torch.where(learning, full, state.all_accepted),
            active=outcome.active,
        )
        self._table.refresh()
        self._begin_round()

    def _learn(self, outcome: RoundOutcome, width: int) -> None:
        """Update the models, the rows' records and the batch's, from the tested positions."""
        assert outcome.acceptance is not None
        state = self._rows
        position = torch.arange(width, device=outcome.drafted.device)
        tested = torch.minimum(outcome.drafted, outcome.accepted + 1) * outcome.active
        is_tested = position < tested.unsqueeze(-1)
        labels = torch.where(is_tested, outcome.acceptance[:, :width].float(), 0.0)
        draft = torch.stack(self._block.draft[:width], dim=1)
        ahead = torch.stack(self._block.ahead[:width], dim=1)
        plain = torch.nn.functional.pad(draft[..., :-1], (0, 1))
        residual = (labels - self._model.predict(model.PLAIN_NOWCAST, plain)) * is_tested
        nowcast = self._model.predict(model.NOWCAST, draft)

        counts = is_tested.float()
        is_first = (position == 0).float()
        features = torch.stack([plain, draft, ahead, ahead]).flatten(1, 2)
        samples = torch.stack([counts, counts, counts * is_first, counts * (1 - is_first)]).flatten(1)
        self._model.learn(features, labels.flatten(), samples)

        memory = self.row_memory ** (tested.unsqueeze(-1) - 1 - position).clamp_min(0).float() * counts
        kept = self.row_memory ** tested.float()
        self._state = _State(
            accepted=kept * state.accepted + (memory * labels).sum(1),
            tested=kept * state.tested + memory.sum(1),
            residual=kept * state.residual + (memory * residual).sum(1),
            next_entropy=state.next_entropy,
            next_probability=state.next_probability,
            all_accepted=state.all_accepted,
            active=state.active,
        )
        total = counts.sum()
        forgotten = 0.999**total
        self._label_sum = forgotten * self._label_sum + labels.sum()
        self._label_count = forgotten * self._label_count + total
        self._notice(((labels - nowcast) * counts).sum(), (nowcast * (1 - nowcast) * counts).sum(), total)

    def _notice(self, deviation: Tensor, variance: Tensor, total: Tensor) -> None:
        """Distrust what was learnt when acceptance has lately lain far from what was predicted."""
        kept = (SURPRISE_DECAY**total).clamp_min(SURPRISE_LEAST_DECAY)
        self._deviation = kept * self._deviation + deviation
        self._variance = kept * self._variance + variance
        self._noticed = kept * self._noticed + total
        limit = SURPRISE_LIMIT * (self._variance + 0.25).sqrt() + SURPRISE_TOLERANCE * self._noticed
        surprised = self._deviation.abs() > limit
        self._model.unsettle(surprised)
        scale = torch.where(surprised, ROW_PRIOR / self._label_count.clamp_min(ROW_PRIOR), 1.0)
        self._label_sum = scale * self._label_sum
        self._label_count = scale * self._label_count
        # A draft that has become better is worth trying at once; one that has become worse is not.
        self._budget = torch.where(surprised & (self._deviation > 0), self._exploration, self._budget)
        self._deviation = torch.where(surprised, 0.0, self._deviation)
        self._variance = torch.where(surprised, 0.0, self._variance)
        self._noticed = torch.where(surprised, 0.0, self._noticed)

    def _settle(self, outcome: RoundOutcome) -> None:
        """Take note of the round's time and tokens, and pay for probes."""
        rows = outcome.active.sum().clamp_min(1)
        steps = outcome.drafted.max().clamp_max(self._longest)
        spent = self._table.times.take(steps)
        gained = ((outcome.accepted + 1) * outcome.active).sum() / rows
        self._time = RATE_DECAY * self._time + spent
        self._tokens = RATE_DECAY * self._tokens + gained
        lucky = ((outcome.accepted > self._probe_at) * outcome.active).sum() * self._token_value()
        refund = torch.where(self._probe_price > 0, torch.minimum(lucky, self._probe_price), 0.0)
        self._budget = torch.minimum(self._budget + refund + self._put_aside * spent, self._exploration * spent)

    def _token_value(self) -> Tensor:
        """Plain steps that one token of one row has taken lately, scalar, float32."""
        return self._time / (self._tokens * self._rows.active.sum().clamp_min(1))

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)
        self._begin_round()
