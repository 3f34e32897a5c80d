"""What a round will do: all that the loop carries from one round to the next, in one value that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from hf_dsde.utils.transfers import upload


class RoundKind(Enum):
    """What is done in a round, and on whose wish."""

    DRAFT = "draft"
    """Some rows draft, as the policy wants."""
    PLAIN = "plain"
    """The policy wants no drafts: a step of plain decoding."""
    PROBE = "probe"
    """No row drafts, so that the seconds of a plain step are measured, whatever the policy wants."""
    OVERTAKEN = "overtaken"
    """The policy wants drafts, but a plain step had begun before that was known. They come a round later, and the
    policy does not observe this round."""


@dataclass(frozen=True)
class RoundPlan:
    """A round before it is run.

    Attributes:
        length_counts: The most tokens each row drafts; 0 for rows that have finished.
        active_rows: Rows still being generated.
        device: Of the sequences.
        kind: What is done.
        index: Number of the round, from 0.
        plain_streak: Rounds without drafts right before this one.
        deferred: What the policy wanted of this round if it is overtaken, like `length_counts`; else None.
        hurried: Whether the next round waits for no drafts (`Drafter.waits`).
    """

    length_counts: Sequence[int]
    active_rows: Sequence[bool]
    device: torch.device
    kind: RoundKind = RoundKind.DRAFT
    index: int = 0
    plain_streak: int = 0
    deferred: Sequence[int] | None = None
    hurried: bool = False

    @cached_property
    def lengths(self) -> Tensor:
        """`length_counts` on the device, `[rows]`, int64. It is brought there when it is first asked for."""
        return upload(self.length_counts, self.device)

    @cached_property
    def active(self) -> Tensor:
        """`active_rows` on the device, `[rows]`, bool, likewise."""
        return upload(self.active_rows, self.device)

    @property
    def width(self) -> int:
        """The longest draft asked for."""
        return max(self.length_counts, default=0)

    @property
    def drafts(self) -> bool:
        """Whether any row drafts."""
        return self.width > 0

    @property
    def resumes(self) -> bool:
        """Whether the draft has missed tokens of several rounds, which it must read before it drafts."""
        return self.drafts and self.plain_streak > 1

    def pass_counts(self, drafted: Sequence[int]) -> list[int]:
        """Tokens of each row in the target's pass, given how many each has drafted."""
        return [n + 1 if on else 0 for n, on in zip(drafted, self.active_rows, strict=True)]

    @property
    def overtaken(self) -> bool:
        """Whether a plain step has overtaken what was wanted of this round."""
        return self.deferred is not None

    @property
    def next_plain_streak(self) -> int:
        """Rounds without drafts right before the next round."""
        return 0 if self.drafts else self.plain_streak + 1

    def foretells_plain(self, rounds: int) -> bool:
        """Return whether the next round is likely to draft nothing: `rounds` before it did not, and nothing waits."""
        return self.deferred is None and (self.hurried or self.next_plain_streak >= rounds)


def usable_lengths(
    wish: Sequence[int], active: Sequence[bool], most: Sequence[int], longest: int, *, fill: bool
) -> list[int]:
    """Return a policy's lengths, lowered to what rows can use.

    Args:
        wish: What the policy wants of each row.
        active: Rows still being generated.
        most: Draft tokens that each row has a use for.
        longest: The longest draft of any row.
        fill: Whether every active row drafts as many tokens as the batch's longest.
    """
    lengths = [min(max(length, 0), longest) if on else 0 for length, on in zip(wish, active, strict=True)]
    if fill:
        lengths = [max(lengths) if on else 0 for on in active]
    return [min(length, bound) for length, bound in zip(lengths, most, strict=True)]


def next_plan(
    previous: RoundPlan | None,
    length_counts: Sequence[int],
    going_on: Sequence[bool],
    device: torch.device,
    *,
    probes: bool,
    plain_begun: bool,
    hurried: bool = False,
) -> RoundPlan:
    """Return the plan of the round after `previous`, or of the first one.

    Args:
        previous: The round that is over.
        length_counts: What the policy wants of each row, and the row can use.
        going_on: Rows that are still generated.
        device: Of the sequences.
        probes: Whether the round measures a plain step.
        plain_begun: Whether the target's pass without drafts is under way already.
        hurried: As in `RoundPlan`.
    """
    wanted = any(length_counts)
    plain = probes or plain_begun
    counts = [0 if plain or not on else n for n, on in zip(length_counts, going_on, strict=True)]
    overtaken = plain_begun and wanted and not probes
    if probes:
        kind = RoundKind.PROBE
    elif overtaken:
        kind = RoundKind.OVERTAKEN
    else:
        kind = RoundKind.DRAFT if any(counts) else RoundKind.PLAIN
    return RoundPlan(
        length_counts=counts,
        active_rows=list(going_on),
        device=device,
        kind=kind,
        index=0 if previous is None else previous.index + 1,
        plain_streak=0 if previous is None else previous.next_plain_streak,
        deferred=length_counts if overtaken else None,
        hurried=hurried,
    )
