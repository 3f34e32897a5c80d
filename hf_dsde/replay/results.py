"""What a grid of replays brought: speeds by cell, policy and seed, and how far they lie from the best fixed length."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_dsde.replay.pricing import CostSetting


@dataclass(frozen=True)
class Gap:
    """How much faster than a reference, in percent, paired by seed.

    Attributes:
        mean: Over seeds.
        deviation: Standard deviation over seeds; 0 for one seed.
    """

    mean: float
    deviation: float

    @classmethod
    def over(cls, speeds: Sequence[float], reference: Sequence[float]) -> Gap:
        """The gap between two sets of speeds, one entry per seed each."""
        gaps = [100 * (speed / base - 1) for speed, base in zip(speeds, reference, strict=True)]
        return cls(statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else 0.0)


@dataclass(frozen=True)
class PolicyScore:
    """A policy's run of one cell.

    Attributes:
        name: Of its `PolicySpec`.
        speeds: Times plain decoding's speed, one per seed.
        drafted: Tokens drafted over all seeds.
        accepted: How many of them were accepted.
        emitted: Tokens of text.
        row_rounds: Rounds times rows.
    """

    name: str
    speeds: tuple[float, ...]
    drafted: int
    accepted: int
    emitted: int
    row_rounds: int

    @property
    def draft_length(self) -> float:
        """Tokens drafted by a row in a round, on average."""
        return self.drafted / self.row_rounds

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted by a row in a round, on average."""
        return self.emitted / self.row_rounds


@dataclass(frozen=True)
class Cell:
    """One column of a comparison: a trace at a temperature, a batch size and a cost setting.

    Attributes:
        trace: Name.
        temperature: 0 or 1.
        rows: Rows of the batch.
        costs: What rounds cost.
        static: Speeds of fixed lengths 0, 1, ..., `[lengths][seeds]`.
        oracle: The oracle's speeds, one per seed.
        fractional: Speeds of fractional budgets, one per seed; empty unless passes are packed.
        policies: Scores, in the order asked for.
    """

    trace: str
    temperature: int
    rows: int
    costs: CostSetting
    static: tuple[tuple[float, ...], ...]
    oracle: tuple[float, ...]
    fractional: dict[float, tuple[float, ...]]
    policies: tuple[PolicyScore, ...]

    @property
    def static_opt(self) -> int:
        """The fixed length of the best mean speed."""
        means = [statistics.fmean(speeds) for speeds in self.static]
        return means.index(max(means))

    @property
    def static_opt_speeds(self) -> tuple[float, ...]:
        """Its speeds."""
        return self.static[self.static_opt]

    @property
    def best_budget(self) -> float | None:
        """The fractional budget of the best mean speed; None where none was tried."""
        if not self.fractional:
            return None
        return max(self.fractional, key=lambda budget: statistics.fmean(self.fractional[budget]))

    def gap(self, speeds: Sequence[float]) -> Gap:
        """How far speeds lie over the best fixed length's."""
        return Gap.over(speeds, self.static_opt_speeds)

    def score(self, name: str) -> PolicyScore:
        """The score of the policy of that name.

        Raises:
            KeyError: There is none.
        """
        found = [score for score in self.policies if score.name == name]
        if not found:
            raise KeyError(f"No policy {name!r} was played; there are: {', '.join(s.name for s in self.policies)}.")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON holds them, ratios and gaps included."""
        values: dict[str, Any] = {
            "trace": self.trace,
            "temperature": self.temperature,
            "batch": self.rows,
            "costs": self.costs.name,
            "static": {str(length): list(speeds) for length, speeds in enumerate(self.static)},
            "static_opt": {"length": self.static_opt, "speed": statistics.fmean(self.static_opt_speeds)},
            "oracle": _scored(self, self.oracle),
            "policies": {},
        }
        if self.best_budget is not None:
            values["fractional"] = {"budget": self.best_budget} | _scored(self, self.fractional[self.best_budget])
        for score in self.policies:
            values["policies"][score.name] = _scored(self, score.speeds) | {
                "draft_length": score.draft_length,
                "block_efficiency": score.block_efficiency,
                "drafted": score.drafted,
                "accepted": score.accepted,
                "emitted": score.emitted,
                "row_rounds": score.row_rounds,
            }
        return values


def _scored(cell: Cell, speeds: Sequence[float]) -> dict[str, Any]:
    gap = cell.gap(speeds)
    return {"speeds": list(speeds), "gap_percent": gap.mean, "gap_deviation": gap.deviation}
