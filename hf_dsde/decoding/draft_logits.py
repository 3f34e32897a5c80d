"""What a draft thinks of the tokens that it knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dsde import signals
from hf_dsde.kernels.dispatch import ops_for


@dataclass(frozen=True)
class DraftLogits:
    """Raw logits of a draft, over its own tokens: often a quarter of the target's vocabulary, or less.

    Attributes:
        values: `[rows, width, n]`, float32.
        ids: The target's id of each of the draft's tokens, `[n]`, int64, each at most once; None for its first n.
        vocabulary_size: Of the target, at least n.
    """

    values: Tensor
    ids: Tensor | None
    vocabulary_size: int

    def to(self, device: torch.device) -> DraftLogits:
        """Return them on a device."""
        ids = None if self.ids is None else self.ids.to(device)
        return DraftLogits(self.values.to(device), ids, self.vocabulary_size)

    def over_target(self) -> Tensor:
        """Return them over the target's vocabulary, `[rows, width, vocabulary]`; see `signals.over_vocabulary`."""
        return signals.over_vocabulary(self.values, self.ids, self.vocabulary_size)

    def divergence(self, target_logits: Tensor) -> Tensor:
        """Return KL(target || draft), `[rows, width]`, float32, nats; see `signals.kl_divergence`.

        Args:
            target_logits: `[rows, width, vocabulary]`, float32, on the same device.
        """
        kld: Tensor = ops_for(self.values.device).kl_divergence(target_logits, self.values, self.ids)
        return kld
