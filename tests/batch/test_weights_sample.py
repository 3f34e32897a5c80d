"""Weights of every kind of tensor are recognised, and what a plain model was known by stays what it is known by."""

from __future__ import annotations

import copy
import hashlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_model
from tiny_pair import tiny_pair
from wrapped_weight import ScaledInt8, round_linear_layers

from hf_dsde.batch.fingerprint import model_identity
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.batch.output import read_results


def _sample(weight):
    """The sample of a module that has one weight; the same module and weight twice have the same one."""

    def once():
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight, requires_grad=False) if isinstance(weight, ScaledInt8) else weight
        if not isinstance(module.weight, torch.nn.Parameter):
            del module.weight
            module.register_buffer("weight", weight)
        module.config = SimpleNamespace(to_json_string=lambda: "{}", _name_or_path="someone/model")
        module.dtype = torch.float32
        return model_identity(module)["weights"]

    first = once()
    assert first is not None
    assert once() == first
    return first


def test_plain_weights_are_known_by_shapes_types_and_sixteen_values():
    model = tiny_model()
    digest = hashlib.sha256()
    for weight in model.parameters():
        flat = weight.detach().reshape(-1)
        places = sorted({i * (len(flat) - 1) // 15 for i in range(16)})
        digest.update(f"{tuple(weight.shape)} {weight.dtype};".encode())
        digest.update(b"".join(flat[place].numpy().tobytes() for place in places))
    assert model_identity(model)["weights"] == digest.hexdigest()[:16]


CODES = torch.arange(-60, 60, dtype=torch.int8).reshape(6, 20)
SCALES = torch.linspace(0.1, 1.0, 6)[:, None]
WRAPPED_CHANGES = {
    "codes": lambda: ScaledInt8(CODES.flip(0), SCALES),
    "scales": lambda: ScaledInt8(CODES, SCALES * 2),
    "what is no tensor": lambda: ScaledInt8(CODES, SCALES, 1),
    "shape": lambda: ScaledInt8(CODES[:, :-1], SCALES),
}


@pytest.mark.parametrize("what", WRAPPED_CHANGES)
def test_every_part_of_a_tensor_made_of_tensors_counts(what):
    assert _sample(WRAPPED_CHANGES[what]()) != _sample(ScaledInt8(CODES, SCALES))


DENSE = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
BYTES = torch.arange(120, dtype=torch.uint8).reshape(6, 20)
KINDS = {
    "coo": lambda w: w.to_sparse(),
    "csr": lambda w: w.to_sparse_csr(),
    "csc": lambda w: w.to_sparse_csc(),
    "bsr": lambda w: w.to_sparse_bsr((2, 2)),
    "per tensor": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    "per channel": lambda w: torch.quantize_per_channel(w, torch.full((6,), 0.1), torch.zeros(6), 0, torch.qint8),
    "jagged": lambda w: torch.nested.nested_tensor(list(w), layout=torch.jagged),
    "float8": lambda w: w.to(torch.float8_e5m2),
    "uint4": lambda w: (w * 9).to(torch.int8).view(torch.uint4),
    "complex": lambda w: torch.complex(w, w),
    "expanded": lambda w: w[:1].expand(6, 20),
}
if hasattr(torch, "float4_e2m1fn_x2"):  # since torch 2.8
    KINDS["float4"] = lambda w: (w * 9).to(torch.int8).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_any_layout_are_sampled(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of them unfinished
        before = _sample(KINDS[kind](DENSE))
        changed = DENSE.clone()
        changed[0, 0] += 1
        assert _sample(KINDS[kind](changed)) != before


def test_scales_of_a_weight_in_four_bits_count_although_they_are_an_attribute_of_it():
    def weight(factor):
        packed = torch.nn.Parameter(BYTES.reshape(-1, 1), requires_grad=False)
        nested = SimpleNamespace(absmax=torch.ones(2))
        packed.quant_state = SimpleNamespace(
            absmax=factor * torch.ones(3), code=torch.arange(16.0), state2=nested, bits=4
        )
        return packed

    assert _sample(weight(1)) != _sample(weight(2))
    bare = weight(1)
    bare.quant_state = None
    assert _sample(bare) != _sample(weight(1))


class UnreadableTensor(ScaledInt8):
    """A tensor class that cannot be taken apart."""

    def __tensor_flatten__(self):
        raise AttributeError("nothing inside")


def test_what_cannot_be_read_at_all_leaves_the_name():
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(UnreadableTensor(CODES, SCALES), requires_grad=False)
    nameless = model_identity(model)["weights"]
    assert nameless == model_identity(model)["weights"] is not None
    assert nameless != model_identity(_rounded_again(UnreadableTensor))["weights"]
    model.config._name_or_path = "someone/model"
    assert model_identity(model)["weights"] is None


def _rounded_again(kind):
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(kind(CODES, SCALES), requires_grad=False)
    return model


def _generator(rounded=round_linear_layers):
    pair = tiny_pair(torch.float32)
    rounded(pair.target)
    return BatchGenerator(
        pair.target,
        pair.tokenizer,
        assistant_model=pair.draft,
        speculation_policy="static",
        max_new_tokens=3,
        batch_size=2,
    )


def test_a_job_of_a_model_with_wrapped_weights_goes_on_and_map_uses_its_cache(tmp_path):
    rows = ["a", "bb", "cGh"]
    assert _generator().run(rows, tmp_path / "out.jsonl").rows == 3
    assert _generator().run(rows, tmp_path / "out.jsonl").skipped == 3
    assert all(result.error is None for result in read_results(tmp_path / "out.jsonl"))

    def doubled(model):
        round_linear_layers(model)
        model.lm_head.weight.scales.mul_(2)

    with pytest.raises(ValueError, match="another"):
        _generator(doubled).run(rows, tmp_path / "out.jsonl")
    Dataset.from_dict({"prompt": rows}).save_to_disk(tmp_path / "data")
    first = Dataset.load_from_disk(tmp_path / "data").map(_generator(), batched=True)
    again = Dataset.load_from_disk(tmp_path / "data").map(_generator(), batched=True)
    assert first.cache_files == again.cache_files != []


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_s_models_are_known(name):
    quantization = pytest.importorskip("torchao.quantization")
    plain = tiny_model().float()
    models = [copy.deepcopy(plain) for _ in range(2)]
    for model in models:
        quantization.quantize_(model, getattr(quantization, name)())
    first, second = (model_identity(model) for model in models)
    assert first == second
    assert first["weights"] not in (None, model_identity(plain)["weights"])
    models[0].model.layers[0].self_attn.q_proj.weight.scale.mul_(2)
    assert model_identity(models[0]) != second
