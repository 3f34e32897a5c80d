"""What every head that drafts from its target's hidden states has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils.generic import ModelOutput

from hf_dsde import compat
from hf_dsde.heads.dense_weights import dense_weight, is_dense

DECODER_PARTS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""Decoder layer, norm and rotary embedding by the `model_type` of a head's layers."""


@dataclass
class HeadOutput(ModelOutput):
    """What a head gives.

    Attributes:
        logits: Over the draft vocabulary, `[B, kept, draft vocabulary]`, of the head's dtype.
        hidden_states: The states that go with the guessed tokens, `[B, T, H]`, of the head's dtype.
    """

    logits: Tensor | None = None
    hidden_states: Tensor | None = None


class DraftHead(PreTrainedModel):
    """A head that reads pairs: the target's features of a token, and the token that comes after it.

    Of a pair it makes a guess at the token after that, and a state of its own that stands for the features which the
    target has not computed yet: the next pair is that state and the guessed token.

    Args:
        config: Of the head's own layers, with the target's vocabulary size.

    Attributes:
        embed_tokens: Embedding of the target's vocabulary, `[V, H]`.
        lm_head: Scores of the draft vocabulary.
        draft_ids: The target's id of each token of the draft vocabulary, `[draft vocabulary]`, int64; None if the two
            vocabularies are one.
    """

    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    layers: nn.ModuleList
    rotary_emb: nn.Module
    draft_ids: Tensor | None

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self._shared: dict[str, nn.Parameter] = {}

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target that the head reads, numbered as in transformers' `output_hidden_states`.

        0 is the embeddings, i what layer i gives, counted from 1, before any norm; the last layer's has gone through
        the target's final norm.
        """

    @abstractmethod
    def project(self, features: Sequence[Tensor]) -> Tensor:
        """Bring the target's hidden states to the head's width.

        Args:
            features: Of each of `feature_layers`, in that order, `[..., feature size]`.

        Returns:
            States, `[..., H]`.
        """

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,  # noqa: ARG002 - what callers of transformers' models pass
    ) -> HeadOutput:
        """Guess the token after each pair.

        Args:
            input_ids: The tokens of the pairs, `[B, T]`, int64: each the one after the token that its state is of.
            hidden_states: Projected features or earlier `hidden_states` of the output, `[B, T, H]`.
            attention_mask: `[B, 1, T, keys]` as the attention implementation takes it; by kind of layer if there are
                several kinds. None: nothing is padded, and each pair sees those before it that its layer lets it see.
            position_ids: `[B, T]`, int64; None: counted on from the cache.
            past_key_values: A cache of transformers, or None.
            logits_to_keep: As in transformers: so many last columns, all for 0, or an index of columns.
            kwargs: What else callers of transformers' models pass, such as `use_cache`: a cache that is given is used.
        """
        embeddings = self.embed_tokens(input_ids)
        shared = self._attention_arguments(embeddings, position_ids, past_key_values)
        masks = self._masks(embeddings, attention_mask, past_key_values)
        scored, states = self._guess(embeddings, hidden_states, masks, shared)
        return HeadOutput(self.lm_head(kept_columns(scored, logits_to_keep)), states)

    @abstractmethod
    def _guess(
        self, embeddings: Tensor, states: Tensor, masks: list[Tensor], shared: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Run the layers.

        Args:
            embeddings: Of the pairs' tokens, `[B, T, H]`.
            states: Of the pairs, `[B, T, H]`.
            masks: One for each layer.
            shared: What every layer gets beside its mask.

        Returns:
            What the vocabulary product gets, and the next states, both `[B, T, H]`.
        """

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which is the target's in most heads."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The vocabulary product."""
        return self.lm_head

    def share_with(self, target: PreTrainedModel, *, embed_tokens: bool = True, lm_head: bool = False) -> None:
        """Take frozen weights of the target; `save_head` can leave them out then.

        They are parameters over the target's storage if the head has its dtype and device, and copies otherwise, as of
        quantised weights. With a draft vocabulary the product is cut to it, which is a copy as well.

        Args:
            target: The head's target.
            embed_tokens: Take the embedding.
            lm_head: Take the vocabulary product.

        Raises:
            ValueError: The target's are of another shape, or its product has a bias or is not there.
        """
        source: Any = target.get_input_embeddings()
        if embed_tokens:
            self._share("embed_tokens", dense_weight(source, self._plain().dtype))
        if lm_head:
            product: Any = target.get_output_embeddings()
            if product is None:
                raise ValueError(
                    f"target: {type(target).__name__} has no vocabulary product for the head; load the target as a "
                    "causal language model"
                )
            if getattr(product, "bias", None) is not None:
                raise ValueError(
                    f"lm_head: that of {type(target).__name__} has a bias, which a head has not; use a head with an "
                    "lm_head of its own"
                )
            ids = self.draft_ids
            weight = dense_weight(product, self._plain().dtype)
            self._share("lm_head", weight if ids is None else weight[ids.to(weight.device)])

    def shares(self, name: str) -> bool:
        """Whether the weight of "embed_tokens" or "lm_head" still is the one that `share_with` took."""
        held: nn.Parameter = getattr(self, name).weight
        return held is self._shared.get(name) and not held.requires_grad

    def _share(self, name: str, weight: Tensor) -> None:
        held = getattr(self, name).weight
        if held.shape != weight.shape:
            raise ValueError(
                f"{name}: the target's has the shape {tuple(weight.shape)}, the head needs {tuple(held.shape)}; use a "
                f"head with {name} of its own, or the target that it was trained for"
            )
        own = self._plain()
        parameter = nn.Parameter(weight.detach().to(own.device, own.dtype), requires_grad=False)
        getattr(self, name).weight = parameter
        self._shared[name] = parameter

    def _plain(self) -> nn.Parameter:
        """A weight that is a head's own and not quantised: each layer has norms."""
        return next(weight for weight in self.layers.parameters() if is_dense(weight))

    def _attention_arguments(self, states: Tensor, position_ids: Tensor | None, past_key_values: Any) -> dict[str, Any]:
        """What every layer gets, its mask apart."""
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + states.shape[1], device=states.device)[None]
        layer: Any = self.layers[0]
        attention: Any = type(layer.self_attn)
        return {
            "position_embeddings": self._rotation(states, position_ids),
            "position_ids": position_ids,
            _cache_argument(attention): past_key_values,
        }

    def _rotation(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary embedding of positions, `[B, T]`."""
        rotation: tuple[Tensor, Tensor] = self.rotary_emb(states, position_ids)
        return rotation

    def _masks(
        self, states: Tensor, attention_mask: Tensor | dict[str, Tensor] | None, past_key_values: Any
    ) -> list[Tensor]:
        """The mask of each layer."""
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        if isinstance(attention_mask, Tensor):
            return [attention_mask] * len(kinds)
        if attention_mask is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = {kind: self._unpadded_mask(states, seen, kind) for kind in set(kinds)}
        return [attention_mask[kind] for kind in kinds]

    def _unpadded_mask(self, states: Tensor, seen: int, kind: str) -> Tensor:
        """The mask of a layer that sees `seen` pairs before those of `states`."""
        keys = torch.arange(seen + states.shape[1], device=states.device)
        distance = keys[seen:, None] - keys
        visible = distance >= 0
        if kind == "sliding_attention":
            visible &= distance < self.config.sliding_window
        visible = visible[None, None]
        if self.config._attn_implementation != "eager":
            return visible
        mask = torch.zeros(visible.shape, dtype=states.dtype, device=states.device)
        return mask.masked_fill(~visible, torch.finfo(states.dtype).min)


@cache
def _cache_argument(attention: Any) -> str:
    """The name under which a class of attention takes its cache. Nothing of it is kept on a head."""
    return compat.cache_argument(attention)


def kept_columns(states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Return the columns of `[B, T, H]` that `logits_to_keep` names, as in transformers."""
    if isinstance(logits_to_keep, int):
        return states[:, -logits_to_keep:]  # all for 0
    return states[:, logits_to_keep]
