"""SVIP (arXiv 2411.18462): stop after a token of which the draft was unsure, by the entropy of its distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde.policies.base import BatchInfo, DraftStep, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.utils.checks import check_integer, check_number


@register("svip")
class SVIPPolicy(StoppingPolicy):
    """Stop after the first token with `sqrt(coefficient H(q)) > threshold`.

    The left side estimates an upper bound of the probability that the token is rejected: Pinsker's inequality, with the
    cross-entropy of draft and target taken as a fixed multiple of the draft's entropy. The rule looks at the draft's
    distribution only, not at the token drawn from it, and the token is verified. It learns nothing.

    Args:
        threshold: h, at least 0. The default stops above 0.6 nats of entropy.
        coefficient: Half of what the cross-entropy exceeds the entropy by, as a multiple of it, at least 0.
        num_draft_tokens: The most tokens a row drafts in a round, if the loop allows as many.
    """

    name = "svip"

    def __init__(self, threshold: float = 0.3, coefficient: float = 0.15, num_draft_tokens: int = 40) -> None:
        self.threshold = check_number("threshold", threshold, 0.0)
        self.coefficient = check_number("coefficient", coefficient, 0.0)
        self.num_draft_tokens = check_integer("num_draft_tokens", num_draft_tokens, 0)
        self._lengths: Tensor | None = None

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        length = min(self.num_draft_tokens, batch.max_draft_length)
        self._lengths = torch.full((batch.rows,), length, device=batch.device)

    def draft_lengths(self) -> Tensor:
        """The most tokens of a round, shape `[rows]`, int64; most rounds stop earlier."""
        if self._lengths is None:
            raise RuntimeError("SVIPPolicy was asked for lengths before `start(batch)`.")
        return self._lengths

    def should_stop(self, step: DraftStep) -> Tensor:
        """Rows whose newest token came from a distribution of too much entropy, shape `[rows]`, bool."""
        return (self.coefficient * step.entropy).sqrt() > self.threshold

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; all rows are alike, so only their number matters. `index` is int64, `[places]`."""
        self._lengths = self.draft_lengths()[:1].expand(len(index))
