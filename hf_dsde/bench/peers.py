"""Other published implementations of assisted decoding, behind one interface, so that a benchmark can run them.

Each adapter drives a package through its documented interface, at its own defaults where nothing else is asked for, on
models that are already in memory. The packages are optional and imported at the first call:

- `economize` decodes batches of prompts of any lengths. Its technique `draft_model` loads the draft from a folder, so
  the adapter saves the draft to a temporary one, and the device holds it twice. On CUDA devices it replays CUDA graphs,
  each recorded when a shape (rows in the pass, tokens per row) comes for the third time. Rows that have ended leave its
  passes, so that some shapes come once in a call; the first call of a kind is therefore made three times over. A large
  batch ends row by row, and a graph for each number of rows may fill the device's memory: `economize_eager` runs its
  passes kernel by kernel.
- `flashspec` decodes one sequence. As it comes, it copies a draft from the text where the last words occur before, and
  asks the draft model elsewhere. `flashspec_compiled` is its compiled path, whose first call takes minutes on large
  models.

This module knows how to call the peers and what they report. It holds no clock, and compares nothing.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde.utils.checks import check_integer, check_number

SEEDS = 2**31
"""Seeds for samplers of a peer's own are drawn below this."""
REHEARSALS = 2
"""Calls before the first of its kind where CUDA graphs are recorded: economize runs each shape twice before."""
Rounds = list[tuple[int, int]]
"""Drafted and accepted tokens of each row's rounds that had a draft, the rows one after another."""


@dataclass(frozen=True)
class PeerOutput:
    """What one call generated.

    Attributes:
        rows: Each row's generated ids, int64, `[its own number]`: all that was generated, the end token included.
        rounds: What was drafted and accepted.
    """

    rows: tuple[Tensor, ...]
    rounds: Rounds

    @property
    def tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(len(row) for row in self.rows)

    def padded(self, pad: int) -> Tensor:
        """All rows, int64, `[rows, longest]`, with `pad` behind the shorter ones."""
        return pad_sequence(list(self.rows), batch_first=True, padding_value=pad)

    def statistics(self) -> dict[str, Any]:
        """What the peer reports of its rounds, under the names of `CaseResult.statistics`.

        A round emits the accepted tokens and one more. Rounds are counted as the peer made them, with tokens behind a
        text's end, which this package's own counts leave out: of little weight unless texts are short.
        """
        statistics: dict[str, Any] = {"emitted": self.tokens}
        longest = max((drafted for drafted, _ in self.rounds), default=0)
        if not longest:
            return statistics
        drafted_at = [sum(drafted > place for drafted, _ in self.rounds) for place in range(longest)]
        accepted_at = [sum(accepted > place for _, accepted in self.rounds) for place in range(longest)]
        return statistics | {
            "acceptance_rate": sum(accepted_at) / sum(drafted_at),
            "acceptance_by_position": [a / d for a, d in zip(accepted_at, drafted_at, strict=True)],
            "drafted_by_position": drafted_at,
            "accepted_by_position": accepted_at,
            "mean_draft_length": sum(drafted_at) / len(self.rounds),
            "tokens_per_round": 1 + sum(accepted_at) / len(self.rounds),
        }


