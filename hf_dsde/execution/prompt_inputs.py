"""Prompts that are more than tokens, such as those with images, and the pass that reads them.

What a prompt brings along enters in the first pass of a text, and only there. So that pass is the model's own, fed by
its own `prepare_inputs_for_generation`: whatever it does with images, with the positions of their parts, and with who
of them sees whom, it does as in plain decoding. Only its keys and values go elsewhere, into the slots of a ragged
cache. From then on a text is tokens, and a row's positions are its slots, shifted by what the images left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_dsde import compat
from hf_dsde.execution import attention
from hf_dsde.execution.kv_cache import RaggedCache, RaggedLayer
from hf_dsde.execution.pass_output import chosen_layers

ENCODED = "mm_encoder_outputs"
"""Argument that holds what a model's own encoder has made of images, which means nothing to another model."""


@dataclass(frozen=True)
class PromptInputs:
    """The prompts of a batch, with what `generate` has prepared for the model's first pass over them.

    Attributes:
        tokens: Left-padded, `[rows, width]`, int64.
        mask: 0 on the padding in front, 1 on tokens, `[rows, width]`.
        arguments: Everything else that the model's `prepare_inputs_for_generation` is given; `attention_mask` again,
            or None where nothing is padded.
        config: Of the model that they were prepared for.
        stand_ins: Which tokens stand for parts of images, `[rows, width]`, bool.
        given: What of the arguments the caller had given, before anything was made of it; None if nobody knows.
    """

    tokens: Tensor
    mask: Tensor
    arguments: Mapping[str, Any]
    config: PretrainedConfig
    stand_ins: Tensor
    given: Mapping[str, Any] | None = None

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return self.tokens.shape[1]

    def shown_to(self, draft: PreTrainedModel) -> PromptInputs | None:
        """Return the prompts for a draft that looks at images as well; None if it cannot look at these."""
        if self.given is None or ENCODED in self.given or not compat.look_alike(self.config, draft.config):
            return None
        places = {name: self.arguments.get(name) for name in ("attention_mask", "position_ids")}
        arguments = {name: _for_model(draft, value) for name, value in {**places, **self.given}.items()}
        return replace(self, tokens=self.tokens.to(draft.device), arguments=arguments)

    def read(self, model: PreTrainedModel, cache: RaggedCache, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Let a model read the prompts, and store their keys and values, and how positions go on after them.

        Args:
            model: Takes the arguments.
            cache: Of all rows, with room for the longest.
            layers: Whose hidden states are wanted, numbered as `PassOutput` says.

        Returns:
            Hidden states, `[rows, width, H]` each.
        """
        mask = self.mask.to(model.device)
        lengths = mask.sum(dim=1)
        slots = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, -1)
        cache.aim(slots, view=0)
        wanted: dict[str, Any] = {"logits_to_keep": 1} if compat.supports_logits_to_keep(model) else {}
        if layers:
            wanted["output_hidden_states"] = compat.hidden_states_argument(layers)
        generating: Any = model
        prepared = generating.prepare_inputs_for_generation(
            self.tokens,
            is_first_iteration=True,
            use_cache=True,
            **{compat.cache_argument(model): _EmptyCache(cache)},
            **self.arguments,
        )
        with attention.own_attention(model):
            output = model(**{**prepared, **wanted, "return_dict": True})
        assert cache.shifts is not None
        last = compat.last_positions(prepared["position_ids"]).to(lengths.device)
        cache.shifts.copy_((last + 1 - lengths)[:, None])
        return chosen_layers(model, output, layers)


def _for_model(model: PreTrainedModel, value: Any) -> Any:
    """Bring a tensor to a model's device, and pixels to its dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


class _EmptyLayer(CacheLayerMixin):
    """Looks empty, as a cache does to the first pass of a text, and passes on what is stored."""

    is_sliding = False

    def __init__(self, layer: RaggedLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the layer that stores allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store a block; show it the block itself, padding included."""
        self._layer.update(key_states, value_states, *args, **kwargs)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of places a query sees and the first one's index."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0."""
        return 0

    def get_max_length(self) -> int:
        """Return that there is no maximum."""
        return -1


class _EmptyCache(Cache):
    """What a model is given in place of the ragged cache in the first pass of a text."""

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__(layers=[_EmptyLayer(layer) for layer in cache.ragged_layers])
