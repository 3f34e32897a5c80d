"""Loading a head for its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dsde.heads.checkpoint import PATTERNS, Checkpoint, open_checkpoint, wanted_weights
from hf_dsde.heads.dense_weights import table_dtype
from hf_dsde.heads.eagle import EagleHead
from hf_dsde.heads.eagle3 import Eagle3Head
from hf_dsde.heads.formats import Description, Target, describe
from hf_dsde.heads.head import DraftHead
from hf_dsde.utils.hub import local_folder

VOCABULARY_NAMES = ("d2t", "t2d")


def load_head(
    folder: Path | str,
    target: PreTrainedModel,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    feature_layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
    norm_output: bool | None = None,
) -> DraftHead:
    """Load a head that drafts from the hidden states of `target`.

    Heads of EAGLE-1, 2 and 3 are read as the EAGLE repository, SpecForge and SGLang write them, and heads of EAGLE-3 as
    the package speculators and `save_head` do. Where the embedding or the vocabulary product is not among the weights,
    it is the target's, over the same storage where dtype and device agree.

    Args:
        folder: A folder with `config.json` and weights, or the id of a Hub repository with these.
        target: The model that the head was trained for.
        dtype: Of the head; that of the target's embedding when None.
        device: Of the head; that of the target's embedding when None.
        feature_layers: Layers of the target that the head reads, numbered as in transformers' `output_hidden_states`,
            in place of what the configuration says. EAGLE-3 only, as the two that follow.
        norm_before_residual: As in `Eagle3Settings`, in place of what the configuration says.
        norm_output: As in `Eagle3Settings`, in place of what the configuration says.

    Returns:
        The head, in evaluation mode.

    Raises:
        FileNotFoundError: There is no such folder or repository, or it holds no head.
        ValueError: The head is of a kind that cannot be loaded, does not fit the target, or has weights too few or too
            many.
    """
    checkpoint = open_checkpoint(local_folder(folder, PATTERNS, "save_head"))
    changes = {
        "feature_layers": None if feature_layers is None else tuple(feature_layers),
        "norm_before_residual": norm_before_residual,
        "norm_output": norm_output,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    facts = Target.of(target)
    description = describe(checkpoint, facts, given)
    embedding: Any = target.get_input_embeddings()
    place = torch.device(embedding.weight.device if device is None else device)
    kind = table_dtype(target) if dtype is None else dtype
    head = _empty_head(description, facts)
    wanted = _check_weights(head, description, checkpoint)
    _set_draft_ids(head, checkpoint)
    weights = checkpoint.tensors(wanted, place)
    head.load_state_dict({name: tensor.to(kind) for name, tensor in weights.items()}, strict=False, assign=True)
    if description.zero_biases:
        _add_zero_biases(head, kind, place)
    head.share_with(
        target,
        embed_tokens="embed_tokens.weight" not in weights,
        lm_head="lm_head.weight" not in weights,
    )
    head.config.dtype = kind
    # What is left are buffers. Through the base class: transformers wraps `to` in a way that loses its signature.
    nn.Module.to(head, place)
    head.train(False)
    return head


def _empty_head(description: Description, target: Target) -> DraftHead:
    """The head without weights, but for its rotary embedding, which is computed."""
    with torch.device("meta"):
        head: DraftHead
        if description.settings is None:
            head = EagleHead(description.config, target.num_layers, fc_bias=description.fc_bias)
        else:
            head = Eagle3Head(description.config, description.settings)
    # Its frequencies are computed, and stay in float32 whatever the head's dtype.
    head.rotary_emb = type(head.rotary_emb)(description.config)
    return head


def _check_weights(head: DraftHead, description: Description, checkpoint: Checkpoint) -> list[str]:
    """Return the names of the weights to load; raise if some are missing, unknown or of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    optional = set(description.optional)
    if description.zero_biases:
        optional |= {name for name in expected if name.endswith("o_proj.bias")}
    # The tables are looked at by themselves.
    size, whole = head.lm_head.out_features, head.config.vocab_size
    tables = {"d2t": (size,), "t2d": (whole,)}
    optional |= {"t2d"} if head.draft_ids is not None else {"d2t", "t2d"}
    wanted = wanted_weights(checkpoint, expected | tables, optional, type(head).__name__)
    return [name for name in wanted if name not in tables]


def _add_zero_biases(head: DraftHead, dtype: torch.dtype, device: torch.device) -> None:
    """Give the output of attention the bias that its class has and the checkpoint has not."""
    for module in head.modules():
        product = getattr(module, "o_proj", None)
        if product is not None and product.bias.is_meta:
            product.bias = nn.Parameter(torch.zeros(product.out_features, dtype=dtype, device=device))


def _set_draft_ids(head: DraftHead, checkpoint: Checkpoint) -> None:
    """Set the ids of the draft vocabulary, from the distance of each token's id to its place in it.

    Raises:
        ValueError: The ids are no subset of the target's, or the two tables contradict each other.
    """
    names = [name for name in VOCABULARY_NAMES if name in checkpoint.shapes]
    tables = checkpoint.tensors(names, torch.device("cpu"))
    size, whole = head.lm_head.out_features, head.config.vocab_size
    where = f"of the head in {str(checkpoint.folder)!r}"
    ids = torch.arange(size)
    if "d2t" in tables:
        ids = ids + tables["d2t"].long()
    if int(ids.min()) < 0 or int(ids.max()) >= whole or len(ids.unique()) < size:
        raise ValueError(
            f"d2t {where} gives ids from {int(ids.min())} to {int(ids.max())}, {size - len(ids.unique())} of them more "
            f"than once, where {size} different ids below {whole} are needed: it has to hold the distance of each "
            "token's id to its place in the draft vocabulary"
        )
    if "t2d" in tables:
        listed = tables["t2d"].bool().nonzero().flatten()
        if not torch.equal(listed, ids.sort().values):
            raise ValueError(f"t2d {where} names {len(listed)} tokens, which are not those that d2t gives: correct one")
    if head.draft_ids is not None:
        head.register_buffer("draft_ids", ids, persistent=False)
    elif not torch.equal(ids, torch.arange(size)):
        raise ValueError(f"d2t {where} puts the whole vocabulary in another order: a whole vocabulary has none but 0")
