"""What hybrids propose, and who drafts by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.drafting import hybrid as hybrids
from hf_dsde.drafting.choice import Choice, Offer
from hf_dsde.drafting.hybrid import HybridDrafter
from hf_dsde.drafting.lookup.rests import RowRests


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[CandidateBatch]:
    """What hybrids propose, round by round."""
    seen: list[CandidateBatch] = []
    original = HybridDrafter.get_candidates

    def get_candidates(self: HybridDrafter, *arguments: Any) -> CandidateBatch:
        seen.append(original(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(HybridDrafter, "get_candidates", get_candidates)
    return seen


@pytest.fixture
def chosen_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who drafts is a matter of chance: what is decided well or badly may change no text. All texts are looked up."""
    numbers = random.Random(0)

    def choose(model: Sequence[Offer], texts: Sequence[Offer], *prices: Any) -> Choice:
        offering = [row for row, text in enumerate(texts) if text.tokens]
        return Choice(frozenset(row for row in offering if numbers.random() < 0.6), numbers.random() < 0.8)

    monkeypatch.setattr(hybrids, "choose", choose)
    monkeypatch.setattr(RowRests, "over", lambda *_: True)
