"""What a round takes by its draft length, in plain steps, kept in step with the call's costs."""

from __future__ import annotations

from torch import Tensor

from hf_dsde.costs import LiveCosts
from hf_dsde.policies.base import BatchInfo
from hf_dsde.utils.transfers import upload


class CostTable:
    """Times of rounds by draft length.

    Args:
        batch: The batch; its `costs` are followed.
        longest: The longest draft length in the table.

    Attributes:
        times: Time of a round in which every row drafts k tokens, k = 0 .. longest, in plain steps: the first entry is
            1.
        times_on_device: The same on the batch's device, shape `[longest + 1]`, float32.
        resumption: Extra time of the first round with drafts after rounds without, in plain steps.

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

    def refresh(self) -> None:
        """Take over changed costs. The host waits for nothing."""
        if self._costs.version == self._version:
            return
        self._version = self._costs.version
        current = self._costs.current
        plain = current.round_seconds(0)
        self.times: list[float] = [current.round_seconds(k) / plain for k in range(self._longest + 1)]
        self.resumption: float = current.resumption / plain
        self.times_on_device: Tensor = upload(self.times, self._device)

    def time_of(self, drafted: Tensor) -> Tensor:
        """Time of a round whose rows drafted `drafted` tokens, `[rows]`, int64, in plain steps, scalar, float32."""
        return self.times_on_device.take(drafted.max().clamp_max(self._longest))
