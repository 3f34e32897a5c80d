"""What drafting costs as rounds show it: a line over draft steps, moved by the least change that a timing asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class ReferenceDraftCosts:
    """The common part of a round's drafting and the part of each step, in float64.

    A timing of k steps moves the line at k by a tenth of the surprise, or by half of it where it is far below. Of all
    changes (a, b), of the line at the usual number of steps and of its slope, with a + (k - usual) b as wanted, it is
    the one that changes the line least at the lengths K of late: it has the least mean of (a + (K - usual) b)^2, which
    is a^2 + variance(K) b^2. After that, a part below 0 goes to the other one. Where rounds hardly differ in length,
    the part of each step goes back to what it was in the beginning, and the line stays where it is at the usual length.
    """

    common: float
    step: float
    usual: float | None = None
    variance: float = 0.0

    def __post_init__(self) -> None:
        self.measured = self.step

    def seconds(self, steps: float) -> float:
        return self.common + self.step * steps

    def observe(self, steps: int, seconds: float) -> None:
        usual = steps if self.usual is None else self.usual
        expected = self.seconds(steps)
        seconds = max(expected / 2, min(seconds, expected + 0.25 * max(expected, self.seconds(usual))))
        wanted = (seconds - expected) * (0.5 if seconds < 0.8 * expected else 0.1)
        # The second unknown is b in units of the deviation, so that both count the same.
        deviation = max(self.variance**0.5, 0.5)
        change, scaled = np.linalg.lstsq(np.array([[1.0, (steps - usual) / deviation]]), np.array([wanted]))[0]
        there, slope = self.seconds(usual) + change, self.step + scaled / deviation
        slope += 0.03 * max(1 - 4 * self.variance, 0.0) * (self.measured - slope)
        if slope < 0:
            slope = 0.0
        if there - slope * usual < 0:
            slope = there / usual
        self.common, self.step = there - slope * usual, slope
        self.usual = 0.9 * usual + 0.1 * steps
        self.variance = 0.9 * self.variance + 0.1 * (steps - usual) ** 2
