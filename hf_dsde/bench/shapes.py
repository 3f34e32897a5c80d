"""Sizes of Llamas, and what follows from them: parameters, and the bytes of weights that a pass reads."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from transformers import PreTrainedModel

from hf_dsde.utils.checks import check_integer


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, all but its vocabulary.

    Args:
        hidden: Width of the residual stream, a multiple of `heads` (which `LlamaConfig` asks for).
        layers: Decoder layers.
        heads: Query heads, a multiple of `kv_heads`.
        kv_heads: Key-value heads, which are the groups of grouped-query attention.
        head_dim: Dimensions per head, an even number.
        intermediate: Channels of the MLP.

    Raises:
        TypeError: A size is no integer.
        ValueError: A size is less than 1, or does not divide as it must.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def __post_init__(self) -> None:
        for field in fields(self):
            check_integer(field.name, getattr(self, field.name), 1)
        for name, divisor_name, divisor in (
            ("hidden", "heads", self.heads),
            ("heads", "kv_heads", self.kv_heads),
            ("head_dim", "2", 2),
        ):
            value = getattr(self, name)
            if value % divisor:
                of = divisor_name if divisor_name.isdigit() else f"`{divisor_name}` ({divisor})"
                raise ValueError(f"`{name}` is {value}, but a multiple of {of} is needed.")

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """The shape of a Llama model."""
        config = model.config
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
        )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: four attention and three MLP projections, two norms."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.intermediate * self.hidden + 2 * self.hidden

    @property
    def decoder_parameters(self) -> int:
        """Parameters of all decoder layers and the final norm."""
        return self.layers * self.layer_parameters + self.hidden

    def parameters(self, vocabulary_size: int, *, tied: bool) -> int:
        """All parameters. Tied models have one matrix for embedding and head, others two."""
        return self.decoder_parameters + (1 if tied else 2) * vocabulary_size * self.hidden

    def weight_bytes(self, vocabulary_size: int, dtype: torch.dtype) -> int:
        """Bytes of weights that each forward pass reads, whatever its tokens.

        Those of the decoder and the head; of the embedding a pass reads a row per token, which is left out. Divided by
        the memory bandwidth, it is the least time that a pass can take.

        Args:
            vocabulary_size: Rows of the head.
            dtype: Of the weights.
        """
        return self.parameters(vocabulary_size, tied=True) * dtype.itemsize


SHAPES: dict[str, Shape] = {
    "32B": Shape(5120, 64, 40, 8, 128, 27648),
    "8B": Shape(4096, 32, 32, 8, 128, 14336),
    "1B": Shape(2048, 16, 32, 8, 64, 8192),
    "deep-1B": Shape(1536, 30, 12, 4, 128, 6144),
    "shallow": Shape(2048, 4, 32, 8, 64, 8192),
}
"""Sizes of published models ("32B" of Qwen2.5-32B, "8B" and "1B" of Llama 3), "deep-1B" for small models of up to 30
layers, and "shallow" for drafts of up to 4: "1B" with a quarter of its layers."""
