"""How the host learns that no row drafts on, when a policy decides that on the device after each token."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class StopFlag:
    """Answers whether any row still drafted, `lag` draft steps ago.

    Without lag the host waits for the step it has just launched, and the device then waits for the host. With a lag of
    one the next step is launched before the answer is looked at: nobody waits, but one step too many is made when the
    answer is no. Both are exact, as the number of tokens that each row drafted is counted on the device.

    Args:
        lag: Steps between a question and its answer.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._asked: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def ask(self, drafting: Tensor) -> None:
        """Ask about the rows that draft on behind this step, `[rows]`, bool."""
        answer = drafting.any()
        if answer.device.type != "cuda":
            self._asked.append((answer, None))
            return
        copied = answer.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(answer.device))
        self._asked.append((copied, event))

    def nobody_drafts(self) -> bool:
        """Say whether no row drafted on behind the step asked about `lag` questions ago; False when that is not yet."""
        if len(self._asked) <= self._lag:
            return False
        answer, event = self._asked.popleft()
        if event is not None:
            event.synchronize()
        return not bool(answer)
