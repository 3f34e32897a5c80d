"""The forward pass of Llama-like models over flat tokens.

Matrix products, the embedding and the rotary module are the model's own modules, called as they are, so that adapters
and quantised weights work. What lies between them, the model's blocks do in dozens of small operations; here each
stretch is one operation of a module that is given: `hf_dsde.kernels.elementwise` or `hf_dsde.kernels.reference`. That
module may also take over the products of plain linear modules that share an input, where it says that this pays, and
it computes what plain LoRA adapters add (`linear_products`).

Whatever somebody attached to a block that is not called would be lost silently: `fused_families.why_not_fused` finds it
out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.decoder_layer import Layer, Norm
from hf_dsde.execution.fused_families import attention_windows, decoder_body, decoder_layers, why_not_fused
from hf_dsde.execution.joined_weights import JoinedWeights
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.execution.linear_products import gated_product, products, to_join
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.torch_modes import without_autocast
from hf_dsde.kernels.block import Block
from hf_dsde.kernels.four_bit_weights import FourBits
from hf_dsde.kernels.reference import LowRank


class FusedOps(Protocol):
    """What a pass is made of beside the model's modules. `hf_dsde.kernels.reference` documents each operation."""

    def pays(self, tokens: int, matrices: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether `linears` and `gated_linear` are preferred to modules, for weights `[rows, width]` in all."""

    def linears(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> list[Tensor]:
        """Return the product with each of one to three weights."""

    def side_by_side(self, products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
        """Return what each of one to three modules makes of `x`."""

    def gated_linear(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(x gate^T) * (x up^T)."""

    def reads_four_bits(self, tokens: int, weight: FourBits, dtype: torch.dtype) -> bool:
        """Say whether `four_bit_linear` is preferred to a module."""

    def four_bit_linear(self, x: Tensor, weight: FourBits, bias: Tensor | None) -> Tensor:
        """Return the product with a weight of four bits."""

    def add_low_rank(self, x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> list[Tensor]:
        """Return what one to three modules made of `x`, with what their adapters add to it."""

    def gated_low_rank(self, x: Tensor, bases: Sequence[Tensor], adapters: Sequence[Sequence[LowRank]]) -> Tensor:
        """Return the gated product of two results with what adapters add to them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalised `x`."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the normalised sum of `x` and `residual`, and the sum."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up."""

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Return turned queries, and store turned keys, and values."""

    def ragged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        block: Block,
        scaling: float,
        window: int | None,
        reach: int,
    ) -> Tensor:
        """Return what each token reads from its cache row."""


@dataclass(frozen=True)
class Pass:
    """One pass: what it runs on, what the tokens' positions mean, and what it has come across.

    Attributes:
        block: T tokens.
        cache: Where their keys and values go.
        reach: Bound on the largest slot + 1.
        cos: Cosines of the positions, `[T, D]`.
        sin: Sines likewise.
        slots: Cache slots, `[T]`, int64, the discard slot where there is no token.
        streams: The residual stream as each layer got it, `[T, H]`, where it is wanted.
    """

    block: Block
    cache: RaggedCache
    reach: int
    cos: Tensor
    sin: Tensor
    slots: Tensor
    streams: dict[int, Tensor] = field(default_factory=dict)


class FusedDecoder:
    """Runs a supported model over flat tokens and a ragged cache.

    Modules are looked up once: a model whose layers are replaced afterwards needs another decoder.

    Args:
        model: In evaluation, on one device.
        ops: The operations between matrix products, usually a module.
        checked: Whether `why_not_fused` has just been asked; it looks at every module.
        hidden_layers: Layers whose hidden states passes return, numbered as `PassOutput` says.

    Raises:
        ValueError: If `why_not_fused` names a reason.
    """

    def __init__(
        self, model: PreTrainedModel, ops: FusedOps, *, checked: bool = False, hidden_layers: tuple[int, ...] = ()
    ) -> None:
        reason = None if checked else why_not_fused(model)
        if reason is not None:
            msg = f"model: no fused pass is known for {type(model).__name__}: {reason}. Run it with the eager runner."
            raise ValueError(msg)
        body = decoder_body(model)
        self._ops = ops
        self._embedding = body.embed_tokens
        self._rotary = body.rotary_emb
        self._axes = 3 if hasattr(body.rotary_emb, "mrope_section") else None
        self._final_norm = Norm.of(body.norm)
        whole: Any = model
        self._head = whole.lm_head
        self._hidden_layers = hidden_layers
        windows = attention_windows(model)
        pairs = zip(decoder_layers(model), windows, strict=True)
        self._layers = [Layer.of(index, layer, window) for index, (layer, window) in enumerate(pairs)]
        self._joined = JoinedWeights()
        self._shorter: FusedDecoder | None = None

    def join_weights(self, joined: JoinedWeights, tokens: int) -> None:
        """Let one product make queries, keys and values, if that is faster in a pass over so many tokens.

        Args:
            joined: Where the copies are kept that this takes.
            tokens: Tokens of the pass that is recorded next.
        """
        if joined is not self._joined:
            self._joined, self._shorter = joined, None
        if not joined.settled:
            dtype = self._final_norm.weight.dtype
            found = {layer.index: to_join(self._ops, layer.projections, tokens, dtype) for layer in self._layers}
            if layers := {index: modules for index, modules in found.items() if modules is not None}:
                joined.make(layers)

    def ending_after(self, layer: int | None) -> FusedDecoder:
        """Return what runs the layers up to one, counted from 1, and then final norm and head; no hidden states.

        None ends after the last layer, which is this decoder itself.
        """
        return self if layer is None else self._with(self._layers[:layer], ())

    def representative(self) -> FusedDecoder:
        """Return what launches all kernels that this one does, and gives as many tensors, with few layers.

        These are the first and the last layer of each kind, and those that give hidden states: what the first of all
        does otherwise, and the last of all, another one of its kind does as the others do.
        """
        if self._shorter is None:
            last = {layer.kind: layer.index for layer in self._layers}
            first = {layer.kind: layer.index for layer in reversed(self._layers)}
            kept = {*first.values(), *last.values(), *self._hidden_layers}
            self._shorter = self._with([layer for layer in self._layers if layer.index in kept], self._hidden_layers)
        return self._shorter

    def _with(self, layers: list[Layer], hidden_layers: tuple[int, ...]) -> FusedDecoder:
        """Return a decoder of some of the layers."""
        other = copy.copy(self)
        other._layers, other._hidden_layers, other._shorter = layers, hidden_layers, None
        return other

    def __call__(
        self, block: Block, cache: RaggedCache, reach: int, keep: Tensor | None, last: Block | None = None
    ) -> PassOutput:
        """Run a block, storing its keys and values in the slots that it names.

        Args:
            block: T tokens over R cache rows.
            cache: Of R rows. Layers without buffers get them, which must not happen in a pass that is recorded.
            reach: Bound on the largest slot + 1, known to the host, a multiple of 64.
            keep: Flat indices of the tokens whose logits and hidden states are wanted, int64; None for all.
            last: These tokens as a block of chains, whose positions are written here: of the others, the last layer
                then computes keys and values only. None to let it compute everything.

        Returns:
            Logits, `[len(keep) or T, vocabulary]`, of the dtype that the head returns, and hidden states, `[len(keep)
            or T, H]`. Anything finite where there is no token.

        Raises:
            RuntimeError: If a layer of the cache has no buffers yet and the cache does not know its rows.
        """
        with torch.no_grad(), without_autocast(block.tokens.device):
            normed, hidden = self._run(block, cache, reach, keep, last)
            return PassOutput(self._head(normed), hidden)

    def store(self, block: Block, cache: RaggedCache, reach: int) -> tuple[Tensor, ...]:
        """Store a block's keys and values only: the last layer ends with them, and no head is run.

        Args:
            block: As for a call.
            cache: As for a call.
            reach: As for a call.

        Returns:
            Hidden states, `[T, H]` each; the last layer's take the rest of that layer.
        """
        *before, last = self._layers
        with torch.no_grad(), without_autocast(block.tokens.device):
            if last.index + 1 in self._hidden_layers:
                return self._run(block, cache, reach, None, None)[1]
            stream, run = self._begun(block, cache, reach)
            stream, added = self._through(before, stream, run)
            self._project(last, self._entered(last, stream, added, run)[0], run)
            return tuple(run.streams[layer] for layer in self._hidden_layers)

    def _run(
        self, block: Block, cache: RaggedCache, reach: int, keep: Tensor | None, last: Block | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all layers; return what the head gets, and the hidden states."""
        *before, final = self._layers
        stream, run = self._begun(block, cache, reach)
        stream, added = self._through(before, stream, run)
        normed, stream = self._entered(final, stream, added, run)
        queries = self._project(final, normed, run)
        if keep is not None and last is not None:
            torch.index_select(block.positions, 0, keep, out=last.positions)
            queries, stream = queries.index_select(0, keep), stream.index_select(0, keep)
            run = replace(run, block=last)
        stream, added = self._passed(final, queries, stream, run)
        if keep is not None and last is None:  # before the norm and the head, which nobody needs of the others
            added, stream = added.index_select(0, keep), stream.index_select(0, keep)
        norm = self._final_norm
        normed, stream = self._ops.add_rms_norm(added, stream, norm.weight, norm.epsilon)
        return normed, self._shown(normed, stream, run, keep)

    def _shown(self, normed: Tensor, stream: Tensor, run: Pass, keep: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """The hidden states that a pass gives.

        Args:
            normed: What the head gets, of the tokens that are kept.
            stream: The same before the final norm.
            run: The pass.
            keep: Which of its tokens are kept; None for all.
        """
        kept = {
            layer: states if keep is None else states.index_select(0, keep) for layer, states in run.streams.items()
        }
        kept[self._layers[-1].index + 1] = normed
        return tuple(kept[layer] for layer in self._hidden_layers)

    def _begun(self, block: Block, cache: RaggedCache, reach: int) -> tuple[Tensor, Pass]:
        """Return the embeddings, and what the tokens' positions mean in their dtype."""
        stream: Tensor = self._embedding(block.tokens)
        positions = block.positions.clamp_min(0)
        if cache.shifts is not None:
            positions = positions + cache.shifts[block.rows, 0]
        # Of text, which alone gets here, the positions of all axes are the same.
        cos, sin = self._rotary(stream, positions[None] if self._axes is None else positions.expand(self._axes, 1, -1))
        slots = block.slots.masked_fill(block.slots < 0, cache.capacity)
        return stream, Pass(block, cache, reach, cos[0], sin[0], slots)

    def _through(self, layers: Sequence[Layer], stream: Tensor, run: Pass) -> tuple[Tensor, Tensor | None]:
        """Run layers; return the residual stream and what the last of them adds to it, both `[T, H]`."""
        added: Tensor | None = None
        for layer in layers:
            normed, stream = self._entered(layer, stream, added, run)
            stream, added = self._passed(layer, self._project(layer, normed, run), stream, run)
        return stream, added

    def _passed(self, layer: Layer, queries: Tensor, stream: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """What follows keys and values in a layer; the stream after attention, and what the MLP adds to it."""
        mixed, norm = self._attend(layer, queries, run), layer.middle_norm
        normed, stream = self._ops.add_rms_norm(mixed, stream, norm.weight, norm.epsilon)
        mlp = layer.mlp
        gated = gated_product(self._ops, mlp.gate_proj, mlp.up_proj, normed)
        return stream, products(self._ops, [mlp.down_proj], gated)[0]

    def _entered(self, layer: Layer, stream: Tensor, added: Tensor | None, run: Pass) -> tuple[Tensor, Tensor]:
        """What a layer's attention gets, and the stream with what the layer in front of it added."""
        norm = layer.input_norm
        if added is None:
            normed = self._ops.rms_norm(stream, norm.weight, norm.epsilon)
        else:
            normed, stream = self._ops.add_rms_norm(added, stream, norm.weight, norm.epsilon)
        if layer.index in self._hidden_layers:
            run.streams[layer.index] = stream
        return normed, stream

    def _attend(self, layer: Layer, q: Tensor, run: Pass) -> Tensor:
        """Let turned queries look back, `[T, Hq, D]` to `[T, H]`."""
        keys, values = _buffers(run.cache, layer.cache_index)
        scaling = layer.attention.scaling
        mixed = self._ops.ragged_attention(q, keys, values, run.block, scaling, layer.window, run.reach)
        return products(self._ops, [layer.attention.o_proj], mixed)[0]

    def _project(self, layer: Layer, normed: Tensor, run: Pass) -> Tensor:
        """Return turned queries, `[T, Hq, D]`, and store keys and values."""
        made = products(self._ops, layer.projections, normed, self._joined.of(layer.index))
        q, k, v = (product.unflatten(-1, (-1, layer.attention.head_dim)) for product in made)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._head_norm(q, layer.query_norm), self._head_norm(k, layer.key_norm)
        keys, values = _buffers(run.cache, layer.cache_index, k, v)
        return self._ops.rotate_and_store(q, k, v, run.cos, run.sin, keys, values, run.block.rows, run.slots)

    def _head_norm(self, states: Tensor, norm: Norm) -> Tensor:
        """Normalise every head of `[T, heads, D]` by itself."""
        return self._ops.rms_norm(states.flatten(0, 1), norm.weight, norm.epsilon).view(states.shape)


def _buffers(cache: RaggedCache, index: int, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A layer's keys and values; where there are none yet, made for states like `k` and `v`, `[T, heads, D]`."""
    layer = cache.ragged_layers[index]
    if not layer.is_initialized and cache.plan.rows is not None and k is not None and v is not None:
        layer.lazy_initialization(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    if layer.keys is None or layer.values is None:
        msg = (
            f"cache: layer {index} has no buffers yet, and it is not known for how many rows. Make the cache with "
            "RaggedCache(layers, capacity, rows)."
        )
        raise RuntimeError(msg)
    return layer.keys, layer.values
