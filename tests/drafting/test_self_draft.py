"""A model that drafts for itself is always right, and after every round both caches hold the text and nothing else.

Covers the kinds of vLLM #8783 (a self-draft accepts less than everything) and mlxcel #994 (the draft's cache drifts by
one, so that acceptance decays with length).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_calls import QUIET, assert_same_text, config_of, end_tokens, endless_model, pair, plain, speculative
from tiny_models import AGREEMENT, ragged_batch, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from transformers import DynamicCache, PreTrainedModel

import hf_dsde
from hf_dsde import compat
from hf_dsde.decoding.loop import SpeculativeLoop
from hf_dsde.execution.model_runner import ModelRunner

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "duplicate"),
    [("llama", lambda model: model), ("mistral", copy.deepcopy), ("gemma3", copy.deepcopy)],
    ids=["llama-same-object", "mistral-copy", "gemma3-copy"],
)
def test_everything_is_accepted_for_300_tokens(
    family: str, duplicate: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    target = hf_dsde.enable(tiny_model(family).float())
    target.generation_config.eos_token_id = None
    output = speculative(
        target, duplicate(target), ragged_batch([1, 6, 11]), hf_dsde.StaticPolicy(5), max_new_tokens=300
    )
    statistics = output.speculation_statistics
    assert statistics.acceptance_rate == 1.0
    assert statistics.acceptance_by_position == (1.0,) * 5
    assert [row.accepted for row in statistics.rows] == [row.drafted for row in statistics.rows]
    assert len(statistics.rounds) == 50


@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_everything_is_accepted_whatever_the_policy(policy: str) -> None:
    target = endless_model()
    output = speculative(target, target, ragged_batch([4, 1]), policy, max_new_tokens=40)
    assert output.speculation_statistics.acceptance_rate == 1.0


def test_everything_is_accepted_when_rows_draft_different_lengths() -> None:
    target = endless_model("gemma3")
    inputs = ragged_batch([1, 6, 11, 2])
    output = speculative(target, target, inputs, RandomLengths(7, stop_probability=0.2), max_new_tokens=60)
    assert output.speculation_statistics.acceptance_rate == 1.0


def test_sampled_drafts_of_the_model_itself_are_accepted() -> None:
    target = endless_model()
    torch.manual_seed(0)
    output = speculative(
        target, target, ragged_batch([4, 1]), hf_dsde.StaticPolicy(4), max_new_tokens=40, do_sample=True, top_k=20
    )
    assert output.speculation_statistics.acceptance_rate == 1.0


Slots = tuple[torch.Tensor, torch.Tensor]


class _Round:
    """Copies of what both caches must hold after a round: per row, layer and model, the slots that are text."""

    def __init__(self, loop: SpeculativeLoop) -> None:
        drafter: Any = loop._drafter
        self.lengths = loop._sequences.length_counts
        self.ended = [end is not None for end in loop._stopping.ends]
        self.cached: list[int] = list(drafter._cached)
        self.target = _text_slots(loop._target, [length - 1 for length in self.lengths])
        self.draft = _text_slots(drafter._runner, self.cached)


def _text_slots(runner: ModelRunner, counts: list[int]) -> dict[int, list[Slots]]:
    """Copy the first slots of every row that has not left the passes, layer by layer."""
    layers: list[Any] = [layer for layer in runner.cache.layers if layer.is_initialized]
    return {
        row: [
            (layer.keys[place, :, : counts[row]].clone(), layer.values[place, :, : counts[row]].clone())
            for layer in layers
        ]
        for place, row in enumerate(runner.live_rows)
    }


def _teacher_forced(model: PreTrainedModel, text: torch.Tensor) -> list[Slots]:
    """Run a whole text at once, with a cache that forgets nothing."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=text[None], use_cache=True, **{compat.cache_argument(model): cache})
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def _watch_rounds(monkeypatch: pytest.MonkeyPatch) -> list[_Round]:
    rounds: list[_Round] = []
    original = SpeculativeLoop._round

    def watched(loop: SpeculativeLoop, request: Any) -> Any:
        following = original(loop, request)
        rounds.append(_Round(loop))
        return following

    monkeypatch.setattr(SpeculativeLoop, "_round", watched)
    return rounds


