"""Tiny random models of every supported family, drafts that agree with them to a known degree, and ragged batches.

Untied embeddings and a wide initialisation keep greedy text from falling into a loop at once, which would make any
draft look good. Everything is float64, so that equality with plain decoding is a fair demand.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 96
PAD, BOS, EOS = 0, 1, 2
WINDOW = 8

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_HYBRID, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3Text", {**_HYBRID, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2", {"n_inner": 64}),
    "gpt_neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
    "gpt_oss": (
        "GptOss",
        {**_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    ),
}
"""Family -> prefix of its configuration class, and what it needs beyond the common shape."""

PLAIN_NEEDS_FLOAT32 = frozenset({"gemma2"})
"""Families whose only attention is the eager one. In float64 plain `generate` itself returns NaN there for padded rows:
the mask's lowest float64 becomes minus infinity in the float32 softmax, and a padded query sees nothing else."""

_MODEL_CLASSES = {"gpt2": "GPT2LMHeadModel", "gemma3": "Gemma3ForCausalLM"}


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model of a family in evaluation mode, in float64 where plain `generate` works in it."""
    prefix, extra = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **extra, **changes})
    name = _MODEL_CLASSES.get(family, f"{prefix}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name)(config)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
    return model.to(torch.float32 if family in PLAIN_NEEDS_FLOAT32 else torch.float64).eval()


def noisy_copy(model: PreTrainedModel, noise: float, *, seed: int = 1) -> PreTrainedModel:
    """Return a draft: the model with Gaussian noise of `noise` times each weight's standard deviation.

    0 agrees always, 0.05 about half of the time, 1.0 next to never.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.parameters():
        scale = noise * weight.data.std() if weight.numel() > 1 else 0.0
        weight.data += scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
    return draft


def fresh_pair(
    family: str = "llama", *, noise: float = 0.05, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a target and a draft of the test's own, which agree as `noise` says."""
    target = tiny_model(family, **changes)
    return target, noisy_copy(target, noise)


AGREEMENT = {"full": 0.0, "half": 0.05, "never": 1.0}
"""Noise of a draft, by how often it agrees with its target."""


def ragged_batch(lengths: Sequence[int], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return left-padded random prompts of the given lengths, as a tokenizer would."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, width - length :] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        attention_mask[row, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def random_lengths(rows: int, *, longest: int = 12, seed: int = 0) -> list[int]:
    """Return prompt lengths of which one is 1 and one is the longest, when there are two rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
    lengths[0] = 1
    lengths[-1] = longest
    return lengths
