"""Who may look at what, from positions alone; and attention that does not copy key-value heads.

Masks are pure functions of positions. The attention function is registered with transformers' `AttentionInterface`
under `PACKED_ATTENTION` and is active only inside `packed_attention`, for models whose attention it reproduces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dsde import compat
from hf_dsde.utils.modules import has_attribute, modules_of

PACKED_ATTENTION = "hf_dsde_packed_gqa"
MASKABLE_IMPLEMENTATIONS = ("sdpa", "eager")
"""Implementations that read an arbitrary mask, and so can serve a model that packed attention does not reproduce."""


@dataclass(frozen=True)
class LayerAttention:
    """How one kind of layer looks back.

    Attributes:
        kind: The layer type in transformers' words, such as `sliding_attention`.
        window: Tokens a query sees, itself included; None for all.
    """

    kind: str
    window: int | None


def attention_kinds(model: PreTrainedModel) -> list[LayerAttention]:
    """Return the distinct kinds of attention among the model's layers."""
    config = model.config.get_text_config(decoder=True)
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    return [LayerAttention(kind, windows[kind]) for kind in dict.fromkeys(compat.layer_types(config))]


def visible_slots(
    positions: Tensor,
    view: int,
    window: int | None = None,
    slots: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Say which cache slots each query may attend to.

    A query of a chain at position p sees the slots `p - window < slot <= p`; slot == position, so this is causality and
    the sliding window at once, whatever lies in later slots. One of a tree sees the slots below those of the block, and
    its ancestors.

    Args:
        positions: `[rows, width]`, int64. Entries below 0 are no tokens; they see slot 0, so that their softmax is
            defined, and nobody reads their output.
        view: Number of slots in view.
        window: Width of the sliding window in tokens; None for full attention.
        slots: Of the tokens of trees, `[rows, width]`, int64; below 0 where there is no token.
        ancestors: Which tokens of its row each token of a tree sees, as bits, `[rows, width]`, int64; None for chains.

    Returns:
        `[rows, 1, width, view]`, bool, True where attention is allowed.
    """
    query = positions.clamp_min(0)[:, None, :, None]
    slot = torch.arange(view, device=positions.device)
    if ancestors is not None and slots is not None:
        visible, place = _visible_in_trees(positions, slots, ancestors, slot)
    else:
        visible, place = slot <= query, slot
    if window is not None:
        visible &= place > query - window
    return visible


def _visible_in_trees(positions: Tensor, slots: Tensor, ancestors: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Say which slots each token of a tree sees, `[rows, 1, width, view]`, and the slots' positions."""
    view, real = len(slot), positions >= 0
    base = slots.masked_fill(~real, view).amin(1)[:, None, None, None]
    bit = slot - base
    seen = (ancestors[:, None, :, None] >> bit.clamp(0, 63)) & 1 == 1
    visible = torch.where(real[:, None, :, None], (bit < 0) | (seen & (bit < 64)), slot == 0)
    places = torch.arange(view + 1, device=slot.device).repeat(len(slots), 1)
    places.scatter_(1, slots.masked_fill(~real, view), positions)
    return visible, places[:, None, None, :view]


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask into one that is added to attention scores: 0 where visible, the lowest value elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def packed_mask(visible: Tensor, shared: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of a query block in which `shared` query heads lie one after another.

    It is of the kind that is added to scores, into which torch would turn a boolean one again in every layer.

    Args:
        visible: `[rows, 1, width, view]`, bool.
        shared: Query heads per key-value head.
        dtype: That of the queries.

    Returns:
        `[rows, 1, shared * width, view]`, of `dtype`.
    """
    mask = additive_mask(visible, dtype)
    if dtype == torch.float16:  # scores are float32, and may be larger than its largest number
        mask.masked_fill_(~visible, float("-inf"))
    return mask.repeat(1, 1, shared, 1)


def packed_gqa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention in which query heads that share a key-value head are rows of one query block.

    With a mask present, the stock path copies every key-value head once per query head that uses it. Moving those
    query heads to the query-length axis instead (`[B, H, Q, D] -> [B, Hkv, H/Hkv * Q, D]`, the mask repeated the same
    way) computes the same numbers and copies nothing.

    Args:
        module: The attention module; only named in errors.
        query: `[rows, heads, width, head_dim]`.
        key: `[rows, key_value_heads, view, head_dim]`.
        value: `[rows, key_value_heads, view, value_head_dim]`.
        attention_mask: `[rows, 1, width, view]`, bool or added to the scores; or already packed, as `packed_mask`
            makes it once for all layers.
        scaling: Factor of the scores; `head_dim ** -0.5` when None.
        dropout: Dropout probability of the attention weights.
        **kwargs: What the model passes to any attention function. Score modifications are refused.

    Returns:
        `[rows, width, heads, value_head_dim]`, and None in place of attention weights.

    Raises:
        NotImplementedError: If the model asks for a score modification or passes no mask of four dimensions.
    """
    if (own := _of_this_thread()) is not None:
        attend = ALL_ATTENTION_FUNCTIONS[own]
        output, weights = attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        return output, weights
    modified = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if modified:
        msg = (
            f"{type(module).__name__} passes {modified[0]}, which packed attention does not reproduce; "
            "use SpeculationConfig(options=RuntimeOptions(packed_attention=False))."
        )
        raise NotImplementedError(msg)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        _refuse_other_passes(type(module).__name__)
    rows, heads, width, _ = query.shape
    key_value_heads = key.shape[1]
    shared = heads // key_value_heads
    packed = query.reshape(rows, key_value_heads, shared * width, query.shape[-1])
    mask = attention_mask
    if mask.shape[2] != packed.shape[2]:  # not packed, or for layers that share their key-value heads otherwise
        mask = mask[:, :, :width].repeat(1, 1, shared, 1)
    if mask.dtype is not torch.bool:
        mask = mask.to(query.dtype)
    output = nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2), None


def _refuse_other_passes(who: str) -> NoReturn:
    msg = (
        f"{who} passes no attention mask of four dimensions, and packed attention makes none. If the model was called "
        "in another thread while a call with `speculation_policy` is running, wait for that one; otherwise use "
        "SpeculationConfig(options=RuntimeOptions(packed_attention=False))."
    )
    raise NotImplementedError(msg)


def no_mask(*args: Any, **kwargs: Any) -> Any:
    """Refuse to make a mask, but for passes in `own_attention`: calls with `speculation_policy` bring their own.

    A pass of somebody else's may ask for one while packed attention is switched on and reach its layers when it is
    switched off again. Without a mask, those would take it for one that hides nothing but later tokens.

    Raises:
        NotImplementedError: Outside of `own_attention`.
    """
    if (own := _of_this_thread()) is not None:
        return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)
    _refuse_other_passes("A forward pass")


