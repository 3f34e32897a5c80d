"""Passes of a decoder that reads an encoder's states, over a ragged cache of its own keys and values.

Self-attention is that of any model here: slot == position, and masks from positions. Cross-attention reads what the
first pass over all rows has made of the encoder's states; a row that leaves takes its part along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_dsde import compat
from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.encoder_states import CrossCache, EncoderStates
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.memory import check_cache_fits
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.ragged_positions import TOLD, RaggedPositions, cross_layers
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.utils.transfers import upload

FEWEST_INPUTS = 64
"""Inputs that recorded passes have room for at least; above that, powers of two."""
MOST_PADDING = 4
"""How many times as many inputs as are needed may be padded to before passes are recorded again."""


class CrossPasses(ModelRunner):
    """Calls the model's `forward` for every block, with what the block's rows bring along."""

    def _bring(self, encoded: EncoderStates, cross: CrossCache) -> None:
        """Take over what rows bring along, and where keys and values of it are kept."""
        self._encoded = encoded
        is_whole = bool(self.model.config.is_encoder_decoder)
        self._cross = cross
        self._both = EncoderDecoderCache(self.cache, cross)
        self._ragged = RaggedPositions(self.model)
        self._context = compat.context_length(self.model)
        prefix = "decoder_" if is_whole else ""
        self._tokens, self._mask_argument = f"{prefix}input_ids", f"{prefix}attention_mask"

    def keep_rows(self, rows: Sequence[int]) -> None:
        """As for any runner; what rows that leave have brought along goes with them."""
        before = self.live_rows
        super().keep_rows(rows)
        if self.live_rows != before:
            place = {row: index for index, row in enumerate(before)}
            kept = upload([place[row] for row in self.live_rows], self.device)
            self._encoded = self._encoded.select(kept)
            self._cross.select_rows(kept)

    def _execute(self, buffers: BlockBuffers, keep: int, exit_layer: int | None = None) -> PassOutput:
        assert exit_layer is None, "no drafter ends passes of such a model early"
        chosen = self.cache.plan.chosen
        encoded = self._encoded if chosen is None else self._encoded.select(chosen)
        self._both.is_updated = dict.fromkeys(range(len(self._cross)), self._cross.aim(chosen))
        arguments: dict[str, Any] = {
            **self._ragged.tell(self._positions(buffers, encoded)),
            self._tokens: buffers.tokens,
            self._mask_argument: next(iter(buffers.masks.values())),
            self._cache_argument: self._both,
        }
        if encoded.mask is not None:
            arguments["attention_mask"] = encoded.mask
        if self._keeps_last:
            arguments["logits_to_keep"] = buffers.last_columns(keep, self._single_device)
        states = BaseModelOutput(last_hidden_state=encoded.hidden)
        with self._computing():
            output = self._ragged.model(encoder_outputs=states, use_cache=True, return_dict=True, **arguments)
        return PassOutput(output.logits)

    def _positions(self, buffers: BlockBuffers, encoded: EncoderStates) -> Tensor:
        """Return what plain decoding takes for the positions of the buffers' tokens."""
        if encoded.offsets is None:
            return buffers.position_ids
        positions = buffers.position_ids + encoded.offsets[:, None]
        # A pass may have columns after all that a row may hold, of which nobody reads what they give.
        return positions if self._context is None else positions.clamp_max(self._context - 1)


class CrossRunner(CrossPasses):
    """Runs such passes eagerly.

    Args:
        model: An encoder-decoder, or a decoder alone that takes an encoder's states, in evaluation.
        rows: As for any runner.
        capacity: As for any runner.
        options: As for any runner.
        encoded: What the rows bring along.

    Raises:
        torch.OutOfMemoryError: If the device has no room for both caches.
    """

    def __init__(
        self, model: PreTrainedModel, rows: int, capacity: int, options: RuntimeOptions, encoded: EncoderStates
    ) -> None:
        super().__init__(model, rows, capacity, options)
        check_cache_fits(model, rows, capacity + encoded.hidden.shape[1])
        encoded = encoded.to(self.device, model.dtype)
        mask = encoded.mask if reads_mask(model) else None
        if mask is not None:  # in the form that attention takes, so that no pass has to ask what is in it
            mask = None if bool(mask.all()) else self._mask(mask.bool()[:, None, None])
        self._bring(replace(encoded, mask=mask), CrossCache(cross_layers(model)))


class RecordedCrossRunner(CrossPasses, GraphRunner):
    """Replays such passes: keys and values of an encoder's states stay where they are, and all rows stay in.

    Args:
        model: As for `CrossRunner`.
        rows: As for any runner.
        capacity: As for any runner.
        options: As for any runner.
        encoded: What the rows bring along.
        **recording: What else a `GraphRunner` takes.

    Raises:
        torch.OutOfMemoryError: If the device has no room for both caches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        capacity: int,
        options: RuntimeOptions,
        encoded: EncoderStates,
        **recording: Any,
    ) -> None:
        super().__init__(model, rows, capacity, options, **recording)
        cross = self.cache.companion
        kept = cross.get_seq_length() if isinstance(cross, CrossCache) else 0
        inputs = encoded.hidden.shape[1]
        if reads_mask(model):
            inputs = held_inputs(inputs, kept)
        if not isinstance(cross, CrossCache) or inputs != kept:
            check_cache_fits(model, rows, capacity + inputs)
            cross = self.cache.companion = CrossCache(cross_layers(model), stays=True)
            self._workspace.passes.clear()
        cross.start_anew()
        self._bring(self._held(encoded.to(self.device, model.dtype), inputs, cross), cross)
        # Nothing may be replayed before keys and values are those of this call's inputs: a pass without tokens makes
        # them.
        nothing = torch.full((rows, 1), -1, device=self.device)
        self._run(RowBlock(torch.zeros_like(nothing), nothing), 1, 1)

    def _held(self, encoded: EncoderStates, inputs: int, cross: CrossCache) -> EncoderStates:
        """Return what rows bring along where recorded passes read it, all of it in every call."""
        if not reads_mask(self.model):
            return replace(encoded, mask=None)
        encoded = encoded.padded(inputs)
        assert encoded.mask is not None
        offsets = encoded.offsets
        if offsets is None:
            offsets = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        mask = cross.hold("mask", self._mask(encoded.mask.bool()[:, None, None]))
        return EncoderStates(encoded.hidden, mask, cross.hold("offsets", offsets))


def reads_mask(model: PreTrainedModel) -> bool:
    """Whether a decoder is told which of an encoder's inputs are padding: all but Whisper's, which has none."""
    return model.config.model_type not in TOLD


def held_inputs(inputs: int, kept: int) -> int:
    """Return for how many inputs recorded passes are made, where that differs from call to call.

    Args:
        inputs: Of this call.
        kept: What was recorded last, 0 for nothing; it serves unless it is too small, or by far too large.
    """
    size = max(FEWEST_INPUTS, 1 << (inputs - 1).bit_length())
    return kept if inputs <= kept <= MOST_PADDING * size else size
