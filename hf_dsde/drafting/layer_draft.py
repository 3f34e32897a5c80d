"""A draft made of a few of its target's own decoder layers.

Such a draft is an ordinary causal LM of the target's class with fewer layers. Embeddings and head are the target's
own storage, so the draft costs only the memory of its layers, and a file of it holds only these layers and the final
norm. Untrained it proposes almost nothing useful; `examples/distill_draft.py` trains it on the target's own text.

This module knows how to build, save and load the pair. It knows nothing about decoding.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from hf_dsde.drafting.plain_layers import why_not_plain
from hf_dsde.heads.dense_weights import dense_weight, is_dense, table_dtype
from hf_dsde.utils.hub import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FORMAT = "hf_dsde.layer_draft"
FORMAT_VERSION = 1
WEIGHTS_NAME = "draft.safetensors"
DESCRIPTION_NAME = "draft.json"
CONFIG_KEY = "hf_dsde_draft"
FINGERPRINT_ROWS = 4096
FINGERPRINT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def initialise_draft(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Build a draft from copies of some of `target`'s decoder layers.

    Embeddings and head of the draft are parameters over the *same storage* as the target's: no memory is added, and
    a value written into one shows in the other. They are parameter objects of their own, and frozen, so that moving,
    casting or freezing one model leaves the other as it was (the moved one then holds a copy). The layers and the
    final norm are copies and trainable.

    Args:
        target: A Llama-like causal LM (`model.layers`, `model.embed_tokens`, `model.norm`, `lm_head`) on one device.
        layers: Which target layers to copy, in the order of the draft's own layers. First and last ones work best,
            for example `[0, 1, 28, 29]` of 30.

    Returns:
        The draft, of the target's class, device and dtype, in evaluation mode, with a copy of the target's
        generation config.

    Raises:
        TypeError: The target's architecture has another layout.
        ValueError: `layers` is empty or names a layer the target does not have, or the target is spread over devices
            or quantised.
    """
    _check_target(target)
    found = why_not_plain(target.model.layers)
    if found is not None:
        raise ValueError(
            f"target has quantised layers, which cannot be copied into a draft: {found}; load it unquantised. A draft "
            "that is trained already may be loaded on it (load_draft)"
        )
    indices = _check_layers(target, layers)
    source: Any = target.model
    copies = nn.ModuleList(copy.deepcopy(source.layers[index]) for index in indices)
    return _assembled(target, indices, copies, copy.deepcopy(source.norm))


def _assembled(
    target: PreTrainedModel, indices: list[int], layers: nn.ModuleList | None, norm: nn.Module | None
) -> PreTrainedModel:
    """Put layers between a target's embedding and head; without layers, such without values, on no device."""
    config = _draft_config(target, indices)
    with torch.device("meta"):
        draft = _plain_class(target)(config)
    body, source = draft.model, target.model
    body.layers, body.norm = layers or body.layers, norm or body.norm
    # Every other part (rotary embedding with its buffers) has no trained state; the meta device gave it no values.
    for name, module in source.named_children():
        if name not in {"layers", "norm", "embed_tokens"}:
            setattr(body, name, copy.deepcopy(module))
    aliases = _storage_aliases(target)
    body.embed_tokens = copy.deepcopy(source.embed_tokens, aliases)
    draft.lm_head = copy.deepcopy(target.lm_head, aliases)
    _adopt_config(draft, config)
    for part in (body.layers, body.norm):
        part.requires_grad_(True)
    if target.generation_config is not None:
        draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.eval()


def save_draft(
    draft: PreTrainedModel,
    folder: Path | str,
    dtype: torch.dtype = torch.float16,
    target_name: str | None = None,
) -> Path:
    """Write a draft's own weights and a description of the target that it needs.

    Args:
        draft: A model that `initialise_draft` or `load_draft` returned.
        folder: Created if missing. Receives `draft.safetensors` (layers and final norm) and `draft.json`.
        dtype: Of the stored weights. float16 keeps more digits than bfloat16 at the same size.
        target_name: What the description calls the target, for people to read; the target's own name when None.

    Returns:
        The folder.

    Raises:
        ValueError: The model is no such draft, or a weight does not fit `dtype`.
    """
    origin = getattr(draft.config, CONFIG_KEY, None)
    if origin is None:
        raise ValueError(
            f"draft of class {type(draft).__name__} was not made by initialise_draft or load_draft, so it is not known "
            "which layers of which target it has: save it with save_pretrained instead"
        )
    weights = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in _own_weights(draft).state_dict().items()
    }
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weight {name} has values that {dtype} cannot hold: pass dtype=torch.float32")
    description = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": origin["layers"],
        "shared_with_target": ["embed_tokens", "lm_head"],
        "target": {
            "name": target_name if target_name is not None else origin["target_name"],
            "architecture": _plain_class(draft).__name__,
            "num_hidden_layers": origin["target_num_hidden_layers"],
            "hidden_size": draft.config.hidden_size,
            "vocab_size": draft.config.vocab_size,
            "embedding_sha256": embedding_fingerprint(draft),
        },
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS_NAME)
    (folder / DESCRIPTION_NAME).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return folder


