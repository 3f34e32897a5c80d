"""A small batch, a target and a draft that the tests of calls and options share."""

from __future__ import annotations

from functools import cache
from typing import Any

from tiny_models import noisy_copy, ragged_batch, tiny_model
from transformers import PreTrainedModel

NEW_TOKENS = 12
BATCH = ragged_batch((3, 6, 1), seed=1)
ARGUMENTS: dict[str, Any] = {**BATCH, "do_sample": False, "max_new_tokens": NEW_TOKENS}


@cache
def untouched() -> PreTrainedModel:
    """A target that is never enabled."""
    return tiny_model("llama")


@cache
def draft() -> PreTrainedModel:
    return noisy_copy(untouched(), 0.05)


@cache
def plain_text() -> list[list[int]]:
    return untouched().generate(**ARGUMENTS).tolist()


def model() -> PreTrainedModel:
    """A target of the test's own, not enabled yet."""
    return tiny_model("llama")
