"""Encoder-decoders whose decoders count positions themselves, and how they are told those of ragged rows.

A decoder that takes no position ids counts on from the length of its cache, one number for all rows. The part that asks
for positions is replaced by one that has those of each row, in a copy of the modules on the way to it; all other
modules, and all weights, are the model's own, and the model stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dsde import compat

TOLD = {"whisper": r""}
"""Families whose forward pass takes the positions of a decoder's tokens."""
LOOKED_UP = dict.fromkeys(
    ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"),
    r"model\.decoder\.embed_positions",
)
"""Families that look positions up in a table, and the module that does so."""
RELATIVE = dict.fromkeys(("t5", "mt5", "umt5"), r"decoder\.block\.\d+\.layer\.0\.SelfAttention")
"""Families that add a bias to attention scores, by the distance of two tokens, and the modules that have one."""
FAMILIES = {**TOLD, **LOOKED_UP, **RELATIVE}


def why_no_ragged_rows(model: PreTrainedModel) -> str | None:
    """Say why a model that reads an encoder's states cannot be told positions of ragged rows; None if it can."""
    family = str(model.config.model_type)
    own_class = type(model).__dict__.get("_hf_dsde_own_class", type(model))
    if family not in FAMILIES or not own_class.__module__.startswith("transformers.models."):
        return (
            f"of encoder-decoders, {', '.join(sorted(FAMILIES))} are known, in transformers' own classes; this one is "
            f"of model_type '{family}' in {own_class.__module__}, and where it takes positions from is not known"
        )
    if not model.config.is_encoder_decoder and family not in TOLD:
        return "alone, without the encoder, its decoder is not known"
    for path, _ in _counting(model):
        for name, module in _on_the_way(model, path):
            if "forward" in vars(module) and not _is_own_method(module):
                return f"`forward` of {name or 'the model'} was replaced, and positions have to pass it"
    return None


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether plain decoding gives a token its column as position, padding in front of a decoder's prompt included."""
    return model.config.is_encoder_decoder and model.config.model_type in LOOKED_UP


class RaggedPositions:
    """A model that is told the position of every token of a pass.

    Args:
        model: Reads an encoder's states, and `why_no_ragged_rows` has nothing against it.

    Attributes:
        model: What is called in its place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._positions = torch.empty(0)
        self._argument = None
        if model.config.model_type in TOLD:
            self._argument = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
        replacements: dict[str, nn.Module] = {}
        for path, module in _counting(model):
            if model.config.model_type in LOOKED_UP:
                replacements[path] = _Table(module, self._current)
            else:
                replacements[path] = _biased(module, self._current)
        self.model = _with_modules(model, replacements)

    def _current(self) -> Tensor:
        return self._positions

    def tell(self, positions: Tensor) -> dict[str, Tensor]:
        """Set the positions of the next pass's tokens.

        Args:
            positions: `[rows, width]`, int64, at least 0.

        Returns:
            Arguments of the model's `forward`.
        """
        self._positions = positions
        return {} if self._argument is None else {self._argument: positions}


class _Table(nn.Module):
    """Stands for a decoder's table of positions."""

    def __init__(self, table: nn.Module, positions: Callable[[], Tensor]) -> None:
        super().__init__()
        self._table = [table]  # no module of this one's: its weights are the model's
        self._positions = positions

    def forward(self, tokens: Tensor | torch.Size, *_: Any, **__: Any) -> Tensor:
        """Return the embeddings of the pass's positions, `[rows, width, H]`, whatever the decoder has counted."""
        positions = self._positions()
        embedded: Tensor = self._table[0](tokens, 0, position_ids=positions)
        return embedded.view(*positions.shape, -1)


def _biased(attention: nn.Module, positions: Callable[[], Tensor]) -> nn.Module:
    """Return an attention module that takes its bias by the positions of ragged rows."""
    twin = _twin(attention)
    vars(twin)["compute_bias"] = partial(_bias, attention, positions)
    return twin


def _bias(attention: Any, positions: Callable[[], Tensor], width: int, slots: int, **_: Any) -> Tensor:
    """Return the bias of each token of a pass towards each slot, `[rows, heads, width, slots]`.

    The model says what the last of so many tokens gets towards each; how far away that is, is all that matters.
    """
    del width
    of_last: Tensor = attention.compute_bias(1, slots, past_seen_tokens=slots - 1)
    by_distance = of_last[0, :, 0].flip(-1)  # [heads, slots]
    asked = positions()
    distance = asked[..., None] - torch.arange(slots, device=asked.device)
    # Later slots are hidden. A token that is none may have a position after all slots, and nobody reads what it gets.
    return by_distance[:, distance.clamp(0, slots - 1)].transpose(0, 1)


def _counting(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model that ask for positions, with their names."""
    pattern = FAMILIES[model.config.model_type]
    if not pattern:
        return
    for name, module in model.named_modules():
        if re.fullmatch(pattern, name) and getattr(module, "has_relative_attention_bias", True):
            yield name, module


def _on_the_way(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model and the modules on the way to one of its own, that one included, with their names."""
    parts = path.split(".")
    for depth in range(len(parts) + 1):
        name = ".".join(parts[:depth])
        yield name, model.get_submodule(name)


def _with_modules(model: PreTrainedModel, replacements: dict[str, nn.Module]) -> PreTrainedModel:
    """Return a copy of a model in which some modules are others. Everything it shares with the model is the same."""
    twins: dict[str, nn.Module] = {}
    for path, replacement in replacements.items():
        for name, module in list(_on_the_way(model, path))[:-1]:
            if name not in twins:
                twins[name] = _twin(module)
                _put(twins, name, twins[name])
        _put(twins, path, replacement)
    return twins.get("", model)  # type: ignore[return-value] # a twin is of its module's class


def _put(twins: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    if name:
        parent, _, child = name.rpartition(".")
        twins[parent]._modules[child] = module


def _twin(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same contents, whose submodules can be replaced."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module), _modules=dict(module._modules))
    for own in ("forward", "_compiled_call_impl"):  # both would run the module that they were taken from
        vars(twin).pop(own, None)
    return twin


def _is_own_method(module: nn.Module) -> bool:
    """Whether `forward` is the class's own, as it stays on the object when accelerate's hook is taken off."""
    forward: Any = vars(module)["forward"]
    return getattr(forward, "__func__", None) is type(module).forward


def cross_layers(model: PreTrainedModel) -> int:
    """Return the number of a decoder's layers, each of which attends to an encoder's states."""
    return int(compat.decoder_config(model).num_hidden_layers)
