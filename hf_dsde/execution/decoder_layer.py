"""What a fused pass reads of a decoder layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from hf_dsde.execution.layer_kinds import kind_of


@dataclass(frozen=True)
class Norm:
    """A root mean square norm: `weight`, `[H]`, and what is added to the mean square."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Read a norm of transformers."""
        return cls(module.weight, module.variance_epsilon)


@dataclass(frozen=True)
class Layer:
    """One decoder layer: the modules that are called, and the numbers that its own `forward` would use."""

    index: int
    attention: Any
    mlp: Any
    input_norm: Norm
    middle_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    cache_index: int
    window: int | None

    @classmethod
    def of(cls, index: int, module: Any, window: int | None) -> Layer:
        """Read a decoder layer of transformers."""
        attend = module.self_attn
        normed = hasattr(attend, "q_norm")
        return cls(
            index=index,
            attention=attend,
            mlp=module.mlp,
            input_norm=Norm.of(module.input_layernorm),
            middle_norm=Norm.of(module.post_attention_layernorm),
            query_norm=Norm.of(attend.q_norm) if normed else None,
            key_norm=Norm.of(attend.k_norm) if normed else None,
            cache_index=attend.layer_idx,
            window=window,
        )

    @property
    def projections(self) -> list[Any]:
        """The modules of queries, keys and values."""
        attend = self.attention
        return [attend.q_proj, attend.k_proj, attend.v_proj]

    @cached_property
    def kind(self) -> Hashable:
        """What layers that launch the same kernels have in common, once both follow a layer."""
        attend, mlp = self.attention, self.mlp
        modules = [getattr(attend, f"{name}_proj") for name in ("q", "k", "v", "o")]
        modules += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        norms = [self.input_norm, self.middle_norm, self.query_norm, self.key_norm]
        read = [None if norm is None else (norm.weight, norm.epsilon) for norm in norms]
        return kind_of(modules, [self.window, attend.head_dim, attend.scaling, *read])
