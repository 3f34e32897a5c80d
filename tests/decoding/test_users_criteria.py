"""Stopping criteria of the user's are called, and obeyed, as in plain batched `generate`.

They may look across rows, count their calls, or answer with one bool (transformers #22340, #29056).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ending_calls import (
    PROMPT_WIDTH,
    PROMPTS,
    STEPS,
    decode,
    endless_text,
    half_agreeing,
    in_blocks,
    prompts,
    stop_arguments,
    target,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PAD, ragged_batch
from tiny_policies import RandomLengths
from tiny_text import StopsAfterCalls, StopsAllWhenRow, StopsRowOn, StopsWhenSure, Witness, tiny_tokenizer
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def users_criteria() -> dict[str, Callable[[], list[StoppingCriteria]]]:
    texts = endless_text(PROMPTS)
    return {
        "per-row tensor": lambda: [StopsRowOn(texts[0][2], texts[1][8], texts[2][5])],
        "single bool": lambda: [StopsAfterCalls(7)],
        "bool at the first step": lambda: [StopsAfterCalls(1)],
        "across rows": lambda: [StopsAllWhenRow(0, texts[0][6])],
        "several": lambda: [StopsRowOn(texts[1][1]), StopsAfterCalls(9), StopsAllWhenRow(2, texts[2][11])],
        "never": lambda: [Witness()],
    }


CRITERIA = ("per-row tensor", "single bool", "bool at the first step", "across rows", "several", "never")


@pytest.mark.parametrize("eos", [None, "some row's"])
@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_of_the_users_end_what_they_end_in_plain_decoding(name: str, eos: str | None) -> None:
    eos_token_id = None if eos is None else endless_text(PROMPTS)[2][3]
    for policy in (in_blocks(3), RandomLengths(6, seed=1)):
        decode(prompts(), policy, half_agreeing(), criteria=users_criteria()[name], eos_token_id=eos_token_id)


@pytest.mark.parametrize("eos", [None, "some row's"])
@pytest.mark.parametrize("policy_seed", range(3))
def test_criteria_see_what_plain_decoding_shows_them(policy_seed: int, eos: str | None) -> None:
    """The same texts, padding of ended rows included, in the same calls."""
    texts = endless_text(PROMPTS)
    witnesses: list[Witness] = []

    def criteria() -> list[StoppingCriteria]:
        witnesses.append(Witness())
        return [StopsRowOn(texts[1][4]), witnesses[-1], StopsAllWhenRow(0, texts[0][12])]

    decode(
        prompts(),
        RandomLengths(6, seed=policy_seed),
        half_agreeing(),
        criteria=criteria,
        eos_token_id=None if eos is None else texts[2][3],
    )
    plain, ours = witnesses
    assert ours.texts == plain.texts
    assert ours.scores == plain.scores == [None] * len(plain.texts)


@pytest.mark.parametrize("policy_seed", range(3))
def test_criteria_get_the_scores_of_the_steps_so_far(policy_seed: int) -> None:
    texts = endless_text(PROMPTS)
    end_token = texts[2][3]
    witnesses: list[Witness] = []

    def criteria() -> list[StoppingCriteria]:
        witnesses.append(Witness())
        return [witnesses[-1]]

    decode(
        prompts(),
        RandomLengths(6, seed=policy_seed),
        half_agreeing(),
        criteria=criteria,
        output_scores=True,
        eos_token_id=end_token,
    )
    plain, ours = witnesses
    assert len(plain.scores) == len(ours.scores) == STEPS
    for step, (expected, got) in enumerate(zip(plain.scores, ours.scores, strict=True), start=1):
        assert expected is not None
        assert got is not None
        assert len(got) == len(expected) == step
        # Where a row has ended, plain decoding scores its padding, which means nothing.
        running = [row for row in range(3) if end_token not in texts[row][: step - 1]]
        torch.testing.assert_close(got[-1][running], expected[-1][running])


@pytest.mark.parametrize("eos", [None, 2])
def test_criteria_may_decide_by_scores(eos: int | None) -> None:
    best = target().generate(**prompts(), max_new_tokens=STEPS, output_scores=True, return_dict_in_generate=True)
    tops = torch.stack([score.amax(dim=-1) for score in best.scores])
    threshold = float(tops.flatten().sort().values[-8]) - 1e-4
    for policy_seed in range(3):
        plain, _ = decode(
            prompts(),
            RandomLengths(6, seed=policy_seed),
            half_agreeing(),
            criteria=lambda: [StopsWhenSure(threshold)],
            output_scores=True,
            eos_token_id=eos,
        )
    assert eos is None or bool((plain == PAD)[:, -1].any())


class Answers(StoppingCriteria):
    """Gives the same answer in a form of its own."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        self._form = form

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> Any:
        return self._form(input_ids[:, -1] % 7 == 3)


@pytest.mark.parametrize(
    "form",
    [lambda stops: stops, lambda stops: bool(stops.all()), lambda stops: stops.any(), lambda stops: stops[:1]],
    ids=["one per row", "bool", "scalar tensor", "tensor of one"],
)
def test_answers_of_any_form_mean_what_they_mean_in_plain_decoding(form: Callable[[torch.Tensor], Any]) -> None:
    decode(prompts(), RandomLengths(6), half_agreeing(), criteria=lambda: [Answers(form)], eos_token_id=2)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 3),
    policy_seed=st.integers(0, 10_000),
    eos_steps=st.lists(st.integers(0, STEPS - 1), max_size=2),
    string_step=st.none() | st.integers(1, STEPS - 1),
    stop_steps=st.lists(st.integers(0, STEPS - 1), max_size=2),
    together=st.none() | st.integers(1, STEPS),
    agreeing=st.booleans(),
)
def test_all_reasons_to_end_work_together(
    lengths: tuple[int, ...],
    seed: int,
    policy_seed: int,
    eos_steps: list[int],
    string_step: int | None,
    stop_steps: list[int],
    together: int | None,
    agreeing: bool,
) -> None:
    texts = endless_text(lengths, seed)
    tokenizer = tiny_tokenizer()
    arguments: dict[str, Any] = {}
    if eos_steps:
        arguments["eos_token_id"] = [texts[i % len(texts)][step] for i, step in enumerate(eos_steps)]
    if string_step is not None:
        before, last = tokenizer.convert_ids_to_tokens(texts[-1][string_step - 1 : string_step + 1])
        arguments |= stop_arguments([before[-1] + last[0]])
    stops = [texts[-1 - i % len(texts)][step] for i, step in enumerate(stop_steps)]

    def criteria() -> list[StoppingCriteria]:
        chosen: list[StoppingCriteria] = [StopsRowOn(*stops)] if stops else []
        return chosen if together is None else [*chosen, StopsAfterCalls(together)]

    decode(
        ragged_batch(lengths, seed=seed),
        RandomLengths(7, seed=policy_seed, stop_probability=0.1),
        target() if agreeing else half_agreeing(),
        criteria=criteria,
        **arguments,
    )


def test_criteria_are_not_changed_by_a_call() -> None:
    criteria = StoppingCriteriaList([StopsRowOn(5), MaxLengthCriteria(PROMPT_WIDTH + 4)])
    before = [copy.deepcopy(vars(criterion)) for criterion in criteria]
    target().generate(
        **prompts(),
        assistant_model=target(),
        speculation_policy="static",
        stopping_criteria=criteria,
        max_new_tokens=STEPS,
    )
    assert len(criteria) == 2
    assert [str(vars(criterion)) for criterion in criteria] == [str(values) for values in before]
