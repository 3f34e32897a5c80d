"""MTP layers (DeepSeek-AI, arXiv 2412.19437): a decoder layer that came with its target, and guesses one token further.

Checkpoints hold it beside the model's own layers, and transformers leaves it out when the model is loaded. The feature
is the target's last hidden state as its vocabulary product gets it, and the layer's own states are of that kind: its
output, normalised. Applied to its own states it guesses on, as a head does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_dsde.heads.checkpoint import CONFIG_NAME, WEIGHTS_NAME, Checkpoint, open_checkpoint, shards, wanted_weights
from hf_dsde.heads.dense_weights import table_dtype
from hf_dsde.heads.head import DraftHead
from hf_dsde.utils.hub import local_folder

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
BLOCK = "layers.0."


@dataclass(frozen=True)
class MtpNames:
    """Where a family keeps its MTP layer.

    Attributes:
        pattern: Of the names of its weights. The first group is the number of the layer, the second the rest.
        outer: What `enorm`, `hnorm`, `eh_proj` and `norm` are called.
        after_layers: The number counts on from the target's last layer.
        state_first: The state comes before the embedding where they are joined.
        shared: Weights that are the target's.
    """

    pattern: str
    outer: Mapping[str, str]
    after_layers: bool = False
    state_first: bool = False
    shared: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")

    def naming(self, key: str, num_layers: int) -> str | None:
        """Return a weight's name in `MtpHead`; None if it is the target's, an unknown one if it is of another layer."""
        found = re.fullmatch(self.pattern, key)
        if found is None or found[2] in self.shared:
            return None
        depth = int(found[1] or 0) - (num_layers if self.after_layers else 0)
        stem, _, kind = found[2].rpartition(".")
        if depth < 0:
            return None
        return f"{self.outer[stem]}.{kind}" if stem in self.outer and depth == 0 else f"layers.{depth}.{found[2]}"


_DEEPSEEK = MtpNames(
    r"model\.layers\.(\d+)\.(.*)",
    {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
    after_layers=True,
)
_QWEN = MtpNames(
    r"mtp\.(?:layers\.(\d+)\.)?(.*)",
    {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"},
)
_MIMO = MtpNames(
    r"model\.mtp_layers\.(\d+)\.(.*)",
    {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"},
    state_first=True,
)
FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mimo": _MIMO,
}
"""By the `model_type` of the target's text configuration."""


