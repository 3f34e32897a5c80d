"""How `generate` reaches the loop: a subclass per model class, with a few methods overridden.

`generate` looks its decoding method up on the class, so an enabled model gets its class swapped for a cached subclass
of the same name. Everything else about the model stays: saving, pickling, copying, and `generate` without a
`speculation_policy`, which goes the stock way.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateOutput

from hf_dsde.config import SpeculationConfig
from hf_dsde.execution.create_runner import release_memory
from hf_dsde.execution.workspaces import workspaces
from hf_dsde.execution.wrappers import innermost
from hf_dsde.integration import images, validation
from hf_dsde.integration.defaults import forget_defaults, set_defaults, with_defaults
from hf_dsde.integration.drafters import Assistant
from hf_dsde.integration.generation import Speculation, generate_speculatively
from hf_dsde.integration.outputs import SpeculativeOutput
from hf_dsde.measurement.rounds import RoundListener
from hf_dsde.policies import StoppingPolicy

_SPECULATION = "_hf_dsde_speculation"
"""Attribute of a call's own copy of the generation config that carries the policy from one override to the next."""
_MARK = -1
"""Number of looked up tokens by which a call whose assistant was kept from the model's own `generate` is assisted."""


def _prepare_generation_config(
    parent: Callable[..., Any], model: PreTrainedModel, generation_config: GenerationConfig | None, **kwargs: Any
) -> tuple[GenerationConfig, dict[str, Any]]:
    policy = kwargs.pop("speculation_policy", None)
    config = kwargs.pop("speculation_config", None)
    speculates = policy is not None or config is not None
    listeners = kwargs.pop("speculation_listeners", ()) if speculates else ()  # else transformers refuses them
    # The `generate` of some models, such as Whisper's, prepares a config of its own, and calls this one's with it.
    under_way: Speculation | None = getattr(generation_config, _SPECULATION, None)
    if under_way is not None:  # a policy and its listeners must not be copied
        generation_config = copy.copy(generation_config)
        delattr(generation_config, _SPECULATION)
    assistant = kwargs.pop("assistant_model", None) if speculates else None
    prepared, model_kwargs = parent(model, generation_config, **kwargs)
    validation.check_hidden_policy(prepared)
    if speculates:
        validation.check_options(generation_config, kwargs)
        validation.check_images(model, model_kwargs.get("input_ids"), model_kwargs)
        under_way = replace(
            Speculation.of(policy, config, listeners, assistant), inputs=images.given_inputs(model_kwargs)
        )
        setattr(prepared, _SPECULATION, under_way)
    elif under_way is not None:
        setattr(prepared, _SPECULATION, under_way)
        if under_way.assistant is not None and prepared.prompt_lookup_num_tokens is None:
            prepared.prompt_lookup_num_tokens = _MARK
    return prepared, model_kwargs


