"""Streamers get what belongs to the output, all of it, once, in order, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from ending_calls import half_agreeing as draft
from ending_calls import target, with_stepping_clock
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ragged_batch
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_text import StopsAfterCalls, StopsAllWhenRow, StopsRowOn, tiny_tokenizer
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer
from waits import RecordsRows

import hf_dsde
from hf_dsde import BatchIteratorStreamer, BatchTextStreamer

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

STEPS = 14
SEED = 1
ONE, THREE = (6,), (3, 7, 1)


@cache
def endless_text(lengths: tuple[int, ...]) -> list[list[int]]:
    batch = ragged_batch(lengths, seed=SEED)
    output = target().generate(**batch, do_sample=False, max_new_tokens=STEPS)
    return output[:, batch["input_ids"].shape[1] :].tolist()


def generate(lengths: tuple[int, ...], policy: hf_dsde.StoppingPolicy | None, **arguments: Any) -> torch.Tensor:
    if policy is not None:
        arguments |= {"assistant_model": draft(), "speculation_policy": policy}
    batch = ragged_batch(lengths, seed=SEED)
    return target().generate(**batch, **{"do_sample": False, "max_new_tokens": STEPS, **arguments})


def check_streamed(streamer: RecordsRows, output: Any, lengths: tuple[int, ...]) -> None:
    """What each row emitted was streamed, once, and nothing else."""
    emitted = [row.emitted for row in output.speculation_statistics.rows]
    new_tokens = output.sequences[:, max(lengths) :]
    assert streamer.rows == [row[:count].tolist() for row, count in zip(new_tokens, emitted, strict=True)]
    assert streamer.ends == 1


class RecordsPuts(BaseStreamer):
    """Any streamer of transformers' kind."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((value.tolist(), value.dtype, str(value.device)))

    def end(self) -> None:
        self.calls.append("end")


