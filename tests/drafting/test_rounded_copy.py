"""The rounded copy: the rule against a plain reference, and which weights it touches."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import FAMILIES, ragged_batch, tiny_model

import hf_dsde
from hf_dsde.drafting.rounded_copy import round_in_groups, rounded_copy


def reference(weights: list[list[float]], bits: int, group_size: int) -> list[list[float]]:
    """The rule in plain floats, a group at a time."""
    largest = 2 ** (bits - 1) - 1
    rounded = []
    for row in weights:
        new: list[float] = []
        for start in range(0, len(row), group_size):
            group = row[start : start + group_size]
            scale = max(abs(w) for w in group) / largest
            new += [scale * round(w / scale) if scale else 0.0 for w in group]
        rounded.append(new)
    return rounded


@pytest.mark.parametrize(
    ("bits", "group_size", "inputs"), [(4, 4, 12), (4, 5, 12), (3, 12, 12), (8, 64, 12), (2, 3, 7)]
)
def test_rounding_is_the_rule(bits, group_size, inputs):
    weight = torch.randn(6, inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[0, :group_size] = 0
    found = round_in_groups(weight, bits, group_size)
    expected = torch.tensor(reference(weight.tolist(), bits, group_size), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    if inputs > group_size:
        whole = torch.tensor(reference(weight.tolist(), bits, inputs), dtype=torch.float64)
        assert not torch.allclose(found, whole), "a scale per row would pass as well"


def test_a_group_takes_few_values_and_keeps_zero_and_its_largest():
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    weight[0, 5] = 0
    found = round_in_groups(weight, 4, 64)[0]
    assert len(found.unique()) <= 15
    assert found[5] == 0
    largest = weight[0].abs().argmax()
    torch.testing.assert_close(found[largest], weight[0, largest])
    assert float((found - weight[0]).abs().max()) <= float(weight.abs().max()) / 14 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_twice_is_rounding_once(dtype):
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    once = round_in_groups(weight, 4, 32)
    twice = round_in_groups(once, 4, 32)
    assert once.dtype == dtype
    # The scale is recovered from the rounded weights to the last digit or its neighbour.
    torch.testing.assert_close(twice, once, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_three_bits_in_groups_of_576_with_a_smaller_last_group():
    weight = torch.randn(4, 1536, generator=torch.Generator().manual_seed(3))
    found = round_in_groups(weight, 3, 576)
    for start, end in ((0, 576), (576, 1152), (1152, 1536)):
        torch.testing.assert_close(found[:, start:end], round_in_groups(weight[:, start:end], 3, 576))
        assert all(len(row.unique()) <= 7 for row in found[:, start:end])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_familys_linear_maps_are_rounded_and_nothing_else(family):
    target = tiny_model(family)
    before = copy.deepcopy(target.state_dict())
    draft = rounded_copy(target, 4, 16)
    after = draft.state_dict()
    for name, weight in target.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    for name, weight in before.items():
        kept = name.endswith(("mlp.gate.weight", "mlp.router.weight", "bias"))
        in_layers = ".layers." in name or ".h." in name
        is_linear = in_layers and weight.dim() >= 2 and not kept
        assert (name in changed) == is_linear, name


def test_inputs_are_grouped_whichever_way_a_weight_lies():
    linear = rounded_copy(tiny_model("llama"), 3, 32).model.layers[0].mlp.up_proj.weight
    assert all(len(row.unique()) <= 7 for row in linear)
    conv = rounded_copy(tiny_model("gpt2"), 3, 32).transformer.h[0].mlp.c_fc.weight
    assert all(len(column.unique()) <= 7 for column in conv.T)
    experts = rounded_copy(tiny_model("mixtral"), 3, 32).model.layers[0].mlp.experts.gate_up_proj
    assert all(len(row.unique()) <= 7 for row in experts.flatten(0, 1))
    transposed = rounded_copy(tiny_model("gpt_oss"), 3, 32).model.layers[0].mlp.experts.gate_up_proj
    assert all(len(column.unique()) <= 7 for column in transposed.transpose(1, 2).flatten(0, 1))


def test_what_is_not_rounded_shares_the_targets_storage():
    target = tiny_model("llama")
    draft = rounded_copy(target)
    for part in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert draft.get_parameter(part).data_ptr() == target.get_parameter(part).data_ptr()
        assert draft.get_parameter(part) is not target.get_parameter(part)
    assert not any(parameter.requires_grad for parameter in draft.parameters())
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert not draft.training


def test_fewer_bits_agree_less():
    target = tiny_model("llama").float()
    inputs = ragged_batch((6, 9, 4))
    with torch.no_grad():
        best = target(**inputs).logits.argmax(-1)
        errors = [
            (rounded_copy(target, bits)(**inputs).logits - target(**inputs).logits).square().mean()
            for bits in (8, 6, 4, 3)
        ]
        assert torch.equal(rounded_copy(target, 8)(**inputs).logits[:, -1].argmax(-1), best[:, -1])
    assert errors == sorted(errors)


def test_it_drafts_for_its_target():
    target = hf_dsde.enable(tiny_model("llama"))
    draft = rounded_copy(target, 8)
    inputs = ragged_batch((3, 6), seed=1)
    arguments = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    output = target.generate(**inputs, assistant_model=draft, speculation_policy="static", **arguments)
    plain = target.generate(**inputs, **arguments)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert output.speculation_statistics.acceptance_rate > 0.7


@pytest.mark.parametrize(
    ("arguments", "name"), [({"bits": 1}, "bits"), ({"bits": 9}, "bits"), ({"group_size": 0}, "group_size")]
)
def test_bounds_are_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        rounded_copy(tiny_model("llama"), **arguments)


def test_a_model_without_layers_is_refused():
    target = tiny_model("llama")
    target.config.num_hidden_layers = 7
    with pytest.raises(TypeError, match="decoder layers"):
        rounded_copy(target)


def test_quantised_weights_are_refused():
    target = tiny_model("llama")
    layer = target.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="unquantised"):
        rounded_copy(target)
