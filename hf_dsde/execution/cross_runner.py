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


class CrossPasses(ModelRunner):
    """Calls the model's `forward` for every block, with what the block's rows bring along."""

    def _bring(self, encoded: EncoderStates, cross: CrossCache) -> None:
        """Take over what rows bring along, and where keys and values of it are kept."""
        encoded = encoded.to(self.device, self.model.dtype)
        is_whole = bool(self.model.config.is_encoder_decoder)
        mask = encoded.mask if is_whole and self.model.config.model_type not in TOLD else None
        if mask is not None:  # in the form that attention takes, so that no pass has to ask what is in it
            mask = None if bool(mask.all()) else self._mask(mask.bool()[:, None, None])
        self._encoded = replace(encoded, mask=mask)
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

    def _execute(self, buffers: BlockBuffers, keep: int) -> PassOutput:
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
        self._bring(encoded, CrossCache(cross_layers(model)))


class RecordedCrossRunner(CrossPasses, GraphRunner):
    """Replays such passes: keys and values of an encoder's states stay where they are, and all rows stay in.

    Args:
        model: As for `CrossRunner`; `why_states_not_recorded` has nothing against it.
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
        if not isinstance(cross, CrossCache) or cross.get_seq_length() != encoded.hidden.shape[1]:
            check_cache_fits(model, rows, capacity + encoded.hidden.shape[1])
            cross = self.cache.companion = CrossCache(cross_layers(model), stays=True)
            self._workspace.passes.clear()
        cross.start_anew()
        self._bring(encoded, cross)
        # Nothing may be replayed before keys and values are those of this call's inputs: a pass without tokens makes
        # them.
        nothing = torch.full((rows, 1), -1, device=self.device)
        self._run(RowBlock(torch.zeros_like(nothing), nothing), 1, 1)


def why_states_not_recorded(model: PreTrainedModel) -> str | None:
    """Say why passes that read an encoder's states are not recorded; None if they can be.

    Whisper's inputs all have one length. Those of others differ from call to call, and with them every pass would.
    """
    if model.config.model_type in TOLD:
        return None
    return "its encoder's inputs are of another length in every call, and passes that read them are not recorded"
