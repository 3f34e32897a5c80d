"""`marginal_goodput` one number at a time: plain Python, float64, and samples learned from by rank-one updates.

With no forgetting the extended Kalman filter can be written for one sample after the other, from the predictions at the
start of the round, which is how it is written here; the policy adds a round's samples up and inverts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Vector = list[float]
SIZE = 7


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def bounded_logit(probability: float) -> float:
    kept = min(max(probability, 0.02), 0.98)
    return math.log(kept / (1 - kept))


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


class Regression:
    def __init__(self, intercept: float, row_mean: float = 0.0) -> None:
        self.theta = [intercept, row_mean, 0.0, 0.0, 0.0, 0.0, 0.0]
        self.reset()

    def reset(self) -> None:
        self.covariance = [[float(i == j) for j in range(SIZE)] for i in range(SIZE)]

    def predict(self, x: Vector) -> float:
        return sigmoid(dot(self.theta, x))

    def image(self, x: Vector) -> Vector:
        return [dot(row, x) for row in self.covariance]

    def learn(self, samples: list[tuple[Vector, float]]) -> None:
        predicted = [self.predict(x) for x, _ in samples]
        for (x, _), p in zip(samples, predicted, strict=True):
            weight = max(p * (1 - p), 0.01)
            image = self.image(x)
            scale = weight / (1 + weight * dot(x, image))
            for i in range(SIZE):
                for j in range(SIZE):
                    self.covariance[i][j] -= scale * image[i] * image[j]
        gradient = [
            math.fsum(x[i] * (y - p) for (x, y), p in zip(samples, predicted, strict=True)) for i in range(SIZE)
        ]
        for i in range(SIZE):
            self.theta[i] += min(max(dot(self.covariance[i], gradient), -1.0), 1.0)


@dataclass
class Row:
    accepted: float = 0.0
    tested: float = 0.0
    residual: float = 0.0
    entropy: float = 1.0
    probability: float = math.exp(-0.6)
    full: float = 0.0
    active: bool = True


@dataclass
class Reference:
    """Feed it what the policy is fed: `stops` after every draft token, `observe` after every round."""

    times: Vector
    rows: list[Row]
    optimism: float
    probe_share: float
    warmup_rounds: int
    memory: float = 0.9
    rounds: int = 0
    labels: float = 1.5
    label_count: float = 3.0
    time: float = 4.0
    tokens: float = 6.0
    deviation: float = 0.0
    variance: float = 0.0
    noticed: float = 0.0
    probe_price: float = 0.0
    probe_at: int = 0
    surprises: int = 0
    closest: float = math.inf
    """The smallest relative distance of a quantity from its limit so far: near 0, rounding decides."""
    drafts: list[list[Vector]] = field(default_factory=list)
    aheads: list[list[Vector]] = field(default_factory=list)

    def __post_init__(self) -> None:
        novelty = 0.25 + 0.75 / len(self.rows)
        self.exploration, self.put_aside = 2 * novelty, self.probe_share * novelty
        self.budget = self.exploration
        self.plain, self.nowcast = Regression(-0.3), Regression(-0.3)
        self.first, self.next = Regression(-0.3, 0.7), Regression(-0.3)
        self.begin()

    def row_mean(self, row: Row) -> float:
        return (row.accepted + 3 * self.labels / self.label_count) / (row.tested + 3)

    def token_value(self) -> float:
        return self.time / (self.tokens * max(1, sum(row.active for row in self.rows)))

    def gain(self, regression: Regression, features: list[Vector], survival: Vector) -> float:
        mass = max(math.fsum(survival), 1e-6)
        mean = math.fsum(s * regression.predict(x) for s, x in zip(survival, features, strict=True)) / mass
        centre = [math.fsum(s * x[i] for s, x in zip(survival, features, strict=True)) / mass for i in range(SIZE)]
        deviation = math.sqrt(max(0.0, dot(centre, regression.image(centre))))
        return mass * (mean + self.optimism * mean * (1 - mean) * deviation) * self.token_value()

    def goes_on(self, gain: float, length: int) -> bool:
        if self.rounds < self.warmup_rounds and length < 4:
            return True
        cost = self.times[length + 1] - self.times[length]
        self.closest = min(self.closest, abs(gain - cost) / cost)
        if gain > cost:
            return True
        self.closest = min(self.closest, abs(self.budget - cost) / cost)
        if self.budget >= cost and self.probe_price == 0:
            self.budget -= cost
            self.probe_price, self.probe_at = cost, length
            return True
        return False

    def begin(self) -> None:
        if not self.drafts:
            self.budget += self.probe_price
        self.drafts, self.probe_price = [], 0.0
        first = [
            [
                1.0,
                bounded_logit(self.row_mean(row)),
                4 * row.residual / (row.tested + 3),
                0.5 * row.entropy - 0.5,
                0.5 * math.log(row.probability) + 0.3,
                row.full,
                0.0,
            ]
            for row in self.rows
        ]
        self.aheads = [first]
        self.drafting = self.goes_on(self.gain(self.first, first, [float(row.active) for row in self.rows]), 0)

    def stops(self, top: list[tuple[float, float]], entropy: Vector, drafting: list[bool]) -> bool:
        if not self.drafts:
            self.survival = [1.0] * len(self.rows)
        draft, ahead = [], []
        for i, row in enumerate(self.rows):
            bias = row.residual / (row.tested + 3)
            first, second = math.log(top[i][0]), math.log(top[i][1])
            x = [1.0, first, entropy[i] / 2, 0.3 * min(6.0, first - second), top[i][0], math.sqrt(entropy[i]), 4 * bias]
            p = self.nowcast.predict(x)
            self.survival[i] *= p * drafting[i]
            draft.append(x)
            ahead.append([1.0, bounded_logit(self.row_mean(row)), 4 * bias, x[1] / 2, x[5] / 2, bounded_logit(p), 0.0])
        self.drafts.append(draft)
        self.aheads.append(ahead)
        length = len(self.drafts)
        if length + 1 >= len(self.times):
            return True
        return not self.goes_on(self.gain(self.next, ahead, self.survival), length)

    def observe(
        self,
        drafted: list[int],
        accepted: list[int],
        active: list[bool],
        acceptance: list[Vector],
        entropy: Vector,
        probability: Vector,
    ) -> None:
        self.rounds += 1
        samples: dict[str, list[tuple[Vector, float]]] = {"plain": [], "nowcast": [], "first": [], "next": []}
        deviation = variance = 0.0
        seen = []
        for i, row in enumerate(self.rows):
            for j in range(min(drafted[i], accepted[i] + 1) if active[i] else 0):
                y, x = acceptance[i][j], self.drafts[j][i]
                bare = [*x[:-1], 0.0]
                samples["plain"].append((bare, y))
                samples["nowcast"].append((x, y))
                samples["first" if j == 0 else "next"].append((self.aheads[j][i], y))
                seen.append((row, y, y - self.plain.predict(bare)))
                p = self.nowcast.predict(x)
                deviation, variance = deviation + y - p, variance + p * (1 - p)
        if self.drafts:
            for name, of_it in samples.items():
                getattr(self, name).learn(of_it)
            for row, y, residual in seen:
                row.accepted = self.memory * row.accepted + y
                row.tested = self.memory * row.tested + 1
                row.residual = self.memory * row.residual + residual
            kept = 0.999 ** len(seen)
            self.labels = kept * self.labels + math.fsum(y for _, y, _ in seen)
            self.label_count = kept * self.label_count + len(seen)
            self.notice(deviation, variance, len(seen))
        self.settle(drafted, accepted, active)
        for i, row in enumerate(self.rows):
            row.active = active[i]
            if active[i] and drafted[i]:
                row.entropy, row.probability = entropy[i], probability[i]
                row.full = float(accepted[i] == drafted[i])
        self.begin()

    def notice(self, deviation: float, variance: float, count: int) -> None:
        kept = max(0.98**count, 0.8)
        self.deviation = kept * self.deviation + deviation
        self.variance = kept * self.variance + variance
        self.noticed = kept * self.noticed + count
        limit = 3 * math.sqrt(self.variance + 0.25) + 0.02 * self.noticed
        self.closest = min(self.closest, abs(abs(self.deviation) - limit) / limit)
        if abs(self.deviation) > limit:
            for regression in (self.plain, self.nowcast, self.first, self.next):
                regression.reset()
            scale = 3 / max(self.label_count, 3)
            self.labels, self.label_count = scale * self.labels, scale * self.label_count
            if self.deviation > 0:
                self.budget = self.exploration
            self.surprises += 1
            self.deviation = self.variance = self.noticed = 0.0

    def settle(self, drafted: list[int], accepted: list[int], active: list[bool]) -> None:
        spent = self.times[min(max(drafted), len(self.times) - 1)]
        gained = sum(a + 1 for a, on in zip(accepted, active, strict=True) if on) / max(1, sum(active))
        self.time = 0.99 * self.time + spent
        self.tokens = 0.99 * self.tokens + gained
        lucky = sum(a > self.probe_at for a, on in zip(accepted, active, strict=True) if on) * self.token_value()
        refund = min(lucky, self.probe_price) if self.probe_price else 0.0
        self.budget = min(self.budget + refund + self.put_aside * spent, self.exploration * spent)
