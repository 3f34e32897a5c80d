"""Calls that end in some way, decoded plainly and speculatively and compared token for token.

Drafts that agree with the target make a round of `DRAFTED` tokens emit exactly `BLOCK`, so that an end can be put at
any offset of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import noisy_copy, ragged_batch, tiny_model
from tiny_policies import ScriptedLengths
from tiny_text import tiny_tokenizer
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import hf_dsde

DRAFTED = 4
BLOCK = DRAFTED + 1
STEPS = 3 * BLOCK
PROMPTS = (3, 7, 1)
PROMPT_WIDTH = max(PROMPTS)
SEED = 1
"""Of prompts whose endless texts use many different tokens."""


@cache
def target() -> PreTrainedModel:
    """A target that knows no end-of-sequence token by itself: each test names its own."""
    model = hf_dsde.enable(tiny_model("llama"))
    model.generation_config.eos_token_id = None
    return model


@cache
def half_agreeing() -> PreTrainedModel:
    return noisy_copy(target(), 0.05)


def in_blocks(rows: int) -> ScriptedLengths:
    return ScriptedLengths([[DRAFTED] * rows])


@cache
def endless_text(lengths: tuple[int, ...], seed: int = SEED) -> list[list[int]]:
    """New tokens of each row when nothing ends it."""
    batch = ragged_batch(lengths, seed=seed)
    output = target().generate(**batch, do_sample=False, max_new_tokens=STEPS + 1)
    return output[:, batch["input_ids"].shape[1] :].tolist()


def decode(
    batch: dict[str, torch.Tensor],
    policy: hf_dsde.StoppingPolicy,
    draft: PreTrainedModel | None = None,
    criteria: Callable[[], Sequence[StoppingCriteria]] = list,
    **arguments: Any,
) -> tuple[torch.Tensor, Any]:
    """Decode plainly and speculatively, assert that the texts are equal, return the plain one and our output.

    Criteria may count, so each call gets its own.
    """
    arguments = {"do_sample": False, "max_new_tokens": STEPS, **arguments, "return_dict_in_generate": True}
    plain = target().generate(**batch, stopping_criteria=StoppingCriteriaList(criteria()), **arguments)
    ours = target().generate(
        **batch,
        stopping_criteria=StoppingCriteriaList(criteria()),
        assistant_model=target() if draft is None else draft,
        speculation_policy=policy,
        **arguments,
    )
    assert ours.sequences.tolist() == plain.sequences.tolist()
    emitted = sum(row.emitted for row in ours.speculation_statistics.rows)
    width = plain.sequences.shape[1] - batch["input_ids"].shape[1]
    assert emitted <= width * len(plain.sequences)
    return plain.sequences, ours


def prompts() -> dict[str, torch.Tensor]:
    return ragged_batch(PROMPTS, seed=SEED)


def stop_arguments(strings: str | list[str]) -> dict[str, Any]:
    return {"stop_strings": strings, "tokenizer": tiny_tokenizer()}


def with_stepping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look that a time limit takes at the clock take a second."""
    seconds = count(1)
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