def _validate_generation_mode(
    parent: Callable[..., None],
    model: PreTrainedModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    speculation: Speculation | None = getattr(generation_config, _SPECULATION, None)
    if speculation is None:
        parent(model, generation_mode, generation_config, generation_mode_kwargs)
        return
    if speculation.assistant is not None:
        generation_mode_kwargs["assistant_model"] = speculation.assistant
        if generation_config.prompt_lookup_num_tokens == _MARK:
            generation_config.prompt_lookup_num_tokens = None
    validation.check_mode(generation_mode, generation_config, generation_mode_kwargs)
    assistant, *tokenizers = (
        generation_mode_kwargs.get(name) for name in ("assistant_model", "tokenizer", "assistant_tokenizer")
    )
    packed_attention = speculation.config.options.packed_attention
    validation.check_assistant(model, assistant, *tokenizers, packed_attention=packed_attention)


def _assisted_decoding(
    parent: Callable[..., Any],
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> SpeculativeOutput | Tensor:
    speculation = getattr(generation_config, _SPECULATION, None)
    if speculation is None:
        return parent(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
    delattr(generation_config, _SPECULATION)  # a drafter may call `generate` with a copy of this config
    return generate_speculatively(
        model, input_ids, logits_processor, stopping_criteria, generation_config, speculation, **kwargs
    )


def _generate(parent: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    return parent(model, *args, **with_defaults(model, parent, args, kwargs))


def _train(parent: Callable[..., Any], model: PreTrainedModel, mode: bool = True) -> Any:
    if mode:
        workspaces.make_room_for_training(model)
    return parent(model, mode)


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "_prepare_generation_config": _prepare_generation_config,
    "_validate_generation_mode": _validate_generation_mode,
    "_assisted_decoding": _assisted_decoding,
}
_OF_ENABLED_MODELS = {**_OVERRIDES, "generate": _generate, "train": _train}


def _override(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that hands the original, and everything it was called with, to the replacement."""

    @functools.wraps(original)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    return method


class _Enabled:
    """Marks the classes made by `enabled_class`. Pickles name the model's own class and enable it again on loading."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        assert isinstance(reduced, tuple)  # from protocol 2 on it always is
        _, _, *rest = reduced
        return (_new_enabled, (_own_class(self),), *rest)


def _own_class(model: Any) -> Any:
    """Return the class that an enabled model had before."""
    return model._hf_dsde_own_class


def _new_enabled(model_class: Any) -> Any:
    subclass = enabled_class(model_class)
    return subclass.__new__(subclass)


@functools.cache
def enabled_class(model_class: Any) -> Any:
    """Return the subclass of `model_class` whose `generate` knows `speculation_policy`."""
    methods = {name: _override(getattr(model_class, name), method) for name, method in _OF_ENABLED_MODELS.items()}
    copied = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    attributes = {**methods, **copied, "_hf_dsde_own_class": model_class}
    return type(model_class.__name__, (_Enabled, model_class), attributes)


def enable(model: PreTrainedModel, **defaults: Any) -> PreTrainedModel:
    """Teach one model's `generate` the arguments `speculation_policy`, `speculation_config`, `speculation_listeners`.

    Arguments that are given here are those of all calls that do not name them: for trainers and pipelines, which call
    `generate` themselves. A call with `speculation_policy=None` goes the stock way then. `disable` forgets them, and
    so does a copy.

    Args:
        model: The target, or a wrapper whose `generate` is that of the model inside it, such as PEFT's or that of
            `torch.compile`. Enabling it again changes the defaults, if any are given, and nothing else.
        **defaults: `assistant_model`, and with it any of `speculation_policy` ("auto" unless it or
            `speculation_config` is given), `speculation_config`, `speculation_listeners`, `tokenizer` and
            `assistant_tokenizer`.

    Returns:
        The same object.

    Raises:
        TypeError: If the object has no `generate` of transformers, or a default is unknown or of another type.
        ValueError: If there are defaults and no assistant among them, or for any reason named in
            `hf_dsde.integration.validation`.
    """
    inner = _generating(model)
    set_defaults(inner, **defaults)
    if not isinstance(inner, _Enabled):
        own_class: Any = type(inner)
        inner.__class__ = enabled_class(own_class)
    return model


def _generating(model: Any) -> Any:
    """Return the model whose `generate` runs when that of `model` is called."""
    if isinstance(model, GenerationMixin):
        return model
    if not hasattr(model, "generate"):
        way_out = "pass its `module`." if hasattr(model, "module") else "pass the causal language model itself."
        raise TypeError(f"model: {type(model).__name__} has no transformers `generate`; {way_out}")
    return innermost("model", model)


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`, and free what calls keep on the device. Does nothing to a model that was not enabled.

    Raises:
        TypeError: If the object has no `generate` of transformers, or something else has changed the model's class
            since, as FSDP's `fully_shard` does.
    """
    inner: PreTrainedModel = _generating(model)
    if isinstance(inner, _Enabled):
        own_class = _own_class(inner)
        if type(inner) is not enabled_class(own_class):
            msg = (
                f"model: its class {type(inner).__name__} was derived from the enabled one by something else; undo "
                "that first, or leave the model enabled: calls without `speculation_policy` go the stock way."
            )
            raise TypeError(msg)
        inner.__class__ = own_class
        forget_defaults(inner)
        release_memory(inner)
    return model


def generate_unenabled(
    model: PreTrainedModel, *inputs: Tensor, **arguments: Any
) -> SpeculativeOutput | GenerateOutput | Tensor:
    """Call `generate` as if the model were enabled, and leave the model as it is, also while the call runs.

    Args:
        model: The target. If something stands in for its `generate`, such as what `from_pretrained` loaded from a
            `custom_generate` folder, its class's own is called.
        *inputs: Positional arguments of `generate`.
        **arguments: Those of `generate`, with `speculation_policy`, `speculation_config`, `speculation_listeners`.

    Returns:
        What `generate` of an enabled model returns.
    """
    model_class: Any = type(model)
    view = object.__new__(_view_class(model_class))
    vars(view).update(vars(model), _hf_dsde_model=model)
    vars(view).pop("generate", None)
    return view.generate(*inputs, **arguments)


@functools.cache
def _view_class(model_class: Any) -> Any:
    """Return a class for objects that `generate` prepares a call with; decoded is with the model in their place.

    Memory, recorded passes and measured costs go by the model's identity, so the loop has to see the model itself.
    """
    enabled: Any = model_class if issubclass(model_class, _Enabled) else enabled_class(model_class)
    names = ("_validate_generation_mode", "_assisted_decoding")
    methods = {name: _with_model(getattr(enabled, name)) for name in names}
    return type(enabled.__name__, (enabled,), {**methods, "__module__": enabled.__module__, "__doc__": enabled.__doc__})


def _with_model(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_model(view: Any, *args: Any, **kwargs: Any) -> Any:
        return method(view._hf_dsde_model, *args, **kwargs)

    return on_model


_originals: dict[tuple[type, str], Callable[..., Any]] = {}


def install() -> None:
    """Teach the `generate` of every transformers model, present and future. Installing twice does nothing.

    What drafts for which model is said in each call, or by `enable`.
    """
    if _originals:
        return
    methods: dict[tuple[type, str], Callable[..., Any]] = {(PreTrainedModel, "train"): _train}
    methods |= {(GenerationMixin, name): method for name, method in _OVERRIDES.items()}
    for (owner, name), method in methods.items():
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, _override(_originals[owner, name], method))


def uninstall() -> None:
    """Undo `install`."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: Assistant = None,
    speculation_policy: str | StoppingPolicy | SpeculationConfig | None = None,
    speculation_config: SpeculationConfig | None = None,
    speculation_listeners: Iterable[RoundListener] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    inputs_tensor: Tensor | None = None,
    **kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """A decoding method for `model.generate(custom_generate=...)`, for models that must not be enabled.

    `generate` hands a custom method neither the assistant nor the streamer, so the assistant has to be bound:

        model.generate(**inputs, custom_generate=functools.partial(hf_dsde.generate, assistant_model=draft))

    So have `tokenizer` and `assistant_tokenizer`, and a streamer, which is *also* passed to `generate`, which puts the
    prompts. `generate` loses the `tokenizer` that `stop_strings` need: pass a `StopStringCriteria` in
    `stopping_criteria` instead.

    Args:
        model: The target.
        input_ids: Prompts, left-padded, `[rows, width]`, int64.
        logits_processor: As `generate` prepared them.
        stopping_criteria: As `generate` prepared them.
        generation_config: As `generate` prepared it.
        assistant_model: The draft: a model, a head made for the target, a `Drafter`, any `CandidateGenerator`, or a
            list of a drafter out of texts and a model.
        speculation_policy: A name, a policy, or a `SpeculationConfig`; "dsde" when neither this nor
            `speculation_config` is given.
        speculation_config: Everything else that can be set.
        speculation_listeners: Hear of every round.
        tokenizer: The target's tokenizer; None to look for it beside the target.
        assistant_tokenizer: The draft's tokenizer, compared with the target's; None to look for it beside the draft.
        inputs_tensor: What an encoder reads, as `generate` passes it.
        **kwargs: What `generate` prepared for the model's `forward`.

    Returns:
        What plain `generate` returns.

    Raises:
        ValueError: If no assistant was bound, or for any reason named in `hf_dsde.integration.validation`.
    """
    mode = GenerationMode.ASSISTED_GENERATION
    if generation_config.num_beams > 1:
        mode = GenerationMode.BEAM_SEARCH
    validation.check_mode(mode, generation_config, {"assistant_model": assistant_model})
    speculation = Speculation.of(speculation_policy, speculation_config, speculation_listeners)
    packed_attention = speculation.config.options.packed_attention
    validation.check_assistant(
        model, assistant_model, tokenizer, assistant_tokenizer, packed_attention=packed_attention
    )
    return generate_speculatively(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        speculation,
        assistant_model=assistant_model,
        tokenizer=tokenizer,
        assistant_tokenizer=assistant_tokenizer,
        inputs_tensor=inputs_tensor,
        **kwargs,
    )
