"""What ours is compared with: the decoding modes of transformers, and peers, which are other published packages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from statistics import mean
from typing import Any, Protocol, cast

from transformers import BatchEncoding

from hf_dsde.bench.methods import Answer, Method, Request, pad_token
from hf_dsde.bench.results import BASELINE, PEER
from hf_dsde.pairs import Pair

__all__ = ["BASELINES", "Answer", "Request", "pad_token", "parse_baseline"]

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


class Peer(Protocol):
    """Another implementation, as `hf_dsde.bench.peers.PEERS` holds it."""

    def refusal(self, batch: int, temperature: float) -> str | None:
        """Why it cannot decode so many rows, or at this temperature; None when it can."""
        ...

    def __call__(self, pair: Pair, inputs: BatchEncoding, request: Request) -> Answer:
        """Answer a batch, as `Method` does. It is set up at its first call."""
        ...

    def close(self) -> None:
        """Let go of what was set up."""
        ...


class PeerMethod(Method):
    """Another package.

    Args:
        name: What results call it.
        peer: Calls the package.
    """

    kind = PEER
    compiles = True

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self._peer = peer

    def refusal(self, rows: int, temperature: float) -> str | None:
        """What the peer says."""
        return self._peer.refusal(rows, temperature)

    def __call__(self, pair: Pair, inputs: BatchEncoding, request: Request) -> Answer:
        """Answer a batch; see `Method`."""
        answer = self._peer(pair, inputs, request)
        self.settings = (answer.statistics or {}).get("settings", {})
        return answer

    def summarise(self, answers: Sequence[Answer], seconds: float) -> dict[str, Any] | None:  # noqa: ARG002
        """Counts added up, with the ratios that follow; the mean over the calls of other numbers."""
        parts = [answer.statistics for answer in answers if answer.statistics]
        if not parts:
            return None
        counted = {
            name: [sum(column) for column in zip_longest(*(part.get(name, []) for part in parts), fillvalue=0)]
            for name in ("drafted_by_position", "accepted_by_position")
        }
        drafted, accepted = counted.values()
        summary: dict[str, Any] = {"emitted": sum(part.get("emitted", 0) for part in parts)}
        for name in ("mean_draft_length", "tokens_per_round"):
            known = [part[name] for part in parts if part.get(name) is not None]
            summary |= {name: mean(known)} if known else {}
        if drafted:
            summary |= counted | {
                "acceptance_rate": sum(accepted) / sum(drafted),
                "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
            }
        return summary

    def close(self) -> None:
        """Close the peer."""
        self._peer.close()


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
    """The method of a baseline's or a peer's name.

    Raises:
        ValueError: There is none of this name.
    """
    if name in BASELINES:
        return BASELINES[name]
    peers = _peers()
    if name not in peers:
        known = ", ".join(map(repr, [*BASELINES, *peers]))
        raise ValueError(f"`baseline` is {name!r}, but one of {known} is needed.")
    return PeerMethod(name, peers[name])


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


def _peers() -> Mapping[str, Peer]:
    # They import what a method is from here.
    from hf_dsde.bench.peers import PEERS

    return cast("Mapping[str, Peer]", PEERS)
