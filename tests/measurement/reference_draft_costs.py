"""What drafting costs as rounds show it: a line over draft steps, moved by the least change that a timing asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class ReferenceDraftCosts:
    """The common part of a round's drafting and the part of each step, in float64.

    A timing of k steps moves the line at k by a tenth of the surprise, or by half of it where it is far below. Of all
    changes (a, b), of the line at the usual number of steps and of its slope, with a + (k - usual) b as wanted, it is the
    one of the least a^2 + (b / 2)^2. After that, a part below 0 goes to the other one.
    """

    common: float
    step: float
    usual: float | None = None

    def seconds(self, steps: float) -> float:
        return self.common + self.step * steps

    def observe(self, steps: int, seconds: float) -> None:
        usual = steps if self.usual is None else self.usual
        expected = self.seconds(steps)
        seconds = max(expected / 2, min(seconds, 1.25 * expected))
        wanted = (seconds - expected) * (0.5 if seconds < 0.8 * expected else 0.1)
        # In units of which both changes count the same: b / 2 is the second unknown.
        change, half_slope = np.linalg.lstsq(np.array([[1.0, 2.0 * (steps - usual)]]), np.array([wanted]))[0]
        there, slope = self.seconds(usual) + change, self.step + 2 * half_slope
        if slope < 0:
            slope = 0.0
        if there - slope * usual < 0:
            slope = there / usual
        self.common, self.step = there - slope * usual, slope
        self.usual = 0.9 * usual + 0.1 * steps
