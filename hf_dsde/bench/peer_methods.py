"""Other packages as methods of a benchmark, set up for each pair at their first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import mean
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import BatchEncoding

from hf_dsde.bench.methods import Answer, Method, Request, pad_token
from hf_dsde.bench.peers import EconomizePeer, FlashSpecPeer, Peer
from hf_dsde.bench.results import PEER
from hf_dsde.pairs import Pair, end_tokens
from hf_dsde.utils.checks import check_integer


@dataclass(frozen=True)
class PeerBuilder:
    """A peer as a method of the benchmark: built for a pair at its first call, and kept until it is closed.

    Attributes:
        peer: The adapter.
        draft_length: Tokens that the draft model proposes in a round; None leaves it to the package.
        compiled: Whether to ask for compiled code or CUDA graphs, which need a CUDA device. None asks economize for
            them, where they cost seconds, and not flashspec, where they cost minutes.
    """

    peer: type[Peer]
    draft_length: int | None = None
    compiled: bool | None = None
    _built: WeakKeyDictionary[Pair, Peer] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the draft length."""
        if self.draft_length is not None:
            check_integer("draft_length", self.draft_length, 1, way_out="Pass None for the package's own.")

    def refusal(self, batch: int, temperature: float) -> str | None:
        """Why the package cannot decode so many rows, or at this temperature; None when it can."""
        return self.peer.refusal(batch, temperature)

    def build(self, pair: Pair) -> Peer:
        """The peer for a pair, made once per pair. It takes a while, and loads what the package does not have yet.

        Raises:
            ImportError: The package is not installed, or one that it needs.
            ValueError: Compiled code is asked for, and the package has none here.
        """
        if pair not in self._built:
            built = self.peer(
                pair.target, pair.draft, pair.tokenizer, draft_length=self.draft_length, compiled=self.compiled
            )
            if self.compiled and not built.settings["compiled"]:
                built.close()
                raise ValueError(
                    f"`compiled` is True, but {self.peer.package} compiles nothing on {pair.target.device}. "
                    "Use a CUDA device, or leave `compiled` out."
                )
            self._built[pair] = built
        return self._built[pair]

    def __call__(self, pair: Pair, inputs: BatchEncoding, request: Request) -> Answer:
        """Answer a batch, as `Method` does. The statistics hold the peer's settings as well."""
        reason = self.refusal(len(inputs["input_ids"]), request.temperature)
        if reason is not None:
            raise ValueError(reason)
        peer = self.build(pair)
        output = peer.generate(
            inputs["input_ids"],
            inputs["attention_mask"],
            request.new_tokens,
            request.temperature,
            end_tokens(pair) if request.stop_at_eos else (),
        )
        sequences = torch.cat([inputs["input_ids"], output.padded(pad_token(pair))], dim=1)
        return Answer(sequences, output.statistics() | {"settings": peer.settings})

    def close(self) -> None:
        """Close what was built. A later call builds anew."""
        for peer in list(self._built.values()):
            peer.close()
        self._built.clear()


PEERS: dict[str, PeerBuilder] = {
    "economize": PeerBuilder(EconomizePeer),
    "economize_eager": PeerBuilder(EconomizePeer, compiled=False),
    "flashspec": PeerBuilder(FlashSpecPeer),
    "flashspec_compiled": PeerBuilder(FlashSpecPeer, compiled=True),
}
"""All peers by name."""


class PeerMethod(Method):
    """Another package.

    Args:
        name: What results call it.
        peer: Calls the package.
    """

    kind = PEER
    compiles = True

    def __init__(self, name: str, peer: PeerBuilder) -> None:
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