class Peer(ABC):
    """A package set up for a target and a draft; the constructor takes them and what `PeerBuilder` describes.

    Attributes:
        settings: What defines the method, as JSON holds it; `compiled` says what runs, not what was asked for.
    """

    package: ClassVar[str]
    """The package's name, to import and to install."""
    tested_version: ClassVar[str]
    """The version that the adapter was written for."""
    settings: dict[str, Any]

    @abstractmethod
    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        draft_length: int | None,
        compiled: bool | None,
    ) -> None: ...

    @classmethod
    @abstractmethod
    def refusal(cls, batch: int, temperature: float) -> str | None:
        """Why the package cannot decode so many rows, or at this temperature; None when it can."""

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        new_tokens: int,
        temperature: float,
        end: Sequence[int] = (),
    ) -> PeerOutput:
        """Continue a batch of prompts.

        Draws come from torch's global generators, so that `torch.manual_seed` before the call makes it repeatable.

        Args:
            input_ids: Padded prompts, int64, `[rows, width]`, on the models' device.
            attention_mask: 0 where `input_ids` is padding, 1 elsewhere, same shape.
            new_tokens: The most tokens each row gains, and exactly so many when nothing ends it.
            temperature: 0 is greedy. Nothing else changes the distributions.
            end: Tokens that end a row.

        Raises:
            ValueError: The package cannot do this; see `refusal`.
        """
        check_integer("new_tokens", new_tokens, 1)
        check_number("temperature", temperature, 0)
        reason = self.refusal(len(input_ids), temperature)
        if reason is not None:
            raise ValueError(reason)
        prompts = [row[mask.bool()] for row, mask in zip(input_ids, attention_mask, strict=True)]
        with torch.no_grad():
            rows, rounds = self._decode(prompts, new_tokens, temperature, tuple(end))
        return PeerOutput(tuple(rows), rounds)

    @abstractmethod
    def _decode(
        self, prompts: list[Tensor], new_tokens: int, temperature: float, end: tuple[int, ...]
    ) -> tuple[list[Tensor], Rounds]: ...

    @abstractmethod
    def close(self) -> None:
        """Let go of all that the package holds, and leave the models as they were. Closing twice does nothing."""


class EconomizePeer(Peer):
    """economize with its technique `draft_model`: one draft length for all rows."""

    package = "economize"
    tested_version = "0.3.2"

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        draft_length: int | None,
        compiled: bool | None,
    ) -> None:
        self._economize = _import("economize", self)
        technique = _import("economize.techniques.draft_model", self)
        # It takes a draft by folder only, and reads it at once.
        with tempfile.TemporaryDirectory(prefix="hf-dsde-peer-") as folder:
            draft.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            self._model: Any = self._economize.apply(target, technique.DraftModelConfig(model=folder))
        options: dict[str, Any] = {"cuda_graphs": compiled is not False}
        if draft_length is not None:
            # A cycle is a draft and the token that the target's pass adds.
            options["cycle_length"] = draft_length + 1
        self._greedy = self._economize.DecodeConfig(**options)
        self._sampling = self._economize.DecodeConfig(**options, verifier="rejection")
        self.settings = {
            "package": self.package,
            "version": _version(self.package),
            "draft_length": self._greedy.cycle_length - 1,
            "compiled": self._model.decoder(self._greedy).graphs is not None,
        }
        self._rehearsed: set[tuple[int, ...]] = set()

    @classmethod
    def refusal(cls, batch: int, temperature: float) -> str | None:  # noqa: ARG003
        """None: it decodes any number of rows, greedily and sampling."""
        return None

    def _decode(
        self, prompts: list[Tensor], new_tokens: int, temperature: float, end: tuple[int, ...]
    ) -> tuple[list[Tensor], Rounds]:
        # Its sampler has generators of its own; a seed out of the global one lets the caller govern them.
        seed = int(torch.randint(SEEDS, ())) if temperature > 0 else 0
        kind = (new_tokens, int(temperature > 0), *(len(prompt) for prompt in prompts))
        rehearsals = REHEARSALS if self.settings["compiled"] and kind not in self._rehearsed else 0
        self._rehearsed.add(kind)
        for _ in range(rehearsals):
            self._decode_once(prompts, new_tokens, temperature, end, seed)
        results = self._decode_once(prompts, new_tokens, temperature, end, seed)
        return [result.tokens for result in results], [pair for result in results for pair in result.acceptance]

    def _decode_once(
        self, prompts: list[Tensor], new_tokens: int, temperature: float, end: tuple[int, ...], seed: int
    ) -> list[Any]:
        how: dict[str, Any] = {"decoding": self._greedy}
        if temperature > 0:
            sampler = self._economize.TopPSampler(temperature=temperature, seed=seed)
            how = {"decoding": self._sampling, "selector": sampler}
        results: list[Any] = self._model.decode_batch(prompts, new_tokens, stop=list(end) or None, **how)
        return results

    def close(self) -> None:
        """Take the technique off the target, and drop the copy of the draft, the caches and the graphs."""
        if self._model is not None:
            self._model.detach()
        self._model = None
        _free_memory()


