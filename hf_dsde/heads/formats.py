"""What the configurations of heads say, by the format that they are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_dsde.heads.checkpoint import Checkpoint, standard_name
from hf_dsde.heads.eagle3 import Eagle3Settings

LAYER_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "initializer_range",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""What a head's layers take from a configuration. The rest is for other programs, or about text."""
ROTARY_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")

SPECULATORS_TYPE = "speculators_model_type"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Target:
    """What a head has to fit.

    Attributes:
        name: For people.
        hidden_size: Width of the hidden states.
        vocab_size: Tokens.
        num_layers: Decoder layers.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Target:
        """Describe a model."""
        config = model.config.get_text_config(decoder=True)
        name = model.config._name_or_path or type(model).__name__
        return cls(name, config.hidden_size, config.vocab_size, config.num_hidden_layers)


@dataclass(frozen=True)
class Description:
    """A head as its files describe it.

    Attributes:
        config: Of its layers.
        settings: Of an EAGLE-3 head; None for one of EAGLE-1 or 2.
        fc_bias: The first product has a bias.
        optional: Weights that are the target's when the head has none.
        zero_biases: Output projections of attention have no bias although the others have one.
    """

    config: PreTrainedConfig
    settings: Eagle3Settings | None
    fc_bias: bool
    optional: tuple[str, ...]
    zero_biases: bool = False


def describes_head(config: Mapping[str, Any], weights: Callable[[], Iterable[str]]) -> bool:
    """Whether files are those of a head, and not of a complete model.

    Args:
        config: What `config.json` says. Those of EAGLE-1 and 2 say what any Llama's does.
        weights: Gives the names of the weights as they are in the files; asked where the configuration does not tell.
            Every head has an `fc`, which fuses states with each other or with embeddings; no complete model has one.
    """
    names = config.get("architectures") or []
    marks = (SPECULATORS_TYPE, "draft_vocab_size", "eagle_config")
    if any(config.get(mark) is not None for mark in marks) or any("Eagle3" in name for name in names):
        return True
    return any(standard_name(key) == "fc.weight" for key in weights())


def describe(checkpoint: Checkpoint, target: Target, changes: Mapping[str, Any]) -> Description:
    """Find out what a head is, and whether it fits its target.

    Args:
        checkpoint: The head.
        target: Its target.
        changes: Fields of `Eagle3Settings` that replace what the configuration says.

    Raises:
        ValueError: The head is of an unknown kind, its configuration is incomplete, or it does not fit the target.
    """
    kind = checkpoint.config.get(SPECULATORS_TYPE)
    if kind == "eagle3":
        found = _speculators(checkpoint, target, changes)
    elif kind is not None:
        raise ValueError(
            f"{SPECULATORS_TYPE} {kind!r} of the head in {str(checkpoint.folder)!r} is not one that can be loaded; "
            "load one of type 'eagle3'"
        )
    elif _is_first_eagle(checkpoint):
        found = _first_eagle(checkpoint, changes)
    else:
        found = _eagle3(checkpoint, target, changes)
    _check_fit(found, checkpoint, target)
    return found


def _speculators(checkpoint: Checkpoint, target: Target, changes: Mapping[str, Any]) -> Description:
    """A head as the package speculators writes it."""
    given = checkpoint.config
    layers = given.get("transformer_layer_config")
    if not isinstance(layers, dict) or layers.get("model_type") not in LAYER_CONFIGS:
        raise ValueError(
            f"transformer_layer_config of the head in {str(checkpoint.folder)!r}: its model_type is "
            f"{layers.get('model_type') if isinstance(layers, dict) else None!r}, but layers can be of the types "
            f"{sorted(LAYER_CONFIGS)} only"
        )
    # Its own default; what it does not write is the default of the type of layers.
    config = _layer_config(layers["model_type"], layers)
    layer_ids = given.get(LAYER_IDS)
    settings = _settings(given, layer_ids, given.get("draft_vocab_size", 32000), target, changes)
    return Description(config, settings, False, ("embed_tokens.weight", "lm_head.weight"))


def _eagle3(checkpoint: Checkpoint, target: Target, changes: Mapping[str, Any]) -> Description:
    """A head as the EAGLE repository, SpecForge and SGLang have it: the configuration of a Llama of one layer."""
    given = checkpoint.config
    _check_complete(given, checkpoint)
    layer_type = "qwen3" if "layers.0.self_attn.q_norm.weight" in checkpoint.shapes else "llama"
    config = _layer_config(layer_type, {"num_hidden_layers": 1, "rope_theta": 10000.0, **given})
    nested = given.get("eagle_config") or {}
    # These count the layers whose outputs are read, from 0; at the top level the numbers are those of vLLM.
    outputs = nested.get(LAYER_IDS)
    layer_ids = given.get(LAYER_IDS) if outputs is None else [layer + 1 for layer in outputs]
    own_head = checkpoint.shapes.get("lm_head.weight")
    size = given.get("draft_vocab_size")
    optional = ["embed_tokens.weight"]
    if size is None:
        size = config.vocab_size if own_head is None else own_head[0]
        optional.append("lm_head.weight")
    norms = "fc_norm.0.weight" in checkpoint.shapes
    settings = _settings({**given, "fc_norm": given.get("fc_norm", norms)}, layer_ids, size, target, changes)
    only_inputs = _only_input_biases(given)
    config.attention_bias = config.attention_bias or only_inputs
    return Description(config, settings, False, tuple(optional), zero_biases=only_inputs)


def _first_eagle(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Description:
    """A head of EAGLE-1 or 2, which have the same weights."""
    if changes:
        raise ValueError(
            f"{', '.join(changes)}: the head in {str(checkpoint.folder)!r} is one of EAGLE-1 or 2, which has no such "
            "setting; leave it out"
        )
    given = checkpoint.config
    _check_complete(given, checkpoint)
    config = _layer_config("llama", {"num_hidden_layers": 1, "rope_theta": 10000.0, **given})
    only_inputs = _only_input_biases(given)
    config.attention_bias = config.attention_bias or only_inputs
    optional = ("embed_tokens.weight", "lm_head.weight")
    return Description(config, None, "fc.bias" in checkpoint.shapes, optional, zero_biases=only_inputs)


def _is_first_eagle(checkpoint: Checkpoint) -> bool:
    shape = checkpoint.shapes.get("fc.weight", (0, 0))
    return "layers.0.hidden_norm.weight" not in checkpoint.shapes and shape[1] == 2 * shape[0]


def _only_input_biases(given: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values have biases and the output of attention has none."""
    return bool(given.get("qkv_bias")) and not given.get("attention_bias")


