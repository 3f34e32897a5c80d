"""Identities: equal for equal settings in any process, different for any other, and what `datasets` makes of them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import dill
import pytest
import torch
from datasets import Dataset, load_from_disk
from datasets.fingerprint import Hasher
from tiny_models import noisy_copy, tiny_model
from tiny_text import tiny_tokenizer
from transformers import GenerationConfig

from hf_dsde.batch.fingerprint import (
    Fingerprinted,
    NotSent,
    fingerprint,
    generator_identity,
    model_identity,
    tokenizer_identity,
)
from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import CostModel
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.lossy_acceptance import Consultant

COSTS = CostModel.relative(0.05, [1.0, 1.02, 1.04]).to_dict()


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def _identity(target, **changes):
    given = {
        "model": target,
        "assistant_model": None,
        "tokenizer": tiny_tokenizer(),
        "speculation_config": SpeculationConfig(),
        "generation_config": GenerationConfig(max_new_tokens=8),
        "settings": {"column": "text"},
        **changes,
    }
    return generator_identity(**given)


def test_the_same_settings_have_the_same_fingerprint(target):
    first = _identity(target, assistant_model=noisy_copy(target, 0.05))
    second = _identity(copy.deepcopy(target), assistant_model=noisy_copy(target, 0.05))
    assert first == second
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 64


def test_every_part_of_a_generator_changes_the_fingerprint(target):
    identities = [
        _identity(target),
        _identity(tiny_model(seed=1)),
        _identity(target, assistant_model=target),
        _identity(target, assistant_model=noisy_copy(target, 0.05)),
        _identity(target, tokenizer=tiny_tokenizer(swapped=(5, 6))),
        _identity(target, speculation_config=SpeculationConfig(policy="static")),
        _identity(target, speculation_config=SpeculationConfig(max_draft_length=4)),
        _identity(target, generation_config=GenerationConfig(max_new_tokens=9)),
        _identity(target, generation_config=GenerationConfig(max_new_tokens=8, do_sample=True)),
        _identity(target, generation_config=GenerationConfig(max_new_tokens=8, eos_token_id=[3])),
        _identity(target, settings={"column": "prompt"}),
        _identity(target, settings={"column": "text", "seed": 1}),
        _identity(target, settings=None),
    ]
    assert len({fingerprint(identity) for identity in identities}) == len(identities)


def test_defaults_that_the_model_brings_count(target):
    other = copy.deepcopy(target)
    other.generation_config.temperature = 0.5
    before = _identity(target)
    assert "temperature" not in before["generation_defaults"]
    before["generation_defaults"]["temperature"] = 0.5
    assert _identity(other) == before


def test_every_field_of_the_speculation_config_but_costs_and_options_is_part_of_the_identity(target):
    kept = _identity(target)["speculation"]
    every = {f.name for f in fields(SpeculationConfig)} - {"costs", "options"}
    assert set(kept) == every - {"acceptance"}  # as in jobs from before there was any other than exact
    lossy = _identity(target, speculation_config=SpeculationConfig(acceptance=Consultant()))["speculation"]
    assert set(lossy) == every


def test_a_job_may_go_on_with_other_options(target):
    options = RuntimeOptions(prefill_chunk=64, keep_memory=False, max_graphs=8)
    changed = _identity(target, speculation_config=SpeculationConfig(options=options))
    assert fingerprint(changed) == fingerprint(_identity(target))


@pytest.mark.parametrize(
    ("samples", "refresh", "counts"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_costs_count_only_where_they_make_a_sampled_run_repeatable(target, samples, refresh, counts):
    given = GenerationConfig(do_sample=samples)
    without, with_costs = (
        _identity(
            target, generation_config=given, speculation_config=SpeculationConfig(costs=costs, refresh_costs=refresh)
        )
        for costs in (None, COSTS)
    )
    assert (without != with_costs) is counts


def test_a_model_that_samples_by_its_own_defaults_counts_as_sampling(target):
    other = copy.deepcopy(target)
    other.generation_config.do_sample = True
    identity = _identity(other, speculation_config=SpeculationConfig(costs=COSTS, refresh_costs=False))
    assert identity["speculation"]["costs"] == COSTS


def test_an_identity_is_plain_json_and_says_what_a_model_is(target):
    named = copy.deepcopy(target)
    named.config._name_or_path, named.config._commit_hash = "someone/model", "abc"
    identity = model_identity(named)
    assert identity["name"] == "someone/model"
    assert identity["revision"] == "abc"
    assert identity["class"] == "LlamaForCausalLM"
    assert identity["dtype"] == "float64"
    assert identity["parameters"] == sum(weight.numel() for weight in target.parameters())
    assert identity["adapters"] == []
    assert identity["quantization"] is None
    assert model_identity(target)["name"] is None
    assert model_identity(target)["config"] == identity["config"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.float(),
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        lambda model: model.get_input_embeddings().weight.data.mul_(2),
        lambda model: model.lm_head.weight.data[-1].add_(1),  # as when only a new token was trained
        lambda model: setattr(model.config, "_commit_hash", "def"),
        lambda model: setattr(model.config, "_name_or_path", "elsewhere"),
        lambda model: setattr(model.config, "quantization_config", {"quant_method": "some", "bits": 4}),
    ],
)
def test_a_changed_model_is_another_one_under_the_same_name(target, change):
    model = copy.deepcopy(target)
    model.config._name_or_path = "someone/model"
    before = model_identity(model)
    change(model)
    assert model_identity(model) != before


def test_what_a_device_computes_again_is_no_part_of_the_weights(target):
    model = copy.deepcopy(target)
    before = model_identity(model)
    model.model.rotary_emb.inv_freq.add_(1e-9)
    assert model_identity(model) == before
    model.register_buffer("scales", torch.ones(3))
    saved = model_identity(model)
    assert saved != before
    model.scales[1] = 2
    assert model_identity(model) != saved


def test_weights_of_any_layout_and_type_are_sampled_without_reading_them_all(target):
    model = copy.deepcopy(target)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = model_identity(model)["weights"]
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous()
    assert model_identity(model)["weights"] == before
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64):
        model.register_buffer("extra", torch.zeros(2, 3, dtype=dtype))
        assert model_identity(model)["weights"] is not None
    for shape in ((), (0,), (1,), (2, 0, 3)):
        model.register_buffer("extra", torch.zeros(shape))
        assert model_identity(model)["weights"] is not None


class _AdapterLayer(torch.nn.Module):
    """What PEFT's layers look like from outside."""

    def __init__(self, base_layer, active):
        super().__init__()
        self.base_layer, self.active_adapters, self.disable_adapters = base_layer, active, False

    def forward(self, inputs):
        return self.base_layer(inputs)


