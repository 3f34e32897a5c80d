"""MTP layers give what the same layer gives as the last one of a model that transformers loads by itself."""

import json

import numpy as np
import pytest
import reference
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import ragged_batch
from tiny_policies import RandomLengths
from transformers import DynamicCache

import hf_dsde
from hf_dsde.heads import load_mtp
from hf_dsde.heads.mtp import FAMILIES

VOCABULARY, WIDTH, LAYERS = 64, 32, 2
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "experts_implementation": "eager",
}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "shared_expert_intermediate_size": 24}
TARGETS = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**ROUTED, **LATENT, "num_key_value_heads": 4}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**ROUTED, "head_dim": 8}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**LINEAR, **EXPERTS}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {**LINEAR, **EXPERTS}),
    "mimo": ("Qwen2ForCausalLM", {}),
}
OUTER = {
    "deepseek_v3": {name: name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")},
    "qwen3_next": {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
                   "shared_head.norm": "norm"},
    "mimo": {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
             "shared_head.norm": "final_layernorm"},
}  # fmt: skip
PLACES = {
    "deepseek_v3": (f"model.layers.{LAYERS}.", f"model.layers.{LAYERS}."),
    "qwen3_next": ("mtp.", "mtp.layers.0."),
    "mimo": ("model.mtp_layers.0.", "model.mtp_layers.0."),
}
LIKE = {"glm4_moe": "deepseek_v3", "qwen3_5_text": "qwen3_next", "qwen3_5_moe_text": "qwen3_next"}


def model_of(family, layers):
    name, changes = TARGETS[family]
    cls = getattr(transformers, name)
    fields = {**COMMON, **changes, "num_hidden_layers": layers}
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        fields["layer_types"] = ["linear_attention", "full_attention", "full_attention"][:layers]
    config = cls.config_class(**fields)
    torch.manual_seed(0)
    model = cls(config).eval()
    for tensor in model.parameters():
        if tensor.dim() == 1:
            tensor.data += 0.3 * torch.randn_like(tensor)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.add_(0.3 * torch.randn_like(buffer))
    return model


def checkpoint(folder, family):
    """Write the checkpoint of a target of two layers and an MTP layer: a model of three, whose third is renamed.

    Returns:
        The target, that model, and the weights around the layer.
    """
    bigger = model_of(family, LAYERS + 1)
    bigger.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    outside, inside = PLACES[LIKE.get(family, family)]
    last = f"model.layers.{LAYERS}."
    renamed = {name.replace(last, inside) if name.startswith(last) else name: held for name, held in weights.items()}
    torch.manual_seed(1)
    outer = {"eh_proj": 0.2 * torch.randn(WIDTH, 2 * WIDTH)}
    outer |= {name: 0.3 * torch.randn(WIDTH) for name in ("enorm", "hnorm", "shared_head.norm")}
    names = OUTER[LIKE.get(family, family)]
    renamed |= {f"{outside}{names[name]}.weight": tensor for name, tensor in outer.items()}
    if "deepseek_v3" in (family, LIKE.get(family)):
        renamed |= {f"{outside}{name}.weight": torch.zeros(1) for name in ("embed_tokens", "shared_head.head")}
    save_file(renamed, folder / "model.safetensors")
    target = model_of(family, LAYERS)
    state = target.state_dict()
    target.load_state_dict({name: held for name, held in bigger.state_dict().items() if name in state})
    if family == "mimo":
        target.config.model_type = "mimo"
    return target, bigger, outer


@torch.no_grad()
def expected(family, bigger, outer, states, ids):
    """Logits and next states for one text, the norms and the product by numpy, the layer as transformers has it."""
    shift = 1.0 if family.startswith("qwen") else 0.0

    def norm(x, name):
        return reference.rms_norm(x, shift + outer[name].double().numpy(), bigger.config.rms_norm_eps)

    embedded = norm(bigger.get_input_embeddings().weight[ids].double().numpy(), "enorm")
    normed = norm(states.double().numpy(), "hnorm")
    pair = [normed, embedded] if family == "mimo" else [embedded, normed]
    x = torch.from_numpy(np.concatenate(pair, -1) @ outer["eh_proj"].double().numpy().T).float()[None]
    positions = torch.arange(len(ids))[None]
    several = hasattr(bigger.model.rotary_emb, "mrope_section")
    rotated = bigger.model.rotary_emb(x, positions.expand(3, 1, -1) if several else positions)
    mask = torch.from_numpy(reference.causal(len(ids)))[None, None]
    hidden = bigger.model.layers[LAYERS](x, attention_mask=mask, position_embeddings=rotated, position_ids=positions)
    out = norm(hidden[0].double().numpy(), "shared_head.norm")
    return out @ bigger.lm_head.weight.double().numpy().T, out


@pytest.mark.parametrize("family", TARGETS)
@torch.no_grad()
def test_an_mtp_layer_computes_what_the_model_with_that_layer_does(tmp_path, family):
    target, bigger, outer = checkpoint(tmp_path, family)
    head = load_mtp(tmp_path, target)
    assert head.feature_layers == (LAYERS,)
    assert head.draft_ids is None
    assert not head.training
    assert head.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert head.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    torch.manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (1, 9))
    seen = target(ids, output_hidden_states=True)
    torch.testing.assert_close(target.lm_head(seen.hidden_states[LAYERS]), seen.logits)
    states = head.project([seen.hidden_states[LAYERS]])
    following = torch.cat([ids[:, 1:], torch.tensor([[5]])], 1)
    output = head(following, states)
    logits, own = expected(family, bigger, outer, states[0], following[0])
    np.testing.assert_allclose(output.logits[0].numpy(), logits, atol=2e-4, rtol=1e-3)
    np.testing.assert_allclose(output.hidden_states[0].numpy(), own, atol=2e-4, rtol=1e-3)

    cache = DynamicCache()
    head(following[:, :4], states[:, :4], past_key_values=cache)
    last = head(following[:, 4:], states[:, 4:], past_key_values=cache, logits_to_keep=1)
    second = head(torch.tensor([[7]]), last.hidden_states[:, -1:], past_key_values=cache)
    longer = torch.cat([states[0], torch.from_numpy(own[-1:]).float()])
    logits, _ = expected(family, bigger, outer, longer, torch.cat([following[0], torch.tensor([7])]))
    np.testing.assert_allclose(second.logits[0, 0].numpy(), logits[-1], atol=2e-4, rtol=1e-3)


