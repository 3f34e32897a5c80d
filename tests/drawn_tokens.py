"""Whether draft tokens are draws from the very probabilities that are handed over, and independent of each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.drafting.chain import ChainDrafter


class Draws:
    """Of each draft token, where in its distribution it lies: uniform on [0, 1), and independent of all others.

    Tokens are put in some order, and each is at a random place of its own share. In the order of their probabilities, a
    token that is no draw is far to one side; in that of their ids, a number that is used twice has similar places.

    Args:
        monkeypatch: Lets proposals be noted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._by_probability: list[Tensor] = []
        self._by_id: list[Tensor] = []
        self._impossible = 0
        self._chance = torch.Generator().manual_seed(11)
        original = ChainDrafter.get_candidates

        def get_candidates(drafter: ChainDrafter, *arguments: Any) -> CandidateBatch:
            candidates = original(drafter, *arguments)
            self._note(candidates)
            return candidates

        monkeypatch.setattr(ChainDrafter, "get_candidates", get_candidates)

    def _note(self, candidates: CandidateBatch) -> None:
        assert isinstance(candidates.law, Sampled)
        tokens, drafted = candidates.tokens.cpu()[:, :, None], candidates.mask.cpu()
        probs = candidates.law.probs.cpu().double()
        self._impossible += int((probs.gather(2, tokens)[:, :, 0][drafted] == 0).sum())
        self._by_id.append(self._places(probs, tokens, drafted))
        ordered, order = probs.sort(dim=2, descending=True)
        place = (order == tokens).long().argmax(dim=2, keepdim=True)
        self._by_probability.append(self._places(ordered, place, drafted))

    def _places(self, probs: Tensor, place: Tensor, drafted: Tensor) -> Tensor:
        """`[rows, width]`, float64, NaN beyond a row's draft."""
        mass = probs.gather(2, place)[:, :, 0]
        before = probs.cumsum(2).gather(2, place)[:, :, 0] - mass
        share = torch.rand(drafted.shape, generator=self._chance, dtype=torch.float64)
        return (before + share * mass).masked_fill(~drafted, float("nan"))

    def failures(self) -> list[str]:
        """Say what is not as it should be. Of right draws, one list in ten thousand is not empty."""
        found = [f"{self._impossible} tokens have no probability"] if self._impossible else []
        for number in range(max(block.shape[1] for block in self._by_probability)):
            values = torch.cat([block[:, number] for block in self._by_probability if block.shape[1] > number])
            values = values[~values.isnan()].sort().values
            ranks = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
            distance = torch.maximum((values - ranks[:-1]).abs(), (values - ranks[1:]).abs()).max()
            if float(distance) * len(values) ** 0.5 > 2.5:  # Kolmogorov: with a probability of 7e-6
                found.append(f"token {number} is no draw from what is handed over")
        blocks = self._by_id
        steps = [(block[:, :-1], block[:, 1:]) for block in blocks]
        turns = [(a[:, :1], b[:, :1]) for a, b in pairwise(blocks)]
        rows = [(block[:-1], block[1:]) for block in blocks]
        for name, pairs in (("step", steps), ("round", turns), ("row", rows)):
            first, second = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
            both = ~first.isnan() & ~second.isnan()
            correlation = torch.corrcoef(torch.stack([first[both], second[both]]))[0, 1]
            if float(correlation.abs()) * int(both.sum()) ** 0.5 > 4.5:  # of a normal variable: 7e-6
                found.append(f"a draw depends on that of the {name} before")
        return found
