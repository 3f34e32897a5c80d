"""What a round costs, in plain steps: the time that the target takes for one token per row.

Prices are either a formula (`LinearCosts`) or a measured `CostModel`. Both become one table per batch size, so that a
round's price is a look-up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts
from hf_dsde.utils.checks import check_integer, check_number

DEFAULT_SLOPE = 0.025


@dataclass(frozen=True)
class LinearCosts:
    """Costs by a formula: `v(tokens) = 1 + slope (tokens / rows - 1) + max(0, tokens - ridge) / ridge`.

    Attributes:
        draft_step: Cost of a draft step in plain steps, more than 0.
        slope: What each further column of a pass costs.
        ridge: Tokens of a pass beyond which arithmetic, not memory, takes the time; None puts it out of reach.
    """

    draft_step: float
    slope: float = DEFAULT_SLOPE
    ridge: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_number("draft_step", self.draft_step, 0.0, open_minimum=True)
        check_number("slope", self.slope, 0.0)
        if self.ridge is not None:
            check_integer("ridge", self.ridge, 1)

    def verify(self, tokens: NDArray[np.int64], rows: int) -> NDArray[np.float64]:
        """Cost of passes of the given numbers of tokens, in plain steps."""
        cost = 1.0 + self.slope * (tokens / rows - 1.0)
        return cost if self.ridge is None else cost + np.maximum(0, tokens - self.ridge) / self.ridge


@dataclass(frozen=True)
class CostSetting:
    """A column of a comparison.

    Attributes:
        name: How results call it.
        costs: A formula, or what was measured on a machine.
        packed: Whether a pass pays for each row's own tokens instead of the longest row's.
    """

    name: str
    costs: LinearCosts | CostModel
    packed: bool = False

    @classmethod
    def linear(
        cls, draft_step: float, slope: float = DEFAULT_SLOPE, ridge: int | None = None, packed: bool = False
    ) -> CostSetting:
        """A setting by formula, named after what it sets."""
        name = f"c={draft_step:g}" + ("" if ridge is None else f" ridge {ridge}") + (" packed" if packed else "")
        return cls(name, LinearCosts(draft_step, slope, ridge), packed)

    @classmethod
    def measured(cls, file: Path, packed: bool = False) -> CostSetting:
        """A setting from a file that holds a `CostModel.to_dict()`.

        Raises:
            ValueError: The file holds no costs.
        """
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as failure:
            raise ValueError(
                f"{file} holds no costs ({failure}). Write one with `json.dumps(cost_model.to_dict())`."
            ) from failure
        return cls(file.stem + (" packed" if packed else ""), CostModel.from_dict(values), packed)

    def prices(self, rows: int, max_draft_length: int) -> RoundPrices:
        """Prices for a batch of `rows` rows that draft up to `max_draft_length` tokens."""
        tokens = np.arange(rows, rows * (max_draft_length + 1) + 1)
        steps = np.arange(max_draft_length + 1)
        if isinstance(self.costs, LinearCosts):
            draft = self.costs.draft_step * steps.astype(np.float64)
            return RoundPrices(rows, draft, 0.0, self.costs.verify(tokens, rows), self.packed)
        costs = self.costs.at(rows)
        plain = costs.verify.at(1) + costs.overhead
        columns = np.arange(1, max_draft_length + 2)
        # A packed pass has a fractional number of columns per row; the curve is linear between whole ones.
        verify = np.interp(tokens / rows, columns, [costs.verify.at(int(column)) for column in columns]) / plain
        draft = np.array([costs.draft_seconds(int(count)) for count in steps]) / plain
        return RoundPrices(rows, draft, costs.overhead / plain, verify, self.packed)

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON holds them."""
        values: dict[str, Any] = {"name": self.name, "packed": self.packed}
        if isinstance(self.costs, LinearCosts):
            return values | {"draft_step": self.costs.draft_step, "slope": self.costs.slope, "ridge": self.costs.ridge}
        return values | {"measured": self.costs.to_dict()}


@dataclass(frozen=True)
class RoundPrices:
    """Prices of one batch size, in plain steps.

    Attributes:
        rows: Rows of the batch.
        draft: 0, 1, ... draft steps.
        overhead: What a round costs in addition.
        verify: A pass of `rows`, `rows + 1`, ... tokens.
        packed: Whether a pass pays for each row's own tokens instead of the longest row's.
    """

    rows: int
    draft: NDArray[np.float64]
    overhead: float
    verify: NDArray[np.float64]
    packed: bool

    def rounds(self, steps: NDArray[np.int64], drafted: NDArray[np.int64]) -> NDArray[np.float64]:
        """Times of rounds.

        Args:
            steps: Draft steps of each round, which is what its longest row drafts, `[rounds]`.
            drafted: Tokens that all rows drafted together, `[rounds]`.

        Returns:
            Shape `[rounds]`, float64, plain steps.
        """
        further = drafted if self.packed else self.rows * steps
        return self.draft[steps] + self.overhead + self.verify[further]

    def live(self, max_draft_length: int) -> LiveCosts:
        """The same prices as a policy sees them, which never change on the way."""
        columns = range(1, max_draft_length + 2)
        verify = CostCurve(tuple(columns), tuple(float(self.verify[self.rows * (column - 1)]) for column in columns))
        steps = range(1, max_draft_length + 1)
        draft = (
            CostCurve(tuple(steps), tuple(float(self.draft[count]) for count in steps)) if self.draft.any() else None
        )
        model = CostModel({self.rows: BatchCosts(draft, verify, self.overhead)})
        return LiveCosts(model, self.rows, refresh=False)
