"""A small Llama inside a larger Llama's shape: the small model's function at the larger model's cost.

Benchmarks of speculative decoding need a target and a draft that agree as often as real models do, and passes that cost
what large models cost. Where the weights of large models cannot be fetched, `inflate` gives both: the text and the
acceptance are those of a small published pair, and each pass reads as many weights and does as much arithmetic as one
of the larger shape. The larger model is an ordinary `LlamaForCausalLM`.

What makes the functions equal (RMSNorm: Zhang and Sennrich 2019; rotary embeddings: Su et al. 2021; grouped-query
attention: Ainslie et al. 2023), with small sizes H, d and large sizes H', d':

- The residual stream gets H' - H channels of zeros. With r = H / H', the mean of squares is r times what it was, so
  each norm has the weight `sqrt(r) w` and the epsilon `r eps`.
- Rotary pair i becomes pair `i d' / d`, whose frequency `theta^(-2 (i d' / d) / d')` is the old `theta^(-2 i / d)`. A
  head's pair i is its dimensions i and i + d / 2. Queries are multiplied by `sqrt(d' / d)`, since scores are divided by
  `sqrt(d')` instead of `sqrt(d)`.
- Query head t of key-value group j stays member t of group j, whatever the number of members.
- What is added (heads, MLP channels, layers) writes nothing: its columns in `o_proj` and `down_proj` are zero.

A weight that is multiplied by zeros only may have any value, and is drawn from a normal distribution: a GPU computes
faster on zeros than on numbers. Weights that must be zero are those named above, the added channels' rows of `o_proj`
and `down_proj`, their columns of the embedding, and the added query dimensions of the heads that are kept.

This module knows the weights of Llama. It knows nothing about drafting or decoding.
"""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_dsde.bench.shapes import SHAPES, Shape
from hf_dsde.drafting.layer_draft import CONFIG_KEY as LAYER_DRAFT_KEY
from hf_dsde.utils.checks import check_choice

__all__ = ["SHAPES", "Shape", "inflate"]

FREQUENCY_TOLERANCE = 1e-6
"""Relative difference of two rotary frequencies that are equal but for float32 rounding (bfloat16 rounds by 4e-3)."""
CHANGING_FREQUENCIES = frozenset({"dynamic", "longrope"})
"""Rotary types whose frequencies depend on the text's length: equal ones at the start would show nothing."""