def test_active_adapters_are_named_and_disabled_ones_are_not(target):
    model = copy.deepcopy(target)
    layer = model.model.layers[0].mlp
    layer.up_proj = _AdapterLayer(layer.up_proj, ["b"])
    layer.down_proj = _AdapterLayer(layer.down_proj, ["a"])
    assert model_identity(model)["adapters"] == ["a", "b"]
    layer.up_proj.disable_adapters = True
    assert model_identity(model)["adapters"] == ["a"]


def test_weights_that_cannot_be_read_leave_the_name_or_else_this_very_object(target):
    with torch.device("meta"):
        models = [type(target)(target.config) for _ in range(2)]
    first, second = map(model_identity, models)
    assert first["weights"] != second["weights"]
    assert first == model_identity(models[0])
    named = copy.deepcopy(models)
    for model in named:
        model.config._name_or_path = "someone/model"
    assert model_identity(named[0])["weights"] is None
    assert model_identity(named[0]) == model_identity(named[1])


def test_a_compiled_model_is_the_model(target):
    assert model_identity(torch.compile(target)) == model_identity(target)


def test_a_tokenizer_is_known_by_what_it_makes_of_text_and_not_by_its_padding():
    plain = copy.deepcopy(tiny_tokenizer())
    before = tokenizer_identity(plain)
    assert before["vocabulary_size"] == len(plain)
    padded = copy.deepcopy(plain)
    padded.padding_side = "right"
    padded("a", padding="max_length", max_length=9)
    assert tokenizer_identity(padded) == before
    with_template = copy.deepcopy(plain)
    with_template.chat_template = "{{ messages }}"
    with_token = copy.deepcopy(plain)
    with_token.add_special_tokens({"eos_token": "<other>"})
    after = tokenizer_identity(with_template)
    assert {key for key in before if after[key] != before[key]} == {"chat_template"}
    after = tokenizer_identity(with_token)
    assert {key for key in before if after[key] != before[key]} == {"vocabulary_size", "vocabulary", "special_tokens"}
    assert after["special_tokens"] == {**before["special_tokens"], "eos_token": "<other>"}


def test_settings_of_many_kinds_are_the_same_in_every_process(target):
    def tool(a: int) -> int:
        """Add one.

        Args:
            a: A number.
        """
        return a + 1

    settings = {
        "tools": [tool],
        "stops": {"b", "a"},
        "folder": Path("x"),
        "dtype": torch.float16,
        "ids": torch.tensor([1, 2]),
        "pair": (1, None),
    }
    kept = _identity(target, settings=settings)["settings"]
    assert kept["tools"][0]["function"]["name"] == "tool"
    assert kept["stops"] == ["a", "b"]
    assert (kept["folder"], kept["dtype"], kept["ids"], kept["pair"]) == ("x", "torch.float16", [1, 2], [1, None])


def test_a_setting_that_would_differ_between_processes_is_refused(target):
    with pytest.raises(TypeError, match=r"written as JSON \(object is not known"):
        _identity(target, settings={"x": object()})


