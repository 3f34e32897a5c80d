"""Saving a head in the format of the package speculators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_dsde.heads.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.heads.formats import LAYER_FIELDS, LAYER_IDS, SPECULATORS_TYPE

SPECULATORS_VERSION = "0.9.0"
"""Of the format."""


def save_head(
    head: Eagle3Head,
    folder: Path | str,
    *,
    target_name: str,
    dtype: torch.dtype = torch.float16,
    shared_weights: bool = True,
) -> Path:
    """Write an EAGLE-3 head as the package speculators does, which loads it again, as vLLM and `load_head` do.

    Args:
        head: The head.
        folder: Created if missing. Receives `config.json` and `model.safetensors`.
        target_name: Repository id or folder of the target.
        dtype: Of the stored weights. float16 keeps more digits than bfloat16 at the same size.
        shared_weights: Write the embedding and the vocabulary product also if they are the target's (`share_with`).
            Without them the file is much smaller, and `load_head` and vLLM take them from the target, but speculators
            does not.

    Returns:
        The folder.

    Raises:
        TypeError: The head is of another kind.
        ValueError: A weight does not fit `dtype`, or two tokens of the draft vocabulary are the same.
    """
    if not isinstance(head, Eagle3Head):
        raise TypeError(f"head of class {type(head).__name__}: the format is one for EAGLE-3 heads; pass an Eagle3Head")
    held = head.state_dict() if shared_weights else _own_weights(head)
    weights = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in held.items()}
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weight {name} has values that {dtype} cannot hold: pass dtype=torch.float32")
    weights |= _vocabulary_tables(head)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    text = json.dumps(_description(head, target_name, dtype), indent=2)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
    return folder


def _own_weights(head: Eagle3Head) -> dict[str, Tensor]:
    shared = {f"{name}.weight" for name in ("embed_tokens", "lm_head") if head.shares(name)}
    return {name: tensor for name, tensor in head.state_dict().items() if name not in shared}


def _vocabulary_tables(head: Eagle3Head) -> dict[str, Tensor]:
    """The draft vocabulary, once as distances and once as a table over the target's."""
    if head.draft_ids is None:
        return {}
    ids = head.draft_ids.cpu()
    if len(ids.unique()) < len(ids):
        raise ValueError(
            f"draft_ids: {len(ids)} tokens of which {len(ids.unique())} are different; give each of the draft "
            "vocabulary another token of the target's"
        )
    listed = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    listed[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": listed}


def _description(head: Eagle3Head, target_name: str, dtype: torch.dtype) -> dict[str, Any]:
    config, settings = head.config, head.settings
    layers = {name: getattr(config, name) for name in LAYER_FIELDS if getattr(config, name, None) is not None}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        SPECULATORS_TYPE: "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": {"model_type": config.model_type, "tie_word_embeddings": False, **layers},
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.feature_size if settings.feature_size != config.hidden_size else None,
        LAYER_IDS: list(settings.feature_layers),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "embed_requires_grad": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
