"""A recorded trace of a tiny pair, with the texts it was recorded on, for the tests to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_pair import tiny_pair

from hf_dsde.pairs import Pair, encode
from hf_dsde.trace import Prompt, Trace, load_trace, record_trace

PROMPTS = (
    Prompt("letters", "a"),
    Prompt("letters", "abcdeHgJk"),
    Prompt("pairs", "fedcbaGhIjKlMn" * 3),
    Prompt("pairs", "GhIjKlGhIj"),
    Prompt("pairs", "Tu"),
)
NEW_TOKENS = 30
DRAFT_LENGTH = 5


@dataclass(frozen=True)
class Recorded:
    """A trace, the pair it is of, and what is needed to compute it again."""

    pair: Pair
    trace: Trace
    prompts: tuple[Prompt, ...] = PROMPTS

    @property
    def committed(self) -> list[dict[str, Any]]:
        return self.trace.committed.to_pylist()

    @property
    def drafted(self) -> list[dict[str, Any]]:
        return self.trace.drafted.to_pylist()

    def prompt_tokens(self, sequence: int) -> list[int]:
        text = self.prompts[sequence % len(self.prompts)].text
        return encode(self.pair.tokenizer, [text])["input_ids"][0].tolist()

    def answer(self, sequence: int) -> list[int]:
        return [row["token"] for row in self.committed if row["sequence"] == sequence]

    def logits(self, tokens: list[int]) -> tuple[list[list[float]], list[list[float]]]:
        """Both models' logits after every token of a text, from a plain pass of that text alone."""
        text = torch.tensor([tokens])
        with torch.no_grad():
            target, draft = (model(text).logits[0].tolist() for model in (self.pair.target, self.pair.draft))
        return target, draft


def record(folder: Path, **changes: Any) -> Recorded:
    """Record the tiny pair in float64; the end of text is off unless a pair is given, so that answers are long."""
    pair = changes.pop("pair", None)
    if pair is None:
        pair = tiny_pair(torch.float64)
        pair.target.generation_config.eos_token_id = None
    settings = {"max_new_tokens": NEW_TOKENS, "batch_size": 2, "draft_length": DRAFT_LENGTH, "seed": 3, **changes}
    prompts = settings.pop("prompts", PROMPTS)
    record_trace(pair, prompts, folder, **settings)
    return Recorded(pair, load_trace(folder), tuple(prompts))
