"""Watches the rounds of a decoding loop and notes the scalars of every drafted position.

Two of the loop's own openings show everything: a policy is asked after each draft token, which brings the draft's raw
logits, and told what was accepted; and the loop's recording is given the target's raw logits of the whole block, the
rejected part included. So nothing about the loop has to be different for a recording. Logits are let go at the end of
their round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_dsde.decoding.recording import Recording
from hf_dsde.policies import DraftStep, RoundOutcome, StaticPolicy
from hf_dsde.trace.position_signals import position_signals

POSITIONS_AT_ONCE = 32
"""Positions whose distributions are copied out of a block together."""


class WatchingPolicy(StaticPolicy):
    """A fixed draft length, keeping what the policy is shown of a round until the round is noted.

    Args:
        num_draft_tokens: The draft length.
    """

    name = "static"

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self._steps: list[DraftStep] = []
        self._outcome: RoundOutcome | None = None

    def should_stop(self, step: DraftStep) -> Tensor | None:
        """Keep the step; stop nothing."""
        self._steps.append(step)
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the outcome."""
        self._outcome = outcome

    def take(self) -> tuple[list[DraftStep], RoundOutcome]:
        """Return the draft steps and the outcome of the round just verified, and forget them."""
        if self._outcome is None:
            raise RuntimeError("WatchingPolicy was asked for a round before the loop reported one.")
        taken = self._steps, self._outcome
        self._steps, self._outcome = [], None
        return taken


class RoundNotes:
    """The drafted positions of one batch, as columns of the table `drafted`.

    Args:
        rows: Number of sequences in the batch.
        policy: The policy of the loop that is watched.
        draws: Source of the random numbers of `residual_draft_probability`, on the CPU; None at temperature 0.
    """

    def __init__(self, rows: int, policy: WatchingPolicy, draws: torch.Generator | None) -> None:
        self._policy = policy
        self._draws = draws
        self._starts = torch.zeros(rows, dtype=torch.long)
        self._rounds = 0
        self._parts: list[dict[str, np.ndarray]] = []

    def note(self, target_logits: Tensor, emitted: list[int]) -> None:
        """Note a round.

        Args:
            target_logits: The target's raw logits over the block, shape `[rows, width + 1, vocabulary]`, float32;
                column j decides about draft token j.
            emitted: Tokens by which each row's text has grown.
        """
        steps, outcome = self._policy.take()
        if steps:
            self._parts.append(self._columns(steps, outcome, target_logits))
        self._starts += torch.tensor(emitted)
        self._rounds += 1

    def columns(self) -> dict[str, np.ndarray]:
        """All columns but `task` and `temperature`, `sequence` being the row of the batch; ordered as in a trace."""
        if not self._parts:
            return {}
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        # Rounds were noted for all rows at once, offsets in order; a stable sort by row keeps both in order.
        order = np.argsort(joined["sequence"], kind="stable")
        return {name: values[order] for name, values in joined.items()}

    def _columns(self, steps: list[DraftStep], outcome: RoundOutcome, target_logits: Tensor) -> dict[str, np.ndarray]:
        drafted = outcome.drafted.cpu()
        accepted = outcome.accepted.cpu()
        row, offset = (torch.arange(len(steps)) < drafted[:, None]).nonzero(as_tuple=True)
        on_device = row.to(target_logits.device), offset.to(target_logits.device)
        tokens = torch.stack([step.tokens for step in steps], dim=1)[on_device]
        draws = None if self._draws is None else torch.rand(len(row), generator=self._draws)
        parts = [
            position_signals(*part)
            for part in _split(target_logits, [step.logits for step in steps], on_device, tokens, draws)
        ]
        where = {
            "sequence": row,
            "round": torch.full_like(row, self._rounds),
            "start": self._starts[row],
            "offset": offset,
            "on_path": offset <= accepted[row],
            "accepted": offset < accepted[row],
            "token": tokens.cpu(),
        }
        scalars = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: values.numpy() for name, values in {**where, **scalars}.items()}


def _split(
    target_logits: Tensor,
    draft_logits: list[Tensor],
    positions: tuple[Tensor, Tensor],
    tokens: Tensor,
    draws: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The arguments of `position_signals`, a few positions at a time, so that no block is copied whole."""
    for start in range(0, len(tokens), POSITIONS_AT_ONCE):
        part = slice(start, start + POSITIONS_AT_ONCE)
        row, offset = positions[0][part], positions[1][part]
        draft = torch.stack([draft_logits[o][r] for r, o in zip(row.tolist(), offset.tolist(), strict=True)])
        yield target_logits[row, offset], draft, tokens[part], None if draws is None else draws[part]


@dataclass(frozen=True)
class RoundRecording(Recording):
    """What the loop records into, in place of the output's scores and logits."""

    notes: RoundNotes | None = None

    def add(self, scores: Tensor, logits: Tensor, emitted: list[int]) -> None:  # noqa: ARG002 - the loop's signature
        """Note a round; both tensors are `[rows, width + 1, vocabulary]`, float32."""
        if self.notes is not None:
            self.notes.note(logits, emitted)
