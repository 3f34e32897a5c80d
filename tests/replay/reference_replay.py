"""A slow replay in plain Python: lists of dictionaries, one row after the other, nothing laid out beforehand.

Written from the description of a replay alone. Random numbers are given to it, since they are not logic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Place = tuple[str, int, int]  # task, sequence, position
ENOUGH = 50


@dataclass
class SlowRow:
    """A row of the batch: what it reads, where it stands, and what a rule wants to remember of it."""

    task: str
    sequence: int
    position: int = 0
    memory: int = 0


@dataclass
class SlowRound:
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    shown: list[list[dict[str, float]]]
    following: list[tuple[float, float]]


@dataclass
class SlowReplay:
    committed: list[dict[str, Any]]
    drafted: list[dict[str, Any]]
    temperature: int
    coins: dict[Place, float]
    tail_draws: dict[Place, float]
    limit: int = 12
    texts: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    tails: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for row in self.committed:
            self.texts.setdefault((row["task"], row["sequence"]), []).append(row)
        blocks: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
        for row in self.drafted:
            blocks.setdefault((row["task"], row["sequence"], row["round"]), []).append(row)
        for (task, _, _), block in blocks.items():
            after = [row for row in block if not row["on_path"]]
            if after:
                self.tails.append((task, after))

    def accepts(self, row: SlowRow, offset: int) -> bool:
        """Whether the draft token at an offset would be accepted, given that those before it were."""
        text = self.texts[row.task, row.sequence]
        position = row.position + offset
        if position >= len(text):
            return False
        at = text[position]
        if self.temperature == 0:
            return bool(at["draft_agrees"])
        ratio = float(as_single(at["draft_probability"])) / float(as_single(at["target_probability"]))
        return self.coins[row.task, row.sequence, position] < ratio

    def shown(self, row: SlowRow, offset: int) -> dict[str, float]:
        """What the draft token at an offset of a block shows."""
        text = self.texts[row.task, row.sequence]
        run = 0
        while self.accepts(row, run):
            run += 1
        last_on_path = min(run, len(text) - row.position - 1)
        if offset > last_on_path:
            failed = row.position + last_on_path
            tail = self.tail((row.task, row.sequence, failed), last_on_path)
            if offset - last_on_path > len(tail):
                return {}  # beyond what any real block has shown; no rule under comparison drafts that far
            return self._signals(tail[offset - last_on_path - 1], rejected=False, off_path=True)
        return self._signals(text[row.position + offset], rejected=offset == run, off_path=False)

    def tail(self, place: Place, offset: int) -> list[dict[str, Any]]:
        """The drafts that follow a rejection at an offset: those of a real block that failed in the same way."""
        longest = max(len(tail) for _, tail in self.tails)
        wanted = longest - offset if offset < longest else min(max(self.limit - offset - 1, 1), longest)
        own = [tail for task, tail in self.tails if task == place[0]]
        pools = ([tail for tail in own if len(tail) == wanted], [tail for tail in own if len(tail) >= wanted])
        everywhere = [tail for _, tail in self.tails if len(tail) >= wanted]
        fitting = next((pool for pool in pools if len(pool) >= ENOUGH), everywhere)
        return fitting[int(self.tail_draws[place] * len(fitting))]

    def _signals(self, at: dict[str, Any], *, rejected: bool, off_path: bool) -> dict[str, float]:
        sampled = self.temperature > 0
        if off_path:
            confidence = at["draft_probability"]
            acceptance = at["acceptance"] if sampled else float(at["target_agrees"])
        else:
            residual = "residual_draft_probability" if rejected else "draft_probability"
            confidence = at[residual if sampled else "draft_top1"]
            acceptance = at["acceptance"] if sampled else float(at["draft_agrees"])
        return {
            "kld": at["kld"],
            "reverse_kld": at["reverse_kld"],
            "entropy": at["draft_entropy"],
            "confidence": confidence,
            "acceptance": acceptance,
            "top1": at["draft_top1"],
            "top2": at["draft_top2"],
        }

    def play(
        self,
        queue: Iterator[tuple[str, int]],
        rows: int,
        tokens: int,
        length: Callable[[SlowRow, int], int],
        stops: Callable[[SlowRow, dict[str, float]], bool] = lambda row, shown: False,
    ) -> list[SlowRound]:
        """Rounds until `tokens` have come out. `length(row, round)` and `stops(row, shown)` are the rule."""
        batch = [SlowRow(*next(queue)) for _ in range(rows)]
        rounds: list[SlowRound] = []
        while sum(sum(r.emitted) for r in rounds) < tokens:
            this = SlowRound([], [], [], [], [])
            for index, row in enumerate(batch):
                text = self.texts[row.task, row.sequence]
                block: list[dict[str, float]] = []
                most = min(length(row, len(rounds)), self.limit)
                while len(block) < most:
                    block.append(self.shown(row, len(block)))
                    if stops(row, block[-1]):
                        break
                accepted = 0
                while accepted < len(block) and self.accepts(row, accepted):
                    accepted += 1
                left = len(text) - row.position
                ending = text[row.position + min(accepted, left - 1)]
                this.drafted.append(len(block))
                this.accepted.append(accepted)
                this.emitted.append(min(accepted + 1, left))
                this.shown.append(block)
                this.following.append((ending["target_entropy"], ending["target_probability"]))
                row.memory += accepted
                row.position += this.emitted[-1]
                if row.position == len(text):
                    batch[index] = SlowRow(*next(queue))
            rounds.append(this)
        return rounds


def as_single(value: float) -> float:
    """Rounded to float32, which is what a trace stores."""
    import struct

    return float(struct.unpack("f", struct.pack("f", value))[0])
