"""Arguments of `generate` that belong to a model: for code that calls it and cannot be told how to speculate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde import compat
from hf_dsde.config import SpeculationConfig
from hf_dsde.integration import validation
from hf_dsde.integration.drafters import Assistant
from hf_dsde.integration.generation import Speculation
from hf_dsde.measurement.rounds import RoundListener
from hf_dsde.policies import StoppingPolicy

WAYS_OF_SPECULATING = ("speculation_policy", "speculation_config")
OTHER_WAYS_OF_DRAFTING = ("prompt_lookup_num_tokens", "use_mtp")
OF_THE_DRAFT = ("assistant_model", "assistant_tokenizer")
DEFAULT_POLICY = "auto"
"""The policy of calls that name none: what drafting gains changes while weights do."""

_defaults: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()
"""Of each model. They are no attributes of it: a draft would be one of its modules, and saved with it."""


def set_defaults(
    model: PreTrainedModel,
    *,
    assistant_model: Assistant = None,
    speculation_policy: str | StoppingPolicy | SpeculationConfig | None = None,
    speculation_config: SpeculationConfig | None = None,
    speculation_listeners: Iterable[RoundListener] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Keep arguments for calls of a model that do not name them; earlier ones are forgotten, if any are given.

    Raises:
        TypeError: If one is of another type.
        ValueError: If there is nothing to draft with, or target and draft cannot work together.
    """
    given: dict[str, Any] = {
        "assistant_model": assistant_model,
        "speculation_policy": speculation_policy,
        "speculation_config": speculation_config,
        "speculation_listeners": list(speculation_listeners) or None,
        "tokenizer": tokenizer,
        "assistant_tokenizer": assistant_tokenizer,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return
    if assistant_model is None:
        msg = (
            f"{', '.join(given)}: as defaults they need something that drafts. Pass assistant_model=... to `enable` as "
            "well, or pass them to `generate`."
        )
        raise ValueError(msg)
    if not any(name in given for name in WAYS_OF_SPECULATING):
        given["speculation_policy"] = DEFAULT_POLICY
    listeners: Sequence[RoundListener] = given.get("speculation_listeners", ())
    config = Speculation.of(given.get("speculation_policy"), speculation_config, listeners).config
    packed_attention = config.options.packed_attention
    validation.check_assistant(
        model, assistant_model, tokenizer, assistant_tokenizer, packed_attention=packed_attention
    )
    _defaults[model] = given


def forget_defaults(model: PreTrainedModel) -> None:
    """Let calls of a model name all that they want again."""
    _defaults.pop(model, None)


def with_defaults(
    model: PreTrainedModel, generate: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments of a call of `generate`, with the model's own for those that it does not name.

    None are added to a call that names None as policy or configuration, and nothing else, or a decoding method of its
    own; no draft to one that says otherwise what drafts.

    Args:
        model: The target.
        generate: Its method, as a function.
        args: Positional arguments of the call, without the model.
        kwargs: The others.
    """
    defaults = _defaults.get(model)
    if defaults is None:
        return dict(kwargs)
    bound = inspect.signature(generate).bind_partial(model, *args, **kwargs).arguments
    named = {**bound, **bound.get("kwargs", {})}
    ways = [name for name in WAYS_OF_SPECULATING if name in named]
    if (ways and all(named[name] is None for name in ways)) or named.get("custom_generate") is not None:
        return dict(kwargs)
    left_out = {name for name, value in named.items() if value is not None}
    if ways:  # a configuration that is named counts in all it says, and a policy is played by the default one
        left_out |= {"speculation_policy"}
    if isinstance(named.get("speculation_policy"), SpeculationConfig):
        left_out |= {"speculation_config"}
    config = named.get("generation_config")
    others = (named.get(name, compat.chosen_option(config, name)) for name in OTHER_WAYS_OF_DRAFTING)
    if named.get("assistant_model") is not None or any(other is not None for other in others):
        left_out |= {*OF_THE_DRAFT}
    return {**kwargs, **{name: value for name, value in defaults.items() if name not in left_out}}
