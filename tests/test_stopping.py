"""Sequences end where plain batched `generate` ends them, wherever in a block that is.

The first part compares whole calls, token for token. Drafts that agree with the target make a round of `k` drafts emit
exactly `k + 1` tokens, so that an end can be put at any offset of a block. The second part holds `Stopping` itself
against a plain model of it. The kinds of error are known from transformers #47912 (an end-of-sequence token accepted
mid-block), #48039 (a stop string completed mid-block), #28555 and #46993 (a block that runs past the limit).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PAD, noisy_copy, ragged_batch, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_text import StopsAfterCalls, StopsAllWhenRow, StopsRowOn, StopsWhenSure, Witness, tiny_tokenizer
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria

import hf_dsde
from hf_dsde.sequences import SequenceBatch
from hf_dsde.stopping import Stopping, length_limit

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

DRAFTED = 4
BLOCK = DRAFTED + 1
STEPS = 3 * BLOCK
PROMPTS = (3, 7, 1)
PROMPT_WIDTH = max(PROMPTS)
SEED = 1
"""Of prompts whose endless texts use many different tokens."""


@cache
def target() -> PreTrainedModel:
    """A target that knows no end-of-sequence token by itself: each test names its own."""
    model = hf_dsde.enable(tiny_model("llama"))
    model.generation_config.eos_token_id = None
    return model


@cache
def half_agreeing() -> PreTrainedModel:
    return noisy_copy(target(), 0.05)


def in_blocks(rows: int) -> ScriptedLengths:
    return ScriptedLengths([[DRAFTED] * rows])


@cache
def endless_text(lengths: tuple[int, ...], seed: int = SEED) -> list[list[int]]:
    """New tokens of each row when nothing ends it."""
    batch = ragged_batch(lengths, seed=seed)
    output = target().generate(**batch, do_sample=False, max_new_tokens=STEPS + 1)
    return output[:, batch["input_ids"].shape[1] :].tolist()


def decode(
    batch: dict[str, torch.Tensor],
    policy: hf_dsde.StoppingPolicy,
    draft: PreTrainedModel | None = None,
    criteria: Callable[[], Sequence[StoppingCriteria]] = list,
    **arguments: Any,
) -> tuple[torch.Tensor, Any]:
    """Decode plainly and speculatively, assert that the texts are equal, return the plain one and our output.

    Criteria may count, so each call gets its own.
    """
    arguments = {"do_sample": False, "max_new_tokens": STEPS, **arguments, "return_dict_in_generate": True}
    plain = target().generate(**batch, stopping_criteria=StoppingCriteriaList(criteria()), **arguments)
    ours = target().generate(
        **batch,
        stopping_criteria=StoppingCriteriaList(criteria()),
        assistant_model=target() if draft is None else draft,
        speculation_policy=policy,
        **arguments,
    )
    assert ours.sequences.tolist() == plain.sequences.tolist()
    emitted = sum(row.emitted for row in ours.speculation_statistics.rows)
    width = plain.sequences.shape[1] - batch["input_ids"].shape[1]
    assert emitted <= width * len(plain.sequences)
    return plain.sequences, ours


def prompts() -> dict[str, torch.Tensor]:
    return ragged_batch(PROMPTS, seed=SEED)


@pytest.mark.parametrize("step", range(STEPS))
def test_eos_ends_a_row_at_every_offset_of_a_block(step: int) -> None:
    end_token = endless_text(PROMPTS)[1][step]
    _, ours = decode(prompts(), in_blocks(3), eos_token_id=end_token)
    ended_at = endless_text(PROMPTS)[1].index(end_token) + 1
    assert ours.speculation_statistics.rows[1].emitted == ended_at
    assert ours.speculation_statistics.rows[1].rounds == -(-ended_at // BLOCK)


def test_the_offsets_of_these_tests_cover_a_block_bonus_token_included() -> None:
    text = endless_text(PROMPTS)[1]
    first_uses = {text.index(token) % BLOCK for token in text[:STEPS]}
    assert first_uses == set(range(BLOCK))


@pytest.mark.parametrize("step", range(BLOCK))
def test_several_eos_tokens_end_each_row_at_its_own_offset(step: int) -> None:
    texts = endless_text(PROMPTS)
    ends = [texts[0][step], texts[1][BLOCK + (step + 2) % BLOCK], texts[2][2 * BLOCK + (step + 4) % BLOCK]]
    decode(prompts(), in_blocks(3), eos_token_id=ends)


@pytest.mark.parametrize("policy_seed", range(4))
def test_eos_ends_rows_that_draft_different_lengths(policy_seed: int) -> None:
    texts = endless_text(PROMPTS)
    decode(
        prompts(),
        RandomLengths(7, seed=policy_seed, stop_probability=0.2),
        half_agreeing(),
        eos_token_id=[texts[0][2], texts[1][9], texts[2][5]],
    )


def test_an_eos_token_inside_the_prompt_ends_nothing() -> None:
    batch = prompts()
    end_token = int(batch["input_ids"][1, 2])
    assert end_token not in endless_text(PROMPTS)[1][:STEPS]
    plain, _ = decode(batch, in_blocks(3), eos_token_id=end_token)
    assert plain.shape[1] == PROMPT_WIDTH + STEPS


def test_a_prompt_that_ends_in_eos_goes_on() -> None:
    batch = prompts()
    batch["input_ids"][:, -1] = 5
    decode(batch, RandomLengths(5), half_agreeing(), eos_token_id=5)


def test_eos_as_pad_token_changes_nothing() -> None:
    texts = endless_text(PROMPTS)
    end_token = texts[0][3]
    decode(prompts(), in_blocks(3), eos_token_id=end_token, pad_token_id=end_token)


def test_all_rows_may_end_in_one_round_at_different_offsets() -> None:
    texts = endless_text(PROMPTS)
    _, ours = decode(prompts(), in_blocks(3), eos_token_id=[texts[0][0], texts[1][2], texts[2][4]])
    assert len(ours.speculation_statistics.rounds) == 1


# Stop strings


def stop_arguments(strings: str | list[str]) -> dict[str, Any]:
    return {"stop_strings": strings, "tokenizer": tiny_tokenizer()}


def spelled(row: int, step: int) -> str:
    return tiny_tokenizer().convert_ids_to_tokens(endless_text(PROMPTS)[row][step])


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("step", range(STEPS))
def test_a_stop_string_is_found_at_every_offset_of_a_block(step: int, eos: int | None) -> None:
    """Without an end-of-sequence token, plain decoding lets stopped rows run on beside the others."""
    decode(prompts(), in_blocks(3), eos_token_id=eos, **stop_arguments(spelled(1, step)))


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_stop_string_may_span_tokens_and_rounds(step: int, eos: int | None) -> None:
    across = spelled(1, step - 1)[-1] + spelled(1, step)[0]
    decode(prompts(), in_blocks(3), eos_token_id=eos, **stop_arguments(across))


def test_a_stop_string_cuts_tokens_that_were_accepted_behind_it() -> None:
    plain, ours = decode(
        ragged_batch([7], seed=3),
        ScriptedLengths([[9]]),
        **stop_arguments(
            tiny_tokenizer().convert_ids_to_tokens(endless_text((7,), 3)[0][4]),
        ),
    )
    assert plain.shape[1] <= 7 + 5
    assert ours.speculation_statistics.emitted == plain.shape[1] - 7


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("policy_seed", range(3))
def test_several_stop_strings_end_rows_that_draft_different_lengths(policy_seed: int, eos: int | None) -> None:
    strings = [spelled(0, 2), spelled(1, 8)[-1] + spelled(1, 9), spelled(2, 5)]
    decode(
        prompts(),
        RandomLengths(7, seed=policy_seed),
        half_agreeing(),
        eos_token_id=eos,
        **stop_arguments(strings),
    )


def test_a_prompt_that_ends_inside_a_stop_string_counts_towards_it() -> None:
    last = tiny_tokenizer().convert_ids_to_tokens(int(prompts()["input_ids"][0, -1]))
    plain, _ = decode(prompts(), in_blocks(3), eos_token_id=2, **stop_arguments(last[-1] + spelled(0, 0)))
    assert plain[0, PROMPT_WIDTH + 1 :].tolist() == [PAD] * (plain.shape[1] - PROMPT_WIDTH - 1)


# Limits


@pytest.mark.parametrize("new_tokens", [1, 2, DRAFTED, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("draft", ["full", "half"])
def test_no_block_runs_past_max_new_tokens(new_tokens: int, draft: str) -> None:
    plain, ours = decode(
        prompts(),
        in_blocks(3),
        target() if draft == "full" else half_agreeing(),
        max_new_tokens=new_tokens,
    )
    assert plain.shape[1] == PROMPT_WIDTH + new_tokens
    assert [row.emitted for row in ours.speculation_statistics.rows] == [new_tokens] * 3


def test_one_new_token_needs_no_draft() -> None:
    _, ours = decode(prompts(), in_blocks(3), max_new_tokens=1)
    assert ours.speculation_statistics.draft_steps == 0


@pytest.mark.parametrize("beyond", [1, 2, BLOCK, BLOCK + 1])
def test_max_length_counts_the_padded_prompt(beyond: int) -> None:
    batch = prompts()
    plain, _ = decode(batch, in_blocks(3), max_new_tokens=None, max_length=PROMPT_WIDTH + beyond)
    assert plain.shape[1] == PROMPT_WIDTH + beyond


@pytest.mark.parametrize("beyond", [-2, 1, 4, STEPS + 3])
def test_a_length_criterion_of_the_users_takes_the_place_of_the_default(beyond: int) -> None:
    """Also when it allows more than the default, or less than the prompt already has."""
    plain, _ = decode(
        prompts(),
        RandomLengths(5),
        half_agreeing(),
        criteria=lambda: [MaxLengthCriteria(PROMPT_WIDTH + beyond)],
    )
    assert plain.shape[1] == PROMPT_WIDTH + max(beyond, 1)


def test_an_eos_criterion_of_the_users_takes_the_place_of_the_default() -> None:
    texts = endless_text(PROMPTS)
    decode(
        prompts(),
        in_blocks(3),
        criteria=lambda: [EosTokenCriteria([texts[1][6]])],
        eos_token_id=texts[0][2],
        pad_token_id=PAD,
    )


@pytest.mark.parametrize("at_least", [1, 3, BLOCK, BLOCK + 2])
@pytest.mark.parametrize("counted", ["min_new_tokens", "min_length"])
def test_no_row_ends_before_its_shortest_length(counted: str, at_least: int) -> None:
    texts = endless_text(PROMPTS)
    minimum = at_least if counted == "min_new_tokens" else PROMPT_WIDTH + at_least
    plain, _ = decode(
        prompts(),
        RandomLengths(6),
        half_agreeing(),
        eos_token_id=[texts[0][0], texts[1][1], texts[2][2]],
        **{counted: minimum},
    )
    ends = torch.isin(plain[:, PROMPT_WIDTH:], torch.tensor([texts[0][0], texts[1][1], texts[2][2]]))
    assert not ends[:, :at_least].any()


class SteppingClock:
    """Stands in for the `time` module: every look at it takes a second."""

    def __init__(self) -> None:
        self._seconds = 0

    def time(self) -> int:
        self._seconds += 1
        return self._seconds


def with_stepping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", SteppingClock())


def test_time_is_looked_at_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding looks after every token; a round is what cannot be interrupted here."""
    with_stepping_clock(monkeypatch)
    output = target().generate(
        **prompts(),
        assistant_model=target(),
        speculation_policy=in_blocks(3),
        max_new_tokens=STEPS,
        max_time=1.5,
    )
    assert output[:, PROMPT_WIDTH:].tolist() == [text[: 2 * BLOCK] for text in endless_text(PROMPTS)]


