"""Profiles a pair of models: what its passes cost and how far its drafts go, by batch size, saved as a configuration.

The result is the table of the policy `batch_table` (Su et al., arXiv 2310.18813) and the costs that policies which
weigh cost against gain start from, so that neither has to be found out again by whoever loads the pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import BatchCosts, CostModel
from hf_dsde.decoding.cost_measurement import remembered_costs
from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.pairs import Pair, encode, generate_once
from hf_dsde.policies import Signal, StaticPolicy
from hf_dsde.policies.batch_table import best_length, survival_probabilities
from hf_dsde.utils.checks import check_integer

DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class ProfileOptions:
    """What to run.

    Attributes:
        batch_sizes: Batches to profile; prompts are repeated where there are fewer of them.
        draft_length: Tokens drafted in every round: lengths up to it are compared.
        max_new_tokens: Limit of every answer.
        temperature: 0 decodes greedily.
        seed: Of the sampling.
    """

    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    draft_length: int = 8
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        for rows in self.batch_sizes:
            check_integer("batch_sizes", rows, 1)
        check_integer("draft_length", self.draft_length, 1)


@dataclass(frozen=True)
class BatchProfile:
    """What a batch size showed.

    Attributes:
        rows: The batch size.
        survival: Chance that the first 1, 2, ... draft tokens are all accepted.
        costs: Seconds of its passes.
        length: The draft length of least time per token.
    """

    rows: int
    survival: tuple[float, ...]
    costs: BatchCosts
    length: int

    def predicted_speedup(self, length: int) -> float:
        """Time per token of plain decoding over that of a draft length, from the measured costs."""
        tokens = 1 + sum(self.survival[:length])
        return tokens * self.costs.round_seconds(0) / self.costs.round_seconds(length)


def profile_pair(
    pair: Pair,
    prompts: Sequence[str],
    options: ProfileOptions,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[BatchProfile]:
    """Run every batch size once with drafts of a fixed length.

    Args:
        pair: Target, enabled, and draft.
        prompts: What to answer, at least one; those of the work to come say most.
        options: What to run.
        on_step: Called with a description when a step begins.

    Raises:
        ValueError: If there is no prompt, or nothing was drafted, since answers end at once.
    """
    if not prompts:
        raise ValueError("`prompts` is empty; at least one is needed.")
    profiles = []
    for rows in sorted(options.batch_sizes):
        on_step(f"batch of {rows}")
        blocks = _Blocks()
        _generate(pair, list(islice(cycle(prompts), rows)), blocks, options)
        survival = survival_probabilities(blocks.drafted, blocks.accepted)
        if not survival:
            raise ValueError(
                f"`prompts` led to no draft in a batch of {rows}: answers end before a token could be drafted. "
                "Take other prompts, or a larger `max_new_tokens`."
            )
        costs = _costs_of(pair.target, pair.draft).at(rows)
        profiles.append(BatchProfile(rows, survival, costs, best_length(survival, costs)))
    return profiles


def tuned_config(profiles: Sequence[BatchProfile]) -> SpeculationConfig:
    """The configuration that the profiles recommend: `batch_table` with its table, and the measured costs."""
    table = {str(profile.rows): profile.length for profile in profiles}
    costs = CostModel({profile.rows: profile.costs for profile in profiles})
    return SpeculationConfig("batch_table", {"table": table}, costs=costs.to_dict())


class _Blocks(RoundListener):
    """Drafted and accepted tokens of every row and round in which something was drafted; has costs measured."""

    requires = frozenset({Signal.COSTS})

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def on_round(self, record: RoundRecord) -> None:
        for drafted, accepted in zip(record.drafted, record.accepted, strict=True):
            if drafted:
                self.drafted.append(drafted)
                self.accepted.append(accepted)


def _generate(pair: Pair, prompts: Sequence[str], blocks: _Blocks, options: ProfileOptions) -> None:
    inputs = encode(pair.tokenizer, prompts).to(pair.target.device)
    sampling: dict[str, Any] = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling["temperature"] = options.temperature
    torch.manual_seed(options.seed)
    policy, limit = StaticPolicy(options.draft_length), options.max_new_tokens
    generate_once(pair, inputs, policy, speculation_listeners=[blocks], max_new_tokens=limit, **sampling)


def _costs_of(target: PreTrainedModel, draft: PreTrainedModel) -> CostModel:
    known = remembered_costs(target, draft)
    assert known is not None  # they were required
    return known
