"""What `generate` makes of its arguments for one prompt: processors, criteria, settings. `generate` itself is asked."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from hf_dsde.batch.requests import Request
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.processing.functions import serves_every_row
from hf_dsde.drafting.translated import TranslatedDrafter
from hf_dsde.integration import encoders, validation
from hf_dsde.integration.drafters import model_of
from hf_dsde.integration.images import IMAGE_ARGUMENTS

OWN_ARGUMENTS = {
    "num_return_sequences": "Repeat the row in the data instead.",
    "num_beams": "A draft is verified against one continuation per row.",
    "streamer": "Use `stream`, which gives texts as they finish.",
    "return_dict_in_generate": "Results carry tokens and statistics anyway.",
    "output_scores": "Results carry text, tokens and statistics.",
    "output_logits": "Results carry text, tokens and statistics.",
    "max_time": "A data set has no common deadline; a job that was stopped is resumed by running it again.",
    "max_length": "Use max_new_tokens: prompts have different lengths.",
    "min_length": "Use min_new_tokens: prompts have different lengths.",
    "assistant_model": "It is an argument of its own.",
    "tokenizer": "It is an argument of its own.",
    "custom_generate": "It would replace the decoding that this is for.",
    "input_ids": "Prompts come with the data.",
    "inputs": "Prompts come with the data.",
    "attention_mask": "Prompts come with the data.",
    **dict.fromkeys(
        sorted(IMAGE_ARGUMENTS),
        "Rows bring text alone; generate prompts with images with model.generate(**processor(images, texts), ...).",
    ),
}
"""Arguments of `generate` that have no meaning, or another place, when rows are texts of their own."""
STOP_CRITERIA_KEPT = 64


@dataclass(frozen=True)
class _Prepared:
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


def _capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> _Prepared:
    """A decoding method for `generate(custom_generate=...)` that decodes nothing."""
    validation.check_call(model, input_ids, logits_processor, generation_config, False, model_kwargs)
    return _Prepared(logits_processor, stopping_criteria, generation_config)


class Preparation:
    """How texts are generated, apart from drafts.

    Args:
        model: The target.
        draft: The draft, which has to suit it, or a drafter.
        tokenizer: Finds stop strings in tokens.
        packed_attention: As in `RuntimeOptions`.
        arguments: Keyword arguments of `generate`.

    Attributes:
        config: The generation config as `generate` completes it for a prompt of one token and one new token.
        do_sample: Whether tokens are drawn.
        end_tokens: Tokens that end a text.
        processors: Logits processors, if they are the same whatever the prompt and its limit; None if each row needs
            its own.

    Raises:
        ValueError: For arguments that have no meaning here, and all that is named in `hf_dsde.integration.validation`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draft: PreTrainedModel | Drafter,
        tokenizer: PreTrainedTokenizerBase,
        packed_attention: bool,
        arguments: dict[str, Any],
    ) -> None:
        for name, way_out in OWN_ARGUMENTS.items():
            value = arguments.get(name)
            if value is None or value is False or (name.startswith("num_") and value == 1):
                continue
            shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}={shown} has no meaning for batch inference. {way_out}")
        validation.check_options(arguments.get("generation_config"), arguments)
        draft_model = model_of(draft)
        encoders.check_jobs(model)
        validation.check_models(model, draft_model, packed_attention)
        if draft_model is not None and not isinstance(draft, TranslatedDrafter):
            validation.check_tokenizers(model, draft_model, tokenizer, arguments.get("assistant_tokenizer"))
        self._model = model
        asked = ("stop_strings", "assistant_tokenizer")
        self._arguments = {name: value for name, value in arguments.items() if name not in asked}
        # Made of the whole vocabulary; data sets repeat a few sets of strings, or have one per row.
        self._stop_criterion = lru_cache(STOP_CRITERIA_KEPT)(partial(_stop_criterion, tokenizer))
        prepared = self._ask([0], 1)
        self.config = _without_tensors(prepared.config)
        mode = GenerationMode.ASSISTED_GENERATION
        if prepared.config.num_beams > 1:
            mode = GenerationMode.BEAM_SEARCH
        validation.check_mode(mode, prepared.config, {"assistant_model": draft})
        self.do_sample = bool(prepared.config.do_sample)
        ends = [c.eos_token_id for c in prepared.criteria if type(c) is EosTokenCriteria]
        self.end_tokens: list[int] = torch.cat(ends).tolist() if ends else []
        own = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self._criteria = [c for c in prepared.criteria if type(c) not in own]
        given = list(map(id, arguments.get("logits_processor") or []))
        same = all(serves_every_row(processor) or id(processor) in given for processor in prepared.processors)
        self.processors: LogitsProcessorList | None = prepared.processors if same else None

    def processors_for(self, request: Request) -> LogitsProcessorList:
        """Return the processors of one prompt, of which some know its length."""
        if self.processors is not None:
            return self.processors
        return self._ask(request.prompt, request.max_new_tokens).processors

    def criteria_for(self, request: Request) -> StoppingCriteriaList:
        """Return the criteria of one prompt beside end tokens and length."""
        criteria = StoppingCriteriaList(self._criteria)
        if request.stop_strings:
            criteria.append(self._stop_criterion(request.stop_strings))
        return criteria

    def _ask(self, prompt: list[int] | tuple[int, ...], max_new_tokens: int) -> _Prepared:
        """Let `generate` prepare a call."""
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        arguments = {**self._arguments, "max_new_tokens": max_new_tokens, "stop_strings": None}
        generate: Any = self._model.generate
        prepared: _Prepared = generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            custom_generate=_capture,
            **arguments,
        )
        return prepared


def _stop_criterion(tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> StopStringCriteria:
    return StopStringCriteria(tokenizer, list(strings))


def _without_tensors(config: GenerationConfig) -> GenerationConfig:
    """Return a copy without what `generate` adds for its own use, which JSON could not hold."""
    clean = copy.copy(config)
    for name in [name for name, value in vars(config).items() if isinstance(value, Tensor)]:
        delattr(clean, name)
    return clean
