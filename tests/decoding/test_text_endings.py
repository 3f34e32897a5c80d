"""Texts end where plain batched `generate` ends them, wherever in a block that is.

The kinds of error are known from transformers #47912 (an end-of-sequence token accepted mid-block), #48039 (a stop
string completed mid-block), #28555 and #46993 (a block that runs past the limit).
"""

from __future__ import annotations

import pytest
import torch
from ending_calls import (
    BLOCK,
    DRAFTED,
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
    with_stepping_clock,
)
from tiny_models import PAD, ragged_batch
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_text import tiny_tokenizer
from transformers import EosTokenCriteria, MaxLengthCriteria

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


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


def test_a_stop_string_cuts_tokens_that_were_accepted_after_it() -> None:
    plain, ours = decode(
        ragged_batch([7], seed=3),
        ScriptedLengths([[9]]),
        **stop_arguments(tiny_tokenizer().convert_ids_to_tokens(endless_text((7,), 3)[0][4])),
    )
    assert plain.shape[1] <= 7 + 5
    assert ours.speculation_statistics.emitted == plain.shape[1] - 7


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("policy_seed", range(3))
def test_several_stop_strings_end_rows_that_draft_different_lengths(policy_seed: int, eos: int | None) -> None:
    strings = [spelled(0, 2), spelled(1, 8)[-1] + spelled(1, 9), spelled(2, 5)]
    decode(prompts(), RandomLengths(7, seed=policy_seed), half_agreeing(), eos_token_id=eos, **stop_arguments(strings))


def test_a_prompt_that_ends_inside_a_stop_string_counts_towards_it() -> None:
    last = tiny_tokenizer().convert_ids_to_tokens(int(prompts()["input_ids"][0, -1]))
    plain, _ = decode(prompts(), in_blocks(3), eos_token_id=2, **stop_arguments(last[-1] + spelled(0, 0)))
    assert plain[0, PROMPT_WIDTH + 1 :].tolist() == [PAD] * (plain.shape[1] - PROMPT_WIDTH - 1)


@pytest.mark.parametrize("eos", [None, 2])
def test_padding_in_front_counts_towards_a_stop_string_as_in_plain_decoding(eos: int | None) -> None:
    """Plain decoding shows a criterion the batch as it is. This string begins in the padding of the shortest row."""
    prompt = tiny_tokenizer().convert_ids_to_tokens(int(prompts()["input_ids"][2, -1]))
    string = f"ad>{prompt}{spelled(2, 0)}{spelled(2, 1)[0]}"
    _, ours = decode(prompts(), in_blocks(3), eos_token_id=eos, **stop_arguments(string))
    assert [row.rounds for row in ours.speculation_statistics.rows] == [3, 3, 3 if eos is None else 1]


# Limits


@pytest.mark.parametrize("new_tokens", [1, 2, DRAFTED, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("draft", ["full", "half"])
def test_no_block_runs_past_max_new_tokens(new_tokens: int, draft: str) -> None:
    plain, ours = decode(
        prompts(), in_blocks(3), target() if draft == "full" else half_agreeing(), max_new_tokens=new_tokens
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
        prompts(), RandomLengths(5), half_agreeing(), criteria=lambda: [MaxLengthCriteria(PROMPT_WIDTH + beyond)]
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


def test_time_is_looked_at_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding looks after every token; a round is what cannot be interrupted here."""
    with_stepping_clock(monkeypatch)
    output = target().generate(
        **prompts(), assistant_model=target(), speculation_policy=in_blocks(3), max_new_tokens=STEPS, max_time=1.5
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