def test_order_of_keys_is_no_difference_but_types_of_values_are():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert len({fingerprint({"a": value}) for value in (1, "1", True, 1.5, None, [1], {"1": 1})}) == 7


GENERATORS = '''
from hf_dsde.batch.fingerprint import Fingerprinted

class Model:
    """Gigabytes of weights, which nothing may pickle."""
    def __reduce__(self):
        raise AssertionError("the model was pickled")

class Shouting(Fingerprinted):
    def __init__(self, mark):
        self.mark, self.calls, self.model = mark, 0, Model()

    @property
    def identity(self):
        return {"mark": self.mark, "nested": {"z": 1, "a": [1, 2]}}

    def __call__(self, batch):
        self.calls += 1
        return {"shout": [text + self.mark for text in batch["text"]]}

    def chat(self, batch):
        return self(batch)
'''

MAPPING = """
import sys
from datasets import Dataset, load_from_disk
from generators import Shouting

for mark in sys.argv[2:]:
    generator = Shouting(mark)
    rows = load_from_disk(sys.argv[1]).map(generator, batched=True)
    assert rows["shout"][:] == ["a" + mark, "b" + mark], rows["shout"][:]
    print(mark, generator.calls, rows._fingerprint)
"""


@pytest.fixture
def generators(tmp_path, monkeypatch):
    """A module with a generator, importable here and in other processes."""
    (tmp_path / "generators.py").write_text(GENERATORS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("generators", None)
    yield __import__("generators")
    sys.modules.pop("generators", None)


def _rows():
    return Dataset.from_dict({"text": ["a", "b"]})


def test_datasets_hash_is_the_identity_s_alone_and_pickles_no_model(generators):
    one, same, other = generators.Shouting("!"), generators.Shouting("!"), generators.Shouting("?")
    same.calls = 3
    assert Hasher.hash(one) == Hasher.hash(same) != Hasher.hash(other)
    assert Hasher.hash(one.chat) == Hasher.hash(same.chat) != Hasher.hash(other.chat)

    def wrapped(generator):
        return lambda batch: {"length": len(generator(batch))}

    assert Hasher.hash(wrapped(one)) == Hasher.hash(wrapped(same)) != Hasher.hash(wrapped(other))
    assert one.fingerprint == fingerprint(one.identity)


@pytest.mark.slow
def test_map_reuses_results_of_the_same_generator_in_a_fresh_process_and_of_no_other(generators, tmp_path):
    _rows().save_to_disk(tmp_path / "rows")
    (tmp_path / "mapping.py").write_text(MAPPING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    first = generators.Shouting("!")
    here = load_from_disk(tmp_path / "rows").map(first, batched=True)
    assert first.calls == 1
    command = [sys.executable, str(tmp_path / "mapping.py"), str(tmp_path / "rows"), "!", "?"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, other = (line.split() for line in done.stdout.splitlines())
    assert same == ["!", "0", here._fingerprint]
    assert other[:2] == ["?", "1"]
    assert other[2] != here._fingerprint


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("bound", [False, True])
def test_map_in_several_processes_is_refused_with_a_way_out(generators, bound, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ)  # `map` puts a copy in its place, and leaves it there
    generator = generators.Shouting("!")
    with pytest.raises(RuntimeError, match=r"pickled `Shouting`.*without `num_proc`.*`accelerate launch`"):
        _rows().map(generator.chat if bound else generator, batched=True, num_proc=2)


@pytest.mark.parametrize("pickler", [pickle, dill])
def test_what_comes_out_of_a_pickle_says_where_the_models_are(generators, pickler):
    sent = pickler.loads(pickler.dumps(generators.Shouting("!")))
    assert isinstance(sent, NotSent)
    for use in (lambda: sent({}), lambda: sent.chat({}), lambda: sent.identity):
        with pytest.raises(RuntimeError, match="stayed in the process"):
            use()
    again = pickler.loads(pickler.dumps(sent))
    assert isinstance(again, NotSent)
    assert isinstance(copy.deepcopy(sent), NotSent)


def test_copies_are_the_generator_itself_as_with_functions(generators):
    generator = generators.Shouting("!")
    assert copy.copy(generator) is generator
    assert copy.deepcopy({"x": generator})["x"] is generator
    rows = _rows()
    rows.set_transform(generator)
    assert rows[0]["shout"] == "a!"


def test_a_generator_without_an_identity_cannot_be_made():
    class Nameless(Fingerprinted):
        pass

    with pytest.raises(TypeError, match="identity"):
        Nameless()


def test_stand_ins_for_unreadable_weights_do_not_keep_models_alive(target):
    from hf_dsde.batch.weights_sample import _unreadable

    gc.collect()
    before = len(_unreadable)
    with torch.device("meta"):
        model = type(target)(target.config)
    model_identity(model)
    assert len(_unreadable) == before + 1
    del model
    gc.collect()
    assert len(_unreadable) == before
