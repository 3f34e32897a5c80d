"""Draft one more token for the batch while what it is expected to add is worth more than the time it takes.

The batch drafts in lockstep, so the question is one for the batch: a further step costs every row a draft step and a
column of verification, and brings each row a token if all its drafts so far are accepted and the next one is. Both
probabilities are predicted from the draft's own distributions by `AcceptanceModel`, which learns from each verified
position what the target really thought of it. Time is measured; a token's price is the time the batch has needed per
token lately, so that the rule seeks the largest ratio of the two (Dinkelbach's method for fractional programmes).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_dsde.policies import acceptance_model as model
from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.cost_table import CostTable
from hf_dsde.policies.marginal_gain import (
    Knowledge,
    MarginalGain,
    Outlook,
    Probes,
    RowRecord,
    Tally,
    Verified,
    padded_block,
)
from hf_dsde.policies.registry import register
from hf_dsde.utils.checks import check_integer, check_number
from hf_dsde.utils.transfers import upload

RATE_PRIOR = 4.0
"""Rounds of (1 plain step, 1.5 tokens) to begin with."""
LABEL_PRIOR = 3.0
"""Tested tokens, of which half were accepted, to begin with."""
WARMUP_LENGTH = 4
"""Tokens that the first rounds draft at least."""
EXPLORATION = 2.0
"""Plain steps to spend on probes at the start, and again when a draft turns out better than was thought: a few samples
can mislead. A quarter of it in large batches, where a probe says more."""


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
    _outlook: Outlook

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
        self._state: RowRecord | None = None

    @property
    def _rows(self) -> RowRecord:
        if self._state is None:
            raise RuntimeError("MarginalGoodputPolicy was used before `start(batch)`.")
        return self._state

    @property
    def _known(self) -> Knowledge:
        return Knowledge(self._rows, self._model, self._tally, self._probes)

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        device = batch.device
        self._longest = min(self.num_draft_tokens, batch.max_draft_length)
        self._table = CostTable(batch, self._longest)
        self._warmup_rounds = math.ceil(self.warmup_tokens / batch.rows)
        self._fresh = _initial_rows(1, device)
        self._lengths = [*upload([float(length) for length in range(self._longest + 1)], device)]
        self._anyway = torch.full((), -math.inf, device=device)
        novelty = 0.25 + 0.75 / batch.rows
        self._forget(batch, novelty * EXPLORATION)
        self._gain = MarginalGain(
            form=self._known,
            features=model.Features(device),
            positions=torch.arange(self._longest, device=device),
            longest=self._longest,
            optimism=self.optimism,
            row_memory=self.row_memory,
            exploration=torch.full((), novelty * EXPLORATION, device=device),
            put_aside=novelty * self.probe_share,
        )
        self._begin_round()

    def _forget(self, batch: BatchInfo, budget: float) -> None:
        """Know nothing but what is assumed at the start."""

        def scalar(value: float) -> Tensor:
            return torch.full((), value, device=batch.device)

        self._rounds = 0
        self._draft: list[Tensor] = []
        self._state = _initial_rows(batch.rows, batch.device)
        self._model = model.AcceptanceModel(batch.device, self.forgetting)
        self._tally = Tally(
            label_sum=scalar(0.5 * LABEL_PRIOR),
            label_count=scalar(LABEL_PRIOR),
            time=scalar(RATE_PRIOR),
            tokens=scalar(1.5 * RATE_PRIOR),
            deviation=scalar(0.0),
            variance=scalar(0.0),
            noticed=scalar(0.0),
        )
        self._probes = Probes(budget=scalar(budget), price=scalar(0.0), at=scalar(0.0))

    def draft_lengths(self) -> Tensor:
        """The longest draft for every row, or 0 when not even the first token pays, shape `[rows]`, int64."""
        rows = len(self._rows.active)
        return self._outlook.length.expand(rows)

    def should_stop(self, step: DraftStep) -> Tensor:
        """All rows or none, shape `[rows]`, bool: whether a further token would cost more than it brings."""
        outlook = self._outlook
        length = step.position + 1
        stops, features, survival, *probes = self._gain.step(
            step.top_probabilities,
            step.entropy,
            step.drafting,
            outlook.survival,
            self._cost(length),
            self._lengths[length],
            self._model.coefficients,
            self._model.covariance,
            outlook.row_logit,
            outlook.bias,
            outlook.token_value,
            *self._probes,
        )
        self._probes, self._outlook = Probes(*probes), outlook._replace(survival=survival)
        self._draft.append(features)
        return stops

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn what the target thought of each tested token, and what the round took and brought."""
        if outcome.acceptance is None or outcome.next_entropy is None or outcome.next_probability is None:
            raise ValueError(
                "MarginalGoodputPolicy needs `outcome.acceptance`, `next_entropy` and `next_probability`, which the "
                "loop left out: they are `requires`d."
            )
        self._rounds += 1
        times = self._table.times
        self._table.refresh()
        verified = Verified(
            outcome.drafted, outcome.accepted, outcome.active, outcome.next_entropy, outcome.next_probability
        )
        tensors = (times, self._cost(0), *verified, *self._known.tensors())
        if self._draft:
            lesson = (*self._block(outcome.acceptance), self._outlook.row_logit, self._outlook.first)
            results = self._gain.learn_and_end_round(*lesson, *tensors)
        else:
            results = self._gain.end_round(*tensors)
        left = iter(results)
        self._take(self._known.holding(left), Outlook(*left))

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)
        self._begin_round()

    def _block(self, acceptance: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels and features of the round's tokens."""
        width = min(len(self._draft), acceptance.shape[1])
        labels = torch.nn.functional.pad(acceptance, (0, width - acceptance.shape[1]))
        return labels, padded_block(self._draft, width)

    def _begin_round(self) -> None:
        self._take(*self._gain.begin_round(self._known, self._cost(0), was_drafted=bool(self._draft)))

    def _take(self, known: Knowledge, outlook: Outlook) -> None:
        self._state, self._model, self._tally, self._probes = known.rows, known.regressions, known.tally, known.probes
        self._outlook = outlook
        self._draft = []

    def _cost(self, length: int) -> Tensor:
        """Plain steps that a token after `length` drafted ones takes; less than nothing when it is drafted anyway."""
        forced = self._rounds < self._warmup_rounds and length < min(WARMUP_LENGTH, self._longest)
        return self._anyway if forced else self._table.steps[length]


def _initial_rows(rows: int, device: torch.device) -> RowRecord:
    zeros = torch.zeros(rows, device=device)
    return RowRecord(
        accepted=zeros,
        tested=zeros,
        residual=zeros,
        next_entropy=zeros + 1.0,
        next_probability=zeros + math.exp(-0.6),
        all_accepted=zeros,
        active=zeros == 0,
    )