class FlashSpecPeer(Peer):
    """flashspec on its path for a single sequence, for which it has two caches per model: growing, or compiled.

    A `draft_length` asks for the draft model alone, at that length, in place of the package's mixture with copying.
    """

    package = "flashspec"
    tested_version = "0.3.1"

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,  # noqa: ARG002
        *,
        draft_length: int | None,
        compiled: bool | None,
    ) -> None:
        self._flashspec = _import("flashspec", self)
        target_type = _import("flashspec.engine.verifier", self).TargetModel
        draft_type = _import("flashspec.engine.hf_drafter", self).HuggingFaceDrafter
        self._target: Any = target_type("target", target.device, target.dtype, model=target)
        self._draft: Any = draft_type("draft", target.device, draft.dtype, model=draft)
        self._options: dict[str, Any] = {"device": str(target.device), "compile": compiled is True}
        self._sampling: dict[str, Any] = {}
        if draft_length is not None:
            self._sampling = {"gamma": draft_length}
            # A bandit with one arm has nothing to choose.
            self._options |= {"drafter_strategy": "bandit", "bandit": self._flashspec.BanditConfig(n_arms=1)}
        self._engines: dict[float, Any] = {}
        arm, self._compiled = self._engine(0.0).arms[0], bool(self._engine(0.0).compiled)
        self.settings = {
            "package": self.package,
            "version": _version(self.package),
            "strategy": self._engine(0.0).drafter_strategy,
            "draft_length": arm.step_gamma(fallback=True),
            "lookup_length": None if arm.fallback is None else arm.gamma,
            "compiled": self._compiled,
        }

    @classmethod
    def refusal(cls, batch: int, temperature: float) -> str | None:  # noqa: ARG003
        """A reason for more than one row."""
        if batch == 1:
            return None
        return (
            f"flashspec decodes one row, not {batch}: given more, it takes no attention mask, so that it would read "
            "padding as text, and computes every text anew in each round"
        )

    def _engine(self, temperature: float) -> Any:
        """The engine of a temperature: an engine's sampling is fixed, while the models' wrappers can be shared."""
        if temperature not in self._engines:
            sampling = self._flashspec.SamplingConfig(temperature=temperature, **self._sampling)
            config = self._flashspec.FlashSpecConfig(sampling=sampling, **self._options)
            self._engines[temperature] = self._flashspec.SpeculativeEngine(config, [self._draft], self._target)
        return self._engines[temperature]

    def _decode(
        self, prompts: list[Tensor], new_tokens: int, temperature: float, end: tuple[int, ...]
    ) -> tuple[list[Tensor], Rounds]:
        engine = self._engine(temperature)
        self._draft.set_temperature(temperature)
        result = engine.generate(prompts[0][None], max_new_tokens=new_tokens, eos_token_ids=end)
        # It fills up with -1 behind the end.
        row = result.output_ids[0, : result.n_tokens_generated]
        return [row], [(step.proposed, step.accepted) for step in result.arm_steps]

    def close(self) -> None:
        """Drop caches and engines, and with compiled ones all that torch has compiled: its graphs hold the caches."""
        self._engines.clear()
        self._target = self._draft = None
        if self._compiled:
            torch.compiler.reset()
        self._compiled = False
        _free_memory()


def _import(module: str, peer: Peer) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise ImportError(
            f"The peer {peer.package} cannot be imported: {missing}. Install it with "
            f"`pip install {peer.package}=={peer.tested_version}`."
        ) from missing


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
