"""The same draft length for every row in every round: the baseline that an adaptive policy has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.utils.checks import check_integer


@register("static")
class StaticPolicy(StoppingPolicy):
    """Every row drafts `num_draft_tokens` tokens in every round.

    Args:
        num_draft_tokens: The draft length; 0 decodes without drafts.
    """

    name = "static"

    def __init__(self, num_draft_tokens: int = 5) -> None:
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self._lengths: Tensor | None = None

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        length = min(self.num_draft_tokens, batch.max_draft_length)
        self._lengths = torch.full((batch.rows,), length, device=batch.device)

    @property
    def may_lag(self) -> bool:
        """Always: it learns nothing."""
        return True

    def draft_lengths(self) -> Tensor:
        """The fixed length, shape `[rows]`, int64."""
        if self._lengths is None:
            raise RuntimeError("StaticPolicy was asked for lengths before `start(batch)`.")
        return self._lengths

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; all rows are alike, so only their number matters. `index` is int64, `[places]`."""
        self._lengths = self.draft_lengths()[:1].expand(len(index))