def inflate(
    model: PreTrainedModel,
    shape: Shape | str,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LlamaForCausalLM:
    """Embed a Llama in a larger Llama that computes the same logits.

    Equal means up to the rounding of `dtype`. In bfloat16 the weights of norms and queries are rounded once more and
    activations are rounded at other places, as between any two kernels; greedy texts then part at near-ties.

    The large model is made on `device` weight by weight, each in place: beyond it and the small model, hardly any
    memory is needed.

    Args:
        model: The small model, a `LlamaForCausalLM` without biases. It is left as it is.
        shape: At least as large in every dimension, `head_dim` by an integer factor; or a name out of `SHAPES`.
        seed: Of the random weights.
        dtype: Of the large model; the small one's when None.
        device: Of the large model; the small one's when None.

    Returns:
        The large model in evaluation mode, its parameters frozen, with the small one's vocabulary, generation config
        and, if it has them, tied embeddings.

    Raises:
        TypeError: `model` is no Llama.
        ValueError: `shape` is too small or no known name, the model has parameters that are not carried over (biases,
            adapters, quantised or offloaded weights), or its rotary frequencies are not among those of the large
            model.
    """
    small = _checked_shape(model)
    large = shape if isinstance(shape, Shape) else SHAPES[check_choice("shape", shape, SHAPES)]
    check_room(small, large)
    weights: Any = model.lm_head.weight
    dtype = dtype or weights.dtype
    device = torch.device(device or weights.device)
    source: Any = model.model
    inflated = _without_weights(model, small, large)
    inflated.model.rotary_emb = checked_rotary(source.rotary_emb, inflated.config, large.head_dim // small.head_dim).to(
        device
    )
    maker = WeightMaker(small, large, model.config.initializer_range, seed, dtype, device)
    _fill(inflated, model, maker)
    inflated.config.dtype = dtype
    inflated.generation_config = copy.deepcopy(model.generation_config)
    inflated.requires_grad_(False)
    return inflated.eval()


def head_places(small: Shape, large: Shape) -> Tensor:
    """Where each query head goes: member t of group j stays member t of group j. Shape `[small.heads]`, int64."""
    head = torch.arange(small.heads)
    group, member = head // small.heads_per_group, head % small.heads_per_group
    return group * large.heads_per_group + member


def dimension_places(small: Shape, large: Shape) -> Tensor:
    """Where each dimension of a head goes, so that it keeps its rotary frequency. Shape `[small.head_dim]`, int64.

    Both halves of a pair are spread alike: i to `i d' / d`, and `i + d / 2` to `i d' / d + d' / 2`, which is the same
    rule.
    """
    return torch.arange(small.head_dim) * (large.head_dim // small.head_dim)


class WeightMaker:
    """Makes the large model's weights, each from the small model's or, for an added layer, from nothing.

    Args:
        small: The small model's shape.
        large: The large model's shape.
        noise: Standard deviation of random weights.
        seed: Of the random weights.
        dtype: Of the weights made.
        device: Of the weights made.
    """

    def __init__(
        self, small: Shape, large: Shape, noise: float, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.small, self.large = small, large
        self.noise, self.dtype, self.device = noise, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)
        heads, dimensions = head_places(small, large), dimension_places(small, large)
        self.queries = self._rows(heads, dimensions)
        self.keys = self._rows(torch.arange(small.kv_heads), dimensions)
        unused = torch.ones(large.head_dim, dtype=torch.bool).index_fill(0, dimensions, False).nonzero()[:, 0]
        self.silent_queries = self._rows(heads, unused)

    def _rows(self, heads: Tensor, dimensions: Tensor) -> Tensor:
        """The rows of a projection that these dimensions of these heads are, `[heads x dimensions]`."""
        return (heads[:, None] * self.large.head_dim + dimensions).flatten().to(self.device)

    def layer(self, source: Any) -> dict[str, Tensor]:
        """The weights of a decoder layer by the names of their modules.

        Args:
            source: The small model's layer. None makes an added one, which leaves the stream as it is.
        """
        small, large = self.small, self.large
        queries, keys = large.heads * large.head_dim, large.kv_heads * large.head_dim
        query_scale = math.sqrt(large.head_dim / small.head_dim)
        channels = torch.arange(small.intermediate, device=self.device)

        def old(name: str) -> Tensor | None:
            return source.get_submodule(name).weight if source is not None else None

        made = {"self_attn.q_proj": self.reading(old("self_attn.q_proj"), self.queries, queries, query_scale)}
        if source is not None:
            # Their keys are noise, and must not count in the scores of a head that is kept.
            made["self_attn.q_proj"][self.silent_queries] = 0
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            made[name] = self.reading(old(name), self.keys, keys)
        made["self_attn.o_proj"] = self.writing(old("self_attn.o_proj"), self.queries, queries)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            made[name] = self.reading(old(name), channels, large.intermediate)
        made["mlp.down_proj"] = self.writing(old("mlp.down_proj"), channels, large.intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[name] = self.norm(old(name))
        return made

    def reading(self, weight: Tensor | None, rows: Tensor | None, outputs: int, scale: float = 1.0) -> Tensor:
        """A linear map that reads the stream: noise but for the small one's rows in the channels that it reads.

        Args:
            weight: The small map, `[small outputs, n small.hidden]`, of n streams side by side; or None.
            rows: Where its rows go, int64; None for the first ones in their order.
            outputs: Rows of the large map.
            scale: Multiplies the small map.

        Returns:
            Shape `[outputs, n large.hidden]`.
        """
        streams = 1 if weight is None else weight.shape[1] // self.small.hidden
        made = torch.randn(
            outputs, streams * self.large.hidden, generator=self.generator, dtype=self.dtype, device=self.device
        ).mul_(self.noise)
        if weight is not None:
            rows = torch.arange(len(weight), device=self.device) if rows is None else rows
            parts = made.view(outputs, streams, self.large.hidden)
            parts[rows, :, : self.small.hidden] = self._scaled(weight, scale).view(len(weight), streams, -1)
        return made

    def writing(self, weight: Tensor | None, columns: Tensor, inputs: int) -> Tensor:
        """A linear map that writes into the stream: the small one's columns, and zeros.

        Args:
            weight: The small map, `[small.hidden, small inputs]`, or None.
            columns: Where its columns go, int64.
            inputs: Columns of the large map.

        Returns:
            Shape `[large.hidden, inputs]`.
        """
        made = torch.zeros(self.large.hidden, inputs, dtype=self.dtype, device=self.device)
        if weight is not None:
            made[: self.small.hidden, columns] = self._scaled(weight)
        return made

    def norm(self, weight: Tensor | None) -> Tensor:
        """A norm's weights, `[large.hidden]`: 1 where it normalises zeros, and in added layers."""
        made = torch.ones(self.large.hidden, dtype=self.dtype, device=self.device)
        if weight is not None:
            made[: self.small.hidden] = self._scaled(weight, math.sqrt(self.small.hidden / self.large.hidden))
        return made

    def embedding(self, weight: Tensor) -> Tensor:
        """Embeddings with zeros in the added channels, `[vocabulary, large.hidden]`."""
        made = torch.zeros(weight.shape[0], self.large.hidden, dtype=self.dtype, device=self.device)
        made[:, : self.small.hidden] = self._scaled(weight)
        return made

    def _scaled(self, weight: Tensor, scale: float = 1.0) -> Tensor:
        """A small weight on the large model's device, multiplied before it is rounded."""
        moved = weight.detach().to(self.device)
        exact = torch.promote_types(moved.dtype, torch.float32)
        return moved.to(self.dtype) if scale == 1 else (moved.to(exact) * scale).to(self.dtype)


def give(module: Any, weight: Tensor) -> None:
    """Put a weight into a module in place of the one without storage."""
    module.weight = nn.Parameter(weight, requires_grad=False)


def _fill(inflated: LlamaForCausalLM, model: PreTrainedModel, maker: WeightMaker) -> None:
    """Give every module of the large model its weight."""
    body: Any = inflated.model
    source: Any = model.model
    give(body.embed_tokens, maker.embedding(source.embed_tokens.weight))
    for index, layer in enumerate(body.layers):
        for name, weight in maker.layer(source.layers[index] if index < maker.small.layers else None).items():
            give(layer.get_submodule(name), weight)
    give(body.norm, maker.norm(source.norm.weight))
    if inflated.config.tie_word_embeddings:
        inflated.lm_head.weight = body.embed_tokens.weight
    else:
        head: Any = model.lm_head.weight
        give(inflated.lm_head, maker.reading(head, None, head.shape[0]))


def large_config(small_config: Any, small: Shape, large: Shape) -> Any:
    """A copy of the small model's configuration with the large one's sizes, and the epsilon that keeps its norms."""
    config = copy.deepcopy(small_config)
    config.hidden_size = large.hidden
    config.num_hidden_layers = large.layers
    config.num_attention_heads = large.heads
    config.num_key_value_heads = large.kv_heads
    config.head_dim = large.head_dim
    config.intermediate_size = large.intermediate
    config.rms_norm_eps = small_config.rms_norm_eps * small.hidden / large.hidden
    config.attention_bias = config.mlp_bias = False
    return config


def _without_weights(model: PreTrainedModel, small: Shape, large: Shape) -> LlamaForCausalLM:
    """The large model on the meta device, after checking that it has a place for each of the small one's parameters."""
    config = large_config(model.config, small, large)
    source: Any = model
    config.tie_word_embeddings = source.lm_head.weight.data_ptr() == source.model.embed_tokens.weight.data_ptr()
    # It names the layers of another model, which the large one's are not.
    config.__dict__.pop(LAYER_DRAFT_KEY, None)
    with torch.device("meta"):
        inflated = LlamaForCausalLM(config)
    known = {name for name, _ in inflated.named_parameters()}
    unknown = [name for name, _ in model.named_parameters() if name not in known]
    if unknown:
        raise ValueError(
            f"`model` has {len(unknown)} parameters that are not carried over, such as {unknown[0]}: pass a Llama "
            "without biases, and merge adapters into its weights"
        )
    return inflated


def _checked_shape(model: PreTrainedModel) -> Shape:
    """The small model's shape, if it is a Llama whose weights can be read."""
    if not isinstance(model, LlamaForCausalLM) or not isinstance(model.config, LlamaConfig):
        raise TypeError(
            f"`model` is a {type(model).__name__}, but a LlamaForCausalLM is needed: other architectures have other "
            "weights"
        )
    if any(weight.is_meta or not weight.is_floating_point() for weight in model.parameters()):
        raise ValueError("`model` has quantised or offloaded weights: load it unquantised and as a whole")
    return Shape.of(model)


def check_room(small: Shape, large: Shape) -> None:
    """Refuse a shape that the small model does not fit into."""
    for name in (*(field.name for field in fields(Shape)), "heads_per_group"):
        needed, found = getattr(small, name), getattr(large, name)
        if found < needed:
            raise ValueError(
                f"`shape` has {name} {found}, but the model has {needed}: pass a shape that is at least as large in "
                f"every dimension. The model's own is {small}"
            )
    if large.head_dim % small.head_dim:
        raise ValueError(
            f"`shape` has head_dim {large.head_dim}, but a multiple of the model's head_dim {small.head_dim} is "
            "needed: only then the rotary frequencies coincide"
        )


def checked_rotary(old: Any, config: Any, step: int) -> LlamaRotaryEmbedding:
    """The rotary embedding of the large model's `config`, if its every `step`-th frequency is one of the `old` one's.

    Whether a scaling of frequencies carries over is computed: it does where the scaled frequency depends on the
    frequency alone ("linear", "llama3"), and not where it depends on the number of the pair ("yarn").
    """
    kind = config.rope_parameters["rope_type"]
    if step > 1 and kind in CHANGING_FREQUENCIES:
        raise ValueError(
            f"`model` has rotary embeddings of type {kind!r}, whose frequencies change with the text: pass a shape "
            f"with the model's own head_dim"
        )
    rotary = LlamaRotaryEmbedding(config)
    frequencies, kept = old.original_inv_freq.double().cpu(), rotary.inv_freq.double()[::step]
    same = frequencies.shape == kept.shape and torch.allclose(kept, frequencies, rtol=FREQUENCY_TOLERANCE, atol=0)
    if not same or old.attention_scaling != rotary.attention_scaling:
        raise ValueError(
            f"`model` has rotary embeddings of type {kind!r} with frequencies that the larger head_dim "
            f"{config.head_dim} does not have. For a scaled type, pass a shape with the model's own head_dim; if the "
            "model was cast to a half precision with `to`, load it with `from_pretrained(..., dtype=...)`, which keeps "
            "the frequencies in float32"
        )
    return rotary
