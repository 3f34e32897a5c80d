"""What cannot be decoded this way, said before anything is computed: the argument, its value, and the way out."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode

from hf_dsde import compat
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.processing.state import refuse_known
from hf_dsde.execution import attention, wrappers
from hf_dsde.integration import drafters, encoders, images, vocabularies
from hf_dsde.integration.heads import check_head, is_head
from hf_dsde.integration.refusal import PLAIN
from hf_dsde.integration.refusal import refuse as _refuse
from hf_dsde.utils.modules import modules_of

SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention")
ALIBI_MODEL_TYPES = ("bloom", "mpt")
MASK_TOKEN_MODEL_TYPES = ("flaubert", "xlm")
"""Models whose plain decoding predicts the token of a mask that it appends to the text."""
ONE_MASK_MODEL_TYPES = ("paligemma",)
"""Models that look at images whose forward pass makes the masks of each kind of layer out of one."""
UNDERSTOOD_KWARGS = frozenset(
    {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", *compat.CACHE_ARGUMENTS}
)
"""What `generate` may hand to the model's `forward` in a call that the loop can serve."""

REPLACED_OPTIONS = {
    "num_assistant_tokens": "StaticPolicy(num_draft_tokens=...)",
    "num_assistant_tokens_schedule": "'static' or 'heuristic'",
    "assistant_confidence_threshold": "ConfidencePolicy(threshold=...)",
}
"""Options of stock assisted generation that decide what a policy decides, and the policy that stands for each."""


def check_options(generation_config: GenerationConfig | None, options: dict[str, Any]) -> None:
    """Refuse options of the call that would do nothing beside a policy.

    Args:
        generation_config: As the user passed it.
        options: Keyword arguments of the call.

    Raises:
        ValueError: If a draft length or a stopping rule was also given the stock way, or a cache, which would stay as
            it is.
    """
    for name in compat.CACHE_ARGUMENTS:
        if options.get(name) is not None:
            _refuse_cache(name, options[name])
    for name, policy in REPLACED_OPTIONS.items():
        value = options.get(name, compat.chosen_option(generation_config, name))
        if value is not None:
            _refuse(
                f"{name}={value!r}",
                "the policy decides how much is drafted, so the option would do nothing. Use "
                f"speculation_policy={policy} for it, or leave it out.",
            )


def check_hidden_policy(generation_config: GenerationConfig) -> None:
    """Refuse a policy inside a generation config, which keeps attributes it does not know and does nothing with them.

    Raises:
        ValueError: If the config carries an argument that belongs to `generate`.
    """
    for name in ("speculation_policy", "speculation_config", "speculation_listeners"):
        if getattr(generation_config, name, None) is not None:
            msg = (
                f"generation_config.{name}={getattr(generation_config, name)!r} does nothing there. Pass {name}=... to "
                "`generate` itself; SpeculationConfig.save_pretrained keeps settings with a model."
            )
            raise ValueError(msg)


