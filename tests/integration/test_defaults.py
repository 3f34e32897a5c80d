"""Arguments that a model has from `enable`: they are those of calls that do not name them, and of no others."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
from small_batch import ARGUMENTS, BATCH, NEW_TOKENS, draft, model, plain_text
from tiny_models import noisy_copy, tiny_model
from tiny_rounds import Notes
from tiny_text import tiny_tokenizer
from transformers import GenerationConfig, PreTrainedModel

import hf_dsde
from hf_dsde import SpeculationConfig
from hf_dsde.drafting import CandidateBatch, Drafter

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
THREE = hf_dsde.StaticPolicy(3)


class Drafted(Notes):
    """Says how many tokens rows have drafted in the longest round since it was asked last."""

    def take(self) -> int:
        most = max((max(record.drafted) for record in self.events), default=0)
        self.events.clear()
        return most


class NeverAsked(Drafter):
    def get_candidates(self, *_: Any) -> CandidateBatch:
        raise AssertionError("another one was named")


@pytest.fixture
def notes() -> Drafted:
    return Drafted()


def enabled(notes: Drafted, **changes: Any) -> PreTrainedModel:
    defaults = {"assistant_model": draft(), "speculation_policy": THREE, "speculation_listeners": [notes], **changes}
    return hf_dsde.enable(model(), **defaults)


def writes_plain_text(target: PreTrainedModel, **arguments: Any) -> bool:
    return target.generate(**{**ARGUMENTS, **arguments}).tolist() == plain_text()


def test_a_call_that_names_nothing_has_all_of_them(notes: Drafted) -> None:
    target = enabled(notes)
    assert writes_plain_text(target)
    assert notes.take() == 3


def test_so_has_one_that_passes_a_generation_config_as_trainers_do(notes: Drafted) -> None:
    target = enabled(notes)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, disable_compile=True, pad_token_id=0)
    inputs = dict(BATCH)
    assert target.generate(**inputs, generation_config=config).tolist() == plain_text()
    assert notes.take() == 3
    assert target.generate(inputs.pop("input_ids"), config, **inputs).tolist() == plain_text()
    assert notes.take() == 3


def test_what_a_call_names_counts(notes: Drafted) -> None:
    target = enabled(notes)
    assert writes_plain_text(target, speculation_policy=hf_dsde.StaticPolicy(2))
    assert notes.take() == 2
    assert writes_plain_text(target, speculation_config=SpeculationConfig("static", {"num_draft_tokens": 1}))
    assert notes.take() == 1
    other = Drafted()
    assert writes_plain_text(target, speculation_listeners=[other])
    assert (notes.take(), other.take()) == (0, 3)


def test_a_configuration_of_the_call_replaces_that_of_the_model(notes: Drafted) -> None:
    target = enabled(notes, speculation_policy=None, speculation_config=SpeculationConfig(max_draft_length=1))
    assert writes_plain_text(target, speculation_policy=THREE)
    assert notes.take() == 1
    assert writes_plain_text(target, speculation_policy=SpeculationConfig("static", {"num_draft_tokens": 2}))
    assert notes.take() == 2


@pytest.mark.parametrize("named", [{"speculation_policy": None}, {"speculation_config": None}])
def test_none_is_the_stock_way(named: dict[str, Any], notes: Drafted) -> None:
    target = enabled(notes)
    assert writes_plain_text(target, **named)
    assert notes.take() == 0
    beams = model().generate(**ARGUMENTS, num_beams=2)
    assert target.generate(**ARGUMENTS, num_beams=2, **named).tolist() == beams.tolist()


def test_what_cannot_be_speculated_says_the_way_out(notes: Drafted) -> None:
    with pytest.raises(ValueError, match=r"num_beams=2.*pass speculation_policy=None"):
        enabled(notes).generate(**ARGUMENTS, num_beams=2)


def test_another_way_of_drafting_takes_the_place_of_the_draft(notes: Drafted) -> None:
    target = enabled(notes, assistant_model=NeverAsked())
    for other in (
        {"assistant_model": draft()},
        {"assistant_model": "suffix"},
        {"prompt_lookup_num_tokens": 2},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=2, pad_token_id=0)},
    ):
        assert writes_plain_text(target, **other)
        assert notes.take()


def test_defaults_without_a_policy_play_auto() -> None:
    target = hf_dsde.enable(model(), assistant_model=draft())
    output = target.generate(**ARGUMENTS, return_dict_in_generate=True)
    assert output.speculation_statistics.policy == "auto"
    assert output.sequences.tolist() == plain_text()


def test_enabling_again_changes_them_or_leaves_them(notes: Drafted) -> None:
    target = hf_dsde.enable(enabled(notes))
    assert writes_plain_text(target)
    assert notes.take() == 3
    hf_dsde.enable(target, assistant_model=draft(), speculation_policy=hf_dsde.StaticPolicy(1))
    assert writes_plain_text(target)
    assert notes.take() == 0  # the listener was a default too


def test_disabling_forgets_them(notes: Drafted) -> None:
    target = hf_dsde.enable(hf_dsde.disable(enabled(notes)))
    assert writes_plain_text(target)
    assert notes.take() == 0


def test_copies_have_none(notes: Drafted) -> None:
    target = enabled(notes)
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):  # noqa: S301
        assert writes_plain_text(twin)
        assert notes.take() == 0


def test_a_draft_is_no_part_of_the_model(notes: Drafted) -> None:
    target = enabled(notes)
    assert target.state_dict().keys() == model().state_dict().keys()
    assert set(vars(target)) == set(vars(model()))


def test_a_model_with_defaults_can_go() -> None:
    target = tiny_model()
    hf_dsde.enable(target, assistant_model=noisy_copy(target, 0.05))
    target.generate(**ARGUMENTS)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("defaults", "failure", "message"),
    [
        ({"speculation_policy": "static"}, ValueError, r"speculation_policy: as defaults .* assistant_model="),
        ({"assistant_model": "sufix"}, ValueError, "assistant_model"),
        ({"assistant_model": draft, "speculation_policy": "sttic"}, ValueError, "sttic"),
        ({"assistant_model": draft, "speculation_config": {}}, TypeError, "speculation_config"),
        ({"assistant_model": draft, "speculation_listeners": [1]}, TypeError, "speculation_listeners"),
        ({"assistant_model": draft, "num_beams": 2}, TypeError, "num_beams"),
        (
            {"assistant_model": draft, "tokenizer": tiny_tokenizer(), "assistant_model_": 1},
            TypeError,
            "assistant_model_",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(defaults: dict[str, Any], failure: type[Exception], message: str) -> None:
    defaults = {name: value() if value is draft else value for name, value in defaults.items()}
    target = model()
    with pytest.raises(failure, match=message):
        hf_dsde.enable(target, **defaults)
    assert type(target) is type(model())