def load_draft(
    folder: Path | str,
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Assemble a saved draft on its target.

    Args:
        folder: A folder that `save_draft` wrote, or the id of a Hub repository with the same files.
        target: The model that the draft was trained for.
        dtype: Of the draft; the target's when None.
        device: Of the draft; the target's when None. On another device or in another dtype than the target's,
            embeddings and head are copied, otherwise they share the target's storage.

    Returns:
        The draft in evaluation mode, ready as `assistant_model`.

    Raises:
        FileNotFoundError: `folder` is neither a folder nor a repository that can be had.
        ValueError: The folder holds no draft, or a draft of another target.
    """
    local = local_folder(folder, [WEIGHTS_NAME, DESCRIPTION_NAME], "save_draft")
    description_file = local / DESCRIPTION_NAME
    if not description_file.is_file():
        raise ValueError(
            f"folder {str(folder)!r} has no {DESCRIPTION_NAME}: it was not written by save_draft. A complete model "
            "is loaded with AutoModelForCausalLM.from_pretrained"
        )
    description = json.loads(description_file.read_text(encoding="utf-8"))
    if description.get("format") != FORMAT or description.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{description_file} is of format {description.get('format')!r}, version "
            f"{description.get('format_version')!r}; this version of hf_dsde reads {FORMAT!r}, version {FORMAT_VERSION}"
        )
    _check_target(target)
    _check_same_target(description, target, folder)
    indices, weights = _check_layers(target, description["layers"]), load_file(local / WEIGHTS_NAME)
    if why_not_plain(target.model.layers) is None:
        draft = initialise_draft(target, indices)
        _own_weights(draft).load_state_dict(weights)
    else:  # then the file's are the only plain ones
        draft = _assembled(target, indices, None, None)
        own = {name: tensor.to(target.device, target.dtype) for name, tensor in weights.items()}
        _own_weights(draft).load_state_dict(own, assign=True)
    getattr(draft.config, CONFIG_KEY)["target_name"] = description["target"]["name"]
    return _place(draft, dtype, device).eval()


def embedding_fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """SHA-256 of a model's input embeddings, per dtype that they may have been loaded in.

    A model is known by its values, not by its name or path. At most `FINGERPRINT_ROWS` evenly spaced rows are hashed,
    after rounding to each of the two half precisions: a model loaded in float32 then has the same fingerprint as the
    same model loaded in that precision.

    Returns:
        The hexadecimal digests by dtype name.
    """
    weight = dense_weight(model.get_input_embeddings(), model.dtype)
    step = max(1, -(-weight.shape[0] // FINGERPRINT_ROWS))
    rows = weight.detach()[::step]
    return {
        name: hashlib.sha256(rows.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, dtype in FINGERPRINT_DTYPES.items()
    }


def _check_target(target: PreTrainedModel) -> None:
    """Refuse what has not the layout of Llama, or whose layers cannot be copied and trained as they are."""
    name = type(target).__name__
    body: Any = getattr(target, "model", None)
    missing = [part for part in ("layers", "embed_tokens", "norm") if not hasattr(body, part)]
    missing += [] if hasattr(target, "lm_head") else ["lm_head"]
    if missing or not hasattr(target.config, "num_hidden_layers"):
        raise TypeError(
            f"target is a {name}, which has no {', '.join(missing) or 'num_hidden_layers'}: a layer draft needs a "
            "Llama-like causal LM (Llama, Mistral, Qwen2, Qwen3, SmolLM and their like). Use a separate small model "
            "as assistant_model for this target"
        )
    devices = {parameter.device for parameter in target.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"target lies on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}): load it on one device"
        )


def _check_layers(target: PreTrainedModel, layers: Sequence[int]) -> list[int]:
    """`layers` as a list, after checking that the target has each of them."""
    count: int = target.config.num_hidden_layers
    indices = [int(index) for index in layers]
    if not indices or any(not 0 <= index < count for index in indices):
        raise ValueError(f"layers is {indices}: name at least one layer, each from 0 to {count - 1}")
    return indices


def _plain_class(model: PreTrainedModel) -> Any:
    """The model's class, without a subclass that this package may have put over it."""
    return next(
        cls for cls in type(model).__mro__ if not any(base.__module__.startswith("hf_dsde") for base in cls.__mro__)
    )


def _draft_config(target: PreTrainedModel, indices: list[int]) -> PreTrainedConfig:
    """A copy of the target's config for the layers `indices`."""
    config = copy.deepcopy(target.config)
    if hasattr(config, "quantization_config"):  # a draft's own layers are not
        del config.quantization_config
    count = config.num_hidden_layers
    config.num_hidden_layers = len(indices)
    for name, value in vars(target.config).items():
        # One entry per layer: `layer_types`, and the likes of SmolLM3's `no_rope_layers`.
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[index] for index in indices])
    origin = {"layers": indices, "target_num_hidden_layers": count, "target_name": config._name_or_path}
    setattr(config, CONFIG_KEY, origin)
    return config


