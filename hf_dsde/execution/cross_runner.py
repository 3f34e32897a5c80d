"""Passes of a decoder that reads an encoder's states, over a ragged cache of its own keys and values.

Self-attention is that of any model here: slot == position, and masks from positions. Cross-attention reads what the
first pass over all rows has made of the encoder's states; a row that leaves takes its part along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_dsde import compat
from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.encoder_states import CrossCache, EncoderStates
from hf_dsde.execution.memory import check_cache_fits
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.ragged_positions import RaggedPositions, cross_layers
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.utils.transfers import upload


class CrossRunner(ModelRunner):
    """Calls the model's `forward` for every block, with what the block's rows bring along.

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
        self,
        model: PreTrainedModel,
        rows: int,
        capacity: int,
        options: RuntimeOptions,
        encoded: EncoderStates,
    ) -> None:
        super().__init__(model, rows, capacity, options)
        layers = cross_layers(model)
        check_cache_fits(model, rows, capacity + encoded.hidden.shape[1])
        self._encoded = encoded.to(self.device, model.dtype)
        self._cross = CrossCache(layers)
        self._both = EncoderDecoderCache(self.cache, self._cross)
        self._layers = range(layers)
        self._ragged = RaggedPositions(model)
        self._places: Tensor | None = None
        self._context = compat.context_length(model)
        self._reads_mask = bool(model.config.is_encoder_decoder)
        prefix = "decoder_" if self._reads_mask else ""
        self._tokens, self._mask_argument = f"{prefix}input_ids", f"{prefix}attention_mask"

    def keep_rows(self, rows: Sequence[int]) -> None:
        """As for any runner, and what the others brought along goes."""
        place = {row: index for index, row in enumerate(self.live_rows)}
        kept = upload([place[row] for row in rows], self.device)
        super().keep_rows(rows)
        self._encoded = self._encoded.select(kept)
        self._cross.select_rows(kept)

    def _fill(self, buffers: BlockBuffers, block: RowBlock, longest: int, places: Tensor | None = None) -> None:
        super()._fill(buffers, block, longest, places)
        self._places = places

    def _execute(self, buffers: BlockBuffers, keep: int) -> PassOutput:
        encoded = self._encoded if self._places is None else self._encoded.select(self._places)
        self._both.is_updated = dict.fromkeys(self._layers, self._cross.aim(self._places))
        arguments: dict[str, Any] = {
            **self._ragged.tell(self._positions(buffers, encoded)),
            self._tokens: buffers.tokens,
            self._mask_argument: next(iter(buffers.masks.values())),
            self._cache_argument: self._both,
        }
        if self._reads_mask and encoded.mask is not None:
            arguments["attention_mask"] = encoded.mask
        if self._keeps_last:
            arguments["logits_to_keep"] = buffers.last_columns(keep, self._single_device)
        states = BaseModelOutput(last_hidden_state=encoded.hidden)
        with self._autocast.held():
            output = self._ragged.model(encoder_outputs=states, use_cache=True, return_dict=True, **arguments)
        return PassOutput(output.logits)

    def _positions(self, buffers: BlockBuffers, encoded: EncoderStates) -> Tensor:
        """Return what plain decoding takes for the positions of the buffers' tokens."""
        if encoded.offsets is None:
            return buffers.position_ids
        positions = buffers.position_ids + encoded.offsets[:, None]
        # A pass may have columns after all that a row may hold, of which nobody reads what they give.
        return positions if self._context is None else positions.clamp_max(self._context - 1)
