"""EAGLE (Li et al., arXiv 2401.15077, and 2406.16858, whose heads are the same): decoder layers over fused pairs.

The feature is the target's last hidden state as its vocabulary product gets it, and the head's own states stand for
just that: the same product, without a norm before it, makes logits of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_dsde.heads.head import DECODER_PARTS, DraftHead


class EagleHead(DraftHead):
    """A head of EAGLE-1 or 2.

    Args:
        config: Of type llama, with the target's hidden size.
        target_layers: Decoder layers of the target.
        fc_bias: The product that fuses pairs has a bias.
    """

    def __init__(self, config: PreTrainedConfig, target_layers: int, *, fc_bias: bool = True) -> None:
        super().__init__(config)
        layer_class, _, rotary_class = DECODER_PARTS[config.model_type]
        self._feature_layers = (target_layers,)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([layer_class(config, index) for index in range(config.num_hidden_layers)])
        self.layers[0].input_layernorm = nn.Identity()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = rotary_class(config)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The last one, after the target's final norm."""
        return self._feature_layers

    def project(self, features: Sequence[Tensor]) -> Tensor:
        """Return the one feature as it is."""
        (feature,) = features
        return feature.to(self.dtype)

    def _guess(
        self, embeddings: Tensor, states: Tensor, masks: list[Tensor], shared: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        hidden = self.fc(torch.cat([embeddings, states], dim=-1))
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = layer(hidden, attention_mask=mask, **shared)
        return hidden, hidden
