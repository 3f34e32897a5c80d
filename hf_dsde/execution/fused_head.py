"""The forward pass of an EAGLE-3 head over flat tokens: that of Llama-like models, but for its two ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.block_buffers import state_size
from hf_dsde.execution.decoder_layer import Layer, Norm
from hf_dsde.execution.fused_decoder import FusedDecoder, FusedOps, Pass


class FusedHead(FusedDecoder):
    """Runs a head. The first layer reads a token's embedding beside its state; what comes out are the next states.

    Args:
        model: As for `FusedDecoder`.
        ops: As for `FusedDecoder`.
        checked: As for `FusedDecoder`.
    """

    def __init__(self, model: PreTrainedModel, ops: FusedOps, *, checked: bool = False) -> None:
        super().__init__(model, ops, checked=checked)
        head: Any = model
        self._state_norm = Norm.of(head.layers[0].hidden_norm)
        self._residual_is_normed: bool = head.settings.norm_before_residual
        self._gives_normed: bool = head.settings.norm_output

    def _entered(self, layer: Layer, stream: Tensor, added: Tensor | None, run: Pass) -> tuple[Tensor, Tensor]:
        """As for any decoder; embeddings enter the first layer, and states go on as its residual."""
        states = run.block.states
        if layer.index or states is None:
            return super()._entered(layer, stream, added, run)
        embedded = self._ops.rms_norm(stream, layer.input_norm.weight, layer.input_norm.epsilon)
        normed = self._ops.rms_norm(states, self._state_norm.weight, self._state_norm.epsilon)
        return torch.cat([embedded, normed], dim=-1), normed if self._residual_is_normed else states

    def _shown(self, normed: Tensor, stream: Tensor, run: Pass, keep: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """The states that go with the guessed tokens."""
        return (normed if self._gives_normed else stream,)


def fused_decoder(
    model: PreTrainedModel, ops: FusedOps, *, checked: bool = False, hidden_layers: tuple[int, ...] = ()
) -> FusedDecoder:
    """Return what runs a model's layers over flat tokens; arguments are those of `FusedDecoder`."""
    if state_size(model) is not None:
        return FusedHead(model, ops, checked=checked)
    return FusedDecoder(model, ops, checked=checked, hidden_layers=hidden_layers)
