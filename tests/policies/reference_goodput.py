"""Goodput in plain Python: SmartSpec's equations (arXiv 2406.14066), one number at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ReferenceGoodput:
    """Decides one length for the batch from counts and the times of rounds by length, in plain steps."""

    times: list[float]
    acceptance: float = 0.7
    decay: float = 0.85
    interval: int = 1
    plain_bonus: float = 1.0
    probe_share: float = 0.01
    estimator: str = "tested"
    length: int = 0
    rounds: int = 0
    best: int = 0
    budget: float = 0.0
    probing: bool = False
    resumption: float = 0.0
    memory_tokens: int = 20
    tokens: float = 8.0
    probes: list[int] = field(default_factory=list)
    rows: int = 4
    lengths: list[int] = field(default_factory=list)
    acceptance_of: str = "slowest_row"
    row_judged: list[float] = field(default_factory=list)
    row_accepted: list[float] = field(default_factory=list)
    active: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.row_judged, self.row_accepted = [0.0] * self.rows, [0.0] * self.rows
        self.active = [True] * self.rows
        self.best = self.length = self.best_length()
        self.lengths = [self.length] * self.rows
        if self.best == 0 and self.probe_share > 0:
            self.budget = self.times[1] - self.times[0] + self.resumption

    def goodput(self, length: int) -> float:
        tokens, acceptance = 0.0, self.acceptance
        if self.acceptance_of == "slowest_row" and self.rows > 1 and any(self.active):
            acceptance = 1.0
            for row in range(self.rows):
                if self.active[row]:
                    own = (self.row_accepted[row] + 16 * self.acceptance) / (self.row_judged[row] + 16)
                    acceptance = min(acceptance, own)
        for reached in range(length + 1):
            tokens += acceptance**reached
        return tokens / self.times[length] * (self.plain_bonus if length == 0 else 1.0)

    def best_length(self) -> int:
        best = 0
        for length in range(1, len(self.times)):
            if self.goodput(length) > self.goodput(best):
                best = length
        return best

    def observe(self, drafted: list[int], accepted: list[int], active: list[bool]) -> None:
        total = 0
        for d, a in zip(drafted, accepted, strict=True):
            total += d if self.estimator == "drafted" else min(a + 1, d)
        if sum(drafted):
            weight = 1 - self.decay
            if self.memory_tokens:
                self.tokens = min(self.tokens, max(self.memory_tokens, total * self.decay / (1 - self.decay)))
                weight = total / (self.tokens + total)
            self.acceptance = (1 - weight) * self.acceptance + weight * sum(accepted) / total
            for row in range(self.rows):
                kept = 1.0 if self.row_judged[row] <= 64 else 64 / self.row_judged[row]
                tested = drafted[row] if self.estimator == "drafted" else min(accepted[row] + 1, drafted[row])
                self.row_judged[row] = kept * self.row_judged[row] + tested
                self.row_accepted[row] = kept * self.row_accepted[row] + accepted[row]
        self.active = active
        self.rounds += 1
        if self.rounds % self.interval == 0:
            self.best = self.best_length()
        self.tokens = 8.0 if self.best == 0 else self.tokens + total
        if self.best == 0:
            self.row_judged, self.row_accepted = [0.0] * self.rows, [0.0] * self.rows
        price = self.times[1] - self.times[0] + self.resumption
        if self.probing:
            self.budget += min(sum(accepted) / max(1, sum(active)), price)
        share = self.probe_share * self.times[min(max(drafted), len(self.times) - 1)]
        self.budget = min(self.budget + share, 2 * max(price, share))
        self.probing = self.best == 0 and self.budget >= price > 0
        if self.probing:
            self.budget -= price
            self.probes.append(self.rounds)
        self.length = 1 if self.probing else self.best
        self.lengths = [self.length] * self.rows
        if self.probing:
            going_on = [row for row in range(self.rows) if active[row]]
            self.lengths = [1 if row in going_on[:4] else 0 for row in range(self.rows)]
