"""Random heads as files, in the formats they are published in, written without the package."""

import json
from functools import partial

import torch
from safetensors.torch import save_file

VOCABULARY, FEATURE = 96, 32
"""Of the target, `tiny_model(num_hidden_layers=8)`."""

SHAPE = {"width": 24, "heads": 4, "kv_heads": 2, "head_dim": 10, "inner": 40, "layers": 1}
"""The width of states and the size of a head are not the target's."""


def layer_weights(name, width_in, shape, draw, *, bias=False, qk_norm=False):
    width, size = shape["width"], shape["head_dim"]
    out = {"q_proj": shape["heads"] * size, "k_proj": shape["kv_heads"] * size, "v_proj": shape["kv_heads"] * size}
    weights = {f"{name}.self_attn.{part}.weight": draw(count, width_in) for part, count in out.items()}
    weights[f"{name}.self_attn.o_proj.weight"] = draw(width, shape["heads"] * size)
    if bias:
        weights |= {f"{name}.self_attn.{part}.bias": draw(count) for part, count in {**out, "o_proj": width}.items()}
    if qk_norm:
        weights |= {f"{name}.self_attn.{part}.weight": draw(size) for part in ("q_norm", "k_norm")}
    for part in ("gate_proj", "up_proj"):
        weights[f"{name}.mlp.{part}.weight"] = draw(shape["inner"], width)
    weights[f"{name}.mlp.down_proj.weight"] = draw(width, shape["inner"])
    for part in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{part}.weight"] = draw(width)
    return weights


def eagle3_weights(shape=SHAPE, *, features=3, draft=None, seed=0, bias=False, qk_norm=False, fc_norm=False,
                   norm_before_fc=False):  # fmt: skip
    """Random weights of an EAGLE-3 head under speculators' names, float64; with `draft` ids a draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes):
        values = torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * values if len(sizes) == 1 else 0.3 * values

    width = shape["width"]
    weights = {"fc.weight": draw(width, features * FEATURE), "embed_tokens.weight": draw(VOCABULARY, width)}
    for index in range(shape["layers"]):
        wide = width if index else 2 * width
        weights |= layer_weights(f"layers.{index}", wide, shape, draw, bias=bias, qk_norm=qk_norm)
    weights |= {"layers.0.hidden_norm.weight": draw(width), "norm.weight": draw(width)}
    weights["lm_head.weight"] = draw(VOCABULARY if draft is None else len(draft), width)
    if fc_norm:
        weights |= {f"fc_norm.{index}.weight": draw(FEATURE) for index in range(features)}
    if norm_before_fc:
        weights["input_norm.weight"] = draw(features * FEATURE)
    return weights | ({} if draft is None else vocabulary_tables(draft))


def vocabulary_tables(draft):
    listed = torch.zeros(VOCABULARY, dtype=torch.bool)
    listed[draft] = True
    return {"d2t": torch.as_tensor(draft) - torch.arange(len(draft)), "t2d": listed}


def first_eagle_weights(shape, *, fc_bias=True, bias=False, seed=0):
    """Random weights of a head of EAGLE-1, float64, with the target's width."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes):
        values = torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * values if len(sizes) == 1 else 0.3 * values

    width = shape["width"]
    weights = {"fc.weight": draw(width, 2 * width), "embed_tokens.weight": draw(VOCABULARY, width)}
    if fc_bias:
        weights["fc.bias"] = draw(width)
    for index in range(shape["layers"]):
        weights |= layer_weights(f"layers.{index}", width, shape, draw, bias=bias)
    del weights["layers.0.input_layernorm.weight"]
    return weights


def layer_fields(shape=SHAPE, **changes):
    fields = {
        "hidden_size": shape["width"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
    }
    return {**fields, **changes}


def eagle_config(shape=SHAPE, **changes):
    """config.json as the EAGLE repository and SpecForge write it."""
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer_fields(shape, **changes)}


def speculators_config(shape=SHAPE, *, layers=None, layer_type="llama", **changes):
    """config.json as speculators writes it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {"model_type": layer_type, **layer_fields(shape, **(layers or {}))},
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": None,
        **changes,
    }


def eagle_names(weights):
    """Weights under the names that the EAGLE repository gives them."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}


def write(folder, config, weights, *, kind="safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    ending = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind.rpartition(" ")[2]]
    zipped = kind != "old bin"
    save = save_file if ending.endswith("safetensors") else partial(torch.save, _use_new_zipfile_serialization=zipped)
    if not kind.startswith("sharded"):
        save(weights, folder / ending)
        return folder
    stem, dot = ending.split(".")
    parts = {f"{stem}-0000{part}-of-00002.{dot}": list(weights)[part - 1 :: 2] for part in (1, 2)}
    for file, names in parts.items():
        save({name: weights[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / f"{ending}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