def _check_complete(given: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        raise ValueError(
            f"config.json of the head in {str(checkpoint.folder)!r} does not say {', '.join(missing)}: add them, or "
            "pass the folder of a head"
        )


def _layer_config(layer_type: str, given: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a head's layers."""
    fields = {name: given[name] for name in LAYER_FIELDS if given.get(name) is not None}
    for name in ROTARY_FIELDS:
        fields.pop(name, None)
    fields |= _rotary_fields(given)
    count = fields.get("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is not None and count is not None and len(kinds) > count and len(set(kinds)) == 1:
        fields["layer_types"] = kinds[:count]  # the target's list
    if layer_type == "qwen3" and kinds is not None and "sliding_attention" in kinds and given.get("sliding_window"):
        fields["use_sliding_window"] = given.get("use_sliding_window", True)
    config = LAYER_CONFIGS[layer_type](**fields)
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None) is None or getattr(config, "sliding_window", None) is None:
        # A window without a kind of layer that uses it is a remnant of the target's configuration.
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.sliding_window = None
    return config


def _rotary_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says of the rotary embedding; of several positions per token, in text, one is enough.

    Raises:
        ValueError: Layers cannot turn positions so.
    """
    name = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    rope = dict(given.get(name) or {})
    factor = rope.get("partial_rotary_factor", given.get("partial_rotary_factor")) or 1.0
    if factor != 1.0:
        raise ValueError(
            f"partial_rotary_factor {factor}: heads whose positions turn a part of each key only cannot be loaded; use "
            "one with the factor 1"
        )
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"{name} differs between kinds of layers ({', '.join(rope)}), which heads cannot have; give those of the "
            "head's one kind"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "mrope_section" in rope:
        kind = "default"
        rope = {"rope_type": kind, **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"{name}: the type {kind!r} is none of {sorted({'default', *ROPE_INIT_FUNCTIONS})}")
    theta = {"rope_theta": given["rope_theta"]} if given.get("rope_theta") and "rope_theta" not in rope else {}
    return theta | ({name: rope} if rope else {})


def _settings(
    given: Mapping[str, Any],
    layer_ids: Sequence[int] | None,
    draft_vocab_size: int,
    target: Target,
    changes: Mapping[str, Any],
) -> Eagle3Settings:
    if layer_ids is None:
        # Both ecosystems, each in its own count.
        layer_ids = (2, target.num_layers // 2, target.num_layers - 3)
    settings = Eagle3Settings(
        feature_layers=tuple(layer_ids),
        feature_size=given.get("target_hidden_size") or target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        **{
            name: bool(given.get(name, False))
            for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
        },
    )
    return replace(settings, **changes)


def _check_fit(found: Description, checkpoint: Checkpoint, target: Target) -> None:
    """Refuse a target other than the head's.

    Raises:
        ValueError: Something differs; it is named.
    """
    where = f"the head in {str(checkpoint.folder)!r}"
    way_out = f"load it with the target that it was trained for, not {target.name!r}"
    config, settings = found.config, found.settings
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"vocab_size: {where} knows {config.vocab_size} tokens of its target, this target has "
            f"{target.vocab_size}; {way_out}"
        )
    if settings is None:
        if config.hidden_size != target.hidden_size:
            raise ValueError(
                f"hidden_size: {where} has {config.hidden_size}, which in heads of EAGLE-1 and 2 is the target's, and "
                f"this target has {target.hidden_size}; {way_out}"
            )
        return
    if settings.feature_size != target.hidden_size:
        raise ValueError(
            f"target_hidden_size: {where} reads features of {settings.feature_size}, this target's hidden states have "
            f"{target.hidden_size}; {way_out}"
        )
    width, expected = checkpoint.shapes.get("fc.weight", (0, 0))[-1], len(settings.feature_layers) * target.hidden_size
    if width and width != expected:
        raise ValueError(
            f"fc.weight: {where} reads features of {width} in all, but {len(settings.feature_layers)} layers "
            f"{list(settings.feature_layers)} of this target have {expected}; {way_out}, or name as many layers as the "
            "head reads in feature_layers"
        )
    if not 0 < settings.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size: {where} guesses {settings.draft_vocab_size} tokens of {config.vocab_size}; correct its "
            "config.json"
        )
    outside = [layer for layer in settings.feature_layers if not 0 <= layer < target.num_layers]
    if outside:
        raise ValueError(
            f"feature_layers: {where} reads the layers {list(settings.feature_layers)} (0 is the embeddings), but "
            f"{outside} cannot be had of a target of {target.num_layers} layers, whose last one gives no states from "
            f"before its final norm; {way_out}, or pass feature_layers if the configuration counts otherwise"
        )
