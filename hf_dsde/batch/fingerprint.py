"""What makes two generators the same, for `datasets`' cache and for going on with an interrupted run.

An identity is a dict of plain JSON: everything that decides which texts come out, and nothing that is only about this
process or machine. Versions of libraries are no part of it, nor are devices and attention implementations, between
which texts may differ by rounding.

Weights are recognised by a sample of their values, `weights_sample.SAMPLED` of each tensor. A name is not enough, since
models are trained, merged and built in memory under the name they were loaded from or none at all, and reading all
weights is too dear for a check. Training, merging, quantising or adding noise changes the samples; a change of a few
chosen values may change none.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import isfunction, ismethod
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.chat_template_utils import get_json_schema

from hf_dsde.batch.weights_sample import weights_sample
from hf_dsde.config import SpeculationConfig
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.integration.drafters import model_of

_HASH_DIGITS = 16
_ABOUT_THE_FILE = ("_name_or_path", "name_or_path", "transformers_version")
"""Keys of a model's configuration that say where it came from, not what it is."""

_PROBE = "The quick brown fox; 0123456789.\n\tÆther — 你好"
"""Tokenised, it shows normalisation, merges and added special tokens, none of which a vocabulary shows."""


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """What a model is: class, name, revision, dtype, configuration, adapters, quantisation and a sample of its weights.

    The sample costs a few milliseconds per hundred parameters and waits for the device. Weights that are on no device,
    as accelerate leaves those it offloads, cannot be sampled: a model with a name is then known by its name, and one
    without gets a random stand-in that no other object and no other process has, so that no stale result is ever used.
    """
    model = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
    config = model.config
    description = json.loads(config.to_json_string())
    quantization = description.get("quantization_config")
    return {
        "class": type(model).__qualname__,
        "name": getattr(config, "_name_or_path", None) or None,
        "revision": getattr(config, "_commit_hash", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": _short_hash({key: value for key, value in description.items() if key not in _ABOUT_THE_FILE}),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "adapters": _active_adapters(model),
        "quantization": None if quantization is None else _short_hash(quantization),
        "weights": weights_sample(model, named=bool(getattr(config, "_name_or_path", None))),
    }


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """What a tokenizer is: class, name, vocabulary, special tokens, chat template and how it cuts a sample text.

    Padding and truncation are no part of it; prompts are neither padded nor cut by the tokenizer.
    """
    vocabulary = tokenizer.get_vocab()
    return {
        "class": type(tokenizer).__qualname__,
        "name": getattr(tokenizer, "name_or_path", None) or None,
        "vocabulary_size": len(tokenizer),
        "vocabulary": _short_hash(vocabulary),
        "chat_template": _short_hash(getattr(tokenizer, "chat_template", None)),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "sample": _short_hash([int(token) for token in tokenizer(_PROBE, verbose=False)["input_ids"]]),
    }


def generator_identity(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafter | None,
    tokenizer: Any,
    speculation_config: SpeculationConfig,
    generation_config: GenerationConfig,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What decides the texts of a generator, as plain JSON.

    Measured costs (`SpeculationConfig.costs`) change draft lengths, and lengths change which random numbers a sampled
    text meets, never its distribution. They count only where they make a run repeatable: with given costs that are not
    refreshed, when sampling or when a lossy rule accepts tokens, whose texts depend on what is drafted. Otherwise
    another measurement of the same machine is the same generator.

    Args:
        model: The target. Its own `generation_config` counts too, which fills what the one given leaves open.
        assistant_model: The draft, or a drafter; None when there is none.
        tokenizer: The tokenizer of the prompts.
        speculation_config: How the target's passes are drafted for.
        generation_config: How tokens are chosen and where texts end.
        settings: Whatever else decides rows and results, such as columns, limits, a seed and arguments of the chat
            template. Functions among them, as in `tools`, count as the schema that a template is shown.

    Raises:
        TypeError: A setting has no form in JSON that would be the same in another process.
    """
    speculation = speculation_config.to_dict()
    samples = bool(generation_config.do_sample or getattr(model.generation_config, "do_sample", False))
    if speculation["refresh_costs"] or not (samples or speculation["acceptance"]):
        del speculation["costs"]
    if speculation["acceptance"] is None:
        del speculation["acceptance"]  # as when there was no such setting, so that jobs of that time go on
    return {
        "target": model_identity(model),
        "draft": _draft_identity(assistant_model),
        "tokenizer": tokenizer_identity(tokenizer),
        "speculation": speculation,
        "generation": _generation_settings(generation_config),
        "generation_defaults": _generation_settings(model.generation_config),
        "settings": json.loads(_canonical(dict(settings or {}))),
    }


def _draft_identity(draft: PreTrainedModel | Drafter | None) -> dict[str, Any] | None:
    """What drafts: a model, or a drafter by its class and settings, but not by what it has seen since."""
    model = None if draft is None else model_of(draft)
    if isinstance(draft, Drafter):
        kind = {"drafter": f"{type(draft).__module__}.{type(draft).__qualname__}", "settings": dict(draft.settings)}
        return kind if model is None else {**kind, "model": model_identity(model)}
    return None if model is None else model_identity(model)


def fingerprint(identity: Mapping[str, Any]) -> str:
    """SHA-256 of an identity's canonical JSON, as 64 hex digits: equal for equal identities in any process.

    Raises:
        TypeError: A value has no form in JSON that would be the same in another process.
    """
    return hashlib.sha256(_canonical(dict(identity)).encode()).hexdigest()


class Fingerprinted(ABC):
    """A callable for `Dataset.map` that `datasets` recognises by its identity, without reading its models.

    `datasets` names the cache file of `map` after a hash of the pickled callable. What is pickled of this object is its
    class's name and the fingerprint of its identity, so that the hash is the same in every process and changes with
    every setting. What that unpickles to, in a process of `map(num_proc=...)` or elsewhere, is a `NotSent`, which
    raises when it is used. Copies are the object itself, as they are for functions: `datasets` copies what it keeps.
    """

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides the results, as plain JSON; see `generator_identity`."""

    @property
    def fingerprint(self) -> str:
        """The identity in 64 hex digits."""
        return fingerprint(self.identity)

    def __reduce__(self) -> tuple[type[NotSent], tuple[str, str]]:
        return NotSent, (f"{type(self).__module__}.{type(self).__qualname__}", self.fingerprint)

    def __copy__(self) -> Fingerprinted:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Fingerprinted:
        return self


class NotSent:
    """Stands for a generator where its models are not: raises when it is called or asked for anything."""

    def __init__(self, name: str, fingerprint: str) -> None:
        self._name, self._fingerprint = name, fingerprint

    def __reduce__(self) -> tuple[type[NotSent], tuple[str, str]]:
        return NotSent, (self._name, self._fingerprint)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a RuntimeError that says what to do instead."""
        raise self._refusal()

    def __getattr__(self, attribute: str) -> NoReturn:
        # Copying and pickling look for special methods and go on without them.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"This is a pickled `{self._name.rpartition('.')[2]}`, whose models stayed in the process that has them. "
            "Call `Dataset.map` without `num_proc`. To use several devices, let each process make its own generator "
            "and take a part of the rows, as with `accelerate launch` or in Ray's workers."
        )


def _generation_settings(config: GenerationConfig | None) -> Any:
    return None if config is None else json.loads(config.to_json_string(ignore_metadata=True))


def _active_adapters(model: torch.nn.Module) -> list[str]:
    """Names of the PEFT adapters that take part in a forward pass, sorted. PEFT need not be installed."""
    names: set[str] = set()
    for module in model.modules():
        adapted = hasattr(module, "base_layer") and not getattr(module, "disable_adapters", False)
        active: Any = getattr(module, "active_adapters", ()) if adapted else ()
        names.update([active] if isinstance(active, str) else active)
    return sorted(names)


def _short_hash(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:_HASH_DIGITS]


def _canonical(value: Any) -> str:
    """JSON with sorted keys, the same for equal values in every process."""
    try:
        return json.dumps(_as_json(value), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as failure:
        raise TypeError(
            f"An identity cannot be written as JSON ({failure}). Use numbers, text, lists and dicts."
        ) from failure


def _as_json(value: Any) -> Any:
    """The value with everything replaced that JSON does not know; refused where it would differ between processes."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_as_json(part) for part in value]
        return sorted(parts, key=_canonical) if isinstance(value, (set, frozenset)) else parts
    if isinstance(value, (torch.dtype, torch.device, PurePath)):
        return str(value)
    if isfunction(value) or ismethod(value):
        return get_json_schema(value)
    if callable(getattr(value, "tolist", None)):
        return _as_json(value.tolist())
    raise TypeError(f"{type(value).__name__} is not known to JSON: {repr(value)[:80]}")
