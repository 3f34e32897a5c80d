"""The target's pass over a round's candidates: padded to the longest row, or packed, whichever costs less.

Padded, every row has as many columns as the longest, so one row's long draft is paid for by all. Packed, the tokens of
all rows lie behind each other and only attention knows rows. While a pass is bound by reading weights both cost the
same; past some hundreds of tokens arithmetic decides, and padding costs what tokens cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import CostCurve
from hf_dsde.decoding.cost_measurement import token_costs
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.packing import packed_bucket

LARGE_BATCH = 32
"""From this many rows on it is measured what tokens of a pass cost: smaller batches are bound by reading weights."""
LEAST_GAIN = 0.03
"""Packing has to save this share of a pass: putting tokens into place and logits back costs something as well."""


@dataclass(frozen=True)
class PassResult:
    """What a pass gives.

    Attributes:
        logits: `[rows, width, vocabulary]`, float32.
        hidden: Hidden states of the layers that the runner was made for, `[rows, width, H]` each.
        packed_tokens: Tokens in the pass, when it was packed; None when it was padded.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    packed_tokens: int | None = None


class VerificationPass:
    """Runs the target over blocks.

    Args:
        runner: Runner of the target.
        config: Says which form a pass takes.
    """

    def __init__(self, runner: ModelRunner, config: SpeculationConfig) -> None:
        self._runner = runner
        self._choice = config.verification
        self._costs: CostCurve | None = None

    def measure(self, longest: int) -> None:
        """Find out what tokens cost, if that will be needed to choose. Call it when the prompts are stored.

        Args:
            longest: Tokens of the longest prompt.
        """
        if self._choice == "auto" and self._runner.packs and self._runner.rows >= LARGE_BATCH:
            self._costs = token_costs(self._runner, longest)

    def recorded(self, width: int, longest: int) -> bool:
        """Whether blocks of this width are run by a padded pass that has been recorded, so that `stage` is cheap."""
        return not self._may_pack(width) and self._runner.recorded(width, longest)

    def runs_beside(self, device: torch.device) -> bool:
        """Whether passes replay recordings on `device`: these may run beside other work, since they drop no memory."""
        return self._runner.replays and self._runner.device == device

    def stage(
        self, tokens: Tensor, positions: Tensor, counts: Tensor, host_counts: Sequence[int] | None, longest: int
    ) -> Callable[[], PassResult]:
        """Get a block ready. The function that is returned runs it; only the block staged last can be run.

        Args:
            tokens: `[rows, width]`, int64, each row's tokens in its first columns.
            positions: `[rows, width]`, int64; below 0 where there is no token.
            counts: Tokens of each row, `[rows]`, int64.
            host_counts: The same on the host, if it knows them; else they are fetched when a choice depends on them.
            longest: A bound, known without asking the device, on the largest position + 1.
        """
        if self._may_pack(tokens.shape[1]):
            total = sum(counts.tolist() if host_counts is None else host_counts)
            size = packed_bucket(total)
            if self._packing_pays(size, tokens.shape[1]):
                return lambda: PassResult(*self._runner.forward_packed(tokens, positions, counts, size, longest), size)
        padded = self._runner.stage(tokens, positions, longest)
        return lambda: PassResult(*padded())

    def _padded_tokens(self, width: int) -> int:
        return len(self._runner.live_rows) * self._runner.padded_width(width)

    def _may_pack(self, width: int) -> bool:
        """Whether packing could pay, whatever the rows' lengths."""
        if not self._runner.packs or self._choice == "padded" or width == 1:
            return False
        return self._choice == "packed" or self._packing_pays(len(self._runner.live_rows), width)

    def _packing_pays(self, size: int, width: int) -> bool:
        if self._choice == "packed":
            return True
        if self._costs is None:
            return False
        return self._costs.at(size) < (1 - LEAST_GAIN) * self._costs.at(self._padded_tokens(width))