def _storage_aliases(target: PreTrainedModel) -> dict[int, Any]:
    """A memo for `copy.deepcopy` that turns each shared parameter into a frozen one over the same storage.

    Tied parameters stay tied, because one parameter has one alias.
    """
    shared = [*target.model.embed_tokens.parameters(), *target.lm_head.parameters()]
    return {
        # A quantised one is more than its numbers; it is frozen already.
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) if is_dense(parameter) else parameter
        for parameter in shared
    }


def _adopt_config(draft: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Point every copied module at the draft's own config and number the attention layers again."""
    module: Any
    for module in draft.modules():
        if isinstance(getattr(module, "config", None), type(config)):
            module.config = config
    layers: Any = draft.model.layers
    for position, layer in enumerate(layers):
        for module in layer.modules():
            # The index is the layer's slot in the KV cache, so it has to follow the draft's own order.
            if hasattr(module, "layer_idx"):
                module.layer_idx = position


def _own_weights(draft: PreTrainedModel) -> nn.ModuleDict:
    """The modules that belong to the draft alone, under the names that the file uses."""
    return nn.ModuleDict({"layers": draft.model.layers, "norm": draft.model.norm})


def _check_same_target(description: dict[str, Any], target: PreTrainedModel, folder: Path | str) -> None:
    """Refuse a target other than the one described, saying which property differs."""
    wanted = description["target"]
    found = {
        "architecture": _plain_class(target).__name__,
        "num_hidden_layers": target.config.num_hidden_layers,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
    }
    for key, value in found.items():
        if wanted[key] != value:
            raise ValueError(
                f"draft {str(folder)!r} belongs to the target {wanted['name']!r} with {key} {wanted[key]}, "
                f"but this target ({target.config._name_or_path!r}) has {key} {value}: load the draft's own target"
            )
    dtype = str(table_dtype(target)).removeprefix("torch.")
    # float32 is compared after rounding to bfloat16, in which most models are published.
    key = dtype if dtype in FINGERPRINT_DTYPES else "bfloat16"
    if embedding_fingerprint(target)[key] != wanted["embedding_sha256"][key]:
        raise ValueError(
            f"draft {str(folder)!r} belongs to the target {wanted['name']!r}; this target "
            f"({target.config._name_or_path!r}) has the same shape and other embedding values (compared in {key}): "
            "load the draft's own target, in the dtype it is published in"
        )


def _place(draft: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str | None) -> PreTrainedModel:
    """Move and cast a draft in place, leaving the target's storage alone."""
    if device is not None:
        # Through the base class: transformers wraps `to` in a way that loses its signature.
        nn.Module.to(draft, device)
    if dtype is not None and dtype != draft.dtype:
        # Parameters only: rotary frequencies are buffers and must stay in float32.
        for parameter in filter(is_dense, draft.parameters()):
            parameter.data = parameter.data.to(dtype)
        draft.config.dtype = dtype
    return draft
