"""Listens to the rounds of a decoding loop and notes the scalars of every drafted position.

Where somebody asks for them, the record of a round has both models' raw logits of the whole draft, the rejected part
included. So nothing about the loop has to be different for a recording. Logits are let go with the record.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.policies import RoundOutcome, Signal
from hf_dsde.trace.position_signals import position_signals

POSITIONS_AT_ONCE = 32
"""Positions whose distributions are copied out of a block together."""


class RoundNotes(RoundListener):
    """The drafted positions of one batch, as columns of the table `drafted`.

    Args:
        rows: Number of sequences in the batch.
        draws: Source of the random numbers of `residual_draft_probability`, on the CPU; None at temperature 0.
    """

    requires = frozenset({Signal.LOGITS})

    def __init__(self, rows: int, draws: torch.Generator | None) -> None:
        self._draws = draws
        self._starts = torch.zeros(rows, dtype=torch.long)
        self._parts: list[dict[str, np.ndarray]] = []

    def on_round(self, record: RoundRecord) -> None:
        """Note what was drafted in a round."""
        if record.outcome is not None and any(record.drafted):
            self._parts.append(self._columns(record, record.outcome))
        self._starts += torch.tensor(record.emitted)

    def columns(self) -> dict[str, np.ndarray]:
        """All columns but `task` and `temperature`, `sequence` being the row of the batch; ordered as in a trace."""
        if not self._parts:
            return {}
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        # Rounds were noted for all rows at once, offsets in order; a stable sort by row keeps both in order.
        order = np.argsort(joined["sequence"], kind="stable")
        return {name: values[order] for name, values in joined.items()}

    def _columns(self, record: RoundRecord, outcome: RoundOutcome) -> dict[str, np.ndarray]:
        assert outcome.tokens is not None  # it is required
        drafted, accepted = torch.tensor(record.drafted), torch.tensor(record.accepted)
        row, offset = (torch.arange(max(record.drafted)) < drafted[:, None]).nonzero(as_tuple=True)
        where = {
            "sequence": row,
            "round": torch.full_like(row, record.index),
            "start": self._starts[row],
            "offset": offset,
            "on_path": offset <= accepted[row],
            "accepted": offset < accepted[row],
            "token": outcome.tokens.cpu()[row, offset],
        }
        parts = list(self._signals(outcome, row.to(outcome.tokens.device), offset.to(outcome.tokens.device)))
        scalars = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {name: values.numpy() for name, values in {**where, **scalars}.items()}

    def _signals(self, outcome: RoundOutcome, row: Tensor, offset: Tensor) -> Iterator[dict[str, Tensor]]:
        """The scalars of a few positions at a time, so that no block is copied whole."""
        target, draft, tokens = outcome.target_logits, outcome.draft_logits, outcome.tokens
        assert target is not None
        assert draft is not None
        assert tokens is not None
        draws = None if self._draws is None else torch.rand(len(row), generator=self._draws)
        for start in range(0, len(row), POSITIONS_AT_ONCE):
            part = slice(start, start + POSITIONS_AT_ONCE)
            at = row[part], offset[part]
            yield position_signals(target[at], draft[at], tokens[at], None if draws is None else draws[part])