_own = threading.local()
"""What stands in for packed attention in passes of a thread, if anything does."""


def _of_this_thread() -> str | None:
    own: str | None = getattr(_own, "implementation", None)
    return own


AttentionInterface.register(PACKED_ATTENTION, packed_gqa_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, no_mask)


def reproduces_attention(model: PreTrainedModel) -> bool:
    """Whether packed attention computes what this model's attention computes.

    True for models that dispatch through `AttentionInterface` and whose scores are plain scaled dot products: no
    soft-capping, no attention sinks. A model set to `eager` keeps it, since somebody asked for it; so does one whose
    cross-attention goes the same way, without a mask of that form.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        bool(getattr(type(model), "_supports_attention_backend", False))
        and model.config._attn_implementation != "eager"
        and not compat.reads_encoder(model)
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(has_attribute(module, "sinks") for module in modules_of(model))
    )


_holders: dict[int, tuple[int, Any]] = {}
"""By id of a configuration: how many calls hold packed attention now, and the setting that the last one puts back."""
_switching = threading.Lock()


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` use packed attention inside the `with` block, and restore its settings whatever happens there.

    Blocks of several threads may overlap in any order: the first to enter switches, the last to leave switches back.
    """
    # What looks at images has no cache, and looks before the first pass, at whatever time that is.
    vision = getattr(model.config, compat.VISION_CONFIG, None)
    configs = [config for config in compat.attention_configs(model.config) if config is not vision]
    for config in configs:
        _hold(config)
    try:
        yield
    finally:
        for config in configs:
            _release(config)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let this thread's passes of `model` attend as it is set, masks included, whoever holds packed attention.

    The setting itself stays: other threads' passes read it. So do kernels of flash attention, which could not work by
    the name that they would find: where they are set, `sdpa` computes the same.
    """
    with _switching:
        held = _holders.get(id(model.config.get_text_config(decoder=True)))
    setting = None
    if held is not None:
        setting = held[1] if held[1] in MASKABLE_IMPLEMENTATIONS else MASKABLE_IMPLEMENTATIONS[0]
    before, _own.implementation = _of_this_thread(), setting
    try:
        yield
    finally:
        _own.implementation = before


def _hold(config: PretrainedConfig) -> None:
    with _switching:
        count, setting = _holders.get(id(config), (0, compat.get_attention_setting(config)))
        _holders[id(config)] = (count + 1, setting)
        compat.set_attention_setting(config, PACKED_ATTENTION)


def _release(config: PretrainedConfig) -> None:
    with _switching:
        count, setting = _holders.pop(id(config))
        if count > 1:
            _holders[id(config)] = (count - 1, setting)
        else:
            compat.set_attention_setting(config, setting)
