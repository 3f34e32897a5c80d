"""What a drafter asks while it drafts: which rows go on. It need not know that a policy answers, or when."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from hf_dsde.decoding.stop_flag import StopFlag
from hf_dsde.policies import DraftStep, Signal

Expect = Callable[[Tensor, Tensor], None]
"""Takes the tokens and lengths that a proposal has if it is over now, as in `CandidateBatch`."""


class DraftMonitor:
    """Stands between one proposal and the policy.

    Args:
        should_stop: The policy's, on tensors on `device`; None if it never stops inside a round.
        signals: What the proposal must hold for the policy and for listeners.
        device: Of the policy's tensors.
        expect: Called when the host would wait for an answer, with what is proposed if no row drafts on. If so, the
            proposal must have the very tensor of tokens that was given.

    Attributes:
        signals: As given.
    """

    def __init__(
        self,
        should_stop: Callable[[DraftStep], Tensor | None] | None,
        signals: frozenset[Signal],
        device: torch.device,
        expect: Expect,
    ) -> None:
        self.signals = signals
        self._should_stop = should_stop
        self._own_rule: Callable[[DraftStep], Tensor] | None = None
        self._device = device
        self._expect = expect
        self._flag = StopFlag()

    def adding(self, others: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> DraftMonitor:
        """Return this monitor for who drafts for some rows, while other rows have their drafts already.

        Args:
            others: Adds them: makes tokens and lengths of all rows of those of some, as `expect` takes them.
        """
        monitor = copy.copy(self)
        monitor._expect = lambda tokens, lengths: self._expect(*others(tokens, lengths))
        return monitor

    def stopping(self, rule: Callable[[DraftStep], Tensor]) -> DraftMonitor:
        """Return this monitor for a drafter with a rule of its own, which stops rows as the policy's does.

        Args:
            rule: Returns the rows that draft no further after a token, `[rows]`, bool, on the drafter's device. Like a
                policy's, it may look at what the token was drawn from, and the token is verified.
        """
        monitor = copy.copy(self)
        monitor._own_rule = rule
        return monitor

    @property
    def stops_inside_round(self) -> bool:
        """Whether rows may draft less than the plan lets them."""
        return self._should_stop is not None or self._own_rule is not None

    def after(self, step: DraftStep, drafting: Tensor) -> Tensor:
        """Return which rows draft on after a token, `[rows]`, bool, on the drafter's device.

        Args:
            step: The token, with what it was chosen from.
            drafting: Rows that may draft on, for all that the plan says, `[rows]`, bool.
        """
        if self._own_rule is not None:
            drafting = drafting & ~self._own_rule(step)
        if self._should_stop is None:
            return drafting
        stops = self._should_stop(step.to(self._device))
        return drafting if stops is None else drafting & ~stops.to(drafting.device)

    def ask(self, drafting: Tensor) -> None:
        """Let the device say whether any row drafts on, while the drafter makes its next step ready.

        Args:
            drafting: Rows that do, `[rows]`, bool.
        """
        if self.stops_inside_round:
            self._flag.ask(drafting)

    def nobody_drafts(self, proposed: Callable[[], tuple[Tensor, Tensor]]) -> bool:
        """Wait for the answer to `ask`; without a rule that stops inside a round, some row always does.

        Args:
            proposed: Gives tokens and lengths of the proposal if it is over, on the device of the sequences.
        """
        if not self.stops_inside_round:
            return False
        if not self._flag.answered:  # a draft that is as fast as the host leaves it no time
            self._expect(*proposed())
        return self._flag.nobody_drafts()
