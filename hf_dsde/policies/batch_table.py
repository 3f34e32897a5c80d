"""Draft lengths looked up by batch size ("The Synergy of Speculative Decoding and Batching", arXiv 2310.18813).

The larger the batch, the dearer a wider pass, and the shorter the best fixed length. It is profiled beforehand, with
`best_length` from acceptance and costs, and looked up while decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

import torch
from torch import Tensor

from hf_dsde.costs import BatchCosts
from hf_dsde.policies.base import BatchInfo, RoundOutcome, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState
from hf_dsde.utils.checks import check_integer, check_number

DEFAULT_TABLE = {1: 3, 8: 3, 32: 3, 128: 1}
"""Best fixed lengths of one pair in a replay of recorded acceptances: SmolLM2-135M-Instruct with a distilled draft of
four layers, weaker than the one that ships with this package, greedy, four tasks mixed. In units of a plain step, a
draft step costs 0.05 there, a further column of the target's pass 0.025, and in the batch of 128 each token beyond 256
in a pass 1/256."""


@dataclass
class _State(RowState):
    active: Tensor  # [rows], bool: still generating, as of the last round


@register("batch_table")
class BatchTablePolicy(StoppingPolicy):
    """Every row drafts what a table says for the number of rows that are still generating.

    A batch size between two profiled ones takes the nearer one's length, by ratio: 4 rows are as far from 2 as from 8,
    and of two equally near sizes the larger counts. Beyond the smallest and the largest, these count.

    Args:
        table: Draft lengths by batch size, at least one: `{1: 5, 8: 3, 32: 2}`. Sizes may be strings, as JSON has them.
            A length of 0 decodes without drafts. None takes `DEFAULT_TABLE`, which fits one small pair: profile yours.
    """

    name = "batch_table"

    def __init__(self, table: Mapping[int | str, int] | None = None) -> None:
        self.table = checked_table(DEFAULT_TABLE if table is None else table)
        self._state: _State | None = None
        self._ceiling = 0

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("BatchTablePolicy was used before `start(batch)`.")
        return self._state

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._ceiling = batch.max_draft_length
        self._state = _State(active=torch.ones(batch.rows, dtype=torch.bool, device=batch.device))
        self._fresh = _State(active=torch.ones(1, dtype=torch.bool, device=batch.device))

    def draft_lengths(self) -> Tensor:
        """The table's length for the batch as it is now, shape `[rows]`, int64, the same for all."""
        active = self._rows.active
        return self.lengths_at(active.sum()).clamp_max(self._ceiling).expand_as(active)

    def lengths_at(self, rows: Tensor) -> Tensor:
        """The table's lengths at batch sizes, int64, any shape."""
        lengths = torch.full_like(rows, next(iter(self.table.values())))
        for (low, _), (high, length) in pairwise(self.table.items()):
            lengths = torch.where(rows >= nearest_from(low, high), length, lengths)
        return lengths

    def observe(self, outcome: RoundOutcome) -> None:
        """Take note of which rows have finished."""
        self._state = _State(active=outcome.active)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index, self._fresh)


def nearest_from(low: int, high: int) -> int:
    """The least batch size that is nearer to `high` than to `low` by ratio, or as near: `sqrt(low high)` rounded up."""
    return isqrt(low * high - 1) + 1


def checked_table(table: object) -> dict[int, int]:
    """The table by ascending batch size.

    Raises:
        TypeError: If it is no mapping of integers, or strings of digits, to integers.
        ValueError: If it is empty, names a batch size twice, or has a batch size below 1 or a length below 0.
    """
    if not isinstance(table, Mapping):
        raise TypeError(f"`table` is {table!r}, but draft lengths by batch size are needed, such as {{1: 5, 8: 3}}.")
    if not table:
        raise ValueError("`table` is empty; the draft length of at least one batch size is needed, such as {1: 5}.")
    by_rows: dict[int, int] = {}
    for key, length in table.items():
        rows = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        rows = check_integer("table", rows, 1, way_out="It is a batch size of the table.")
        if rows in by_rows:
            raise ValueError(f"`table` has the batch size {rows} twice, once as a string. Keep one of them.")
        by_rows[rows] = check_integer("table", length, 0, way_out=f"It is the draft length of batch size {rows}.")
    return dict(sorted(by_rows.items()))


def survival_probabilities(drafted: Sequence[int], accepted: Sequence[int]) -> tuple[float, ...]:
    """Chance that the first j tokens of a draft are all accepted, j = 1 .. longest draft, from rounds of any lengths.

    The product of `rounds that accepted token i / rounds that tested token i` for i up to j (Kaplan and Meier 1958): a
    round that drafted fewer tokens says nothing about later ones and is left out there. It ends before the first token
    that no round has tested.

    Args:
        drafted: Tokens that each row drafted in each round.
        accepted: How many of them were accepted, from the front.

    Raises:
        ValueError: If there are not as many of one as of the other, or a round accepted more than it drafted.
    """
    if len(drafted) != len(accepted):
        raise ValueError(
            f"`drafted` has {len(drafted)} rounds and `accepted` {len(accepted)}; equal numbers are needed."
        )
    rounds = list(zip(drafted, accepted, strict=True))
    for length, matches in rounds:
        check_integer("drafted", length, 0)
        check_integer("accepted", matches, 0, length)
    rates = []
    for position in range(max(drafted, default=0)):
        tested = [matches > position for length, matches in rounds if length > position and matches >= position]
        if not tested:
            break
        rates.append(sum(tested) / len(tested))
    return tuple(accumulate(rates, lambda survived, rate: survived * rate))


def best_length(survival: Sequence[float], costs: BatchCosts) -> int:
    """The draft length of least time per token, `argmin_s (t_L(b, s) + s t_S(b)) / l(s)` (arXiv 2310.18813).

    `l(s)` is the number of tokens that a row gains in a round, the correction or bonus token included: 1 plus the
    chances that the first 1, 2, ... s tokens are accepted. `t_L` is the cost of the target's pass, with what a round
    costs in addition, and `t_S` that of a draft step; here, `s t_S` is what s draft steps of a round cost together.

    Args:
        survival: Chance that the first j draft tokens are all accepted, j = 1, 2, ...; in [0, 1] and not rising.
        costs: Costs of the batch size b.

    Returns:
        A length from 0, which is plain decoding, to the number of chances; of equally good ones the shortest.

    Raises:
        ValueError: If `survival` is no such sequence.
    """
    for chance in survival:
        check_number("survival", chance, 0.0, 1.0)
    if any(later > earlier for earlier, later in pairwise(survival)):
        raise ValueError(
            f"`survival` is {list(survival)}, which rises, but more tokens cannot be accepted more often than fewer. "
            "`survival_probabilities` gives chances that do not."
        )
    tokens = accumulate(survival, initial=1.0)
    seconds_per_token = [costs.round_seconds(length) / gained for length, gained in enumerate(tokens)]
    return min(range(len(seconds_per_token)), key=seconds_per_token.__getitem__)
