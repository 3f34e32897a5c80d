"""Drafts whose lengths differ from round to round: few passes are recorded for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_calls import config_of
from tiny_models import AGREEMENT, fresh_pair, noisy_copy, ragged_batch, random_lengths
from tiny_policies import RandomLengths, ScriptedLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.pass_shapes import PADDING_OF_RECORDING
from hf_dsde.policies import StoppingPolicy
from hf_dsde.utils import tuning

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
ROWS, NEW_TOKENS = 24, 60


class Ragged(RandomLengths):
    """In some rounds nobody drafts, in some a few rows do, in some most of them."""

    def draft_lengths(self) -> torch.LongTensor:
        share = torch.rand(1, generator=self._generator)
        drafting = torch.rand(self._rows, generator=self._generator) < 1.2 * share - 0.2
        return super().draft_lengths() * drafting.to(self._device)


Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture
def pair() -> Pair:
    """One that has recorded nothing."""
    target, _ = fresh_pair()
    return target, noisy_copy(target, AGREEMENT["half"])


def job(pair: Pair, policy: StoppingPolicy) -> torch.Tensor:
    """Generate texts; none ends before it has all of its tokens."""
    target, draft = pair
    return hf_dsde.enable(target).generate(
        **ragged_batch(random_lengths(ROWS)),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=config_of(runner="graph"),
    )


@pytest.fixture
def shapes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of the target's passes that are recorded, where few tokens are free."""
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=32))
    recorded: list[Any] = []
    original = GraphRunner._record

    def record(self: GraphRunner, shape: Any, reach: int) -> Any:
        if self.model is pair[0] and shape[0] in ("packed", "padded"):
            recorded.append(shape)
        return original(self, shape, reach)

    monkeypatch.setattr(GraphRunner, "_record", record)
    return recorded


def test_later_jobs_record_next_to_nothing(pair: Pair, shapes: list[Any]) -> None:
    counts = []
    for seed in range(3):
        job(pair, Ragged(8, seed=seed))
        counts.append((len(shapes), len([shape for shape in shapes if shape[0] == "packed"])))
        shapes.clear()
    (first, packed), (second, _), (third, _) = counts
    assert 2 <= packed <= 6
    assert first <= 16
    assert second <= 2
    assert third == 0


def columns(shapes: list[Any]) -> list[int]:
    """Of recorded padded passes over all rows."""
    return [shape[2] for shape in shapes if shape[:2] == ("padded", ROWS)]


def test_a_policy_of_one_length_is_recorded_as_it_is_where_nothing_larger_was(pair: Pair, shapes: list[Any]) -> None:
    job(pair, ScriptedLengths([[3] * ROWS]))
    assert columns(shapes) == [4]


@pytest.mark.parametrize("lent", [0, 3, 1000])
def test_a_length_that_comes_back_gets_a_recording_of_its_own(
    lent: int, pair: Pair, shapes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = 2 * ROWS
    monkeypatch.setitem(PADDING_OF_RECORDING, "padded", lent * padding)
    script = [[5] * ROWS, *[[3] * ROWS] * max(lent, 1)]
    job(pair, ScriptedLengths([*script[: lent + 1], [5] * ROWS]))
    assert columns(shapes) == [6]
    job(pair, ScriptedLengths(script))
    assert columns(shapes) == ([6] if lent == 1000 else [6, 4])
    recorded = list(shapes)
    job(pair, ScriptedLengths(script))
    assert columns(shapes) == columns(recorded)
