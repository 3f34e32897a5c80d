"""A round waits for the device once, whoever wants to know its tokens. What a GPU shows is in `test_gpu_runner.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ending_calls import PROMPT_WIDTH, PROMPTS, STEPS, endless_text, half_agreeing, prompts, stop_arguments, target
from tiny_models import ragged_batch
from tiny_text import tiny_tokenizer
from waits import OnDevice, RecordsRows, noted_looks

import hf_dsde
from hf_dsde.plots import LivePlot

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

EACH_ROUND = "utils/transfers.py::wait"
SETTING_UP = {"decoding/sequences.py::__init__", "decoding/lengths.py::first"}
"""Where a call may look once or twice, however long its text gets."""


def test_looking_is_noted() -> None:
    """Else the counts below would show nothing."""
    OnDevice.looks.clear()
    tensor = torch.tensor([1, 0, 2]).as_subclass(OnDevice)
    bool((tensor[:2] + 1).any())
    torch.cat([tensor, torch.tensor([3])]).tolist()
    assert type(tensor.cpu()) is torch.Tensor
    assert OnDevice.looks == {"elsewhere": 3}


def stop_strings() -> list[str]:
    """One that a token ends, and one that lies across two."""
    tokens = [tiny_tokenizer().convert_ids_to_tokens(text) for text in endless_text(PROMPTS)]
    return [tokens[0][7], tokens[1][9][-1] + tokens[1][10][0]]


@pytest.mark.parametrize("eos", [None, 2])
@pytest.mark.parametrize("drafted", [0, 2])
@pytest.mark.parametrize("wanted", ["nothing", "a stream", "stop strings", "both", "both, in time", "a plot"])
def test_a_round_looks_at_the_device_once(
    wanted: str, drafted: int, eos: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": eos}
    if wanted not in ("nothing", "a stream", "a plot"):
        arguments |= stop_arguments(stop_strings())
    if "time" in wanted:
        arguments["max_time"] = 1e6
    expected = target().generate(**prompts(), **arguments)
    streamer = RecordsRows() if wanted not in ("nothing", "stop strings", "a plot") else None
    with noted_looks(monkeypatch) as looks:
        output = target().generate(
            **prompts(),
            **arguments,
            assistant_model=half_agreeing(),
            speculation_policy=hf_dsde.StaticPolicy(drafted),
            speculation_listeners=[LivePlot()] if wanted == "a plot" else [],
            streamer=streamer,
            return_dict_in_generate=True,
        )
    noted = dict(looks)  # what comes out of it lies on the device as well
    assert output.sequences.tolist() == expected.tolist()
    if streamer is not None:
        emitted = [row.emitted for row in output.speculation_statistics.rows]
        new = expected[:, PROMPT_WIDTH:].tolist()
        assert streamer.rows == [text[:count] for text, count in zip(new, emitted, strict=True)]
    assert noted.pop(EACH_ROUND) == len(output.speculation_statistics.rounds)
    assert set(noted) <= SETTING_UP, noted
    assert sum(noted.values()) <= 4, noted


def test_rows_of_a_job_are_ended_and_handed_out_without_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    strings = stop_strings()
    lengths, limits = [3, 7, 1, 9, 4, 12, 2], [9, 3, STEPS, 5, 7, STEPS, 8]
    rows: list[dict[str, Any]] = [
        {"input_ids": ids[-length:].tolist(), "max_new_tokens": limit, "stop_strings": strings[: row % 3]}
        for row, (ids, length, limit) in enumerate(
            zip(ragged_batch(lengths, seed=1)["input_ids"], lengths, limits, strict=True)
        )
    ]
    made = hf_dsde.BatchGenerator(
        target(),
        tiny_tokenizer(),
        assistant_model=half_agreeing(),
        speculation_policy=hf_dsde.StaticPolicy(2),
        batch_size=3,
        do_sample=False,
        eos_token_id=endless_text(PROMPTS)[1][8],
        pad_token_id=0,
    )
    with noted_looks(monkeypatch) as looks:
        results = list(made.stream(rows, ordered=True))
    noted = dict(looks)
    assert {result.finish_reason for result in results} >= {"length", "stop"}
    assert noted.pop(EACH_ROUND) >= max(limits) / 3
    # Rows that begin another text draft as many tokens as the policy says then.
    assert noted.pop("decoding/lengths.py::first") <= len(rows)
    assert set(noted) <= SETTING_UP, noted
