"""Putting a loop together from two models and a batch: for `generate`, for jobs and for traces."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import PreTrainedModel

from hf_dsde.config import SpeculationConfig
from hf_dsde.decoding.drafter import DraftCall, Drafter
from hf_dsde.decoding.loop import SpeculativeLoop
from hf_dsde.decoding.recording import Recording
from hf_dsde.decoding.sampling import ScoreProcessor
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.token_feed import TokenFeed
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.encoder_states import EncoderStates
from hf_dsde.execution.workspaces import workspaces
from hf_dsde.integration.drafters import model_of

Loop = TypeVar("Loop", bound=SpeculativeLoop)

PACKING_MIN_TOKENS = 32
"""Calls that may emit fewer tokens than this do not pack weights: that takes as long as four or five plain steps, and
each round then saves about half of one."""


def build_loop(
    kind: type[Loop],
    model: PreTrainedModel,
    drafter: Drafter,
    sequences: SequenceBatch,
    *,
    capacity: int,
    process: ScoreProcessor,
    do_sample: bool,
    config: SpeculationConfig,
    cache_limit: int | None = None,
    recording: Recording | None = None,
    feed: TokenFeed | None = None,
    encoded: EncoderStates | None = None,
    draft_encoded: EncoderStates | None = None,
    more_texts: bool = False,
    **parts: Any,
) -> Loop:
    """Return a loop over a batch.

    Args:
        kind: Class of the loop.
        model: The target.
        drafter: Proposes tokens; is started here.
        sequences: The batch, with its prompts.
        capacity: Tokens per row that the caches have room for from the start.
        process: Logits processors.
        do_sample: Sample if True, decode greedily otherwise.
        config: Everything else that can be set.
        cache_limit: Tokens per row up to which caches grow ahead of need; None for no limit.
        recording: Where scores and logits go; None for nowhere.
        feed: Takes tokens as soon as they are certain; None if nobody does.
        encoded: What rows bring along for a target that reads an encoder's states; None for other targets.
        draft_encoded: Likewise for a draft.
        more_texts: Whether rows may begin other texts.
        **parts: The loop's other arguments.
    """
    if config.options.keep_memory is None:
        draft = model_of(drafter)
        if model.training:  # its training takes the memory next
            config = config.replace(options=config.options.replace(keep_memory=False))
        elif draft is not None:
            workspaces.join(model, draft)
    if sequences.max_new_tokens < PACKING_MIN_TOKENS and not more_texts:
        config = config.replace(options=config.options.replace(packed_weights=False))
    vocabulary_size = model.config.get_text_config(decoder=True).vocab_size
    target = create_runner(
        model,
        sequences.rows,
        capacity,
        config.options,
        config.runner,
        hidden_layers=drafter.hidden_layers,
        encoded=encoded,
    )
    target.cache.limit = cache_limit
    target.keeps_stored_states = drafter.reads_prompt_states
    drafter.start(
        DraftCall(sequences, vocabulary_size, process, do_sample, capacity, cache_limit, config, target, draft_encoded)
    )
    return kind(
        target=target,
        drafter=drafter,
        sequences=sequences,
        process=process,
        do_sample=do_sample,
        config=config,
        recording=recording or Recording(),
        feed=feed or TokenFeed(None, sequences.rows),
        **parts,
    )
