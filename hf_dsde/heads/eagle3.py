"""EAGLE-3 (Li et al., arXiv 2503.01840): one decoder layer that reads the target's hidden states and guesses on.

The head reads pairs: the target's features of a token t, and the token that comes after it. Of a pair it makes a guess
at the token after that, and a state of its own that stands for the features which the target has not computed yet: the
next pair is that state and the guessed token. So every call looks the same, whether its states are the target's
features, brought to the head's width by `project`, or its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_dsde.heads.head import DECODER_PARTS, DraftHead


@dataclass(frozen=True)
class Eagle3Settings:
    """What differs between heads of this kind, apart from the sizes of their layers.

    Attributes:
        feature_layers: Layers of the target whose hidden states are read, numbered as in transformers'
            `output_hidden_states`: 0 is the embeddings, i what layer i gives, counted from 1.
        feature_size: Width of the target's hidden states.
        draft_vocab_size: Tokens that the head can guess.
        fc_norm: Each feature is normalised by itself before they are joined.
        norm_before_fc: The joined features are normalised. Not together with `fc_norm`.
        norm_before_residual: The residual stream of the first layer is the normalised state, not the state as it came.
        norm_output: The next state is the normalised output, as the head's vocabulary product gets it.
    """

    feature_layers: tuple[int, ...]
    feature_size: int
    draft_vocab_size: int
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that exclude each other.

        Raises:
            ValueError: Both ways of normalising the features are asked for.
        """
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm: True with norm_before_fc=True would normalise the features twice, which no head was trained "
                "with; set one of them"
            )


class Eagle3FirstLayer(nn.Module):
    """A decoder layer whose attention reads a token's embedding beside the state, both normalised.

    Args:
        config: Of the head's layers.
        norm_before_residual: As in `Eagle3Settings`.
    """

    def __init__(self, config: PreTrainedConfig, norm_before_residual: bool) -> None:
        super().__init__()
        layer_class, norm_class, _ = DECODER_PARTS[config.model_type]
        plain = layer_class(config, 0)
        self.self_attn = plain.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = plain.mlp
        self.input_layernorm = plain.input_layernorm
        self.post_attention_layernorm = plain.post_attention_layernorm
        self.hidden_norm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, embeddings: Tensor, states: Tensor, **attention: Any) -> Tensor:
        """Return the layer's output, `[B, T, H]`, for embeddings and states of that shape."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=joined, **attention)[0]
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class Eagle3Head(DraftHead):
    """An EAGLE-3 head. Its `config` is that of its own layers, with the target's vocabulary size.

    Args:
        config: Of type llama or qwen3.
        settings: Everything else.
    """

    def __init__(self, config: PreTrainedConfig, settings: Eagle3Settings) -> None:
        super().__init__(config)
        layer_class, norm_class, rotary_class = DECODER_PARTS[config.model_type]
        self.settings = settings
        width = len(settings.feature_layers) * settings.feature_size
        if settings.fc_norm:  # torch's norm is one kernel on a GPU, that of transformers six
            norms = [nn.RMSNorm(settings.feature_size, eps=config.rms_norm_eps) for _ in settings.feature_layers]
            self.fc_norm = nn.ModuleList(norms)
        if settings.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        first = Eagle3FirstLayer(config, settings.norm_before_residual)
        others = [layer_class(config, index) for index in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *others])
        self.norm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, settings.draft_vocab_size, bias=False)
        self.rotary_emb = rotary_class(config)
        whole = settings.draft_vocab_size == config.vocab_size
        ids = None if whole else torch.arange(settings.draft_vocab_size)
        self.register_buffer("draft_ids", ids, persistent=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """As in the settings."""
        return self.settings.feature_layers

    def project(self, features: Sequence[Tensor]) -> Tensor:
        """Normalise the features, where the head does, and join them by one product."""
        parts = [part.to(self.dtype) for part in features]
        if self.settings.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        joined = torch.cat(parts, dim=-1)
        states: Tensor = self.fc(self.input_norm(joined) if self.settings.norm_before_fc else joined)
        return states

    def _guess(
        self, embeddings: Tensor, states: Tensor, masks: list[Tensor], shared: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        hidden = self.layers[0](embeddings, states, attention_mask=masks[0], **shared)
        for layer, mask in zip(self.layers[1:], masks[1:], strict=True):
            hidden = layer(hidden, attention_mask=mask, **shared)
        normed = self.norm(hidden)
        return normed, normed if self.settings.norm_output else hidden
