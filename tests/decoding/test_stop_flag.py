"""Drafting ends after the step at which no row drafts on; how the host learns of it never shows in the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_calls import QUIET, assert_same_text, pair, plain, speculative
from tiny_models import ragged_batch, random_lengths
from tiny_policies import RandomLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.stop_flag import StopFlag
from hf_dsde.drafting import model as drafting
from hf_dsde.policies import BatchInfo, DraftStep, StoppingPolicy

pytestmark = pytest.mark.slow

INPUTS = ragged_batch(random_lengths(6))
NEW_TOKENS = 40
STOPPING = ["confidence", "svip", "adaedl"]


class PlannedStops(StoppingPolicy):
    """Every row may draft `longest` tokens, and stops where a table of random numbers says, whatever it was asked."""

    name = "planned-stops"

    def __init__(self, longest: int = 6, least: int = 1) -> None:
        self._longest, self._least = longest, least

    def start(self, batch: BatchInfo) -> None:
        self._rows = batch.rows
        self._round = -1

    def draft_lengths(self) -> torch.Tensor:
        self._round += 1
        generator = torch.Generator().manual_seed(self._round)
        self._stops = torch.randint(self._least, self._longest + 1, (self._rows,), generator=generator)
        return torch.full((self._rows,), self._longest)

    def should_stop(self, step: DraftStep) -> torch.Tensor:
        return self._stops <= step.position + 1


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[CandidateBatch]:
    """What was proposed, round by round."""
    seen: list[CandidateBatch] = []
    original = drafting.ModelDrafter.get_candidates

    def get_candidates(self: drafting.ModelDrafter, *arguments: Any) -> CandidateBatch:
        seen.append(original(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(drafting.ModelDrafter, "get_candidates", get_candidates)
    return seen


@contextmanager
def counted_passes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Tokens per row of each forward pass inside the `with` block."""
    widths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield widths
    finally:
        hook.remove()


def generate(policy: str | StoppingPolicy, **arguments: Any) -> Any:
    target, draft = pair()
    return speculative(target, draft, INPUTS, policy, QUIET, max_new_tokens=NEW_TOKENS, **arguments)


class TestAnswers:
    @given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=12))
    def test_an_answer_is_about_the_step_asked_about(self, steps: list[list[bool]]) -> None:
        flag = StopFlag()
        for drafting_rows in steps:
            flag.ask(torch.tensor(drafting_rows))
            assert flag.nobody_drafts() == (not any(drafting_rows))

    def test_without_a_question_drafting_goes_on(self) -> None:
        flag = StopFlag()
        assert not flag.nobody_drafts()
        flag.ask(torch.zeros(2, dtype=torch.bool))
        assert flag.nobody_drafts()
        assert not flag.nobody_drafts()

    def test_a_question_is_about_the_rows_as_they_were(self) -> None:
        rows = torch.tensor([True, False])
        flag = StopFlag()
        flag.ask(rows)
        rows.zero_()
        assert not flag.nobody_drafts()

    @pytest.mark.gpu
    def test_answers_of_a_busy_device_are_right(self) -> None:
        device = torch.device("cuda", 0)
        flag = StopFlag()
        work = torch.randn(2048, 2048, device=device)
        for step in range(40):
            work = (work @ work).clamp_(-1, 1)
            rows = torch.zeros(8, dtype=torch.bool, device=device)
            rows[step % 8] = step % 3 != 0
            flag.ask(rows & work.isfinite().all())
            assert flag.nobody_drafts() == (step % 3 == 0)
            assert flag.answered


class TestCalls:
    @pytest.mark.parametrize("policy", [*STOPPING, "random", "planned"])
    def test_greedy_text_is_that_of_plain_decoding(self, policy: str) -> None:
        made = {"random": RandomLengths(stop_probability=0.4), "planned": PlannedStops()}
        output = generate(made.get(policy, policy))
        assert_same_text(output, plain(pair()[0], INPUTS, max_new_tokens=NEW_TOKENS))

    def test_processors_that_look_at_the_text_see_it(self) -> None:
        options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
        output = generate(PlannedStops(), **options)
        assert_same_text(output, plain(pair()[0], INPUTS, max_new_tokens=NEW_TOKENS, **options))

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_rows_draft_what_the_policy_lets_them(self, do_sample: bool, proposals: list[CandidateBatch]) -> None:
        torch.manual_seed(0)
        output = generate(PlannedStops(), do_sample=do_sample)
        rounds = output.speculation_statistics.rounds
        assert len(proposals) == sum(entry.draft_steps > 0 for entry in rounds)
        for number, candidates in enumerate(proposals[:4]):  # before any row comes near its limit
            generator = torch.Generator().manual_seed(number)
            planned = torch.randint(1, 7, (6,), generator=generator)
            assert candidates.lengths.tolist() == planned.tolist()

    @pytest.mark.parametrize("policy", [*STOPPING, "planned", "random"])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_steps_are_the_passes_made_and_columns_those_that_somebody_drafted(
        self, do_sample: bool, policy: str, proposals: list[CandidateBatch]
    ) -> None:
        torch.manual_seed(1)
        made = {"random": RandomLengths(stop_probability=0.4), "planned": PlannedStops()}
        with counted_passes(pair()[1]) as widths:
            output = generate(made.get(policy, policy), do_sample=do_sample)
        assert proposals
        # One more pass stores the prompts.
        assert sum(candidates.steps for candidates in proposals) == len(widths) - 1
        assert output.speculation_statistics.draft_steps == len(widths) - 1
        for candidates in proposals:
            assert candidates.width == int(candidates.lengths.max())
            assert candidates.steps == candidates.width
            probs = candidates.law.probs if isinstance(candidates.law, Sampled) else None
            for stacked in (probs, candidates.logits, candidates.entropy, candidates.confidence):
                assert stacked is None or stacked.shape[1] == candidates.width
            assert (probs is not None) == do_sample


@pytest.mark.parametrize("stop_after", [[1] * 6, [5] * 6, [6] * 6, [5, 1, 1, 5, 2, 3], [4] * 6], ids=str)
def test_every_row_may_stop_after_the_same_token(stop_after: Sequence[int], proposals: list[CandidateBatch]) -> None:
    """After the first token, the last but one, and the last."""

    class SameStops(PlannedStops):
        def draft_lengths(self) -> torch.Tensor:
            longest = super().draft_lengths()
            self._stops = torch.tensor(stop_after)
            return longest

    generate(SameStops())
    first = proposals[0]
    assert first.lengths.tolist() == list(stop_after)
    assert first.width == max(stop_after)
    assert first.steps == max(stop_after)


def test_a_policy_that_fixes_lengths_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StopFlag, drafting_rows: torch.Tensor) -> None:
        raise AssertionError("nobody stops inside a round")

    monkeypatch.setattr(StopFlag, "ask", refuse)
    assert generate(hf_dsde.StaticPolicy(4)).speculation_statistics.draft_steps > 0
