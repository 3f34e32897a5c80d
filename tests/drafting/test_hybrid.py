"""Texts and a model that draft together: exact text, who drafts when, and what the model reads later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_drafters import EIGHT, cycling_model
from tiny_calls import compared, endless_model, pair, plain
from tiny_heads import fitted_head, reference_draft, tiny_head
from tiny_models import ragged_batch
from tiny_policies import RandomLengths
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from two_drafters import ALL_KINDS, CHEAP, DEAR, LENGTHS, Astray, Knowing, kinds, known

import hf_dsde
from hf_dsde.decoding import loop, run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundKind, RoundPlan, next_plan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.decoding.stop_flag import StopFlag
from hf_dsde.drafting import cached_model
from hf_dsde.drafting import hybrid as hybrids
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.choice import Choice, Offer
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.hybrid import HybridDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.measurement.views import numbers

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize(("family", "overlapping"), [("llama", True), ("mistral", False), ("gpt2", True)])
def test_the_text_is_the_targets_own(
    family: str, kind: str, overlapping: bool, rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target, draft = pair(family)
    draft = draft if kind == "model" else tiny_head(target, draft_vocabulary=70)
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 40)[:3])
    for policy in (hf_dsde.StaticPolicy(3), RandomLengths(5, stop_probability=0.2)):
        output = compared(target, [text, draft], inputs, policy, CHEAP, max_new_tokens=40)
        assert output.speculation_statistics.accepted > 20
    assert kinds(rounds) == ALL_KINDS


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("policy", hf_dsde.available_policies())
def test_every_policy(policy: str, rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    both = [draft, Knowing(*known(target, inputs, 40)[::2])]
    for overlapping, capped in ((False, False), (True, True)):
        monkeypatch.setattr(run_ahead, "overlaps", lambda device, answer=overlapping: answer)
        compared(target, both, inputs, policy, CHEAP.replace(cost_cap=capped), max_new_tokens=40)
    assert kinds(rounds) >= {(True, True), (True, False)}


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_measured_costs_and_rows_that_leave(rows: int) -> None:
    target, draft = pair()
    inputs = ragged_batch([1 + 3 * row % 7 for row in range(rows)])
    ends = [int(plain(target, inputs, max_new_tokens=12)[0, -1])]
    for other in (draft, fitted_head(target)):
        compared(target, ["suffix", other], inputs, "goodput", max_new_tokens=40, eos_token_id=ends)


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_processors_are_shown_the_drafts_of_both(options: dict[str, Any], rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 40, **options)[::2])
    output = compared(target, [text, draft], inputs, "static", CHEAP, max_new_tokens=40, **options)
    assert output.speculation_statistics.accepted > 20
    assert kinds(rounds) == ALL_KINDS


class EndsByRow(StoppingCriteria):
    """Ends each row a few tokens after the one before it."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] - max(LENGTHS) >= 8 + 5 * torch.arange(len(input_ids))


@pytest.mark.usefixtures("chosen_at_random")
def test_rows_that_a_criterion_ends_draft_no_more() -> None:
    """That is known only after their next drafts were chosen."""
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    both = [Knowing(*known(target, inputs, 40)), draft]
    criteria = StoppingCriteriaList([EndsByRow()])
    compared(target, both, inputs, "static", CHEAP, max_new_tokens=40, stopping_criteria=criteria, pad_token_id=0)


def test_no_pass_of_a_model_that_is_not_worth_its_steps(rounds: list[CandidateBatch]) -> None:
    """Whose policy wants two tokens: a text that is almost certain is drafted further."""
    target = cycling_model()
    output = compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(2), DEAR, max_new_tokens=60)
    assert {each.steps for each in rounds if any(each.unjudged)} == {0}
    assert max(each.width for each in rounds) > 8
    counts = output.speculation_statistics.rounds
    assert sum(r.draft_steps == 0 and r.pass_width > 3 for r in counts) > 2
    assert all(r.draft_steps == 0 for r in counts if r.pass_width > 3)


def test_a_model_that_is_worth_its_steps_drafts_beside_texts(rounds: list[CandidateBatch]) -> None:
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 40)[:2])
    output = compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(2), CHEAP, max_new_tokens=40)
    assert {tuple(each.unjudged) for each in rounds if each.steps} >= {(True, True, False, False)}
    assert not any(any(each.unjudged[2:]) for each in rounds)
    counts = output.speculation_statistics
    copied = [[n * taken for n, taken in zip(each.host_lengths, each.unjudged)] for each in rounds]  # noqa: B905
    assert counts.text_drafted == sum(map(sum, copied)) > 20
    assert 20 < counts.text_accepted <= sum(row.accepted for row in counts.rows[:2])
    assert counts.accepted - counts.text_accepted >= sum(row.accepted for row in counts.rows[2:]) > 0
    assert f"{counts.text_drafted}, {counts.text_accepted} of them accepted" in dict(numbers(counts)).values()


