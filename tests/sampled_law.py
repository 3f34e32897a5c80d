"""A target of a few tokens, the exact law of its text by enumeration, and a test of what was sampled."""

from __future__ import annotations

from typing import Any

import torch
from plain_processors import plain_processors
from tiny_models import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde

PAD = 0
PROMPTS = torch.tensor([[PAD, 3, 1], [1, 1, 3]])
"""Of lengths 2 and 3: rows of one batch follow different laws."""
PROMPT_MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


def toy_model(vocabulary: int, seed: int = 0) -> PreTrainedModel:
    """A target of a few tokens with a lively, context-dependent distribution."""
    model = tiny_model(
        "llama",
        seed=seed,
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return hf_dsde.enable(model.float())


def exact_law(target: PreTrainedModel, prompt: int, depth: int, options: dict[str, Any]) -> Tensor:
    """The law of the first `depth` tokens after a prompt.

    Returns:
        `[vocabulary ** depth]`, float64; the first token is the most significant digit of the index.
    """
    vocabulary = target.config.vocab_size
    texts, law = PROMPTS[prompt][None], torch.ones(1, dtype=torch.float64)
    ended = torch.zeros(1, dtype=torch.bool)
    eos = options.get("eos_token_id")
    for _ in range(depth):
        mask = torch.nn.functional.pad(
            PROMPT_MASK[prompt].expand(len(texts), -1), (0, texts.shape[1] - PROMPTS.shape[1]), value=1
        )
        prompts, prompt_masks = (part[prompt].expand(len(texts), -1) for part in (PROMPTS, PROMPT_MASK))
        processors = plain_processors(target, prompts, prompt_masks, **options)
        with torch.no_grad():
            positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
            logits = target(input_ids=texts, attention_mask=mask, position_ids=positions).logits[:, -1].float()
        probs = processors(texts, logits).double().softmax(dim=-1)
        probs[ended] = torch.nn.functional.one_hot(torch.tensor(PAD), vocabulary).double()
        law = (law[:, None] * probs).flatten()
        tokens = torch.arange(vocabulary).repeat(len(texts))
        texts = torch.cat([texts.repeat_interleave(vocabulary, dim=0), tokens[:, None]], dim=1)
        ended = ended.repeat_interleave(vocabulary) | (False if eos is None else tokens == eos)
    return law


def pearson(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; rare outcomes are put together until they can be judged."""
    if bool((observed[expected == 0] > 0).any()):
        return float("inf"), 1
    order = expected.argsort(descending=True)
    statistic, bins = 0.0, 0
    seen = wanted = 0.0
    for count, mass in zip(observed[order].tolist(), expected[order].tolist(), strict=True):
        seen, wanted = seen + count, wanted + mass
        if wanted >= 5:
            statistic, bins = statistic + (seen - wanted) ** 2 / wanted, bins + 1
            seen = wanted = 0.0
    if wanted > 1e-3:  # what is left is judged with less than the usual mass, but never left out
        statistic, bins = statistic + (seen - wanted) ** 2 / max(wanted, 1.0), bins + 1
    return statistic, bins - 1