def endings(lengths: tuple[int, ...]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Arguments under which texts end in every way; made again for each call, as some criteria count."""
    texts = endless_text(lengths)
    first, last = texts[0], texts[-1]
    spelled = tiny_tokenizer().convert_ids_to_tokens([first[5], last[3], last[4]])

    def criteria(*chosen: StoppingCriteria) -> StoppingCriteriaList:
        return StoppingCriteriaList(chosen)

    return {
        "length": dict,
        "one token": lambda: {"max_new_tokens": 1},
        "eos": lambda: {"eos_token_id": [first[4], last[8]]},
        "stop string": lambda: {
            "stop_strings": [spelled[0], spelled[1][-1] + spelled[2][0]],
            "tokenizer": tiny_tokenizer(),
        },
        "criterion of each row": lambda: {"stopping_criteria": criteria(StopsRowOn(first[6], last[2]))},
        "criterion across rows": lambda: {"stopping_criteria": criteria(StopsAllWhenRow(len(texts) - 1, last[5]))},
        "criterion with one answer": lambda: {"stopping_criteria": criteria(StopsAfterCalls(6))},
    }


ENDINGS = (
    "length",
    "one token",
    "eos",
    "stop string",
    "criterion of each row",
    "criterion across rows",
    "criterion with one answer",
)


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_single_sequence_is_streamed_call_for_call_as_in_plain_decoding(ending: str, eos: int | None) -> None:
    streamers = []
    for policy in (None, ScriptedLengths([[4]]), RandomLengths(6, seed=2)):
        streamers.append(RecordsPuts())
        generate(ONE, policy, streamer=streamers[-1], **{"eos_token_id": eos, **endings(ONE)[ending]()})
    plain, *ours = streamers
    assert plain.calls[-1] == "end"
    assert [streamer.calls for streamer in ours] == [plain.calls] * 2


@pytest.mark.parametrize("ending", ["length", "eos", "stop string"])
def test_transformers_own_streamers_give_the_text_of_plain_decoding(
    ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, iterated = [], []
    for policy in (None, ScriptedLengths([[4]])):
        arguments = endings(ONE)[ending]
        generate(ONE, policy, streamer=TextStreamer(tiny_tokenizer(), skip_prompt=True), **arguments())
        printed.append(capsys.readouterr().out)
        iterator = TextIteratorStreamer(tiny_tokenizer(), timeout=5)
        generate(ONE, policy, streamer=iterator, **arguments())
        iterated.append(list(iterator))
    assert printed[0] == printed[1] != "\n"
    assert "".join(iterated[0]) == "".join(iterated[1]) != ""


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [ONE, THREE])
@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_of_a_batch_are_streamed_exactly_as_they_come_out(
    ending: str, eos: int | None, lengths: tuple[int, ...]
) -> None:
    for policy in (ScriptedLengths([[4] * len(lengths)]), RandomLengths(7, seed=3)):
        streamer = RecordsRows()
        arguments = {"eos_token_id": eos, **endings(lengths)[ending]()}
        output = generate(lengths, policy, streamer=streamer, return_dict_in_generate=True, **arguments)
        assert streamer.prompts == output.sequences[:, : max(lengths)].tolist()
        check_streamed(streamer, output, lengths)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    policy_seed=st.integers(0, 10_000),
    eos_steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, STEPS - 1)), max_size=2),
    stop_steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, STEPS - 1)), max_size=3),
    together=st.none() | st.integers(1, STEPS),
)
def test_nothing_is_streamed_that_is_cut_later(
    policy_seed: int, eos_steps: list[tuple[int, int]], stop_steps: list[tuple[int, int]], together: int | None
) -> None:
    """Criteria judge a step when all rows have reached it, so rows that ran ahead are cut after the fact."""
    texts = endless_text(THREE)
    criteria: list[StoppingCriteria] = [StopsRowOn(*(texts[row][step] for row, step in stop_steps))]
    if together is not None:
        criteria.append(StopsAfterCalls(together))
    streamer = RecordsRows()
    output = generate(
        THREE,
        RandomLengths(7, seed=policy_seed),
        streamer=streamer,
        eos_token_id=[texts[row][step] for row, step in eos_steps] or None,
        stopping_criteria=StoppingCriteriaList(criteria),
        return_dict_in_generate=True,
    )
    check_streamed(streamer, output, THREE)


def test_a_row_that_stopped_is_not_closed_while_it_goes_on_with_the_batch() -> None:
    """Without an end-of-sequence token a stopped row gets real tokens until the batch's last row has stopped."""
    texts = endless_text(THREE)
    streamer = RecordsRows()
    output = generate(
        THREE,
        ScriptedLengths([[0, 0, 6]]),
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([StopsRowOn(texts[2][11])]),
    )
    assert streamer.rows == output[:, max(THREE) :].tolist()
    assert {len(row) for row in streamer.rows} == {STEPS}


@pytest.mark.parametrize("eos", [None, 2])
def test_nothing_is_streamed_that_time_cuts(monkeypatch: pytest.MonkeyPatch, eos: int | None) -> None:
    with_stepping_clock(monkeypatch)
    streamer = RecordsRows()
    output = generate(
        THREE,
        ScriptedLengths([[0, 6, 2], [1, 0, 4]]),
        streamer=streamer,
        max_time=1.5,
        eos_token_id=eos,
        return_dict_in_generate=True,
    )
    check_streamed(streamer, output, THREE)
    assert max(map(len, streamer.rows)) < STEPS


def test_tokens_come_while_other_rows_still_run() -> None:
    """Without criteria, what a round adds is certain at once: each row gets one put per round."""
    streamer = RecordsRows()
    output = generate(THREE, ScriptedLengths([[2, 2, 2]]), streamer=streamer, return_dict_in_generate=True)
    assert streamer.puts == sum(row.rounds for row in output.speculation_statistics.rows)
    assert streamer.puts > 3


def test_a_row_is_closed_before_slower_ones_have_ended() -> None:
    first_token = endless_text(THREE)[1][0]
    streamer = RecordsRows()
    generate(THREE, ScriptedLengths([[4, 4, 4]]), streamer=streamer, eos_token_id=first_token)
    assert streamer.ended[0] == 1


def test_text_of_a_batch_is_what_decoding_the_output_gives() -> None:
    class Collects(BatchTextStreamer):
        texts: dict[int, str]

        def on_text(self, row: int, text: str, end: bool) -> None:
            self.texts = {**getattr(self, "texts", {}), row: getattr(self, "texts", {}).get(row, "") + text}

    streamer = Collects(tiny_tokenizer())
    output = generate(THREE, RandomLengths(5), streamer=streamer)
    assert [streamer.texts[row] for row in range(3)] == tiny_tokenizer().batch_decode(output[:, max(THREE) :])


def test_a_batch_can_be_iterated_over() -> None:
    streamer = BatchIteratorStreamer(tiny_tokenizer(), timeout=5)
    output = generate(THREE, RandomLengths(5), streamer=streamer)
    texts = ["", "", ""]
    for row, text in streamer:
        texts[row] += text
    assert texts == tiny_tokenizer().batch_decode(output[:, max(THREE) :])


def test_a_streamer_serves_two_calls() -> None:
    iterator = BatchIteratorStreamer(tiny_tokenizer(), timeout=5)
    for _ in range(2):
        generate(THREE, RandomLengths(5), streamer=iterator)
        assert {row for row, _ in iterator} == {0, 1, 2}


def test_a_streamer_for_single_sequences_is_refused_for_a_batch() -> None:
    with pytest.raises(ValueError, match=r"streamer: RecordsPuts takes one sequence, but the batch has 3; pass a"):
        generate(THREE, RandomLengths(5), streamer=RecordsPuts())
    with pytest.raises(ValueError, match="batch size 1"):
        generate(THREE, RandomLengths(5), streamer=TextStreamer(tiny_tokenizer()))


class FailsLater(StoppingCriteria):
    """A user's criterion with a fault in it."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> bool:
        if input_ids.shape[1] > max(THREE) + 4:
            raise ZeroDivisionError
        return False


def test_an_iteration_ends_when_decoding_fails() -> None:
    streamer = BatchIteratorStreamer(tiny_tokenizer(), timeout=5)
    with pytest.raises(ZeroDivisionError):
        target().generate(
            **ragged_batch(THREE, seed=SEED),
            max_new_tokens=STEPS,
            assistant_model=draft(),
            speculation_policy="static",
            stopping_criteria=StoppingCriteriaList([FailsLater()]),
            streamer=streamer,
        )
    assert {row for row, _ in streamer} <= {0, 1, 2}