def drafted_for(folder, family):
    """A call in which the layer drafts for its target, and what the target writes alone."""
    target, _, _ = checkpoint(folder, family)
    target = hf_dsde.enable(target.double())
    inputs = ragged_batch([1, 9, 4])
    inputs["input_ids"] %= VOCABULARY
    arguments = {**inputs, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    policy = RandomLengths(4)
    return target.generate(**arguments), lambda: target.generate(
        **arguments, assistant_model=load_mtp(folder, target), speculation_policy=policy
    )


@pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo"])
def test_a_layer_drafts_for_its_target(tmp_path, family):
    plain, call = drafted_for(tmp_path, family)
    assert torch.equal(call(), plain)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_recurrent_targets_are_refused(tmp_path, family):
    _, call = drafted_for(tmp_path, family)
    with pytest.raises(ValueError, match="its recurrent state cannot forget a rejected draft token"):
        call()


def test_weights_are_cast_and_the_biases_of_experts_are_not(tmp_path):
    target, bigger, _ = checkpoint(tmp_path, "glm4_moe")
    head = load_mtp(tmp_path, target, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    held, theirs = head.layers[0].mlp.gate, bigger.model.layers[LAYERS].mlp.gate
    assert torch.equal(held.e_score_correction_bias, theirs.e_score_correction_bias)
    assert head(torch.tensor([[3, 4]]), torch.zeros(1, 2, WIDTH, dtype=torch.bfloat16)).logits.dtype == torch.bfloat16


def test_only_the_files_that_hold_the_layer_are_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    target, _, _ = checkpoint(tmp_path, "mimo")
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    own = {name: held for name, held in weights.items() if "mtp" in name}
    save_file(own, tmp_path / "model-2.safetensors")
    index = dict.fromkeys(weights, "model-1.safetensors") | dict.fromkeys(own, "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    asked = []

    def fetch(name, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    load_mtp("someone/a-target", target)
    assert asked[-1] == ["config.json", "model.safetensors.index.json", "model-2.safetensors"]
    load_mtp(tmp_path, target)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("deepseek_v3", "model.layers.3.hnorm.weight", r"unknown \['layers.1.hnorm.weight'\]"),
        ("qwen3_next", "mtp.layers.1.mlp.gate.weight", r"unknown \['layers.1.mlp.gate.weight'\]"),
        ("mimo", "model.mtp_layers.0.self_attn.q_proj.weight_scale_inv", r"unknown \['layers.0.*weight_scale_inv'\]"),
        ("qwen3_next", "-mtp.layers.0.mlp.experts.2.up_proj.weight", r"missing \['layers.0.mlp.experts.2.up_proj.w"),
        ("glm4_moe", f"-model.layers.{LAYERS}.shared_head.norm.weight", r"missing \['norm.weight'\]"),
    ],
)
def test_several_layers_and_other_weights_are_refused(tmp_path, family, name, message):
    target, _, _ = checkpoint(tmp_path, family)
    weights = load_file(tmp_path / "model.safetensors")
    if name.startswith("-"):
        del weights[name[1:]]
    else:
        weights[name] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_mtp(tmp_path, target)


def test_targets_without_a_layer_are_refused(tmp_path):
    target = model_of("mimo", LAYERS)
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"type 'qwen2' are not known, but those of \['deepseek_v3'"):
        load_mtp(tmp_path, target)
    target.config.model_type = "mimo"
    with pytest.raises(ValueError, match="holds no MTP layer"):
        load_mtp(tmp_path, target)
    assert set(TARGETS) == set(FAMILIES)
