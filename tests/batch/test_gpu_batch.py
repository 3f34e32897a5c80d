"""Batch inference where only a GPU can show it: recorded storing of prompts, real memory limits, two devices."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, noisy_copy, ragged_batch, tiny_model
from tiny_text import tiny_tokenizer
from transformers import PreTrainedModel
from waits import noted_waits

from hf_dsde import BatchGenerator, BatchSizeWarning, RunnerWarning, release_memory
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.memory import cache_bytes

pytestmark = pytest.mark.gpu

RECORDED = [family for family in FAMILIES if family != "mixtral"]
FUSED = [family for family in RECORDED if why_not_fused(tiny_model(family)) is None]
LENGTHS = [1, 9, 2, 30, 1, 5, 17, 3, 200, 2, 8, 4, 1, 90]
LIMITS = [7, 1, 19, 3, 12, 24, 1, 9, 5, 16, 2, 30, 11, 20]


def rows() -> list[dict[str, Any]]:
    inputs = ragged_batch(LENGTHS, seed=5)["input_ids"]
    return [
        {"input_ids": row[-length:].tolist(), "max_new_tokens": limit}
        for row, length, limit in zip(inputs, LENGTHS, LIMITS, strict=True)
    ]


@functools.cache
def pair(family: str = "llama", target: str = "cuda:0", draft: str = "cuda:0") -> tuple[PreTrainedModel, ...]:
    model = tiny_model(family).float()
    return model.to(target), noisy_copy(tiny_model(family).float(), 0.05).to(draft)


@functools.cache
def alone(family: str = "llama") -> list[list[int]]:
    """What stock `generate` gives for each prompt alone."""
    model, _ = pair(family)
    texts = []
    for row in rows():
        ids = torch.tensor([row["input_ids"]], device=model.device)
        mask = torch.ones_like(ids)
        text = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=row["max_new_tokens"], do_sample=False, pad_token_id=0
        )
        texts.append(text[0, ids.shape[1] :].tolist())
    return texts


def generator(models: tuple[PreTrainedModel, ...], **settings: Any) -> BatchGenerator:
    target, draft = models
    arguments = {"speculation_policy": "static", "batch_size": 4, "do_sample": False, "pad_token_id": 0, **settings}
    return BatchGenerator(target, tiny_tokenizer(), assistant_model=draft, **arguments)


def texts(made: BatchGenerator) -> list[list[int] | None]:
    return [result.token_ids for result in made.stream(rows(), ordered=True)]


@pytest.mark.parametrize("family", RECORDED)
def test_every_text_is_that_of_its_prompt_alone(family: str) -> None:
    """The second time every pass is recorded, and the cache holds other texts."""
    made = generator(pair(family))
    assert texts(made) == alone(family)
    assert texts(made) == alone(family)


# Said once per process when the mode is switched on.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_rows_are_ended_by_stop_strings_and_handed_out_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    strings = [tokenizer.convert_ids_to_tokens(text[len(text) // 2]) for text in alone()]
    asked = [{**row, "stop_strings": [string]} for row, string in zip(rows(), strings, strict=True)]
    made = generator(pair())
    expected = [result.token_ids for result in made.stream(asked, ordered=True)]
    for text, whole, string in zip(expected, alone(), strings, strict=True):
        assert text is not None
        assert text == whole[: len(text)]
        assert string in tokenizer.decode(text[-2:])
    with noted_waits(monkeypatch) as waits:
        assert [result.token_ids for result in made.stream(asked, ordered=True)] == expected
    assert waits["utils/transfers.py::wait"] > 0
    deciding = {
        place for place in waits if "stopping.py" in place or "stop_strings.py" in place or "_hand_out" in place
    }
    assert all(place.endswith("::__init__") for place in deciding), waits


@pytest.mark.parametrize("policy", ["dsde", "goodput", "marginal_goodput", "confidence"])
def test_policies_that_learn_keep_the_text(policy: str) -> None:
    assert texts(generator(pair(), speculation_policy=policy)) == alone()


@pytest.mark.parametrize("family", FUSED)
def test_prompts_of_refilled_rows_are_stored_by_recorded_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, eager = [], []
    original = GraphRunner._record_store

    def record(self, size, reach):
        sizes.append(size)
        return original(self, size, reach)

    monkeypatch.setattr(GraphRunner, "_record_store", record)
    monkeypatch.setattr(GraphRunner, "_store_eagerly", lambda *arguments: eager.append(arguments))
    expected = alone(family)
    for model in pair(family):
        release_memory(model)  # what earlier tests of this process have recorded
    assert texts(generator(pair(family))) == expected
    assert sizes
    assert not eager


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    for model in (target, draft):
        release_memory(model)  # what other tests left fits already
    room = cache_bytes(target, 3, 256)  # the longest row needs 231 slots, and gets 256
    monkeypatch.setattr("hf_dsde.execution.memory.free_bytes", lambda device: room)
    made = generator((target, draft), cache_budget=10**12)
    with pytest.warns(BatchSizeWarning, match="Memory ran out with 4 rows"):
        assert texts(made) == alone()
    assert made.statistics.batch_sizes[0] == 4
    assert max(made.statistics.batch_sizes[-1:]) <= 2


@pytest.mark.filterwarnings("ignore::hf_dsde.RunnerWarning")
@pytest.mark.parametrize(("target", "draft"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_target_and_draft_on_different_devices(target: str, draft: str) -> None:
    if torch.cuda.device_count() < 2 and "cuda:1" in (target, draft):
        pytest.skip("needs two CUDA devices")
    assert texts(generator(pair("llama", target, draft))) == alone()


def test_a_target_over_two_devices_runs_eagerly() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    from accelerate import dispatch_model

    model = tiny_model().float()
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    spread = dispatch_model(model, {**places, "model.rotary_emb": 0})
    made = generator((spread, pair()[1]))
    with pytest.warns(RunnerWarning):
        assert texts(made) == alone()


def test_tokens_are_of_the_vocabulary() -> None:
    assert all(0 <= token < VOCABULARY for text in alone() for token in text)