def _check_slots(held: list[Slots], reference: list[Slots]) -> None:
    for layer, (keys, values) in enumerate(held):
        for states, expected in zip((keys, values), reference[layer], strict=True):
            torch.testing.assert_close(states, expected[:, : states.shape[1]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ends", [False, True], ids=["to-the-limit", "rows-end-early"])
@pytest.mark.parametrize("agreement", AGREEMENT)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_caches_hold_the_text_after_every_round(
    family: str, agreement: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot == position, and the last token is not in the cache: after a round slots 0 to length - 2 are the text's."""
    target, draft = pair(family, agreement)
    lengths = [1, 5, 9]
    inputs = ragged_batch(lengths)
    arguments = {"eos_token_id": end_tokens(target, inputs, (0, 10))} if ends else {}
    expected = plain(target, inputs, max_new_tokens=16, **arguments)
    rounds = _watch_rounds(monkeypatch)
    policy = RandomLengths(4, seed=1, stop_probability=0.2)
    output = speculative(target, draft, inputs, policy, config_of(QUIET, view_bucket=4), max_new_tokens=16, **arguments)
    assert_same_text(output, expected)
    texts = [output.sequences[row, max(lengths) - length :] for row, length in enumerate(lengths)]
    references = [(_teacher_forced(target, text), _teacher_forced(draft, text)) for text in texts]
    assert len(rounds) >= (1 if ends else 3)
    for state in rounds:
        for row, length in enumerate(state.lengths):
            if state.ended[row]:
                continue
            assert state.cached[row] <= length - 1
            _check_slots(state.target[row], references[row][0])
            _check_slots(state.draft[row], references[row][1])


def test_the_draft_misses_what_it_never_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token after a rejection, two after a fully accepted draft, one more per round in which nobody drafts."""
    target, draft = pair(agreement="full")
    rounds = _watch_rounds(monkeypatch)
    policy = ScriptedLengths([[3, 0], [0, 0], [0, 0], [1, 2], [2, 0]])
    speculative(target, draft, ragged_batch([4, 2]), policy, max_new_tokens=40)
    missing = [[n - c for n, c in zip(r.lengths, r.cached, strict=True)] for r in rounds[:5]]
    assert missing == [[2, 1], [3, 2], [4, 3], [2, 2], [2, 1]]


def test_the_draft_misses_one_token_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair(agreement="never")
    rounds = _watch_rounds(monkeypatch)
    output = speculative(target, draft, ragged_batch([4, 2]), hf_dsde.StaticPolicy(3), max_new_tokens=6)
    assert output.speculation_statistics.accepted == 0
    assert [[n - c for n, c in zip(r.lengths, r.cached, strict=True)] for r in rounds[:3]] == [[1, 1]] * 3


def test_a_drifting_draft_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails when the draft believes to have stored the last draft token, which it never fed."""
    from hf_dsde.drafting.model import ModelDrafter

    def drifting(drafter: Any, sequences: Any, scores: Any, accepted: list[int], drafted: list[int]) -> None:
        for row, length in enumerate(drafter._caught_up):
            if length is not None:
                drafter._cached[row] = length + accepted[row]
        drafter._caught_up = []

    monkeypatch.setattr(ModelDrafter, "update_candidate_strategy", drifting)
    with pytest.raises(AssertionError):
        test_caches_hold_the_text_after_every_round("llama", "full", False, monkeypatch)
    target, _ = pair()
    output = speculative(target, target, ragged_batch([4]), hf_dsde.StaticPolicy(4), max_new_tokens=60)
    assert output.speculation_statistics.acceptance_rate < 1.0
