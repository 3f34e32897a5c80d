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
        self._current = self._costs.current
        self._plain = self._current.round_seconds(0)
        self._times = [1.0]
        self._on_device: Tensor | None = None
        self.resumption: float = self._current.resumption / self._plain

    def times(self, longest: int) -> list[float]:
        """Return the times of rounds in which every row drafts 0, 1, ... tokens, in plain steps: the first is 1.

        Costs change every few rounds, and hardly any length is ever asked for: only those are computed.

        Args:
            longest: The last draft length that is needed; the table's own is the longest that there is.
        """
        for length in range(len(self._times), min(longest, self._longest) + 1):
            self._times.append(self._current.round_seconds(length) / self._plain)
        return self._times

    def time(self, longest: int) -> float:
        """Return the time of a round whose longest draft is as long, in plain steps."""
        length = min(longest, self._longest)
        return self.times(length)[length]

    def time_of(self, drafted: Tensor) -> Tensor:
        """Time of a round whose rows drafted `drafted` tokens, `[rows]`, int64, in plain steps, scalar, float32."""
        if self._on_device is None:
            self._on_device = upload(self.times(self._longest), self._device)
        return self._on_device.take(drafted.max().clamp_max(self._longest))
