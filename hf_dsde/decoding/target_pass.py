"""The target's pass over a round's candidates: padded to the longest row, or packed, whichever has to compute less.

Padded, every row has as many columns as the longest, so one row's long draft is paid for by all. Packed, the tokens of
all rows lie one after another and only attention knows rows. While a pass is bound by reading weights both cost the
same; past some number of tokens arithmetic decides, and padding costs what tokens cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.pass_shapes import PassSizes
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.utils.tuning import tuning_of


def pass_sizes(runner: ModelRunner) -> PassSizes:
    """Return how many tokens passes over the rows that are in now take in."""
    free_tokens = tuning_of(runner.device).free_tokens
    return PassSizes(len(runner.live_rows), runner.padded_width, runner.packs, free_tokens)


class VerificationPass:
    """Runs the target over blocks.

    Args:
        runner: Runner of the target.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def recorded(self, width: int, longest: int) -> bool:
        """Whether blocks of this width are run by a padded pass that has been recorded, so that `stage` is cheap."""
        return not self._may_pack(width) and self._runner.recorded(width, longest)

    def runs_beside(self, device: torch.device) -> bool:
        """Whether passes replay recordings on `device`: these may run beside other work, since they drop no memory."""
        return self._runner.replays and self._runner.device == device

    def stage(self, block: RowBlock, host_counts: Sequence[int] | None, longest: int) -> Callable[[], PassOutput]:
        """Get a block ready. The function that is returned runs it; only the block staged last can be run.

        Args:
            block: The candidates, each row's in its first columns, with their counts.
            host_counts: The counts on the host, if it knows them; else they are fetched when a choice depends on them.
            longest: A bound, known without asking the device, on the largest slot + 1.
        """
        if self._may_pack(block.width):
            assert block.counts is not None
            tokens = sum(block.counts.tolist() if host_counts is None else host_counts)
            block = replace(block, size=pass_sizes(self._runner).packed(tokens, block.width))
        return self._runner.stage(block, longest)

    def _may_pack(self, width: int) -> bool:
        """Whether packing could save enough, whatever the rows' lengths."""
        return pass_sizes(self._runner).packed(len(self._runner.live_rows), width) is not None
