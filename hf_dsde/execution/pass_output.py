"""What a pass of a model gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel


class PassOutput(NamedTuple):
    """Logits, and the hidden states of the layers that the runner was made for.

    Hidden states are numbered and valued as those of transformers' `output_hidden_states`: 0 is what the first layer
    gets, i what the i-th layer gives, counted from 1, before any norm; the last layer's has gone through the model's
    final norm, as the head gets it.

    Attributes:
        logits: `[rows, columns, vocabulary]`, float32.
        hidden: For each layer that was asked for, in that order, `[rows, columns, H]`, of the model's dtype. Anything
            finite where there is no token.
        packed_tokens: Tokens in the pass, when it was packed; None when it was padded.
        probs: What the step of a chain drew its tokens from, `[rows, 1, vocabulary]`, float32; None of all else.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    packed_tokens: int | None = None
    probs: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> PassOutput:
        """Return what `function` makes of logits and hidden states."""
        return self._replace(logits=function(self.logits), hidden=tuple(map(function, self.hidden)))


def checked_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return layers that hidden states are asked of.

    Raises:
        ValueError: If the model has no such layer.
    """
    last = model.config.get_text_config(decoder=True).num_hidden_layers
    for layer in layers:
        if not 0 <= layer <= last:
            msg = (
                f"hidden_layers: {layer} was asked for, but {type(model).__name__} has 0 (its embeddings) to {last} "
                "(its last layer, after the final norm). Name those that the heads were trained with."
            )
            raise ValueError(msg)
    return layers


def chosen_layers(model: PreTrainedModel, output: Any, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the hidden states of some layers from what a model gave.

    Raises:
        ValueError: If it gave none.
    """
    if layers and getattr(output, "hidden_states", None) is None:
        msg = (
            f"model: a pass of {type(model).__name__} gives no hidden states (output_hidden_states=True), and what "
            f"drafts for it reads those of layers {list(layers)}. Use a draft model, or prompt lookup."
        )
        raise ValueError(msg)
    return tuple(output.hidden_states[layer] for layer in layers)
