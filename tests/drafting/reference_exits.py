"""DEL's numbers in plain Python, out of everything that was ever seen: slow, and written without the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """A shadow token: its exit, whether it was the target's own token, and how sure the exit was of it."""

    place: int
    matched: bool
    confidence: float


def tokens_per_layer(a: float, layer: float, layers: float, length: int) -> float:
    tokens = length + 1.0 if a == 1.0 else (1 - a ** (length + 1)) / (1 - a)
    return tokens / (length * layer + layers)


@dataclass
class Reference:
    """Keeps every shadow token of every round, and weighs each again whenever it is asked."""

    exits: Sequence[int]
    layers: int
    head: float
    decay: float
    rows: int
    rounds: list[list[list[Seen]]] = field(default_factory=list)  # by round and row
    begun: dict[int, int] = field(default_factory=dict)  # the round in which a row's text began

    def learn(self, shadows: Any, confidence: Any, texts: Sequence[Sequence[int]]) -> None:
        this_round: list[list[Seen]] = []
        for row in range(self.rows):
            seen = []
            for column, token in enumerate(texts[row]):
                for place in range(len(self.exits)):
                    guess = shadows[place][row][column]
                    seen.append(Seen(place, guess == token, confidence[place][row][column]))
            this_round.append(seen)
        self.rounds.append(this_round)

    def begin(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.begun[row] = len(self.rounds)

    def _share(self, weighed: list[tuple[float, Seen]], place: int) -> tuple[float, float]:
        own = [(weight, seen) for weight, seen in weighed if seen.place == place]
        return sum(w for w, seen in own if seen.matched), sum(w for w, _ in own)

    def _of_batch(self) -> list[tuple[float, Seen]]:
        last = len(self.rounds) - 1
        return [
            (self.decay ** (last - number), seen)
            for number, rows in enumerate(self.rounds)
            for row in rows
            for seen in row
        ]

    def _of_row(self, row: int) -> list[tuple[float, Seen]]:
        own = [rows[row] for rows in self.rounds[self.begun.get(row, 0) :] if rows[row]]
        return [(self.decay ** (len(own) - 1 - age), seen) for age, seen_then in enumerate(own) for seen in seen_then]

    def acceptance(self, place: int) -> float:
        matched, judged = self._share(self._of_batch(), place)
        return (matched + 1.0) / (judged + 2.0)

    def row_acceptance(self, place: int) -> list[float]:
        shares = [self._share(self._of_row(row), place) for row in range(self.rows)]
        return [(matched + 16 * self.acceptance(place)) / (judged + 16) for matched, judged in shares]

    def threshold(self, place: int) -> float:
        means = []
        for kind in (False, True):
            own = [(w, seen) for w, seen in self._of_batch() if w and seen.place == place and seen.matched == kind]
            if not own:
                return 0.0
            means.append(sum(w * seen.confidence for w, seen in own) / sum(w for w, _ in own))
        wrong, right = means
        return (wrong + right) / 2 if right > wrong else 0.0

    def _value(self, place: int, length: int, acceptance: float) -> float:
        layer, layers = self.exits[place] + self.head, self.layers + self.head
        return tokens_per_layer(acceptance, layer, layers, length)

    def best_exit(self, longest: int) -> int:
        pairs = [(place, length) for place in range(len(self.exits)) for length in range(longest + 1)]
        return max(pairs, key=lambda pair: self._value(*pair, self.acceptance(pair[0])))[0]

    def exit_for(self, length: int) -> int:
        return max(range(len(self.exits)), key=lambda place: self._value(place, length, self.acceptance(place)))

    def lengths(self, place: int, most: Sequence[int]) -> list[int]:
        found = []
        for acceptance, bound in zip(self.row_acceptance(place), most, strict=True):
            found.append(max(range(bound + 1), key=lambda n: self._value(place, n, acceptance)))
        return found
