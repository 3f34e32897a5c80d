"""How `generate` gets to the loop, and that a model is otherwise the model it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from small_batch import ARGUMENTS, BATCH, NEW_TOKENS, draft, model, plain_text, untouched
from tiny_models import PAD, noisy_copy, ragged_batch, tiny_model
from tiny_policies import RandomLengths
from tiny_text import tiny_tokenizer
from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

import hf_dsde
from hf_dsde import SpeculationConfig

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def speculates(target: PreTrainedModel, **arguments: Any) -> bool:
    """Decode with a policy; whether the text is the plain one and came from our loop."""
    arguments = {"speculation_policy": "static", "assistant_model": draft(), **ARGUMENTS, **arguments}
    output = target.generate(**arguments, return_dict_in_generate=True)
    return output.sequences.tolist() == plain_text() and output.speculation_statistics.draft_steps > 0


def refuses(target: PreTrainedModel) -> bool:
    """Whether the model knows nothing of a policy."""
    with pytest.raises(ValueError, match="speculation_policy"):
        target.generate(**ARGUMENTS, assistant_model=draft(), speculation_policy="static")
    return True


@pytest.fixture
def installed() -> Iterator[None]:
    hf_dsde.install()
    yield
    hf_dsde.uninstall()


# The literal call


@pytest.mark.parametrize(
    "how",
    [
        {"speculation_policy": "dsde"},
        {"speculation_policy": hf_dsde.DSDEStoppingPolicy(sl_max=8)},
        {"speculation_policy": SpeculationConfig(policy="heuristic")},
        {"speculation_policy": None, "speculation_config": SpeculationConfig(policy="confidence")},
        {"speculation_policy": "static", "speculation_config": SpeculationConfig(max_draft_length=3)},
        {"speculation_policy": RandomLengths(4), "speculation_config": SpeculationConfig(max_draft_length=3)},
    ],
    ids=["name", "policy", "config as policy", "config", "name and config", "policy and config"],
)
def test_a_policy_may_be_a_name_a_policy_or_a_config(how: dict[str, Any]) -> None:
    assert speculates(hf_dsde.enable(model()), **how)


def test_prompts_may_be_positional_and_without_a_mask() -> None:
    target = hf_dsde.enable(model())
    ids = ragged_batch((5, 5), seed=2)["input_ids"]
    plain = target.generate(ids, max_new_tokens=5)
    assert (
        target.generate(ids, max_new_tokens=5, assistant_model=draft(), speculation_policy="dsde").tolist()
        == plain.tolist()
    )


def test_a_name_beside_a_config_keeps_the_configs_arguments_for_that_name() -> None:
    config = SpeculationConfig(policy="static", policy_arguments={"num_draft_tokens": 2})
    target = hf_dsde.enable(model())
    output = target.generate(
        **ARGUMENTS,
        assistant_model=target,
        speculation_policy="static",
        speculation_config=config,
        return_dict_in_generate=True,
    )
    assert len(output.speculation_statistics.drafted_by_position) == 2


def test_a_config_that_was_saved_serves_the_call(tmp_path: Path) -> None:
    SpeculationConfig(policy="static", max_draft_length=2).save_pretrained(tmp_path)
    assert speculates(
        hf_dsde.enable(model()), speculation_policy=None, speculation_config=SpeculationConfig.from_pretrained(tmp_path)
    )


# enable, disable, install


def test_enabling_twice_is_enabling_once() -> None:
    target = model()
    assert hf_dsde.enable(target) is target
    enabled = type(target)
    assert type(hf_dsde.enable(target)) is enabled
    assert speculates(target)


def test_disabling_brings_the_models_own_class_back() -> None:
    target = model()
    own = type(target)
    assert hf_dsde.disable(hf_dsde.enable(target)) is target
    assert type(target) is own
    assert refuses(target)
    assert type(hf_dsde.disable(target)) is own


def test_enabling_one_model_leaves_others_of_its_class_alone() -> None:
    hf_dsde.enable(model())
    assert refuses(model())


def test_an_enabled_model_passes_for_what_it_is() -> None:
    target, own = model(), type(untouched())
    hf_dsde.enable(target)
    assert isinstance(target, own)
    assert (type(target).__name__, type(target).__module__, type(target).__doc__) == (
        own.__name__,
        own.__module__,
        own.__doc__,
    )
    assert repr(target) == repr(untouched())


def test_disabling_stops_at_what_something_else_did_to_the_class() -> None:
    model = hf_dsde.enable(tiny_model())
    model.__class__ = type("Sharded", (type(model),), {})
    with pytest.raises(TypeError, match="Sharded was derived from the enabled one"):
        hf_dsde.disable(model)


def test_only_models_that_generate_can_be_enabled() -> None:
    with pytest.raises(TypeError, match="model: Linear has no transformers `generate`; pass the causal language"):
        hf_dsde.enable(torch.nn.Linear(2, 2))


def test_installing_serves_every_model_until_it_is_undone(installed: None) -> None:
    target = model()
    hf_dsde.install()
    assert speculates(target)
    assert speculates(hf_dsde.enable(target))
    hf_dsde.uninstall()
    assert refuses(untouched())
    assert speculates(target), "enabled models stay enabled"


def test_a_class_enabled_while_installed_outlives_the_installation(installed: None) -> None:
    target = tiny_model("qwen3")  # a class that no other test enables
    hf_dsde.enable(target)
    hf_dsde.uninstall()
    plain = target.generate(**ARGUMENTS)
    ours = target.generate(**ARGUMENTS, assistant_model=noisy_copy(target, 0.05), speculation_policy="static")
    assert ours.tolist() == plain.tolist()
    assert refuses(hf_dsde.disable(target))


def test_disabling_leaves_an_installation_in_place(installed: None) -> None:
    assert speculates(hf_dsde.disable(hf_dsde.enable(model())))


def test_uninstalling_without_installing_does_nothing() -> None:
    hf_dsde.uninstall()
    assert refuses(untouched())


# Without a policy everything is stock


def test_stock_assisted_decoding_is_untouched() -> None:
    target = hf_dsde.enable(model())
    one = {**ragged_batch((5,), seed=3), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    for absent in ({}, {"speculation_policy": None}, {"speculation_policy": None, "speculation_config": None}):
        output = target.generate(**one, assistant_model=draft(), return_dict_in_generate=True, **absent)
        assert not hasattr(output, "speculation_statistics")
        assert output.sequences.tolist() == untouched().generate(**one, assistant_model=draft()).tolist()
    with pytest.raises(ValueError, match="batch_size = 1"):
        target.generate(**ARGUMENTS, assistant_model=draft())


def test_stock_prompt_lookup_sampling_and_beams_are_untouched() -> None:
    target = hf_dsde.enable(model())
    one = {**ragged_batch((5,), seed=3), "max_new_tokens": NEW_TOKENS}
    for arguments in ({"prompt_lookup_num_tokens": 2}, {"num_beams": 2}, {"do_sample": True}):
        texts = []
        for either in (target, untouched()):
            torch.manual_seed(0)
            texts.append(either.generate(**one, **arguments).tolist())
        assert texts[0] == texts[1]


# custom_generate, for models that are not enabled


@pytest.mark.parametrize(
    ("bound", "passed"),
    [
        ({}, {}),
        ({"speculation_policy": "static"}, {}),
        ({}, {"speculation_policy": "heuristic"}),
        ({"speculation_config": SpeculationConfig(policy="confidence")}, {}),
        ({}, {"speculation_config": SpeculationConfig(policy="static", max_draft_length=2)}),
    ],
)
def test_a_custom_decoding_method_serves_models_that_are_not_enabled(
    bound: dict[str, Any], passed: dict[str, Any]
) -> None:
    method = partial(hf_dsde.generate, assistant_model=draft(), **bound)
    output = untouched().generate(**ARGUMENTS, **passed, custom_generate=method, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain_text()
    named = {**bound, **passed}
    config = named.get("speculation_config")
    expected = named.get("speculation_policy", "dsde" if config is None else config.policy)
    assert output.speculation_statistics.policy == expected


def test_a_custom_decoding_method_serves_enabled_models_too() -> None:
    method = partial(hf_dsde.generate, assistant_model=draft())
    target = hf_dsde.enable(model())
    assert target.generate(**ARGUMENTS, custom_generate=method, speculation_policy="static").tolist() == plain_text()


def test_a_custom_decoding_method_without_a_draft_says_so() -> None:
    with pytest.raises(ValueError, match=r"assistant_model=None.*Pass assistant_model"):
        untouched().generate(**ARGUMENTS, custom_generate=hf_dsde.generate, assistant_model=draft())


def test_a_custom_decoding_method_takes_a_bound_streamer_and_stop_string_criteria() -> None:
    class Collects(hf_dsde.BatchTextStreamer):
        def on_text(self, row: int, text: str, end: bool) -> None:
            texts[row] += text

    tokenizer = tiny_tokenizer()
    width = BATCH["input_ids"].shape[1]
    stop = tokenizer.convert_ids_to_tokens(plain_text()[2][width + 4])
    arguments = {**ARGUMENTS, "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, stop)])}
    texts = ["", "", ""]
    streamer = Collects(tokenizer)
    method = partial(hf_dsde.generate, assistant_model=draft(), streamer=streamer)
    ours = untouched().generate(**arguments, streamer=streamer, custom_generate=method)
    assert ours.tolist() == untouched().generate(**arguments).tolist()
    decoded = tokenizer.batch_decode(ours[:, width:])
    assert [text.replace("<pad>", "") for text in texts] == [text.replace("<pad>", "") for text in decoded]


# What else one does with a model


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_enabled_model_survives_pickling(protocol: int) -> None:
    copied = pickle.loads(pickle.dumps(hf_dsde.enable(model()), protocol))  # noqa: S301 - our own bytes
    assert speculates(copied)
    assert refuses(hf_dsde.disable(copied))


def test_an_enabled_model_survives_copying() -> None:
    target = hf_dsde.enable(model())
    for copied in (copy.deepcopy(target), copy.copy(target)):
        assert type(copied) is type(target)
        assert speculates(copied)


def test_an_enabled_model_survives_torch_save() -> None:
    file = io.BytesIO()
    torch.save(hf_dsde.enable(model()), file)
    file.seek(0)
    assert speculates(torch.load(file, weights_only=False))


def test_saved_files_are_those_of_a_model_that_was_never_enabled(tmp_path: Path) -> None:
    target = hf_dsde.enable(model())
    assert speculates(target, speculation_policy="dsde")
    target.save_pretrained(tmp_path / "enabled")
    untouched().save_pretrained(tmp_path / "never")
    files = {path.name for path in (tmp_path / "never").iterdir()}
    assert files >= {"config.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "enabled").iterdir()} == files
    for name in files:
        assert (tmp_path / "enabled" / name).read_bytes() == (tmp_path / "never" / name).read_bytes(), name
    loaded = type(untouched()).from_pretrained(tmp_path / "enabled", dtype=torch.float64)
    assert loaded.config.architectures == [type(untouched()).__name__]
    assert refuses(loaded)
    assert speculates(hf_dsde.enable(loaded))


# What plain `generate` takes


def test_the_models_own_generation_config_counts() -> None:
    target = hf_dsde.enable(model())
    target.generation_config.max_new_tokens = 5
    target.generation_config.repetition_penalty = 1.5
    plain = target.generate(**BATCH)
    assert plain.shape[1] <= BATCH["input_ids"].shape[1] + 5
    assert target.generate(**BATCH, assistant_model=draft(), speculation_policy="dsde").tolist() == plain.tolist()


# Wrappers


def test_a_hook_of_accelerate_goes_on_working() -> None:
    for order in ("hook first", "enabled first"):
        target = model() if order == "hook first" else hf_dsde.enable(model())
        add_hook_to_module(target, AlignDevicesHook(execution_device="cpu", io_same_device=True))
        assert speculates(hf_dsde.enable(target))


def test_a_dispatched_model_works() -> None:
    target = dispatch_model(hf_dsde.enable(model()), device_map={"": "cpu"}, force_hooks=True)
    assert speculates(target, assistant_model=dispatch_model(copy.deepcopy(draft()), {"": "cpu"}, force_hooks=True))


@pytest.mark.parametrize("assistant", ["in the call", "in the pipeline"])
def test_an_enabled_model_serves_a_pipeline(assistant: str) -> None:
    """Whose own config names every option of stock assisted generation, in some versions."""
    arguments = {"tokenizer": tiny_tokenizer(), "model": hf_dsde.enable(model())}
    prompts, settings = ["abGhHi", "f"], {"do_sample": False, "max_new_tokens": 8, "batch_size": 2}
    plain = transformers.pipeline("text-generation", **arguments)(prompts, **settings)
    drafts = {"assistant_model": draft()}
    in_call, in_pipeline = (drafts, {}) if assistant == "in the call" else ({}, drafts)
    pipe = transformers.pipeline("text-generation", **arguments, **in_pipeline)
    assert pipe(prompts, **settings, **in_call, speculation_policy="static") == plain
    with pytest.raises(ValueError, match="num_assistant_tokens=7"):
        pipe(prompts, **settings, **in_call, speculation_policy="static", num_assistant_tokens=7)


def test_an_enabled_model_serves_datasets_map() -> None:
    target = hf_dsde.enable(model())
    texts = [BATCH["input_ids"][row][BATCH["attention_mask"][row] == 1].tolist() for row in range(3)]
    rows = datasets.Dataset.from_dict({"prompt": [*texts, *texts[:2]]})

    def answer(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        width = max(map(len, examples["prompt"]))
        padded = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in examples["prompt"]])
        output = target.generate(
            padded,
            attention_mask=(padded != PAD).long(),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            assistant_model=draft(),
            speculation_policy="dsde",
        )
        return {"answer": output[:, width:].tolist()}

    # Hashing a closure that holds a model would take longer than the model.
    answered = rows.map(answer, batched=True, batch_size=3, new_fingerprint="answers")
    width = BATCH["input_ids"].shape[1]
    assert answered["answer"][:3] == [row[width:] for row in plain_text()]
    assert len(answered) == 5
