"""From the arguments of `generate` to the parts of a loop, and from the loop's result to the output of `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_dsde import compat
from hf_dsde.config import SpeculationConfig
from hf_dsde.decoding.loop import SpeculativeLoop
from hf_dsde.decoding.recording import Recording, StepRecorder
from hf_dsde.decoding.sampling import BlockProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stopping import Stopping, length_limit
from hf_dsde.decoding.token_feed import TokenFeed
from hf_dsde.execution.wrappers import may_depend_on_rows
from hf_dsde.integration import encoders, validation
from hf_dsde.integration.drafters import Assistant, drafter_for, model_of
from hf_dsde.integration.images import prompt_inputs
from hf_dsde.integration.loop_builder import build_loop
from hf_dsde.integration.outputs import (
    SpeculativeEncoderDecoderOutput,
    SpeculativeGenerateOutput,
    SpeculativeOutput,
)
from hf_dsde.lossy_acceptance import described, warn_once
from hf_dsde.measurement.rounds import RoundListener
from hf_dsde.measurement.statistics import StatisticsRecorder
from hf_dsde.policies.base import StoppingPolicy

RESERVED_NEW_TOKENS = 1024
"""Generated tokens per row that caches have room for from the start; longer texts let them grow."""


@dataclass(frozen=True)
class Speculation:
    """How one call speculates, and who listens.

    Attributes:
        policy: Decides how much is drafted.
        config: Everything else that can be set.
        listeners: Hear of every round.
        assistant: What drafts, if a `generate` of the model's own must not see it: Whisper's changes the generation
            configs of both models where there is an assistant, and text then need not be that of plain decoding.
        inputs: What prompts bring along beside their tokens, as it was given; None if nobody knows.
    """

    policy: StoppingPolicy
    config: SpeculationConfig
    listeners: tuple[RoundListener, ...] = ()
    assistant: Assistant = None
    inputs: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        policy: str | StoppingPolicy | SpeculationConfig | None,
        config: SpeculationConfig | None,
        listeners: Iterable[RoundListener] = (),
        assistant: Assistant = None,
    ) -> Speculation:
        """Read `speculation_policy`, `speculation_config` and `speculation_listeners`.

        Args:
            policy: A policy's name, a policy, or a `SpeculationConfig`. None leaves the choice to `config`.
            config: Every other setting, and the policy when `policy` is None.
            listeners: Hear of every round.
            assistant: What drafts, unless it comes another way.

        Raises:
            TypeError: If any is of another type.
            ValueError: If a `SpeculationConfig` is given twice, or the name is unknown.
        """
        listeners = tuple(listeners)
        for listener in listeners:
            if not isinstance(listener, RoundListener):
                msg = f"speculation_listeners: expected hf_dsde.RoundListener objects, got {type(listener).__name__}."
                raise TypeError(msg)
        if config is not None and not isinstance(config, SpeculationConfig):
            msg = f"speculation_config: expected a SpeculationConfig, got {type(config).__name__}."
            raise TypeError(msg)
        if isinstance(policy, SpeculationConfig):
            if config is not None:
                msg = (
                    "speculation_config: a SpeculationConfig was already given as speculation_policy; pass one of them."
                )
                raise ValueError(msg)
            return cls(policy.build_policy(), policy, listeners, assistant)
        config = config or SpeculationConfig()
        if policy is None:
            return cls(config.build_policy(), config, listeners, assistant)
        if isinstance(policy, StoppingPolicy):
            return cls(config.capped(policy), config, listeners, assistant)
        if isinstance(policy, str):
            if policy == config.policy:
                return cls(config.build_policy(), config, listeners, assistant)
            return cls(config.replace(policy=policy, policy_arguments={}).build_policy(), config, listeners, assistant)
        msg = (
            f"speculation_policy: expected a policy's name, a StoppingPolicy or a SpeculationConfig, got "
            f"{type(policy).__name__}."
        )
        raise TypeError(msg)


def generate_speculatively(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    speculation: Speculation,
    *,
    assistant_model: Assistant = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """Run the loop on what `generate` has prepared. Arguments are those of transformers' decoding methods.

    `inputs_tensor` is what an encoder reads.

    Raises:
        ValueError: For any reason named in `hf_dsde.integration.validation`.
    """
    if speculation.config.acceptance is not None:
        warn_once(speculation.config.acceptance)
    validation.check_call(model, input_ids, logits_processor, generation_config, synced_gpus, model_kwargs)
    drafter = drafter_for(model, assistant_model, generation_config, logits_processor, tokenizer, assistant_tokenizer)
    config = speculation.config
    if may_depend_on_rows(model) or drafter.depends_on_rows:  # then all rows stay in, each at its place
        config = config.replace(options=config.options.replace(drop_finished_rows=False))
    limit = length_limit(stopping_criteria, generation_config.max_length)
    mask = compat.prompt_mask(input_ids, model_kwargs)
    given = speculation.inputs if generation_config.num_return_sequences == 1 else None  # else of fewer rows
    sequences = SequenceBatch(
        input_ids,
        mask,
        max_new_tokens=max(limit - input_ids.shape[1], 1),
        scratch=config.max_draft_length + 1,
        pad_token=_scalar(generation_config._pad_token_tensor),
        inputs=prompt_inputs(model, input_ids, mask, model_kwargs, given),
    )
    encoded = encoders.target_states(model, sequences, model_kwargs)
    new_tokens = min(sequences.max_new_tokens, RESERVED_NEW_TOKENS)
    capacity = max(sequences.prompt_lengths) + new_tokens + config.max_draft_length
    wants_scores = generation_config.return_dict_in_generate and generation_config.output_scores
    wants_logits = generation_config.return_dict_in_generate and generation_config.output_logits
    recording = Recording(
        scores=StepRecorder(sequences.rows) if wants_scores else None,
        logits=StepRecorder(sequences.rows) if wants_logits else None,
    )
    recorder = StatisticsRecorder(sequences.rows, speculation.policy.name, described(config.acceptance))
    loop = build_loop(
        SpeculativeLoop,
        model,
        drafter,
        sequences,
        capacity=capacity,
        policy=speculation.policy,
        process=BlockProcessor(logits_processor),
        stopping=Stopping(stopping_criteria, sequences),
        statistics=recorder,
        do_sample=bool(generation_config.do_sample),
        config=config,
        recording=recording,
        feed=TokenFeed(streamer, sequences.rows),
        listeners=speculation.listeners,
        encoded=encoded,
        draft_encoded=encoders.draft_states(model, model_of(drafter), encoded, inputs_tensor),
    )
    text, lengths = loop.run()
    statistics = recorder.finish(lengths, loop.recording_costs)
    if loop.probes_cost:  # the odd plain round of a shorter call is too little to judge by
        statistics.warn_if_losing()
    if not generation_config.return_dict_in_generate:
        return text
    fields: dict[str, Any] = {
        "sequences": text,
        "scores": None if recording.scores is None else recording.scores.steps(max(lengths)),
        "logits": None if recording.logits is None else recording.logits.steps(max(lengths)),
    }
    if encoded is None:
        return SpeculativeGenerateOutput(**fields, speculation_statistics=statistics)
    return SpeculativeEncoderDecoderOutput(**fields).with_statistics(statistics)


def _scalar(token: torch.Tensor | None) -> int | None:
    return None if token is None else int(token.reshape(-1)[0])