class MtpHead(DraftHead):
    """An MTP layer as a head.

    Args:
        config: Of a single layer, as `layer_config` makes it.
        target: Gives the classes of layers, norms and rotary embedding.
        state_first: As in `MtpNames`.
    """

    def __init__(self, config: PreTrainedConfig, target: PreTrainedModel, *, state_first: bool = False) -> None:
        super().__init__(config)
        decoder: Any = target.get_decoder()
        norm_class, width = type(decoder.norm), config.hidden_size
        self._feature_layers = (len(decoder.layers),)
        self.state_first = state_first
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.enorm = norm_class(width, eps=config.rms_norm_eps)
        self.hnorm = norm_class(width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([type(decoder.layers[-1])(config, 0)])
        self.norm = norm_class(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.rotary_emb = type(decoder.rotary_emb)(config)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The last one, after the target's final norm."""
        return self._feature_layers

    def project(self, features: Sequence[Tensor]) -> Tensor:
        """Return the one feature as it is."""
        (feature,) = features
        return feature.to(self.dtype)

    def _guess(
        self, embeddings: Tensor, states: Tensor, masks: list[Tensor], shared: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        embeddings, states = self.enorm(embeddings), self.hnorm(states)
        pairs = [states, embeddings] if self.state_first else [embeddings, states]
        (mask,) = masks
        normed = self.norm(self.layers[0](self.eh_proj(torch.cat(pairs, dim=-1)), attention_mask=mask, **shared))
        return normed, normed

    def _rotation(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As in the base class; models of images and text have three positions per token, which are one in text."""
        several = hasattr(self.rotary_emb, "mrope_section")
        return super()._rotation(states, position_ids.expand(3, *position_ids.shape) if several else position_ids)


def load_mtp(
    folder: Path | str,
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MtpHead:
    """Load the MTP layer that a target's checkpoint holds.

    Args:
        folder: Folder or Hub repository of the target. Of a repository, only files that hold the layer are fetched.
        target: The model, loaded from there, of one of the families in `FAMILIES`.
        dtype: Of the head; that of the target's embedding when None.
        device: Of the head; that of the target's embedding when None.

    Returns:
        The head, in evaluation mode, over the storage of the target's embedding and vocabulary product where dtype and
        device agree.

    Raises:
        FileNotFoundError: There is no such folder or repository, or it holds no weights.
        ValueError: The target is of another family, or the checkpoint holds no MTP layer, several, or one with other
            weights than the target's layers have.
    """
    config = target.config.get_text_config(decoder=True)
    names = FAMILIES.get(config.model_type)
    if names is None:
        raise ValueError(
            f"target: MTP layers of the type {config.model_type!r} are not known, but those of {sorted(FAMILIES)}; "
            "use a draft model, or a head (`load_head`)"
        )
    family, num_layers = names, config.num_hidden_layers

    def naming(key: str) -> str | None:
        return family.naming(key, num_layers)

    checkpoint = open_checkpoint(_fetched(folder, naming), naming)
    if not checkpoint.names:
        raise ValueError(f"folder {str(folder)!r} holds no MTP layer: pass the published checkpoint of the target")
    embedding: Any = target.get_input_embeddings()
    place = torch.device(embedding.weight.device if device is None else device)
    kind = table_dtype(target) if dtype is None else dtype
    own = layer_config(config)
    with torch.device("meta"):
        head = MtpHead(own, target, state_first=family.state_first)
    head.rotary_emb = type(head.rotary_emb)(own)
    _load_weights(head, checkpoint, kind, place)
    head.share_with(target, lm_head=True)
    own.dtype = kind
    nn.Module.to(head, place)
    head.train(False)
    return head


def layer_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a model that is its MTP layer: one layer, of full attention, with all experts."""
    own: Any = copy.deepcopy(config)
    own.num_hidden_layers = 1
    changes = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0,
    }
    for name, value in changes.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    own.tie_word_embeddings = False
    return own


def _fetched(folder: Path | str, naming: Any) -> Path:
    """The folder, or a snapshot of a repository with the files that hold the layer."""
    found = local_folder(folder, [CONFIG_NAME, INDEX_NAME], "save_pretrained")
    if Path(folder).expanduser().is_dir():
        return found
    index = found / INDEX_NAME
    needed = shards(index, naming) if index.is_file() else [WEIGHTS_NAME]
    return local_folder(folder, [CONFIG_NAME, INDEX_NAME, *needed], "save_pretrained")


def _load_weights(head: MtpHead, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fill everything but what is the target's, stacking experts that lie one by one."""
    shared = {"embed_tokens.weight", "lm_head.weight"}
    state = {name: tensor for name, tensor in head.state_dict().items() if name not in shared}
    parts = {name: _parts(name, tensor, checkpoint) for name, tensor in state.items()}
    expected = {part: shape for shapes in parts.values() for row in shapes for part, shape in row.items()}
    wanted_weights(checkpoint, expected, (), type(head).__name__)
    parameters = dict(head.named_parameters())
    loaded = {}
    for name, rows in parts.items():
        # Buffers, such as the biases of experts, keep their dtype.
        kind = dtype if name in parameters else None
        held = checkpoint.tensors([part for row in rows for part in row], device)
        joined = [torch.cat([held[part] for part in row]) if len(row) > 1 else held[next(iter(row))] for row in rows]
        loaded[name] = (joined[0] if name in checkpoint.shapes else torch.stack(joined)).to(kind)
    head.load_state_dict(loaded, strict=False, assign=True)


def _parts(name: str, tensor: Tensor, checkpoint: Checkpoint) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes of what a weight is made of: for each expert what is joined, or just itself."""
    stem, _, last = name.rpartition(".")
    if name in checkpoint.shapes or not stem.endswith(".experts"):
        return [{name: tuple(tensor.shape)}]
    names = {"gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
    _, rows, columns = tensor.shape
    shape = (rows // len(names), columns)
    return [{f"{stem}.{expert}.{part}.weight": shape for part in names} for expert in range(len(tensor))]