def test_rows_show_all_they_have_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with_stepping_clock(monkeypatch)
    output = target().generate(
        **prompts(),
        assistant_model=target(),
        speculation_policy=ScriptedLengths([[1, 4, 0], [2, 0, 3]]),
        max_new_tokens=STEPS,
        max_time=1.5,
        eos_token_id=2,
    )
    texts = endless_text(PROMPTS)
    lengths = [2 + 3, 5 + 1, 1 + 4]
    assert [2 in text for text in texts] == [False] * 3
    for row, length in enumerate(lengths):
        padding = [PAD] * (max(lengths) - length)
        assert output[row, PROMPT_WIDTH:].tolist() == texts[row][:length] + padding


def test_rows_end_together_when_time_is_up_and_nothing_pads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_stepping_clock(monkeypatch)
    output = target().generate(
        **prompts(),
        assistant_model=target(),
        speculation_policy=ScriptedLengths([[1, 4, 0], [2, 0, 3]]),
        max_new_tokens=STEPS,
        max_time=1.5,
    )
    assert output[:, PROMPT_WIDTH:].tolist() == [text[:5] for text in endless_text(PROMPTS)]


# Criteria of the user's


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


# `Stopping` by itself


class RowSays(StoppingCriteria):
    """Stops a row whose last two tokens are equal, and everything when the last tokens of all rows are equal."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        twice = input_ids[:, -1] == input_ids[:, -2]
        return twice | bool((input_ids[:, -1] == input_ids[0, -1]).all())


def plain_lengths(
    texts: list[list[int]], prompt: list[int], eos: list[int], criteria: Sequence[StoppingCriteria]
) -> list[int]:
    """Where plain decoding ends rows that would otherwise go on like `texts`."""
    rows, limit = len(texts), len(texts[0])
    shown = [[token] for token in prompt]
    ends: list[int | None] = [None] * rows
    for step in range(1, limit + 1):
        for row in range(rows):
            pads = eos and ends[row] is not None
            shown[row].append(PAD if pads else texts[row][step - 1])
        says = StoppingCriteriaList(criteria)(torch.tensor(shown), None).tolist()
        for row in range(rows):
            stops = says[row] or step == limit or shown[row][-1] in eos
            if stops and ends[row] is None:
                ends[row] = step
        if None not in ends:
            break
    width = max(end for end in ends if end is not None)
    return [end if eos and end is not None else width for end in ends]


def batch_of(prompt: list[int], limit: int) -> SequenceBatch:
    ids = torch.tensor(prompt)[:, None]
    return SequenceBatch(ids, torch.ones_like(ids), max_new_tokens=limit, scratch=8, pad_token=PAD)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), limit=st.integers(1, 14), with_criteria=st.booleans())
def test_stopping_agrees_with_a_plain_model_of_it(
    data: st.DataObject, rows: int, limit: int, with_criteria: bool
) -> None:
    token = st.integers(1, 9)
    texts = data.draw(st.lists(st.lists(token, min_size=limit, max_size=limit), min_size=rows, max_size=rows))
    prompt = data.draw(st.lists(token, min_size=rows, max_size=rows))
    eos = data.draw(st.lists(token, max_size=2))
    users = [RowSays()] if with_criteria else []
    expected = plain_lengths(texts, prompt, eos, users)

    sequences = batch_of(prompt, limit)
    criteria = [MaxLengthCriteria(limit + 1), *users, *([EosTokenCriteria(eos)] if eos else [])]
    stopping = Stopping(StoppingCriteriaList(criteria), sequences)
    promised = [0] * rows
    while not all(stopping.finished()):
        counts = [
            0 if done else min(data.draw(st.integers(1, 5)), limit - sent)
            for done, sent in zip(stopping.finished(), sequences.generated_counts, strict=True)
        ]
        block = torch.full((rows, 5), PAD)
        for row, (start, count) in enumerate(zip(sequences.generated_counts, counts, strict=True)):
            block[row, :count] = torch.tensor(texts[row][start : start + count])
        kept, ended = stopping.cut(block, torch.tensor(counts))
        assert all(0 <= keeps <= count for keeps, count in zip(kept.tolist(), counts, strict=True))
        sequences.append(block, kept)
        sequences.synchronise(sequences.generated.tolist())
        stopping.advance(ended.tolist(), lambda step: None)
        for row in range(rows):
            assert promised[row] <= stopping.confirmed(row) <= expected[row], "promised a token that was not to be"
            promised[row] = stopping.confirmed(row)
    assert stopping.final_lengths() == expected
    assert promised == expected


def test_cut_takes_the_first_of_eos_and_limit_and_leaves_finished_rows_alone() -> None:
    sequences = batch_of([7, 7, 7, 7], limit=3)
    stopping = Stopping(StoppingCriteriaList([EosTokenCriteria([4, 5])]), sequences)
    block = torch.tensor([[1, 5, 4, 1], [1, 1, 1, 5], [5, 1, 1, 1], [1, 1, 5, 1]])
    kept, ended = stopping.cut(block, torch.tensor([4, 4, 0, 2]))
    assert kept.tolist() == [2, 3, 0, 2]
    assert ended.tolist() == [True, True, False, False]


def test_an_eos_token_beyond_a_rows_count_is_not_seen() -> None:
    stopping = Stopping(StoppingCriteriaList([EosTokenCriteria([5])]), batch_of([7], limit=9))
    kept, ended = stopping.cut(torch.tensor([[1, 5]]), torch.tensor([1]))
    assert kept.tolist() == [1]
    assert ended.tolist() == [False]


def test_final_lengths_are_not_given_out_early() -> None:
    stopping = Stopping(StoppingCriteriaList(), batch_of([7, 7], limit=9))
    with pytest.raises(RuntimeError, match="still being generated"):
        stopping.final_lengths()


@pytest.mark.parametrize("eos", [[], [9]])
def test_time_never_takes_back_what_was_confirmed(eos: list[int]) -> None:
    """Without padding, rows end together, so what ran ahead may yet be cut and is not confirmed."""
    sequences = batch_of([7, 7], limit=9)
    limit = MaxTimeCriteria(max_time=1e6)
    stopping = Stopping(
        StoppingCriteriaList([limit, *([EosTokenCriteria(eos)] if eos else [])]),
        sequences,
    )
    confirmed = [0, 0]
    for counts, time_is_up in (([3, 1], False), ([2, 1], True)):
        limit.max_time = -1.0 if time_is_up else 1e6
        sequences.append(torch.full((2, 3), 3), torch.tensor(counts))
        sequences.synchronise(sequences.generated.tolist())
        stopping.advance([False, False], lambda step: None)
        for row in range(2):
            assert stopping.confirmed(row) >= confirmed[row]
            confirmed[row] = stopping.confirmed(row)
    assert stopping.final_lengths() == confirmed


def test_the_strictest_length_limit_counts() -> None:
    limits = StoppingCriteriaList([MaxLengthCriteria(9), MaxLengthCriteria(7)])
    assert length_limit(limits, 20) == 7
    assert length_limit(StoppingCriteriaList(), 20) == 20


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
