"""Loaded heads give what their weights say, by a reference that knows neither torch nor the package."""

import numpy as np
import pytest
import reference
import torch
from head_files import (
    FEATURE,
    SHAPE,
    VOCABULARY,
    eagle3_weights,
    eagle_config,
    eagle_names,
    first_eagle_weights,
    speculators_config,
    write,
)
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_dsde import load_head

LENGTH = 9
DRAFT = [3, 4, 9, 20, 33, 34, 35, 60, 77, 95]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
"""Norms and rotations are computed in float32, whatever the dtype of the head."""


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_hidden_layers=8)


def as_numpy(weights):
    return {name: tensor.double().numpy() for name, tensor in weights.items()}


def inputs(features=3, width=FEATURE):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(features, 1, LENGTH, width, generator=generator, dtype=torch.float64)
    return list(states), torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)


def numbers(tensors):
    return [tensor[0].numpy() for tensor in tensors]


@torch.no_grad()
def outputs(head, features, ids):
    """Logits and next states, `[T, ...]`."""
    output = head(ids, head.project(features))
    return output.logits[0].numpy(), output.hidden_states[0].numpy()


@torch.no_grad()
def guessed_on(head, features, ids):
    """The logits after one more pair: the head's own state of the last pair, and token 7. With a cache, in steps."""
    cache = DynamicCache()
    states = head.project(features)
    head(ids[:, :4], states[:, :4], past_key_values=cache)
    first = head(ids[:, 4:], states[:, 4:], past_key_values=cache, logits_to_keep=1)
    assert first.logits.shape[1] == 1
    second = head(torch.tensor([[7]]), first.hidden_states[:, -1:], past_key_values=cache)
    return second.logits[0, -1].numpy()


def guessed_on_by_reference(weights, states, ids, settings, shape, **options):
    _, own = reference.eagle3(weights, states, ids, settings, shape, **options)
    longer = np.concatenate([states, own[-1:]])
    return reference.eagle3(weights, longer, np.append(ids, 7), settings, shape, **options)[0][-1]


SETTINGS = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "output": {"norm_output": True},
    "joined": {"norm_before_fc": True, "norm_before_residual": True},
    "each": {"fc_norm": True, "norm_output": True},
}
LAYERS = {"llama": {}, "qwen3": {"qk_norm": True}, "biased": {"bias": True}}
FORMATS = ("eagle", "speculators")


def written_head(folder, form, weights, shape, settings, *, layer_type="llama", bias=False):
    changes = {"attention_bias": bias}
    size = len(weights["lm_head.weight"])
    if form == "eagle":
        return write(
            folder, {**eagle_config(shape, draft_vocab_size=size, **changes), **settings}, eagle_names(weights)
        )
    config = speculators_config(shape, layers=changes, layer_type=layer_type, **settings, draft_vocab_size=size)
    return write(folder, config, weights)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_head_computes_what_its_weights_say(tmp_path, target, form, layer, name):
    settings, traits = SETTINGS[name], LAYERS[layer]
    shape = {**SHAPE, "layers": 2 if layer == "qwen3" else 1}
    norms = {key: settings[key] for key in ("fc_norm", "norm_before_fc") if key in settings}
    weights = eagle3_weights(shape, **traits, **norms, draft=DRAFT)
    layer_type = "qwen3" if layer == "qwen3" else "llama"
    bias = layer == "biased"
    head = load_head(written_head(tmp_path, form, weights, shape, settings, layer_type=layer_type, bias=bias), target)
    assert not head.training
    assert head.dtype == torch.float64
    assert head.draft_ids.tolist() == DRAFT
    features, ids = inputs()
    plain = as_numpy(weights)
    states = reference.project(plain, numbers(features), settings)
    np.testing.assert_allclose(head.project(features)[0].detach().numpy(), states, **CLOSE)
    logits, following = outputs(head, features, ids)
    wanted = reference.eagle3(plain, states, ids[0].numpy(), settings, shape)
    np.testing.assert_allclose(logits, wanted[0], **CLOSE)
    np.testing.assert_allclose(following, wanted[1], **CLOSE)
    again = guessed_on_by_reference(plain, states, ids[0].numpy(), settings, shape)
    np.testing.assert_allclose(guessed_on(head, features, ids), again, **CLOSE)


