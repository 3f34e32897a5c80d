"""From what a call names as its assistant to a drafter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import LongTensor, Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
    MTPCandidateGenerator,
)

from hf_dsde.decoding.drafter import Drafter
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.early_exit import EarlyExitDrafter
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.hybrid import HybridDrafter
from hf_dsde.drafting.lookup.prompt_lookup import NGRAM_SIZE, PromptLookupDrafter
from hf_dsde.drafting.lookup.sssd import SSSDDrafter
from hf_dsde.drafting.lookup.suffix import SuffixDrafter
from hf_dsde.drafting.lookup.text_drafter import TextDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.drafting.per_row import PerRowDrafter
from hf_dsde.drafting.translated import TranslatedDrafter
from hf_dsde.drafting.translation import Translation
from hf_dsde.execution.wrappers import unwrapped
from hf_dsde.integration import vocabularies
from hf_dsde.integration.heads import is_head
from hf_dsde.measurement.statistics import SpeculationWarning
from hf_dsde.utils.checks import check_choice

Assistant = PreTrainedModel | Drafter | CandidateGenerator | str | Sequence[PreTrainedModel | Drafter | str] | None
"""What `assistant_model` takes: a model, a head made for the target, a drafter, the name of one that needs no model, a
list of a drafter out of texts and a model, a generator of transformers or of the user's; None where the generation
config asks for prompt lookup, or for the target's own layers for multi-token prediction."""

LEAST_SHARE = 0.25
"""Share of the smaller vocabulary below which shared tokens are too few to write a text with."""
EARLY_EXIT = "early_exit"
"""The name of the drafter that runs layers of the target, as a model would draft: others by name draft out of texts."""

NAMED_DRAFTERS: Mapping[str, Callable[[PreTrainedModel], Drafter]] = {
    EARLY_EXIT: EarlyExitDrafter,
    "prompt_lookup": lambda _: PromptLookupDrafter(),
    "sssd": lambda _: SSSDDrafter(),
    "suffix": lambda _: SuffixDrafter(),
}
"""Drafters without a model of their own, by the names that `assistant_model` knows them by: each for a target, and else
as it is without arguments."""


def check_name(name: str) -> None:
    """Refuse a name that no drafter has.

    Raises:
        ValueError: If it is another one.
    """
    way_out = "A model is loaded first (from_pretrained, hf_dsde.load_draft, hf_dsde.load_head) and passed itself."
    check_choice("assistant_model", name, NAMED_DRAFTERS, way_out=way_out)


