"""Tiny random draft heads, and what a head drafts when everything is computed again from the whole text."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_models import ragged_batch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.heads.eagle import EagleHead
from hf_dsde.heads.eagle3 import Eagle3Head, Eagle3Settings
from hf_dsde.heads.head import DraftHead
from hf_dsde.heads.mtp import MtpHead, layer_config

HEAD_SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def tiny_head(
    target: PreTrainedModel,
    *,
    kind: str = "llama",
    layers: tuple[int, ...] = (0, 1, 2),
    draft_vocabulary: int | None = None,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **settings: bool,
) -> Eagle3Head:
    """Return a random head of a target, of its dtype, in evaluation mode.

    Args:
        target: The target.
        kind: Of the head's layers, `llama` or `qwen3`.
        layers: Of the target, whose hidden states are read.
        draft_vocabulary: Tokens that can be guessed, a random choice; None for all, in order.
        seed: Of the weights.
        config: Changes of the layers' configuration.
        **settings: Of `Eagle3Settings`.
    """
    whole = target.config.get_text_config(decoder=True)
    config_class = getattr(transformers, {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[kind])
    shape = {**HEAD_SHAPE, "vocab_size": whole.vocab_size, **(config or {})}
    size = draft_vocabulary or whole.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config_class(**shape), Eagle3Settings(layers, whole.hidden_size, size, **settings))
        for weight in head.parameters():
            weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.3)
        if head.draft_ids is not None:
            head.draft_ids.copy_(torch.randperm(whole.vocab_size)[:draft_vocabulary].sort().values)
    return head.to(target.dtype).eval()


def other_head(target: PreTrainedModel, kind: str) -> DraftHead:
    """Return a random head of another kind: `eagle`, the first of the name, or `mtp`, a layer like the target's."""
    config = target.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "mtp":
            head: DraftHead = MtpHead(layer_config(config), target)
        else:
            shape = {**HEAD_SHAPE, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
            head = EagleHead(transformers.LlamaConfig(**shape), config.num_hidden_layers)
        for weight in head.parameters():
            weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.3)
    return head.to(target.dtype).eval()


@torch.no_grad()
def fitted_head(target: PreTrainedModel) -> Eagle3Head:
    """Return a random head whose product is fitted to greedy texts of its target: about one guess in eight is right."""
    head = tiny_head(target, seed=1)
    texts = target.generate(**ragged_batch([6] * 80, seed=9), max_new_tokens=30, do_sample=False)
    output = target(texts, output_hidden_states=True)
    states = head.project([output.hidden_states[layer][:, :-1] for layer in head.feature_layers])
    seen = head.norm(head(texts[:, 1:], hidden_states=states).hidden_states).flatten(0, 1)
    wanted = output.logits[:, 1:].flatten(0, 1)
    wanted = wanted - wanted.mean(dim=1, keepdim=True)
    head.lm_head.weight.copy_(torch.linalg.lstsq(seen, wanted).solution.T)
    return head


def guessed_ids(head: DraftHead) -> Tensor:
    """The ids of what a head can guess, `[dv]`."""
    return torch.arange(head.config.vocab_size) if head.draft_ids is None else head.draft_ids


def causal_mask(width: int, window: int | None = None) -> Tensor:
    """What each of `width` tokens sees, `[1, 1, width, width]`, bool."""
    place = torch.arange(width)
    visible = place <= place[:, None]
    if window is not None:
        visible &= place > place[:, None] - window
    return visible[None, None]


@torch.no_grad()
def states_of(target: PreTrainedModel, head: DraftHead, text: list[int]) -> Tensor:
    """A head's states of all tokens of a text but the last, by transformers alone, `[1, length - 1, H]`."""
    tokens = torch.tensor([text])
    hidden = target(input_ids=tokens, output_hidden_states=True).hidden_states
    return head.project([hidden[layer][:, :-1] for layer in head.feature_layers])


@torch.no_grad()
def head_pass(head: DraftHead, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over the draft vocabulary and states after the last pair, without a cache, `[dv]` and `[1, 1, H]`."""
    kinds = getattr(head.config, "layer_types", None) or ["full_attention"]
    windows = {"full_attention": None, "sliding_attention": getattr(head.config, "sliding_window", None)}
    masks = {kind: causal_mask(tokens.shape[1], windows[kind]) for kind in kinds}
    output = head(tokens, hidden_states=states, attention_mask=masks)
    return output.logits[0, -1], output.hidden_states[:, -1:]


def reference_draft(
    target: PreTrainedModel, head: DraftHead, text: list[int], drafted: list[int]
) -> tuple[list[int], Tensor]:
    """What a head drafts greedily after a text.

    Args:
        target: The target.
        head: Its head.
        text: At least two tokens.
        drafted: What was drafted, which says how much, and what the passes after the first are fed.

    Returns:
        The tokens, as many; the logits that each is chosen by, `[len(drafted), dv]`.
    """
    states, tokens = states_of(target, head, text), torch.tensor([text[1:]])
    best, logits = [], []
    for token in drafted:
        scores, state = head_pass(head, states, tokens)
        best.append(int(guessed_ids(head)[scores.argmax()]))
        logits.append(scores)
        states = torch.cat([states, state], dim=1)
        tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
    return best, torch.stack(logits)