@pytest.mark.parametrize("mutant", ["order", "residual", "feedback"])
@pytest.mark.parametrize("settings", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_the_reference_tells_mistakes_apart(tmp_path, target, mutant, settings):
    weights = eagle3_weights()
    head = load_head(written_head(tmp_path, "eagle", weights, SHAPE, settings), target)
    features, ids = inputs()
    plain = as_numpy(weights)
    states = reference.project(plain, numbers(features), settings)
    wrong = guessed_on_by_reference(plain, states, ids[0].numpy(), settings, SHAPE, mutant=mutant)
    assert np.abs(guessed_on(head, features, ids) - wrong).max() > 0.1


def test_features_are_joined_in_the_order_of_the_layers(tmp_path, target):
    weights = eagle3_weights()
    head = load_head(written_head(tmp_path, "eagle", weights, SHAPE, {}), target)
    features, _ = inputs()
    turned = reference.project(as_numpy(weights), numbers(features[::-1]), {})
    assert np.abs(head.project(features)[0].detach().numpy() - turned).max() > 0.1


def test_the_names_of_each_features_norm_are_those_of_sglang_too(tmp_path, target):
    weights = eagle3_weights(fc_norm=True)
    names = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
    for index, name in enumerate(names):
        weights[f"{name}.weight"] = weights.pop(f"fc_norm.{index}.weight")
    head = load_head(write(tmp_path, eagle_config(), eagle_names(weights)), target)
    features, _ = inputs()
    wanted = reference.project(as_numpy(weights), numbers(features), {"fc_norm": True, "fc_norm_names": names})
    np.testing.assert_allclose(head.project(features)[0].detach().numpy(), wanted, **CLOSE)


def with_prefix(weights):
    return {f"model.{name}" if "lm_head" not in name else name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("kind", ["safetensors", "bin", "old bin", "sharded safetensors", "sharded bin"])
@pytest.mark.parametrize("names", [eagle_names, with_prefix])
def test_weights_are_found_in_every_kind_of_file_and_with_a_prefix(tmp_path, target, kind, names):
    weights = eagle3_weights(draft=DRAFT)
    folder = write(tmp_path, eagle_config(draft_vocab_size=len(DRAFT)), names(weights), kind=kind)
    head = load_head(folder, target)
    features, ids = inputs()
    plain = as_numpy(weights)
    wanted, _ = reference.eagle3(plain, reference.project(plain, numbers(features), {}), ids[0].numpy(), {}, SHAPE)
    np.testing.assert_allclose(outputs(head, features, ids)[0], wanted, **CLOSE)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("rope", "theta", "factor"),
    [
        ({}, 10000.0, 1.0),
        ({"rope_theta": 500.0}, 500.0, 1.0),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, 500.0, 4.0),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}, 500.0, 4.0),
    ],
)
def test_positions_turn_as_the_heads_own_configuration_says(tmp_path, form, rope, theta, factor):
    """Not as the target's does, although it was trained on the target's states."""
    target = tiny_model(num_hidden_layers=8, rope_theta=123.0)
    weights = eagle3_weights()
    if form == "eagle":
        folder = write(tmp_path, eagle_config(**rope), eagle_names(weights))
    else:
        folder = write(tmp_path, speculators_config(layers=rope), weights)
    head = load_head(folder, target)
    features, ids = inputs()
    plain = as_numpy(weights)
    shape = {**SHAPE, "theta": theta, "factor": factor}
    wanted, _ = reference.eagle3(plain, reference.project(plain, numbers(features), {}), ids[0].numpy(), {}, shape)
    np.testing.assert_allclose(outputs(head, features, ids)[0], wanted, **CLOSE)


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_layers_slide_where_the_configuration_says_which(tmp_path, target, layer_type):
    shape = {**SHAPE, "layers": 2, "windows": [3, None]}
    weights = eagle3_weights(shape, qk_norm=layer_type == "qwen3")
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    folder = write(tmp_path, speculators_config(shape, layers=sliding, layer_type=layer_type), weights)
    features, ids = inputs()
    plain = as_numpy(weights)
    states = reference.project(plain, numbers(features), {})
    wanted, _ = reference.eagle3(plain, states, ids[0].numpy(), {}, shape)
    for implementation in ("sdpa", "eager"):
        head = load_head(folder, target)
        head.set_attn_implementation(implementation)
        np.testing.assert_allclose(outputs(head, features, ids)[0], wanted, **CLOSE)
    np.testing.assert_allclose(
        guessed_on(head, features, ids),
        guessed_on_by_reference(plain, states, ids[0].numpy(), {}, shape),
        **CLOSE,
    )
    everywhere, _ = reference.eagle3(plain, states, ids[0].numpy(), {}, {**shape, "windows": [None, None]})
    assert np.abs(everywhere - wanted).max() > 0.1
    masks = {
        "sliding_attention": torch.from_numpy(reference.causal(LENGTH, 3))[None, None],
        "full_attention": torch.from_numpy(reference.causal(LENGTH))[None, None],
    }
    head.set_attn_implementation("sdpa")
    with torch.no_grad():
        given = head(ids, head.project(features), attention_mask=masks).logits[0].numpy()
    np.testing.assert_allclose(given, wanted, **CLOSE)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("remnant", [{"sliding_window": 3}, {"sliding_window": 3, "use_sliding_window": False}])
