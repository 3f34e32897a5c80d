"""What ours is compared with: the decoding modes of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import BatchEncoding

from hf_dsde.bench.methods import Answer, Method, Request
from hf_dsde.bench.results import BASELINE
from hf_dsde.pairs import Pair

STATIC_CACHE_STATE = ("_cache", "_previous_max_cache_length", "_compiled_call", "_last_compile_config")
"""Attributes that `generate` with a static cache leaves on a model: a later call would take the size of an earlier."""
PROMPT_LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes at most, as its author has it (Saxena 2023, prompt-lookup-decoding)."""


class BaselineMethod(Method):
    """A decoding mode of transformers.

    Args:
        name: What results call it.
        arguments: Of `generate`, beyond the request's, for a pair.
        single_row: Whether it takes one row only.
        compiles: Whether it may leave compiled code behind.
    """

    kind = BASELINE

    def __init__(
        self,
        name: str,
        arguments: Callable[[Pair], dict[str, Any]],
        *,
        single_row: bool = False,
        compiles: bool = False,
    ) -> None:
        self.name, self.compiles = name, compiles
        self._arguments, self._single_row = arguments, single_row

    def refusal(self, rows: int, temperature: float) -> str | None:  # noqa: ARG002
        """A reason for more than one row where transformers takes no more."""
        return f"{self.name} of transformers takes one row, not {rows}" if self._single_row and rows > 1 else None

    def __call__(self, pair: Pair, inputs: BatchEncoding, request: Request) -> Answer:
        """Answer a batch; see `Method`."""
        target: Any = pair.target
        with own_generation_configs(pair):
            return Answer(target.generate(**inputs, **request.arguments(pair), **self._arguments(pair)))


BASELINES: dict[str, BaselineMethod] = {
    method.name: method
    for method in (
        BaselineMethod("generate", lambda _: {}),
        # On an accelerator, transformers compiles the decoding steps of a static cache by itself.
        BaselineMethod("generate_static", lambda _: {"cache_implementation": "static"}, compiles=True),
        BaselineMethod("assisted", lambda pair: {"assistant_model": pair.draft}, single_row=True),
        BaselineMethod("prompt_lookup", lambda _: {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}, single_row=True),
    )
}


def parse_baseline(name: str) -> Method:
    """The method of a baseline's name.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in BASELINES:
        raise ValueError(f"`baseline` is {name!r}, but one of {', '.join(map(repr, BASELINES))} is needed.")
    return BASELINES[name]


@contextmanager
def own_generation_configs(pair: Pair) -> Iterator[None]:
    """Give both models copies of their generation configs for a while.

    Assisted generation adapts its number of draft tokens in the draft's, so that a call would depend on those before.
    """
    originals: list[tuple[Any, Any]] = [(model, model.generation_config) for model in (pair.target, pair.draft)]
    for model, config in originals:
        model.generation_config = copy.deepcopy(config)
    try:
        yield
    finally:
        for model, config in originals:
            model.generation_config = config


def forget_static_cache(pair: Pair) -> None:
    """Take from the models what a static cache left on them, so that the next cell starts afresh."""
    for model in (pair.target, pair.draft):
        for name in STATIC_CACHE_STATE:
            model.__dict__.pop(name, None)
