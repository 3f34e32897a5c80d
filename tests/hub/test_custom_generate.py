"""`generate` out of an exported folder that transformers loads: as an enabled model's, and the model untouched."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from recorded import NotingCapture
from small_batch import ARGUMENTS, BATCH, draft, model, plain_text, untouched
from tiny_calls import QUIET, config_of
from tiny_heads import tiny_head
from tiny_models import fresh_pair, noisy_copy, tiny_model
from tiny_text import tiny_tokenizer
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

import hf_dsde
from hf_dsde.drafting.layer_draft import initialise_draft, save_draft

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

WIDTH = BATCH["input_ids"].shape[1]


def test_a_ragged_batch_gets_the_text_of_plain_generate_and_statistics(call: dict[str, Any]) -> None:
    output = untouched().generate(
        **ARGUMENTS, **call, assistant_model=draft(), speculation_policy="static", return_dict_in_generate=True
    )
    assert output.sequences.tolist() == plain_text()
    assert output.speculation_statistics.policy == "static"
    assert output.speculation_statistics.draft_steps > 0
    text = untouched().generate(**ARGUMENTS, **call, assistant_model=draft(), speculation_policy="dsde")
    assert text.tolist() == plain_text()


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        ({}, "dsde"),
        ({"speculation_policy": hf_dsde.StaticPolicy(2)}, "static"),
        ({"speculation_config": hf_dsde.SpeculationConfig("confidence")}, "confidence"),
    ],
    ids=["nothing", "policy", "config"],
)
def test_policies_are_chosen_as_for_an_enabled_model(call: dict[str, Any], how: dict[str, Any], policy: str) -> None:
    output = untouched().generate(**ARGUMENTS, **call, **how, assistant_model=draft(), return_dict_in_generate=True)
    assert output.sequences.tolist() == plain_text()
    assert output.speculation_statistics.policy == policy


def test_the_model_is_left_as_it_is_while_the_call_runs_and_after(call: dict[str, Any]) -> None:
    target = model()
    before, kind = dict(vars(target)), type(target)
    seen: list[tuple[Any, Any]] = []

    class Looks(hf_dsde.DSDEStoppingPolicy):
        def observe(self, outcome: Any) -> None:
            seen.append((type(target), dict(vars(target))))
            super().observe(outcome)

    output = target.generate(**ARGUMENTS, **call, assistant_model=draft(), speculation_policy=Looks())
    assert output.tolist() == plain_text()
    assert seen
    assert all(state == (kind, before) for state in [*seen, (type(target), dict(vars(target)))])
    with pytest.raises(ValueError, match="speculation_policy"):
        target.generate(**ARGUMENTS, assistant_model=draft(), speculation_policy="static")


def test_a_second_call_uses_what_the_first_has_recorded(call: dict[str, Any], recording: list[NotingCapture]) -> None:
    target, helper = fresh_pair()
    config = config_of(QUIET, policy="static", runner="graph")
    arguments = {**ARGUMENTS, **call, "assistant_model": helper, "speculation_config": config}
    first = target.generate(**arguments)
    recorded = [capture.recorded for capture in recording]
    assert len(recorded) == 2
    assert min(recorded) > 0
    assert torch.equal(target.generate(**arguments), first)
    assert [capture.recorded for capture in recording] == recorded


@pytest.mark.parametrize("way", ["enable", "install"])
def test_enabled_models_take_it_too(call: dict[str, Any], way: str) -> None:
    target = model()
    if way == "install":
        hf_dsde.install()
    else:
        hf_dsde.enable(target)
    try:
        kind = type(target)
        assert target.generate(**ARGUMENTS, **call, assistant_model=draft()).tolist() == plain_text()
        assert type(target) is kind
    finally:
        hf_dsde.uninstall()


def test_sampling_is_reproducible_and_that_of_an_enabled_model(call: dict[str, Any]) -> None:
    arguments = {**BATCH, "do_sample": True, "max_new_tokens": 12, "assistant_model": draft()}
    arguments |= {"speculation_policy": "static", "speculation_config": QUIET}
    texts = []
    for target, way in ((untouched(), call), (untouched(), call), (hf_dsde.enable(model()), {})):
        torch.manual_seed(5)
        texts.append(target.generate(**arguments, **way).tolist())
    assert texts[0] == texts[1] == texts[2]
    torch.manual_seed(6)
    assert untouched().generate(**arguments, **call).tolist() != texts[0]


# What transformers hands on


def test_prompts_may_be_positional(call: dict[str, Any]) -> None:
    ids, mask = BATCH["input_ids"], BATCH["attention_mask"]
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    config = GenerationConfig(**{name: settings[name] for name in ("do_sample", "max_new_tokens")})
    ours = untouched().generate(ids, config, attention_mask=mask, assistant_model=draft(), **call)
    assert ours.tolist() == untouched().generate(ids, config, attention_mask=mask).tolist() == plain_text()


def test_configs_processors_and_prefixes_mean_what_they_mean_to_generate(call: dict[str, Any]) -> None:
    target = model()
    target.generation_config.repetition_penalty = 1.3
    arguments: dict[str, Any] = {
        **BATCH,
        "generation_config": GenerationConfig(max_new_tokens=9, no_repeat_ngram_size=2),
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]),
        "prefix_allowed_tokens_fn": lambda row, text: [t for t in range(3, 96) if (t + row + len(text)) % 3],
    }
    plain = target.generate(**arguments).tolist()
    assert plain != target.generate(**BATCH, max_new_tokens=9).tolist()
    assert target.generate(**arguments, **call, assistant_model=draft()).tolist() == plain


@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_stop_strings_find_the_tokenizer(call: dict[str, Any], where: str) -> None:
    tokenizer, target, arguments = tiny_tokenizer(), model(), {**ARGUMENTS, "tokenizer": tiny_tokenizer()}
    stop = tokenizer.convert_ids_to_tokens(plain_text()[2][WIDTH + 4])
    if where == "argument":
        arguments["stop_strings"] = stop
    elif where == "config":
        arguments = {**BATCH, "tokenizer": tokenizer}
        arguments["generation_config"] = GenerationConfig(do_sample=False, max_new_tokens=12, stop_strings=stop)
    else:
        target.generation_config.stop_strings = [stop]
    plain = target.generate(**arguments).tolist()
    assert plain != plain_text()
    assert target.generate(**arguments, **call, assistant_model=draft()).tolist() == plain


def test_a_streamer_hears_prompts_and_texts(call: dict[str, Any]) -> None:
    class Collects(hf_dsde.BatchTextStreamer):
        def on_text(self, row: int, text: str, end: bool) -> None:
            texts[row] += text

    tokenizer, texts = tiny_tokenizer(), ["", "", ""]
    ours = untouched().generate(**ARGUMENTS, **call, assistant_model=draft(), streamer=Collects(tokenizer))
    decoded = tokenizer.batch_decode(ours[:, WIDTH:])
    assert [text.replace("<pad>", "") for text in texts] == [text.replace("<pad>", "") for text in decoded]


def test_a_draft_of_another_tokenizer_is_translated(call: dict[str, Any]) -> None:
    other = tiny_tokenizer(swapped=(5, 6))
    arguments = {**ARGUMENTS, "assistant_model": draft(), "tokenizer": tiny_tokenizer()}
    arguments |= {"speculation_policy": "static", "return_dict_in_generate": True}
    with pytest.warns(hf_dsde.SpeculationWarning, match="assistant_tokenizer: 2 token ids differ"):
        output = untouched().generate(**arguments, **call, assistant_tokenizer=other)
    assert output.sequences.tolist() == plain_text()


def test_arguments_that_say_how_the_folder_is_loaded_are_not_the_models(call: dict[str, Any]) -> None:
    loading = {"revision": "main", "token": False, "local_files_only": True, "force_download": False, "proxies": None}
    text = untouched().generate(**ARGUMENTS, **call, **loading, assistant_model=draft())
    assert text.tolist() == plain_text()


def test_a_pipeline_hands_its_arguments_on(call: dict[str, Any]) -> None:
    pipe = transformers.pipeline("text-generation", model=untouched(), tokenizer=tiny_tokenizer())
    prompts, settings = ["abGhHi", "f"], {"do_sample": False, "max_new_tokens": 8, "batch_size": 2}
    plain = pipe(prompts, **settings)
    assert pipe(prompts, **settings, **call, assistant_model=draft(), speculation_policy="static") == plain
    with_draft = transformers.pipeline(
        "text-generation", model=untouched(), tokenizer=tiny_tokenizer(), assistant_model=draft()
    )
    assert with_draft(prompts, **settings, **call, speculation_policy="static") == plain


# What drafts, by name


def write(folder: Path, assistant: str) -> PreTrainedModel:
    """Save a draft of some kind; return the target that it is for."""
    target = tiny_model("llama")
    if assistant == "model":
        noisy_copy(target, 0.05).save_pretrained(folder)
    elif assistant == "layers":
        save_draft(initialise_draft(target, [0]), folder, dtype=torch.float64)
    else:
        hf_dsde.save_head(tiny_head(target, layers=(0, 1)), folder, target_name="organisation/target")
    return target


@pytest.mark.parametrize("assistant", ["model", "layers", "head"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_names_a_draft(call: dict[str, Any], tmp_path: Path, assistant: str, kind: type) -> None:
    target = write(tmp_path / "draft", assistant)
    arguments = {**ARGUMENTS, **call, "assistant_model": kind(tmp_path / "draft"), "speculation_policy": "static"}
    output = target.generate(**arguments, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain_text()
    assert output.speculation_statistics.draft_steps > 0


def test_a_named_draft_is_loaded_once_and_goes_with_its_target(call: dict[str, Any], tmp_path: Path) -> None:
    target = write(tmp_path / "draft", "model")
    arguments = {**ARGUMENTS, **call, "assistant_model": str(tmp_path / "draft")}
    target.generate(**arguments)
    for file in (tmp_path / "draft").iterdir():
        file.unlink()
    assert target.generate(**arguments).tolist() == plain_text()
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["suffix", "sssd", "prompt_lookup"])
def test_drafters_without_a_model_keep_their_names(call: dict[str, Any], name: str) -> None:
    text = untouched().generate(**ARGUMENTS, **call, assistant_model=name, speculation_policy="static")
    assert text.tolist() == plain_text()


def test_prompt_lookup_may_be_asked_for_the_stock_way(call: dict[str, Any]) -> None:
    text = untouched().generate(**ARGUMENTS, **call, prompt_lookup_num_tokens=3, speculation_policy="static")
    assert text.tolist() == plain_text()


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"assistant_model=None.*Leave out `speculation_policy`.*`custom_generate`"),
        ({"assistant_model": "sufix"}, "assistant_model='sufix' is no folder.*Hub id.*suffix"),
        ({"assistant_model": "suffix"}, "speculation_policy='dsde'.*SuffixDrafter has none"),
        ({"assistant_model": "suffix", "num_beams": 2}, "num_beams=2"),
        ({"assistant_model": "suffix", "num_assistant_tokens": 3}, "num_assistant_tokens=3"),
        ({"assistant_model": "suffix", "speculation_policy": "dsed"}, "dsed"),
        ({"assistant_model": "suffix", "synced_gpus": True}, "synced_gpus=True"),
        ({"assistant_model": "suffix", "nonsense": 1}, "nonsense"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_name(
    call: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        untouched().generate(**ARGUMENTS, **call, **arguments)


def test_code_from_the_folder_is_run_by_consent_only(call: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        untouched().generate(**ARGUMENTS, **{**call, "trust_remote_code": False}, assistant_model=draft())


# Beside a model's weights, where `from_pretrained` puts the function in the place of the model's `generate`


@pytest.fixture
def replaced(call: dict[str, Any]) -> Any:
    folder = Path(call["custom_generate"])
    untouched().save_pretrained(folder)
    target = type(untouched()).from_pretrained(folder, dtype=torch.float64, trust_remote_code=True)
    assert isinstance(vars(target)["generate"], partial)
    return target


def test_a_model_that_came_with_it_takes_every_form_of_call(replaced: Any, call: dict[str, Any]) -> None:
    settings = {"do_sample": False, "max_new_tokens": 12, "attention_mask": BATCH["attention_mask"]}
    arguments = {"assistant_model": draft(), "speculation_policy": "static"}
    assert replaced.generate(**ARGUMENTS, **arguments).tolist() == plain_text()
    assert replaced.generate(BATCH["input_ids"], **settings, **arguments).tolist() == plain_text()
    assert replaced.generate(**ARGUMENTS, **arguments, **call).tolist() == plain_text()


def test_a_model_that_came_with_it_can_be_given_another_decoding_method(replaced: Any) -> None:
    def prompts(model: Any, input_ids: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids

    assert replaced.generate(**ARGUMENTS, custom_generate=prompts) is BATCH["input_ids"]


def test_a_model_that_came_with_it_heals_tokens_the_stock_way(replaced: Any) -> None:
    """`generate` calls itself for the prompts then."""
    tokenizer = tiny_tokenizer()
    inputs = tokenizer(["abGh", "fHi"], return_tensors="pt", padding=True)
    arguments = {**inputs, "tokenizer": tokenizer, "token_healing": True, "do_sample": False, "max_new_tokens": 5}
    plain = untouched().generate(**arguments)
    ours = replaced.generate(**arguments, assistant_model=draft(), speculation_policy="static")
    assert ours.tolist() == plain.tolist()