def check_mode(mode: GenerationMode, generation_config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Refuse decoding modes that are not greedy or sampled text with one draft model.

    Raises:
        ValueError: For beams, a policy without an assistant, two ways of drafting at once, synchronised GPUs, or
            another kind of cache, which `generate` would set up next.
    """
    if generation_config.num_beams > 1:
        _refuse(
            f"num_beams={generation_config.num_beams}",
            "a draft can only be verified against one continuation per row. Use num_beams=1. " + PLAIN,
        )
    assistant = mode_kwargs.get("assistant_model")
    if early := getattr(generation_config, "assistant_early_exit", None):
        _refuse(
            f"assistant_early_exit={early}",
            f"here, the target's first layers draft as assistant_model=hf_dsde.EarlyExitDrafter(model, {early}), with "
            "the target's own cache. " + PLAIN,
        )
    ways = {name: getattr(generation_config, name, None) for name in ("prompt_lookup_num_tokens", "use_mtp")}
    ways = {"assistant_model": assistant, **{name: value or None for name, value in ways.items()}}
    named = [name for name, value in ways.items() if value is not None]
    if not named:
        _refuse(
            "assistant_model=None",
            "`speculation_policy` decides how much is drafted, so something has to draft. Pass assistant_model=..., or "
            "prompt_lookup_num_tokens=... to draft from the text itself, or use_mtp=True where the target has layers "
            "for it. " + PLAIN,
        )
    if len(named) > 1:
        _refuse(f"{named[1]}={ways[named[1]]}", f"it is another way of drafting. Use it or {named[0]}.")
    if getattr(generation_config, "dola_layers", None) is not None:
        _refuse(
            f"dola_layers={generation_config.dola_layers!r}",
            "layers of the target are contrasted in plain decoding, and a draft would leave that out. " + PLAIN,
        )
    if getattr(generation_config, "is_assistant", False):
        _refuse("is_assistant=True", "it marks the calls of a draft inside a stock call. Leave it out.")
    if getattr(generation_config, "speculation_type", None):
        _refuse(
            f"speculation_type={generation_config.speculation_type}",
            "it is another way of drafting beside assistant_model. Leave it out. " + PLAIN,
        )
    if getattr(assistant, "requires_model_outputs", False):
        _refuse(
            f"assistant_model={type(assistant).__name__}",
            "it needs the target's hidden states, which are not handed to generators that are passed. "
            "Use use_mtp=True for the target's own layers. " + PLAIN,
        )
    if mode is not GenerationMode.ASSISTED_GENERATION:
        _refuse(f"generation mode '{mode.value}'", "only greedy decoding and sampling can be verified. " + PLAIN)
    if mode_kwargs.get("synced_gpus"):
        _refuse_synced_gpus()
    if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        _refuse(
            f"cache_implementation={generation_config.cache_implementation!r}",
            "the loop keeps a ragged cache of its own. Leave the argument out.",
        )


def check_assistant(
    target: PreTrainedModel,
    assistant: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    *,
    packed_attention: bool,
) -> None:
    """Refuse a target, or what is to draft for it in `generate`, if they cannot work together here.

    Args:
        target: The target.
        assistant: A model, any candidate generator, the name of a drafter, a list of two, or None for prompt lookup.
        tokenizer: The target's tokenizer, if it was given.
        assistant_tokenizer: The draft's, likewise. Where both are given, drafts of another vocabulary are translated.
        packed_attention: As for `check_models`.

    Raises:
        TypeError: If the assistant is none of these.
        ValueError: As for `check_models` and `check_tokenizers`, for names that no drafter has, and for two that do not
            draft together.
    """
    drafts_alone = not isinstance(assistant, (list, tuple))
    if isinstance(assistant, (str, list, tuple)):
        assistant = drafters.job_draft(assistant, target)
    if isinstance(assistant, Drafter):
        draft = drafters.model_of(assistant)
    elif assistant is None or isinstance(assistant, CandidateGenerator):
        draft = None
    else:
        draft = wrappers.unwrapped("assistant_model", assistant)
    check_models(target, draft, packed_attention)
    translated = drafts_alone and tokenizer is not None and assistant_tokenizer is not None
    if draft is not None and (not translated or compat.reads_encoder(draft)):  # who reads an encoder has to understand
        check_tokenizers(target, draft, tokenizer, assistant_tokenizer)


def check_models(target: PreTrainedModel, draft: PreTrainedModel | None, packed_attention: bool) -> None:
    """Refuse models whose cache cannot be ragged.

    Args:
        target: The target.
        draft: The draft; None where no model of this package's runs drafts.
        packed_attention: Whether packed attention may stand in for what the models are set to.

    Raises:
        ValueError: For encoder-decoders that are not known and pairs whose encoders do not fit, models with recurrent
            or otherwise unknown layers, ALiBi, attention implementations that take no mask, models whose inputs
            somebody else's method makes, training with gradient checkpointing where that drops the cache, and heads of
            another target.
    """
    _check_model("model", target, packed_attention)
    encoders.check_target(target)
    if draft is not None:
        _check_model("assistant_model", draft, packed_attention)
        encoders.check_pair(target, draft)
        if is_head(draft):
            check_head(target, draft)


def _check_model(argument: str, model: PreTrainedModel, packed_attention: bool) -> None:
    name = f"{argument} ({type(model).__name__})"
    config = model.config.get_text_config(decoder=True)
    encoders.check_model(name, model)
    if getattr(model, "_is_stateful", False):
        _refuse(name, "its recurrent state cannot forget a rejected draft token. " + PLAIN)
    unknown = sorted(set(compat.layer_types(config)) - set(SUPPORTED_LAYER_TYPES))
    if unknown:
        _refuse(f"{name} with layer types {unknown}", f"known are {list(SUPPORTED_LAYER_TYPES)}. " + PLAIN)
    if getattr(config, "num_kv_shared_layers", None):
        _refuse(f"{name} with num_kv_shared_layers={config.num_kv_shared_layers}", "layers share a cache. " + PLAIN)
    if config.model_type in ALIBI_MODEL_TYPES or getattr(config, "alibi", False):
        _refuse(f"{name} with ALiBi", "its bias is built from a rectangular mask, not from positions. " + PLAIN)
    implementation = model.config._attn_implementation
    masked = implementation in attention.MASKABLE_IMPLEMENTATIONS
    if not masked and not (packed_attention and attention.reproduces_attention(model)):
        _refuse(
            f"{name} with attn_implementation='{implementation}'",
            f"it takes no mask per row. Call model.set_attn_implementation with one of "
            f"{list(attention.MASKABLE_IMPLEMENTATIONS)}.",
        )
    _check_passes(name, model)


def _check_passes(name: str, model: PreTrainedModel) -> None:
    """Refuse models whose passes take other inputs than tokens at positions, or keep no cache."""
    parameters = compat.forward_parameters(model)
    if not any(cache in parameters for cache in compat.CACHE_ARGUMENTS):
        _refuse(
            name, f"its forward takes none of {compat.CACHE_ARGUMENTS}, and drafts need a key-value cache. " + PLAIN
        )
    if "position_ids" not in parameters and not compat.reads_encoder(model):
        _refuse(name, "its forward takes no position_ids, and rows of a batch are at different positions. " + PLAIN)
    if model.config.model_type in ONE_MASK_MODEL_TYPES and len(attention.attention_kinds(model)) > 1:
        _refuse(name, "some of its layers slide and some do not, and its forward takes one mask for all. " + PLAIN)
    if model.config.model_type in MASK_TOKEN_MODEL_TYPES:
        _refuse(name, "it is fed a mask token after the text at every step. " + PLAIN)
    method = wrappers.foreign_input_method(model)
    if method is not None:
        _refuse(
            f"{name} with {method}",
            "what the model is fed is made here, so what the method adds or changes would be lost. Remove it from "
            "class or model if it does neither. " + PLAIN,
        )
    hook = wrappers.foreign_hook(model)
    if hook is not None:
        _refuse(f"{name} with the hook {hook}", "it counts on the passes of plain decoding. " + PLAIN)
    if compat.gives_up_cache(modules_of(model)):
        _refuse(
            f"{name} in training mode with gradient checkpointing",
            "its forward drops the key-value cache then, which verification needs. Call eval(), or "
            "gradient_checkpointing_disable(), on it for the time of the call.",
        )


def check_tokenizers(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Refuse a draft with another vocabulary, when the tokenizers are there to tell.

    Sizes may differ: models of one family pad their vocabularies differently, and a tokenizer may name tokens inside
    the padding. What counts is that an id which both tokenizers name, below both sizes, means the same token to both.
    Tokenizers that are not given are looked for where the models came from, on this machine. Without tokenizers nothing
    can be compared; the output is exact all the same, and a draft that speaks another language shows in the acceptance
    rate.

    Args:
        target: The target.
        draft: The draft.
        tokenizer: The target's tokenizer; None to look for it.
        assistant_tokenizer: The draft's tokenizer; None to look for it.

    Raises:
        ValueError: If the vocabularies differ; the message names the first differing ids.
    """
    if is_head(draft):  # its tokens are the target's
        return
    if tokenizer is None and assistant_tokenizer is None and target.name_or_path == draft.name_or_path:
        return
    if tokenizer is None:
        tokenizer = vocabularies.tokenizer_at(target.name_or_path)
    found = vocabularies.tokenizer_at(draft.name_or_path) if assistant_tokenizer is None else None
    theirs = found if assistant_tokenizer is None else assistant_tokenizer
    if tokenizer is None or theirs is None:
        return
    different = vocabularies.differences(tokenizer, theirs, vocabularies.shared_size(target, draft))
    if different:
        wrong = (
            f"if {draft.name_or_path!r} holds a wrong one, put the right one there, or pass assistant_tokenizer to "
            "`generate` or `BatchGenerator`"
            if found is not None
            else "pass another assistant_tokenizer if this one is wrong"
        )
        others = "for other pairs, pass tokenizer and assistant_tokenizer: the draft then proposes the tokens of both."
        if compat.reads_encoder(draft):
            others = "drafts are translated from the text alone, and this one reads an encoder's states."
        _refuse(
            f"assistant_model ({type(draft).__name__})",
            f"{len(different)} token ids differ from the target's tokenizer ({vocabularies.examples(different)}). Use "
            f"a draft of the same tokenizer; {wrong}; {others}",
        )


def check_call(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse what this call asks for beyond text.

    Raises:
        ValueError: For caches of the user's, inputs other than tokens, outputs of inner layers, logits processors that
            remember their last call, and settings that have no meaning here.
    """
    if synced_gpus:
        _refuse_synced_gpus()
    if not model_kwargs.get("use_cache", True):
        _refuse("use_cache=False", "verification needs the key-value cache. Use use_cache=True. " + PLAIN)
    cache = compat.given_cache(model_kwargs)
    if cache is not None and (compat.is_users_cache(cache) or cache.get_seq_length() > 0):
        _refuse_cache(next(name for name in compat.CACHE_ARGUMENTS if model_kwargs.get(name) is cache), cache)
    if input_ids.shape[1] == 0:
        _refuse("inputs_embeds without input_ids", "drafts are made of tokens. Pass input_ids.")
    for name in ("output_attentions", "output_hidden_states"):
        if model_kwargs.get(name) or getattr(generation_config, name, None):
            _refuse(f"{name}=True", "a pass covers positions of several steps. " + PLAIN)
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        _refuse(
            f"assistant_ensemble_weight={generation_config.assistant_ensemble_weight}",
            "it mixes the draft into the target's distribution, which stays the target's here. Leave it out; a "
            "lossy rule of acceptance is given as SpeculationConfig(acceptance=...).",
        )
    encoders.check_call(model, generation_config, model_kwargs)
    for processor in processors:
        refuse_known(processor)
    check_images(model, input_ids, model_kwargs)
    understood = UNDERSTOOD_KWARGS | images.IMAGE_ARGUMENTS | encoders.understood_kwargs(model)
    if others := sorted(images.given(model_kwargs).keys() - understood):
        _refuse(f"{', '.join(others)}", "only text prompts can be decoded with a draft here. " + PLAIN)
    if not images.counts_positions(input_ids, model_kwargs):
        _refuse("position_ids", "a token's position is its place in the row, not another. Leave the argument out.")
    _check_rotary_scaling(model, generation_config.max_length)


def check_images(model: PreTrainedModel, input_ids: Tensor | None, model_kwargs: dict[str, Any]) -> None:
    """Refuse what prompts bring along beside their tokens, if later passes would have to see it.

    Args:
        model: The target.
        input_ids: Prompts, `[rows, width]`; None if they are not known yet.
        model_kwargs: Arguments of the call.

    Raises:
        ValueError: For models not known to look at images once, and prompts that end in an image.
    """
    if refused := images.refusal(model, input_ids, model_kwargs):
        what, why = refused
        _refuse(what, f"{why} {PLAIN}")


def _check_rotary_scaling(model: PreTrainedModel, max_length: int) -> None:
    """Refuse texts for which the rotary frequencies change midway.

    How a key is rotated then depends on when it is computed, and a draft gets to a position before plain decoding does.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else rope.values():
        kind = parameters.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        if max_length > limit:
            _refuse(
                f"rope_type='{kind}' and max_length={max_length}",
                f"its frequencies change after {limit} tokens, and cached keys would not be those of plain decoding. "
                f"Keep prompt and new tokens within {limit} (max_new_tokens). " + PLAIN,
            )


def _refuse_cache(name: str, cache: Any) -> None:
    _refuse(
        f"{name} ({type(cache).__name__})",
        "the loop keeps a ragged cache of its own and leaves this one as it is. Leave the argument out, and pass the "
        "whole text as input_ids.",
    )


def _refuse_synced_gpus() -> None:
    _refuse(
        "synced_gpus=True",
        "ranks draft different lengths, so they would wait for each other forever (FSDP, ZeRO-3). Keep a whole model "
        "on each GPU. " + PLAIN,
    )
