"""What heads compute, written out in numpy and float64 over the weights as they lie in a file.

Nothing here knows the package. `mutant` names a mistake to make on purpose.
"""

import numpy as np


def rms_norm(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta, factor=1.0):
    """Turn `[heads, T, d]` by position: the i-th of the first half with the i-th of the second half."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / factor * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(x, weights, name):
    bias = weights.get(f"{name}.bias")
    return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)


def attention(x, weights, name, shape, positions, visible):
    """Return what attention adds for `[T, width]`, with `visible` `[T, T]`."""
    heads, groups, size = shape["heads"], shape["kv_heads"], shape["head_dim"]

    def split(part, count):
        return linear(x, weights, f"{name}.{part}").reshape(len(x), count, size).transpose(1, 0, 2)

    queries, keys, values = split("q_proj", heads), split("k_proj", groups), split("v_proj", groups)
    if f"{name}.q_norm.weight" in weights:
        queries = rms_norm(queries, weights[f"{name}.q_norm.weight"])
        keys = rms_norm(keys, weights[f"{name}.k_norm.weight"])
    theta, factor = shape.get("theta", 10000.0), shape.get("factor", 1.0)
    queries, keys = rotate(queries, positions, theta, factor), rotate(keys, positions, theta, factor)
    keys, values = (np.repeat(part, heads // groups, axis=0) for part in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(size)
    scores = np.where(visible, scores, -np.inf)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = chances / chances.sum(-1, keepdims=True) @ values
    return linear(mixed.transpose(1, 0, 2).reshape(len(x), heads * size), weights, f"{name}.o_proj")


def mlp(x, weights, name):
    gate = linear(x, weights, f"{name}.gate_proj")
    return linear(gate / (1 + np.exp(-gate)) * linear(x, weights, f"{name}.up_proj"), weights, f"{name}.down_proj")


def causal(length, window=None):
    distance = np.arange(length)[:, None] - np.arange(length)
    return (distance >= 0) & (distance < (window or length))


def project(weights, features, settings):
    """Bring features `[layers, T, F]` to the width of the head."""
    if settings.get("fc_norm"):
        names = settings.get("fc_norm_names", [f"fc_norm.{index}" for index in range(len(features))])
        features = [rms_norm(part, weights[f"{name}.weight"]) for part, name in zip(features, names, strict=True)]
    joined = np.concatenate(list(features), axis=-1)
    if settings.get("norm_before_fc"):
        joined = rms_norm(joined, weights["input_norm.weight"])
    return linear(joined, weights, "fc")


def eagle3(weights, states, ids, settings, shape, *, first="layers.0", mutant=None):
    """Return logits and next states of an EAGLE-3 head for one text of T pairs that come one after another."""
    positions, windows = np.arange(len(ids)), shape.get("windows", [None] * shape.get("layers", 1))
    embedded = rms_norm(weights["embed_tokens.weight"][ids], weights[f"{first}.input_layernorm.weight"])
    normed = rms_norm(states, weights[f"{first}.hidden_norm.weight"])
    joined = [normed, embedded] if mutant == "order" else [embedded, normed]
    before = settings.get("norm_before_residual", False) != (mutant == "residual")
    for index, window in enumerate(windows):
        name = first if index == 0 else f"layers.{index}"
        if index == 0:
            residual, x = normed if before else states, np.concatenate(joined, axis=-1)
        else:
            residual, x = hidden, rms_norm(hidden, weights[f"{name}.input_layernorm.weight"])  # noqa: F821
        visible = causal(len(ids), window)
        hidden = residual + attention(x, weights, f"{name}.self_attn", shape, positions, visible)
        hidden = hidden + mlp(
            rms_norm(hidden, weights[f"{name}.post_attention_layernorm.weight"]), weights, f"{name}.mlp"
        )
    out = rms_norm(hidden, weights["norm.weight"])
    feedback = settings.get("norm_output", False) != (mutant == "feedback")
    return out @ weights["lm_head.weight"].T, out if feedback else hidden


def first_eagle(weights, states, ids, shape, *, mutant=None):
    """Return logits and next states of a head of EAGLE-1 or 2."""
    embedded = weights["embed_tokens.weight"][ids]
    joined = [states, embedded] if mutant == "order" else [embedded, states]
    hidden = linear(np.concatenate(joined, axis=-1), weights, "fc")
    for index in range(shape.get("layers", 1)):
        name = f"layers.{index}"
        x = hidden if index == 0 else rms_norm(hidden, weights[f"{name}.input_layernorm.weight"])
        hidden = hidden + attention(x, weights, f"{name}.self_attn", shape, np.arange(len(ids)), causal(len(ids)))
        hidden = hidden + mlp(
            rms_norm(hidden, weights[f"{name}.post_attention_layernorm.weight"]), weights, f"{name}.mlp"
        )
    return hidden @ weights["lm_head.weight"].T, hidden
