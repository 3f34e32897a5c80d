"""Inflated models: the same function, every weight in its place, and noise wherever zeros are not needed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_calls import assert_same_text, endless_model, plain, speculative
from tiny_models import PAD, noisy_copy, ragged_batch, tiny_model
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_dsde
from hf_dsde.bench.inflate import Shape, inflate
from hf_dsde.drafting.layer_draft import initialise_draft

SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=64)
SHAPES_BY_CHANGE = {
    "nothing": SMALL,
    "hidden": replace(SMALL, hidden=52),
    "layers": replace(SMALL, layers=5),
    "groups": replace(SMALL, heads=8, kv_heads=4),
    "members": replace(SMALL, heads=8),
    "head_dim": replace(SMALL, head_dim=16),
    "head_dim by 3": replace(SMALL, head_dim=24),
    "intermediate": replace(SMALL, intermediate=100),
    "everything": Shape(hidden=48, layers=4, heads=12, kv_heads=3, head_dim=24, intermediate=96),
}
EVERYTHING = SHAPES_BY_CHANGE["everything"]
# Bands of unscaled, blended and divided frequencies: a head of 8 dimensions has a frequency in each.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def small_model(*, dtype: torch.dtype = torch.float64, **changes: object) -> LlamaForCausalLM:
    """A tiny Llama with no zero among its weights, and an epsilon that counts beside the mean of squares."""
    model = tiny_model("llama", **{"rms_norm_eps": 0.05, **changes})
    # The padding token's embedding is initialised to zeros.
    model.model.embed_tokens.weight.data[PAD] = 0.3
    return model if dtype == torch.float64 else model.to(dtype)


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in the model's own dtype: the stock ones compute in float32, whatever the model's dtype."""

    def forward(self: LlamaRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(square + self.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@torch.no_grad()
def difference(model: LlamaForCausalLM, other: LlamaForCausalLM) -> float:
    """The largest difference of logits over the largest logit, at the tokens of a ragged batch."""
    inputs = ragged_batch((30, 1, 17))
    real = inputs["attention_mask"].bool()
    logits, others = (each(**inputs).logits[real].double() for each in (model, other))
    return float((logits - others).abs().max() / logits.abs().max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES_BY_CHANGE.values(), ids=SHAPES_BY_CHANGE)
def test_logits_are_the_small_models(shape, tied, exact_norms):
    model = small_model(tie_word_embeddings=tied)
    inflated = inflate(model, shape)
    assert Shape.of(inflated) == shape
    assert (
        (inflated.lm_head.weight is inflated.model.embed_tokens.weight) == tied == inflated.config.tie_word_embeddings
    )
    assert difference(model, inflated) < 1e-9


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_are_the_small_models_with_stock_norms(attention):
    # Eager attention has NaN in float64 for padding, which sees nothing.
    model = small_model(dtype=torch.float32, attn_implementation=attention)
    inflated = inflate(model, EVERYTHING)
    assert inflated.config._attn_implementation == attention
    assert difference(model, inflated) < 1e-5


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR], ids=lambda rope: rope["rope_type"])
def test_scalings_of_the_frequency_alone_carry_over(rope, exact_norms):
    model = small_model(rope_parameters=dict(rope))
    scaled = model.model.rotary_emb.inv_freq / small_model().model.rotary_emb.inv_freq
    assert (len(scaled.unique()) >= 3) == (rope is LLAMA3)
    assert difference(model, inflate(model, EVERYTHING)) < 1e-9