def test_texts_that_promise_too_much_are_trusted_less(rounds: list[CandidateBatch]) -> None:
    target, inputs = endless_model(), ragged_batch(LENGTHS)
    compared(target, [Astray(longest=8), target], inputs, hf_dsde.StaticPolicy(3), CHEAP, max_new_tokens=40)
    believed = [any(each.unjudged) for each in rounds]
    assert believed[0]
    assert not any(believed[4:])


@pytest.mark.parametrize("overlapping", [True, False])
def test_texts_draft_where_the_policy_wants_nothing(overlapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target = cycling_model()
    output = compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(0), DEAR, max_new_tokens=40)
    assert output.speculation_statistics.block_efficiency > 3
    assert output.speculation_statistics.draft_steps == 0


@pytest.mark.usefixtures("recording")
def test_what_was_overtaken_is_asked_again(rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """After rounds without drafts a plain step has begun when a text has something to offer: it comes a round later,
    and what the policy wants is still nothing."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    turns = itertools.cycle([False, False, False, True, True])

    def choose(model: Sequence[Offer], texts: Sequence[Offer], *prices: Any) -> Choice:
        asked.append(max(offer.tokens for offer in model))
        offering = [row for row, text in enumerate(texts) if text.tokens] if next(turns) else []
        return Choice(frozenset(offering[:2]), True)

    def planned(*arguments: Any, **flags: Any) -> RoundPlan:
        plans.append(next_plan(*arguments, **flags))
        return plans[-1]

    asked: list[int] = []
    plans: list[RoundPlan] = []
    monkeypatch.setattr(hybrids, "choose", choose)
    monkeypatch.setattr(loop, "next_plan", planned)
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    text = Knowing(*known(target, inputs, 60), longest=3)
    output = compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(0), CHEAP, max_new_tokens=60)
    assert len(rounds) > 3
    assert sum(plan.kind is RoundKind.OVERTAKEN for plan in plans) > 3
    assert set(asked) == {0}
    assert output.speculation_statistics.draft_steps == 0


def test_a_draft_out_of_texts_has_a_longest_length(rounds: list[CandidateBatch]) -> None:
    target = cycling_model()
    settings = DEAR.replace(max_draft_length=5)
    compared(target, ["suffix", target], ragged_batch(EIGHT), hf_dsde.StaticPolicy(2), settings, max_new_tokens=40)
    assert max(each.width for each in rounds) == 5


@pytest.mark.usefixtures("chosen_at_random")
@pytest.mark.parametrize(("overlapping", "large"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_model_that_sat_out_drafts_as_if_it_had_read_all(
    kind: str, overlapping: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it proposes, also with a pass that was begun before, is what it proposes after the whole text.

    Large batches take in apart what would make the first pass wide.
    """
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    if large:
        tuning = replace(cached_model.tuning_of(torch.device("cpu")), wide_pass_tokens=1, long_gap=2)
        monkeypatch.setattr(cached_model, "tuning_of", lambda device: tuning)
    target, draft = pair()
    draft = draft if kind == "model" else fitted_head(target)
    inputs = ragged_batch([2, 9, 4, 6])
    sat_out = [0] * 4
    proposed: list[tuple[list[int], list[int], int]] = []
    stored: list[Sequence[int]] = []
    kind_of_drafter = HeadDrafter if kind == "head" else ModelDrafter
    store = kind_of_drafter._store_missing

    def store_missing(self: Any, rows: Sequence[int]) -> bool:
        if any(self._cached[row] > 0 for row in rows):
            stored.append(rows)
        return store(self, rows)

    monkeypatch.setattr(kind_of_drafter, "_store_missing", store_missing)
    original = HybridDrafter.get_candidates

    def get_candidates(self: HybridDrafter, sequences: Any, *others: Any) -> CandidateBatch:
        candidates = original(self, sequences, *others)
        copied = candidates.unjudged or [False] * 4
        for row, n in enumerate(candidates.lengths.tolist()):
            sat_out[row] += copied[row]
            if n and not copied[row]:
                proposed.append((sequences.host_text(row), candidates.tokens[row, :n].tolist(), sat_out[row]))
        return candidates

    monkeypatch.setattr(HybridDrafter, "get_candidates", get_candidates)
    text = Knowing(*known(target, inputs, 40)[:3])
    compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(3), CHEAP, max_new_tokens=40)
    assert sum(missed > 0 for _, _, missed in proposed) > 5
    assert bool(stored) == large
    for known_text, drafted, _ in proposed:
        if kind == "head":
            expected, _ = reference_draft(target, draft, known_text, drafted)
        else:
            ids, n = torch.tensor([known_text]), len(drafted)
            whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # some tokens look like padding
            expected = draft.generate(**whole, max_new_tokens=n, do_sample=False, eos_token_id=None)[0, -n:].tolist()
        assert drafted == expected


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_pass_that_was_begun_is_used_where_texts_drafted_little(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read as many tokens as the rows have of others."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)

    def choose(model: Sequence[Offer], texts: Sequence[Offer], *prices: Any) -> Choice:
        return Choice(frozenset(row for row, text in enumerate(texts) if row < 2 and text.tokens), True)

    monkeypatch.setattr(hybrids, "choose", choose)
    target, draft = pair()
    draft = draft if kind == "model" else fitted_head(target)
    inputs = ragged_batch([5, 8, 6, 7])
    used: list[bool] = []
    original = ChainDrafter._catch_up

    def catch_up(self: ChainDrafter, *arguments: Any) -> Any:
        begun = self._prepared
        output = original(self, *arguments)
        used.append(begun is not None and output.output is begun.output)
        return output

    monkeypatch.setattr(ChainDrafter, "_catch_up", catch_up)
    text = Knowing(*known(target, inputs, 40), longest=6)
    compared(target, [text, draft], inputs, hf_dsde.StaticPolicy(2), CHEAP, max_new_tokens=20)
    assert len(used) > 3
    assert used == [False] + [True] * (len(used) - 1)


def test_a_head_goes_on_reading_while_it_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it drafts again, it takes the pass that was begun, however long the texts' drafts were."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    choices = itertools.count()

    def choose(model: Sequence[Offer], texts: Sequence[Offer], *prices: Any) -> Choice:
        copying = next(choices) % 4 < 2
        return Choice(frozenset(row for row, text in enumerate(texts) if copying and text.tokens), not copying)

    monkeypatch.setattr(hybrids, "choose", choose)
    target, _ = pair()
    head, inputs = fitted_head(target), ragged_batch([5, 8, 6, 7])
    used: list[bool] = []
    missed: list[int] = []
    original, store = HeadDrafter._catch_up, HeadDrafter._store_missing

    def catch_up(self: HeadDrafter, *arguments: Any) -> Any:
        begun = self._prepared
        missed.append(max(self._texts.length_counts[row] - self._cached[row] for row in range(4)))
        output = original(self, *arguments)
        used.append(begun is not None and output.output is begun.output)
        return output

    stored: list[Sequence[int]] = []
    monkeypatch.setattr(HeadDrafter, "_catch_up", catch_up)
    monkeypatch.setattr(HeadDrafter, "_store_missing", lambda self, rows: stored.append(rows) or store(self, rows))
    text = Knowing(*known(target, inputs, 90), longest=18)
    compared(target, [text, head], inputs, hf_dsde.StaticPolicy(2), CHEAP, max_new_tokens=90)
    assert len(used) > 4
    assert max(missed) > cached_model.tuning_of(torch.device("cpu")).long_gap
    assert all(used)
    assert not any(stored)


@pytest.mark.usefixtures("chosen_at_random")
def test_the_pass_that_is_made_ready_is_over_the_drafts_of_both(
    rounds: list[CandidateBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the host waits to hear whether the model drafts on, the target's pass is made ready for all rows."""
    expected: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(StopFlag, "answered", False)
    monkeypatch.setattr(RunAhead, "expect", lambda _, tokens, lengths, plan: expected.append((tokens, lengths)))
    target, draft = pair()
    inputs = ragged_batch(LENGTHS)
    policy = RandomLengths(5, stop_probability=0.7)
    compared(target, [Knowing(*known(target, inputs, 40)[:2]), draft], inputs, policy, CHEAP, max_new_tokens=40)
    ready = [
        (lengths.tolist(), candidates.lengths.tolist())
        for candidates in rounds
        for tokens, lengths in expected
        if tokens is candidates.tokens and any(candidates.unjudged)
    ]
    assert len(ready) > 2
    assert all(lengths == proposed for lengths, proposed in ready)