def job_draft(
    assistant: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel | Drafter:
    """Return what drafts for a target in all calls of a job: a model, out of what wraps it, or a drafter.

    Args:
        assistant: As `Assistant` says, but for generators.
        target: The target.
        tokenizer: As for `drafter_for`.
        assistant_tokenizer: As for `drafter_for`.

    Raises:
        TypeError: If it is something else.
        ValueError: If it is a name that no drafter has, one of a drafter that the target is not fit for, or a list of
            other than a drafter out of texts and a model.
    """
    if isinstance(assistant, str):
        check_name(assistant)
        return NAMED_DRAFTERS[assistant](target)
    if isinstance(assistant, (list, tuple)):
        return _hybrid(assistant, target)
    if isinstance(assistant, Drafter):
        return assistant
    draft = unwrapped("assistant_model", assistant)
    translation = _translation(target, draft, tokenizer, assistant_tokenizer)
    if translation is None or translation.share < LEAST_SHARE:
        return draft
    return model_drafter(draft, translation)


def _hybrid(assistants: Sequence[Any], target: PreTrainedModel) -> HybridDrafter:
    """Return what drafts with two together, in whichever order they are named."""
    drafts = [job_draft(each, target) for each in assistants]
    drafters = [each if isinstance(each, Drafter) else model_drafter(each) for each in drafts]
    texts = [each for each in drafters if isinstance(each, TextDrafter)]
    models = [each for each in drafters if isinstance(each, ChainDrafter)]
    if len(drafters) == 2 and len(texts) == len(models) == 1:
        return HybridDrafter(texts[0], models[0])
    names = ", ".join(each if isinstance(each, str) else type(each).__name__ for each in assistants)
    msg = (
        f"assistant_model=[{names}]: two draft together if one of them drafts out of texts "
        "('prompt_lookup', 'sssd', 'suffix', or such a drafter) and the other is a model, a head or 'early_exit'. Pass "
        "one of each, or one drafter alone."
    )
    raise ValueError(msg)


def model_of(draft: PreTrainedModel | Drafter) -> PreTrainedModel | None:
    """Return the model that drafts beside the target; None where a drafter has none, or runs it by itself."""
    if isinstance(draft, HybridDrafter):
        draft = draft.model
    if isinstance(draft, EarlyExitDrafter):
        return None
    if isinstance(draft, ChainDrafter):
        return draft.model
    return None if isinstance(draft, Drafter) else draft


def drafter_for(
    target: PreTrainedModel,
    assistant: Assistant,
    generation_config: GenerationConfig,
    processors: LogitsProcessorList,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> Drafter:
    """Return what drafts in a call of `generate`.

    Args:
        target: The target.
        assistant: As `Assistant` says.
        generation_config: Of the call.
        processors: Of the call.
        tokenizer: The target's tokenizer, if it was given.
        assistant_tokenizer: The draft's tokenizer, likewise. If both are there and their vocabularies differ, the draft
            proposes tokens that both have; where these are few, its text is translated, row by row.
    """
    if isinstance(assistant, (Drafter, str, list, tuple)):
        drafter = job_draft(assistant, target)
        assert isinstance(drafter, Drafter)
        return drafter
    if isinstance(assistant, CandidateGenerator):
        return PerRowDrafter(partial(_copied, assistant), owner=assistant)
    if assistant is None and getattr(generation_config, "use_mtp", None):
        generator = _multi_token_predictor(target, generation_config, processors)
        last = target.config.get_text_config(decoder=True).num_hidden_layers
        make, least = partial(_copied, generator), generator.num_mtp_layers or 0
        return PerRowDrafter(make, owner=target, hidden_layers=(last,), least_states=least)
    if assistant is None:
        return _lookup(generation_config)
    draft = unwrapped("assistant_model", assistant)
    translation = _translation(target, draft, tokenizer, assistant_tokenizer)
    if translation is not None and translation.share < LEAST_SHARE:
        assert tokenizer is not None
        assert assistant_tokenizer is not None
        make = partial(_translating, draft, generation_config, tokenizer, assistant_tokenizer)
        return PerRowDrafter(make, owner=draft)
    return model_drafter(draft, translation)


def _translation(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> Translation | None:
    """Return what translates between both tokenizers if they are given and differ, and say so."""
    if tokenizer is None or assistant_tokenizer is None or is_head(draft):
        return None
    different = vocabularies.differences(tokenizer, assistant_tokenizer, vocabularies.shared_size(target, draft))
    if not different:
        return None
    translation = vocabularies.translation(target, draft, tokenizer, assistant_tokenizer)
    enough = translation.share >= LEAST_SHARE
    then = "so those are what is drafted" if enough else "too few, so drafts are translated as text, row by row"
    warnings.warn(
        f"assistant_tokenizer: {len(different)} token ids differ from the target's "
        f"({vocabularies.examples(different)}). Both have {len(translation.shared)} tokens in common, "
        f"{translation.share:.0%} of the smaller vocabulary, {then}. A draft of the target's tokenizer is better.",
        SpeculationWarning,
        stacklevel=2,
    )
    return translation


def model_drafter(draft: PreTrainedModel, translation: Translation | None = None) -> ChainDrafter:
    """Return what drafts with a model of the target's vocabulary, with a head, or with a model of another vocabulary.

    Args:
        draft: The model.
        translation: Between the tokenizers, if they differ.
    """
    if translation is not None:
        return TranslatedDrafter(draft, translation)
    return HeadDrafter(draft) if is_head(draft) else ModelDrafter(draft)


def _copied(generator: CandidateGenerator, text: Tensor) -> CandidateGenerator:  # noqa: ARG001 - as `make` is called
    """Copy a generator for a row, but for the models and tokenizers that it holds."""
    shared = [part for part in vars(generator).values() if isinstance(part, (nn.Module, PreTrainedTokenizerBase))]
    return copy.deepcopy(generator, {id(part): part for part in shared})


def _lookup(generation_config: GenerationConfig) -> PromptLookupDrafter:
    """Prompt lookup as the generation config asks for it; the policy says how many tokens."""
    config: Any = generation_config
    ends = config._eos_token_tensor
    return PromptLookupDrafter(
        config.max_matching_ngram_size or NGRAM_SIZE, end_tokens=() if ends is None else ends.flatten().tolist()
    )


def _multi_token_predictor(
    target: PreTrainedModel, generation_config: GenerationConfig, processors: LogitsProcessorList
) -> MTPCandidateGenerator:
    """The layers for multi-token prediction that lie beside the target's weights, loaded as transformers does it."""
    return MTPCandidateGenerator(
        main_model=target,
        generation_config=_greedy(generation_config),
        model_kwargs={},
        logits_processor=processors,
    )


def _greedy(generation_config: GenerationConfig) -> GenerationConfig:
    """A copy that takes the best tokens: of what could be proposed, the best is the likeliest to be drawn."""
    greedy = copy.deepcopy(generation_config)
    greedy.do_sample = False
    return greedy


class _Translating(AssistedCandidateGeneratorDifferentTokenizers):
    """Universal assisted generation, also where a text means nothing to the draft yet."""

    def get_candidates(self, input_ids: LongTensor, **kwargs: Any) -> tuple[LongTensor, Tensor | None]:  # type: ignore[override] # as it is
        """Propose nothing as long as the draft would be shown nothing, such as for a prompt of special tokens alone."""
        if self.prev_assistant_ids is None:
            text = self.target_tokenizer.decode(input_ids[0], skip_special_tokens=True)
            if not self.assistant_tokenizer(text)["input_ids"]:
                return input_ids, None
        return super().get_candidates(input_ids, **kwargs)


def _translating(
    draft: PreTrainedModel,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    assistant_tokenizer: PreTrainedTokenizerBase,
    text: Tensor,
) -> CandidateGenerator:
    """Universal assisted generation: the draft's own greedy text, translated."""
    return _Translating(
        input_ids=cast("LongTensor", text),
        assistant_model=draft,
        target_tokenizer=tokenizer,
        assistant_tokenizer=assistant_tokenizer,
        generation_config=_greedy(generation_config),
        model_kwargs={},
        logits_processor=LogitsProcessorList(),
    )