@pytest.mark.parametrize("rope", [YARN, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_other_scalings_need_the_same_head_dim(rope, exact_norms):
    model = small_model(rope_parameters=dict(rope))
    with pytest.raises(ValueError, match=rf"'{rope['rope_type']}'.*own head_dim"):
        inflate(model, EVERYTHING)
    assert difference(model, inflate(model, replace(EVERYTHING, head_dim=8))) < 1e-9


def expected_weight(name: str, row: int, column: int, shape: Shape, old: list[list[float]] | None) -> float | str:
    """What one entry must be, from the definition of the embedding: a number, or "zero", or "noise"."""
    writes = name in {"o_proj", "down_proj"}
    if writes:  # what the others read: rows and columns trade places
        row, column = column, row
    kept, silent, scale, place = row < SMALL.intermediate, False, 1.0, row
    if name in {"q_proj", "k_proj", "v_proj", "o_proj"}:
        members = 1 if name in {"k_proj", "v_proj"} else shape.heads // shape.kv_heads
        old_members = 1 if name in {"k_proj", "v_proj"} else SMALL.heads // SMALL.kv_heads
        head, dimension = divmod(row, shape.head_dim)
        group, member = divmod(head, members)
        half, pair = divmod(dimension, shape.head_dim // 2)
        step = shape.head_dim // SMALL.head_dim
        known_head = group < SMALL.kv_heads and member < old_members
        kept = known_head and pair % step == 0
        silent = name == "q_proj" and known_head and not kept
        scale = math.sqrt(step) if name == "q_proj" else 1.0
        place = (group * old_members + member) * SMALL.head_dim + half * SMALL.head_dim // 2 + pair // step
    if old is None:
        return "zero" if writes else "noise"
    if silent:
        return "zero"
    if not kept or column >= SMALL.hidden:
        return "zero" if writes else "noise"
    return (old[column][place] if writes else old[place][column]) * scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPES_BY_CHANGE["nothing"], EVERYTHING], ids=["nothing", "everything"])
def test_every_entry_of_a_layer_is_in_its_place(shape, dtype):
    model = small_model()
    layers = inflate(model, shape, dtype=dtype).model.layers
    for index in {0, shape.layers - 1}:
        source = model.model.layers[index] if index < SMALL.layers else None
        projections = {n: m for n, m in layers[index].named_modules() if n.endswith("_proj")}
        assert len(projections) == 7
        for path, module in projections.items():
            old = None if source is None else source.get_submodule(path).weight.tolist()
            name = path.rsplit(".", 1)[1]
            for row, values in enumerate(module.weight.tolist()):
                for column, value in enumerate(values):
                    expected = expected_weight(name, row, column, shape, old)
                    if expected == "noise":
                        assert 0 < abs(value) < 6 * model.config.initializer_range, (path, row, column)
                    elif expected == "zero":
                        assert value == 0, (path, row, column)
                    else:
                        assert math.isclose(value, expected, rel_tol=torch.finfo(dtype).eps), (path, row, column)


def zeros(weight: torch.Tensor) -> float:
    return float((weight == 0).double().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_what_must_be_zero_is_zero(dtype):
    inflated = inflate(small_model(), EVERYTHING, dtype=dtype)
    real = SMALL.hidden / EVERYTHING.hidden
    first, added = inflated.model.layers[0], inflated.model.layers[3]
    # Of 12 heads 4 are kept, and of their 24 dimensions 8.
    expected = {
        "self_attn.q_proj": (4 / 12 * 16 / 24, 0.0),
        "self_attn.o_proj": (1 - real * 4 / 12 * 8 / 24, 1.0),
        "mlp.down_proj": (1 - real * 64 / 96, 1.0),
    }
    for path, module in first.named_modules():
        if hasattr(module, "weight"):
            wanted = expected.get(path, (0.0, 0.0))
            found = zeros(module.weight), zeros(added.get_submodule(path).weight)
            assert found == pytest.approx(wanted, abs=1e-12), path
    assert zeros(inflated.model.embed_tokens.weight) == pytest.approx(1 - real)
    assert zeros(inflated.lm_head.weight) == zeros(inflated.model.norm.weight) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_has_the_scale_of_initialised_weights_and_many_values(dtype):
    wide = inflate(small_model(), replace(SMALL, intermediate=2000), dtype=dtype)
    noise = wide.model.layers[0].mlp.up_proj.weight[SMALL.intermediate :].double()
    assert float(noise.std()) == pytest.approx(wide.config.initializer_range, rel=0.02)
    assert abs(float(noise.mean())) < 0.01 * wide.config.initializer_range
    assert len(noise.unique()) > 1000


def scale_norms(inflated: LlamaForCausalLM) -> None:
    for module in inflated.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.data *= math.sqrt(EVERYTHING.hidden / SMALL.hidden)


def keep_final_norm(inflated: LlamaForCausalLM) -> None:
    inflated.model.norm.weight.data *= math.sqrt(EVERYTHING.hidden / SMALL.hidden)


def keep_epsilon(inflated: LlamaForCausalLM) -> None:
    for module in inflated.modules():
        if isinstance(module, LlamaRMSNorm):
            module.variance_epsilon = 0.05


def unscale_queries(inflated: LlamaForCausalLM) -> None:
    for layer in inflated.model.layers:
        layer.self_attn.q_proj.weight.data /= math.sqrt(EVERYTHING.head_dim / SMALL.head_dim)


def wake_silent_queries(inflated: LlamaForCausalLM) -> None:
    weight = inflated.model.layers[0].self_attn.q_proj.weight.data
    weight[weight == 0] = 0.2


def write_from_added_heads(inflated: LlamaForCausalLM) -> None:
    inflated.model.layers[0].self_attn.o_proj.weight.data[: SMALL.hidden, -1] = 0.2


def write_from_added_layer(inflated: LlamaForCausalLM) -> None:
    inflated.model.layers[-1].mlp.down_proj.weight.data[0, 0] = 0.2


def leak_into_added_channels(inflated: LlamaForCausalLM) -> None:
    inflated.model.embed_tokens.weight.data[:, -1] = 0.2


@pytest.mark.parametrize(
    "mutate",
    [
        scale_norms,
        keep_final_norm,
        keep_epsilon,
        unscale_queries,
        wake_silent_queries,
        write_from_added_heads,
        write_from_added_layer,
        leak_into_added_channels,
    ],
)
def test_what_must_hold_of_the_weights_is_needed(mutate: Callable[[LlamaForCausalLM], None], exact_norms):
    model = small_model()
    inflated = inflate(model, EVERYTHING)
    mutate(inflated)
    assert difference(model, inflated) > 1e-4


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("dimension_places", lambda small, large: torch.arange(small.head_dim)),
        (
            "dimension_places",
            lambda small, large: (
                torch.arange(small.head_dim // 2).repeat(2)
                + torch.tensor([0, large.head_dim // 2]).repeat_interleave(small.head_dim // 2)
            ),
        ),
        ("head_places", lambda small, large: torch.arange(small.heads)),
        ("head_places", lambda small, large: torch.arange(small.heads) + large.heads - small.heads),
    ],
    ids=["pairs split", "first pairs", "heads contiguous", "heads last"],
)
def test_other_places_compute_something_else(function, wrong, monkeypatch, exact_norms):
    model = small_model()
    monkeypatch.setattr(f"hf_dsde.bench.inflate.{function}", wrong)
    assert difference(model, inflate(model, EVERYTHING)) > 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_text_is_the_same(tied):
    model = small_model(tie_word_embeddings=tied)
    # Not what the model's config says: the generation config is the one of the small model.
    model.generation_config.max_new_tokens = 40
    inputs = ragged_batch((5, 1, 9))
    text = plain(model, inputs)
    assert text.shape == (3, 49)
    assert torch.equal(plain(inflate(model, EVERYTHING), inputs), text)


def test_an_inflated_target_is_decoded_speculatively():
    model = endless_model("llama")
    inflated = inflate(model, EVERYTHING)
    assert type(inflated) is LlamaForCausalLM
    inflated.generation_config.eos_token_id = None
    inputs = ragged_batch((5, 1, 9))
    draft = noisy_copy(model, 0.05)
    expected = plain(model, inputs, max_new_tokens=40)
    output = speculative(hf_dsde.enable(inflated), draft, inputs, "static", max_new_tokens=40)
    assert_same_text(output, expected)
    small = speculative(model, draft, inputs, "static", max_new_tokens=40)
    assert output.speculation_statistics.acceptance_rate == small.speculation_statistics.acceptance_rate
    assert 0.1 < output.speculation_statistics.acceptance_rate < 0.9


def test_an_inflated_draft_is_accepted_as_the_small_one_is():
    model = endless_model("llama")
    inputs = ragged_batch((5, 1, 9))
    expected = plain(model, inputs, max_new_tokens=40)
    itself = speculative(model, inflate(model, EVERYTHING), inputs, "static", max_new_tokens=40)
    assert_same_text(itself, expected)
    assert itself.speculation_statistics.acceptance_rate == 1
    draft = noisy_copy(model, 0.05)
    small = speculative(model, draft, inputs, "static", max_new_tokens=40)
    large = speculative(model, inflate(draft, EVERYTHING), inputs, "static", max_new_tokens=40)
    assert_same_text(large, expected)
    assert large.speculation_statistics.acceptance_rate == small.speculation_statistics.acceptance_rate


def test_a_layer_draft_becomes_a_model_of_its_own():
    target = small_model(tie_word_embeddings=True)
    draft = initialise_draft(target, [1])
    inflated = inflate(draft, EVERYTHING)
    assert difference(draft, inflated) < 1e-5
    assert not hasattr(inflated.config, "hf_dsde_draft")
    assert hasattr(draft.config, "hf_dsde_draft")
    inflated.model.embed_tokens.weight.data.zero_()
    assert bool((target.model.embed_tokens.weight != 0).all())


def test_an_inflated_model_can_be_saved(tmp_path):
    model = small_model(dtype=torch.float32)
    inflated = inflate(model, EVERYTHING)
    inflated.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert difference(inflated, loaded) == 0


def test_the_small_model_is_left_alone():
    model = small_model()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    inflate(model, EVERYTHING)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config.to_dict() == config
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_seed_gives_the_same_noise():
    model = small_model()
    first, again, other = (inflate(model, EVERYTHING, seed=seed) for seed in (0, 0, 1))
    assert difference(first, again) == 0
    noise = [each.model.layers[-1].mlp.up_proj.weight for each in (first, again, other)]
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])


def test_the_dtype_is_that_of_the_weights_and_not_of_the_rotary_frequencies():
    model = small_model(dtype=torch.float32)
    inflated = inflate(model, EVERYTHING, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in inflated.parameters()} == {torch.bfloat16}
    assert inflated.config.dtype == torch.bfloat16
    assert inflated.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not inflated.training
    assert not any(parameter.requires_grad for parameter in inflated.parameters())
    assert 1e-5 < difference(model, inflated) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 16}, "hidden 16, but the model has 32"),
        ({"layers": 1}, "layers 1, but the model has 2"),
        ({"heads": 2}, "heads 2, but the model has 4"),
        ({"kv_heads": 1}, "kv_heads 1, but the model has 2"),
        ({"heads": 4, "kv_heads": 4}, "heads_per_group 1, but the model has 2"),
        ({"head_dim": 4}, "head_dim 4, but the model has 8"),
        ({"head_dim": 12}, "multiple of the model's head_dim 8"),
        ({"intermediate": 32}, "intermediate 32, but the model has 64"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        inflate(small_model(), replace(SMALL, **changes))


def test_what_cannot_be_carried_over_is_refused():
    with pytest.raises(TypeError, match="Qwen2ForCausalLM, but a LlamaForCausalLM"):
        inflate(tiny_model("qwen2"), EVERYTHING)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.bias"):
        inflate(small_model(attention_bias=True), EVERYTHING)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.bias"):
        inflate(small_model(mlp_bias=True), EVERYTHING)
    with pytest.raises(ValueError, match="`shape` is '7B'"):
        inflate(small_model(), "7B")
    quantised = small_model()
    weight = quantised.model.layers[0].mlp.up_proj.weight
    quantised.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="unquantised"):
        inflate(quantised, EVERYTHING)


def test_rounded_frequencies_are_refused():
    with pytest.raises(ValueError, match=r"from_pretrained\(\.\.\., dtype="):
        inflate(small_model(dtype=torch.bfloat16), EVERYTHING)


@pytest.mark.gpu
def test_on_a_gpu_it_is_made_there_without_a_second_copy():
    model = small_model(dtype=torch.float32)
    shape = Shape(hidden=1024, layers=24, heads=16, kv_heads=4, head_dim=64, intermediate=4096)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    inflated = inflate(model, shape, device="cuda")
    size = 4 * shape.parameters(model.config.vocab_size, tied=False)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * size
    assert difference(model, inflated.cpu()) < 1e-4
