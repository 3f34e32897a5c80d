"""Calls in which texts and a model draft together: what draws on texts that a test knows, and prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiny_calls import QUIET, config_of, plain
from torch import Tensor

import hf_dsde
from hf_dsde.costs import CostModel
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.text_drafter import TextDrafter


def priced(draft_step: float, column: float = 0.0) -> hf_dsde.SpeculationConfig:
    """Settings with given costs: a plain step takes 1, a draft step so much, a further column likewise."""
    costs = CostModel.relative(draft_step, [1.0 + column * width for width in range(33)]).to_dict()
    return config_of(QUIET, costs=costs, cost_cap=False, refresh_costs=False)


CHEAP, DEAR = priced(0.001), priced(50.0)
"""Draft steps that are always worth it, and ones that never are where a text knows anything."""


class Tokens(list[int]):
    """A text as it is."""


class Knowing(TextDrafter[Tokens]):
    """Knows how some texts go on, but for every seventh token, and lets no score be trusted."""

    def __init__(self, *texts: Sequence[int], longest: int = 99) -> None:
        super().__init__()
        self._known, self._longest = [list(text) for text in texts], longest

    def new_text(self) -> Tokens:
        return Tokens()

    def continuation(self, text: Tokens, most: int) -> Continuation:
        end = len(text)
        known = next((each for each in self._known if each[:end] == list(text)), [])
        tokens = [token if place % 7 else 5 for place, token in enumerate(known)][end : end + min(most, self._longest)]
        return Continuation(tokens, float(len(tokens)), end) if tokens else NOTHING


class Astray(Knowing):
    """Proposes tokens that follow from the text's last one and nothing else."""

    def continuation(self, text: Tokens, most: int) -> Continuation:
        tokens = [(3 * text[-1] + 2 * step) % 5 for step in range(min(most, self._longest))]
        return Continuation(tokens, float(len(tokens)), 1)


def known(target: Any, inputs: dict[str, Tensor], new_tokens: int, **options: Any) -> list[list[int]]:
    """What a target makes of prompts, without padding."""
    text = plain(target, inputs, max_new_tokens=new_tokens, **options)
    first = inputs["attention_mask"].argmax(dim=1).tolist()
    return [row[begin:] for row, begin in zip(text.tolist(), first, strict=True)]


def mixed(rounds: Sequence[CandidateBatch]) -> int:
    """Rounds in which both have drafted."""
    return sum(1 for each in rounds if any(each.unjudged) and each.steps)


def kinds(rounds: Sequence[CandidateBatch]) -> set[tuple[bool, bool]]:
    """Whether texts and the model have drafted, in any round."""
    return {(any(each.unjudged), each.steps > 0) for each in rounds}


ALL_KINDS = {(True, True), (True, False), (False, True)}
LENGTHS = [1, 9, 4, 6]
