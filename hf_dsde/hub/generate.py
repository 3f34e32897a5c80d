"""What `custom_generate/generate.py` of an exported folder calls: `generate` with a policy, for a model left as it is.

transformers hands such a function the arguments of `generate` as the user gave them, before anything is prepared. So
they go through `generate` once more, this time the way of an enabled model, and mean what they mean there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateOutput

from hf_dsde import pairs
from hf_dsde.config import SpeculationConfig
from hf_dsde.integration.drafters import NAMED_DRAFTERS
from hf_dsde.integration.hooks import generate_unenabled
from hf_dsde.integration.outputs import SpeculativeOutput

LOADING_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "repo_type",
    "revision",
    "token",
)
"""Arguments that say how transformers gets the folder. It hands them on with all others, and they are done with."""

_Drafts = dict[tuple[str, torch.device, torch.dtype], PreTrainedModel]

_loaded: WeakKeyDictionary[PreTrainedModel, _Drafts] = WeakKeyDictionary()
"""Drafts that were named, by their targets, so that a second call need not load them."""


def generate(*inputs: Tensor, model: PreTrainedModel, **arguments: Any) -> SpeculativeOutput | GenerateOutput | Tensor:
    """Generate with drafts, in a call of `model.generate(custom_generate=FOLDER, trust_remote_code=True)`.

    Args:
        *inputs: The prompts, where the folder has taken the place of the model's own `generate` and was called with a
            positional argument, `[rows, width]`, int64.
        model: The target. It is not enabled, and stays the object it is.
        **arguments: Those of `generate` of an enabled model. `assistant_model` may also be the folder or Hub id of a
            draft: a complete model, or layers or a head for this target; it is loaded once and kept as long as the
            target. `speculation_policy` is "dsde" when neither it nor `speculation_config` is given.

    Returns:
        What plain `generate` returns, with `speculation_statistics` under `return_dict_in_generate=True`.

    Raises:
        OSError: If `assistant_model` names a folder or repository without a draft.
        TypeError: As for `generate` of an enabled model.
        ValueError: If `assistant_model` is a word that names nothing, and as for `generate` of an enabled model.
    """
    if arguments.get("custom_generate") is not None:  # another decoding method, for a model whose `generate` this is
        model_class: Any = type(model)
        return model_class.generate(model, *inputs, **arguments)
    for name in LOADING_ARGUMENTS:
        arguments.pop(name, None)
    if arguments.get("speculation_policy") is None and arguments.get("speculation_config") is None:
        arguments["speculation_config"] = SpeculationConfig()
    assistant = arguments.get("assistant_model")
    if isinstance(assistant, (str, Path)) and assistant not in NAMED_DRAFTERS:
        arguments["assistant_model"] = _draft(str(assistant), model)
    return generate_unenabled(model, *inputs, **arguments)


def _draft(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """Return the draft of a folder or Hub id, of the target's dtype and device."""
    if "/" not in name and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"assistant_model={name!r} is no folder here, no Hub id (organisation/name), and none of "
            f"{', '.join(NAMED_DRAFTERS)}. Pass one of these, or a model."
        )
    drafts = _loaded.setdefault(target, {})
    key = (name, target.device, target.dtype)
    if key not in drafts:
        drafts[key] = pairs.load_assistant(name, target, target.dtype, target.device)
    return drafts[key]
