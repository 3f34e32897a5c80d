"""Shapes: their counts are those of models, and sizes that no Llama has are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from hf_dsde.bench.inflate import inflate
from hf_dsde.bench.shapes import SHAPES, Shape

SHAPE = Shape(hidden=48, layers=4, heads=12, kv_heads=3, head_dim=24, intermediate=96)


@pytest.mark.parametrize("tied", [False, True])
def test_counts_of_parameters_are_those_of_the_model(tied):
    model = inflate(tiny_model("llama", tie_word_embeddings=tied), SHAPE, dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert SHAPE.parameters(model.config.vocab_size, tied=tied) == count
    looked_up = 0 if tied else model.model.embed_tokens.weight.numel()
    assert SHAPE.weight_bytes(model.config.vocab_size, torch.bfloat16) == 2 * (count - looked_up)


def test_named_shapes_have_the_published_sizes():
    assert SHAPES["8B"].parameters(128256, tied=False) == 8_030_261_248  # Llama 3 8B
    assert SHAPES["1B"].parameters(128256, tied=True) == 1_235_814_400  # Llama 3.2 1B
    biases = 64 * (5120 + 2 * 1024)
    assert SHAPES["32B"].parameters(152064, tied=False) + biases == 32_763_876_352  # Qwen2.5 32B


@pytest.mark.parametrize("name", ["8B", "32B", "deep-1B"])
def test_a_135m_model_fits_the_deep_shapes(name):
    for field, size in {"hidden": 576, "layers": 30, "kv_heads": 3, "intermediate": 1536}.items():
        assert getattr(SHAPES[name], field) >= size
    assert SHAPES[name].heads_per_group >= 3
    assert SHAPES[name].head_dim % 64 == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "`hidden` is 0"),
        ({"hidden": 50}, "`hidden` is 50, but a multiple of `heads`"),
        ({"heads": 8, "kv_heads": 3}, "`heads` is 8, but a multiple of `kv_heads`"),
        ({"head_dim": 7}, "`head_dim` is 7, but a multiple of 2"),
    ],
)
def test_sizes_that_no_llama_has_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SHAPE, **changes)
