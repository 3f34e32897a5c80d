"""From what a call names as its assistant to a drafter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import LongTensor, Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
    MTPCandidateGenerator,
    PromptLookupCandidateGenerator,
)

from hf_dsde.decoding.drafter import Drafter
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.drafting.per_row import PerRowDrafter
from hf_dsde.execution.wrappers import unwrapped
from hf_dsde.integration import vocabularies
from hf_dsde.integration.heads import is_head
from hf_dsde.measurement.statistics import SpeculationWarning

Assistant = PreTrainedModel | Drafter | CandidateGenerator | None
"""What `assistant_model` takes: a model, a head made for the target, a drafter, a generator of transformers or of the
user's; None where the generation config asks for prompt lookup, or for the target's own layers for multi-token
prediction."""

NGRAM_SIZE = 2
"""Tokens that prompt lookup matches at most where the generation config names no number, as in transformers."""


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
        assistant_tokenizer: The draft's tokenizer, likewise. If both are there and their vocabularies differ, drafts
            are translated through their text, row by row.
    """
    if isinstance(assistant, Drafter):
        return assistant
    if isinstance(assistant, CandidateGenerator):
        return PerRowDrafter(partial(_copied, assistant), owner=assistant)
    if assistant is None and getattr(generation_config, "use_mtp", None):
        generator = _multi_token_predictor(target, generation_config, processors)
        last = target.config.get_text_config(decoder=True).num_hidden_layers
        make, least = partial(_copied, generator), generator.num_mtp_layers or 0
        return PerRowDrafter(make, owner=target, hidden_layers=(last,), least_states=least)
    if assistant is None:
        return PerRowDrafter(partial(_lookup, target, generation_config, processors), owner=target)
    draft = unwrapped("assistant_model", assistant)
    if tokenizer is not None and assistant_tokenizer is not None and not is_head(draft):
        shared = vocabularies.shared_size(target, draft)
        different = vocabularies.differences(tokenizer, assistant_tokenizer, shared)
        if different:
            _warn_of_translation(different)
            make = partial(_translating, draft, generation_config, tokenizer, assistant_tokenizer)
            return PerRowDrafter(make, owner=draft)
    return model_drafter(draft)


def model_drafter(draft: PreTrainedModel) -> ChainDrafter:
    """Return what drafts with a model of the target's vocabulary, or with a head."""
    return HeadDrafter(draft) if is_head(draft) else ModelDrafter(draft)


def _warn_of_translation(different: Sequence[vocabularies.Difference]) -> None:
    warnings.warn(
        f"assistant_tokenizer: {len(different)} token ids differ from the target's "
        f"({vocabularies.examples(different)}), so drafts are translated through their text, row by row. "
        "A draft of the target's tokenizer is much faster.",
        SpeculationWarning,
        stacklevel=2,
    )


def _copied(generator: CandidateGenerator, text: Tensor) -> CandidateGenerator:  # noqa: ARG001 - as `make` is called
    """Copy a generator for a row, but for the models and tokenizers that it holds."""
    shared = [part for part in vars(generator).values() if isinstance(part, (nn.Module, PreTrainedTokenizerBase))]
    return copy.deepcopy(generator, {id(part): part for part in shared})


def _lookup(
    target: PreTrainedModel,
    generation_config: GenerationConfig,
    processors: LogitsProcessorList,
    text: Tensor,  # noqa: ARG001 - as `make` is called
) -> CandidateGenerator:
    """Prompt lookup (Saxena 2023, prompt-lookup-decoding) as transformers does it."""
    config: Any = generation_config
    return PromptLookupCandidateGenerator(
        eos_token_id=config._eos_token_tensor,
        num_output_tokens=config.prompt_lookup_num_tokens,
        max_matching_ngram_size=config.max_matching_ngram_size or NGRAM_SIZE,
        max_length=config.max_length,
        logits_processor=processors,
        vocab_size=target.config.get_text_config().vocab_size,
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
