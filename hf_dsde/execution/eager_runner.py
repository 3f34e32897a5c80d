"""The runner that launches every pass one kernel at a time: what is left where none can be recorded."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_dsde import compat
from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.early_exit import ending_after
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_output import PassOutput, chosen_layers


class EagerRunner(ModelRunner):
    """Calls the model's `forward` for every block."""

    def _execute(self, buffers: BlockBuffers, keep: int, exit_layer: int | None = None) -> PassOutput:
        masks = buffers.masks
        model = self.model if exit_layer is None else self._ending_after(exit_layer)
        hidden_layers = self.hidden_layers if exit_layer is None else ()
        arguments: dict[str, Any] = {self._cache_argument: self.cache}
        if self._keeps_last:
            arguments["logits_to_keep"] = buffers.last_columns(keep, self._single_device)
        if hidden_layers:
            arguments["output_hidden_states"] = compat.hidden_states_argument(hidden_layers)
        if buffers.states is not None:
            arguments["hidden_states"] = buffers.states
        with self._computing():
            output = model(
                input_ids=buffers.tokens,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=buffers.position_ids,
                use_cache=True,
                return_dict=True,
                **arguments,
            )
        if buffers.states is not None:
            return PassOutput(output.logits, (output.hidden_states,))
        return PassOutput(output.logits, chosen_layers(model, output, hidden_layers))

    def _ending_after(self, layer: int) -> PreTrainedModel:
        if layer not in self._exits:
            self._exits[layer] = ending_after(self.model, layer)
        return self._exits[layer]
