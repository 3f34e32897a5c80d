"""Costs as tensors: what a round takes by its draft length, in plain steps, kept in step with the call's costs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_dsde.costs import LiveCosts
from hf_dsde.policies.base import BatchInfo
from hf_dsde.utils.transfers import upload


class CostTable:
    """Times of rounds by draft length, on the policy's device.

    Args:
        batch: The batch; its `costs` are followed.
        longest: The longest draft length in the table.

    Attributes:
        times: Time of a round in which every row drafts k tokens, k = 0 .. longest, in plain steps: the first entry is
            1. Shape `[longest + 1]`, float32.
        resumption: Extra time of the first round with drafts after rounds without, in plain steps, scalar, float32.
        steps: What one token more takes after k drafted ones, in plain steps; infinity after the longest draft. Shape
            `[longest + 1]`, float32.

    Raises:
        ValueError: If the batch comes without costs.
    """

    def __init__(self, batch: BatchInfo, longest: int) -> None:
        if batch.costs is None:
            raise ValueError(
                "`batch.costs` is None, but a policy that weighs gain against cost needs them: the loop provides them "
                "to policies that require `Signal.COSTS`."
            )
        self._costs: LiveCosts = batch.costs
        self._longest = longest
        self._device = batch.device
        self._version = -1
        self.refresh()

    def refresh(self) -> bool:
        """Take over changed costs; return whether there were any. The host waits for nothing."""
        if self._costs.version == self._version:
            return False
        self._version = self._costs.version
        current = self._costs.current
        plain = current.round_seconds(0)
        times = [current.round_seconds(k) / plain for k in range(self._longest + 1)]
        numbers = upload([*times, current.resumption / plain], self._device)
        self.times: Tensor = numbers[:-1]
        self.resumption: Tensor = numbers[-1]
        self.steps: Tensor = torch.nn.functional.pad(self.times.diff(), (0, 1), value=math.inf)
        return True