def test_a_window_that_no_layer_is_said_to_use_is_not_used(tmp_path, target, form, remnant):
    weights = eagle3_weights()
    if form == "eagle":
        folder = write(tmp_path, eagle_config(**remnant, layer_types=["full_attention"] * 8), eagle_names(weights))
    else:
        folder = write(tmp_path, speculators_config(layers=remnant), weights)
    head = load_head(folder, target)
    features, ids = inputs()
    plain = as_numpy(weights)
    wanted, _ = reference.eagle3(plain, reference.project(plain, numbers(features), {}), ids[0].numpy(), {}, SHAPE)
    np.testing.assert_allclose(outputs(head, features, ids)[0], wanted, **CLOSE)
    assert head.config.layer_types == ["full_attention"]


def test_biases_of_queries_keys_and_values_alone(tmp_path, target):
    weights = eagle3_weights(bias=True)
    del weights["layers.0.self_attn.o_proj.bias"]
    head = load_head(write(tmp_path, eagle_config(qkv_bias=True), eagle_names(weights)), target)
    features, ids = inputs()
    plain = as_numpy(weights)
    wanted, _ = reference.eagle3(plain, reference.project(plain, numbers(features), {}), ids[0].numpy(), {}, SHAPE)
    np.testing.assert_allclose(outputs(head, features, ids)[0], wanted, **CLOSE)


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_heads_of_the_first_eagle(tmp_path, target, fc_bias, layers, qkv_bias):
    shape = {**SHAPE, "width": FEATURE, "head_dim": 8, "layers": layers}
    weights = first_eagle_weights(shape, fc_bias=fc_bias, bias=qkv_bias)
    for index in range(layers):
        weights.pop(f"layers.{index}.self_attn.o_proj.bias", None)
    # The type is the target's, and says nothing of the head's layers.
    config = {**eagle_config(shape, qkv_bias=qkv_bias), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    head = load_head(write(tmp_path, config, weights, kind="bin"), target)
    assert head.feature_layers == (8,)
    assert head.draft_ids is None
    features, ids = inputs(1)
    plain = as_numpy(weights) | {"lm_head.weight": target.lm_head.weight.detach().numpy()}
    states = features[0][0].numpy()
    wanted = reference.first_eagle(plain, states, ids[0].numpy(), shape)
    logits, following = outputs(head, features, ids)
    np.testing.assert_allclose(logits, wanted[0], **CLOSE)
    np.testing.assert_allclose(following, wanted[1], **CLOSE)
    turned, _ = reference.first_eagle(plain, states, ids[0].numpy(), shape, mutant="order")
    assert np.abs(turned - logits).max() > 0.1


def test_the_first_eagles_feature_is_what_the_targets_head_gets(tmp_path, target):
    shape = {**SHAPE, "width": FEATURE, "head_dim": 8}
    head = load_head(write(tmp_path, eagle_config(shape), first_eagle_weights(shape)), target)
    with torch.no_grad():
        seen = target(torch.arange(3, 12)[None], output_hidden_states=True)
        feature = head.project([seen.hidden_states[layer] for layer in head.feature_layers])
        torch.testing.assert_close(target.lm_head(feature), seen.logits)


@pytest.mark.parametrize("form", FORMATS)
def test_a_pass_asks_nothing_of_the_device(tmp_path, target, form):
    """So that it can be recorded: on the meta device there is nothing to be asked."""
    weights = eagle3_weights(draft=DRAFT)
    head = load_head(written_head(tmp_path, form, weights, SHAPE, {}), target).to("meta")
    features = [torch.empty(2, 5, FEATURE, dtype=torch.float64, device="meta") for _ in range(3)]
    ids = torch.empty(2, 5, dtype=torch.int64, device="meta")
    mask = torch.empty(2, 1, 5, 5, dtype=torch.bool, device="meta")
    for keep in (0, 1, torch.tensor([4], device="meta")):
        output = head(
            ids, head.project(features), attention_mask=mask, position_ids=ids, logits_to_keep=keep, use_cache=True
        )
        assert output.logits.shape == (2, 5 if isinstance(keep, int) and keep == 0 else 1, len(DRAFT))
        assert output.hidden_states.shape == (2, 5, SHAPE["width"])
