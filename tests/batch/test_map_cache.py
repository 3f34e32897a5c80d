"""`Dataset.map` reuses results of the same settings and models, and of no others."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, IterableDataset
from tiny_models import noisy_copy
from tiny_pair import tiny_pair
from transformers import LogitsProcessor
from watched_forward import watch

from hf_dsde import SpeculationConfig
from hf_dsde.batch.generator import BatchGenerator

pytestmark = pytest.mark.usefixtures("quiet_datasets")
PROMPTS = ["a", "bb", "cGh", "dIj"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Dataset.from_dict({"prompt": PROMPTS, "id": list("wxyz")}).save_to_disk(tmp_path / "data")
    return tmp_path / "data"


class AddsToScores(LogitsProcessor):
    """A processor of a user's own."""

    def __init__(self, token: int, value: float = 1.0) -> None:
        self._token, self._value = token, value

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self._token] += self._value
        return scores


def generator(pair=None, **changes) -> BatchGenerator:
    pair = tiny_pair(torch.float64) if pair is None else pair
    settings = {"speculation_policy": "static", "batch_size": 2, "max_new_tokens": 3, **changes}
    return BatchGenerator(pair.target, pair.tokenizer, assistant_model=pair.draft, **settings)


def mapped(folder: Path, made: BatchGenerator) -> tuple[Dataset, int]:
    """The data with texts, and how often the target was run for them."""
    passes = watch(made._model)
    # Loaded again each time, as another run of a script would, so that only files can be reused.
    return datasets.load_from_disk(folder).map(made, batched=True), passes.calls


def test_new_columns_stand_beside_the_old_ones_in_the_order_of_the_rows(saved):
    made = generator()
    data, _ = mapped(saved, made)
    assert data["id"] == list("wxyz")
    pair = tiny_pair(torch.float64)
    for prompt, tokens, text in zip(PROMPTS, data["generated_token_ids"], data["generated_text"], strict=True):
        inputs = pair.tokenizer(prompt, return_tensors="pt")
        out = pair.target.generate(**inputs, do_sample=False, max_new_tokens=3)[0, inputs["input_ids"].shape[1] :]
        assert tokens == out.tolist()
        assert text == pair.tokenizer.decode(out, skip_special_tokens=True)


def test_the_same_settings_run_no_model_again(saved):
    first, passes = mapped(saved, generator())
    assert passes > 0
    second, passes = mapped(saved, generator())
    assert passes == 0
    assert second.to_list() == first.to_list()


@pytest.mark.parametrize("changes", [{"batch_size": 3}, {"refill": False}, {"cache_budget": 1 << 30}], ids=str)
def test_what_decides_no_text_makes_no_other_file(saved, changes):
    mapped(saved, generator())
    assert mapped(saved, generator(**changes))[1] == 0


CHANGES = {
    "more tokens": {"max_new_tokens": 4},
    "another policy": {"speculation_policy": "dsde"},
    "a policy's setting": {
        "speculation_policy": SpeculationConfig(policy="static", policy_arguments={"num_draft_tokens": 2})
    },
    "a speculation setting": {"speculation_config": SpeculationConfig(max_draft_length=3)},
    "sampling": {"do_sample": True},
    "a temperature": {"do_sample": True, "temperature": 0.5},
    "a stop string": {"stop_strings": ["Gh"]},
    "a penalty": {"repetition_penalty": 1.3},
    "a processor": {"logits_processor": [AddsToScores(7)]},
    "a processor's setting": {"logits_processor": [AddsToScores(8)]},
    "a limit of prompts": {"max_prompt_tokens": 2},
}


def test_every_change_of_a_setting_generates_again(saved):
    mapped(saved, generator())
    for what, changes in CHANGES.items():
        assert mapped(saved, generator(**changes))[1] > 0, what
        if what != "sampling":
            assert mapped(saved, generator(**changes))[1] == 0, f"{what}, again"


def test_weights_that_were_changed_in_place_generate_again(saved):
    pair = tiny_pair(torch.float64)
    mapped(saved, generator(pair))
    for weight in pair.target.parameters():
        weight.data *= 1.01
    assert mapped(saved, generator(pair))[1] > 0


def test_one_generator_whose_weights_were_changed_meanwhile_generates_again(saved):
    pair = tiny_pair(torch.float64)
    made = generator(pair)
    mapped(saved, made)
    pair.target.lm_head.weight.data *= -1.0
    assert mapped(saved, made)[1] > 0


def test_another_draft_generates_again(saved):
    pair = tiny_pair(torch.float64)
    mapped(saved, generator(pair))
    other = type(pair)(pair.target, noisy_copy(pair.target, 0.05, seed=2), pair.tokenizer)
    assert mapped(saved, generator(other))[1] > 0


def test_another_chat_template_generates_again(tmp_path):
    rows = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    Dataset.from_dict({"messages": rows}).save_to_disk(tmp_path / "data")
    pair = tiny_pair(torch.float64)
    before, _ = mapped(tmp_path / "data", generator(pair))
    pair.tokenizer.chat_template = pair.tokenizer.chat_template.replace("ab{{", "ba{{")
    after, passes = mapped(tmp_path / "data", generator(pair))
    assert passes > 0
    assert before["generated_token_ids"] != after["generated_token_ids"]


def test_a_stream_of_rows_can_be_mapped(saved):
    whole, _ = mapped(saved, generator())
    stream = datasets.load_from_disk(saved).to_iterable_dataset(num_shards=2)
    assert isinstance(stream, IterableDataset)
    assert list(stream.map(generator(), batched=True, batch_size=2)) == whole.to_list()


def test_several_processes_are_refused_with_the_way_out(saved, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ)  # `map` puts a copy in its place, and leaves it there
    data = datasets.load_from_disk(saved)
    with pytest.raises(Exception, match=r"Call `Dataset.map` without `num_proc`.*accelerate launch"):
        data.map(generator(), batched=True, num_proc=2)


def test_rows_one_by_one_are_refused_with_the_way_out(saved):
    with pytest.raises(TypeError, match="Call map with batched=True"):
        datasets.load_from_disk(saved).map(generator())
