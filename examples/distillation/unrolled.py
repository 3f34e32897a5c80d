"""All chains of an EAGLE-3 head at once: what it would draft after each token of a finished text.

Chain i begins with the pair (features of token i, token i + 1). Its step j has the state of step j - 1 and token
i + j + 1, stands at position i + j, and guesses token i + j + 2; the tokens are those of the text, as if every guess so
far had been accepted. Such a step sees what it would see while decoding: the first pairs of all chains up to i, which
are made of true features, and the earlier steps of its own chain. This is what EAGLE-3 (Li et al., arXiv 2503.01840)
calls training-time test.

All chains of a text are rows of one tensor, so that step j is one pass of the head. What that pass sees does not lie
in one row of keys: an attention function of its own does it, and the head stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from hf_dsde import compat
from hf_dsde.heads.eagle3 import Eagle3Head

UNROLLED = "eagle3_unrolled"
"""Name of the attention function; a head is told with `set_attn_implementation`."""

KeysAndValues = tuple[Tensor, Tensor]
Step = list[KeysAndValues]
"""Keys and values of one step by layer, each `[B, Hkv, T, D]`."""


class StepCache:
    """Stands where the head expects a key-value cache, for one step.

    Args:
        earlier: The steps so far.
    """

    def __init__(self, earlier: Sequence[Step]) -> None:
        self.earlier = earlier
        self.added: Step = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> KeysAndValues:
        """Take this step's keys and values; returns those of all steps, `[B, Hkv, steps, T, D]`."""
        # Rotated under autocast they are float32 again.
        keys = keys.to(values.dtype)
        self.added.append((keys, values))
        steps = [*(step[layer] for step in self.earlier), (keys, values)]
        return torch.stack([part for part, _ in steps], dim=2), torch.stack([part for _, part in steps], dim=2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of grouped queries, with what it takes to join more keys later.

    Args:
        query: `[B, Hkv, G, T, D]`, scaled.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, D]`.

    Returns:
        The mixed values, `[B, Hkv, G, T, D]`, and the logarithm of each query's sum of exponentials, `[B, Hkv, G, T]`,
        both at least float32.
    """
    groups, width = query.shape[2:4]
    exact = torch.promote_types(value.dtype, torch.float32)
    scores = (query.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, (groups, width)).to(exact)
    seen = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    total = scores.logsumexp(dim=-1)
    shares = (scores - total[..., None]).exp().to(value.dtype)
    return (shares.flatten(2, 3) @ value).unflatten(2, (groups, width)).to(exact), total


# The matrix of scores is what training moves most of, an elementary operation at a time.
compiled_causal_attention = torch.compile(causal_attention, dynamic=True)


def unrolled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' signature; who sees whom is settled here
    scaling: float | None = None,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Attention of all chains' queries at one step.

    The scores of the first step's keys are a matrix, those of the chain's own keys one number a step: both parts are
    joined by the logarithm of the sum of their exponentials.

    Args:
        module: The attention layer; in training on a GPU the matrix part is compiled.
        query: `[B, H, T, D]`, by chain.
        key: `[B, Hkv, steps, T, D]`, this step last.
        value: As `key`.
        attention_mask: Not used.
        scaling: Of the scores; `D**-0.5` when None.
        **kwargs: Not used.

    Returns:
        `[B, T, H, D]`, and None for the attention weights.
    """
    batch, heads, width, size = query.shape
    exact = torch.promote_types(value.dtype, torch.float32)
    grouped = query.to(value.dtype).reshape(batch, key.shape[1], -1, width, size) * (scaling or size**-0.5)
    causal = compiled_causal_attention if module.training and query.is_cuda else causal_attention
    # Copies look the same at all steps, which one compiled form then serves.
    first_key, first_value = (part[:, :, 0].clone(memory_format=torch.contiguous_format) for part in (key, value))
    mixed, first = causal(grouped, first_key, first_value)
    own = (grouped[:, :, None] * key[:, :, 1:, None]).sum(dim=-1, dtype=exact)
    total = torch.cat([first[:, :, None], own], dim=2).logsumexp(dim=2)
    shares = (own - total[:, :, None]).exp().to(value.dtype)
    mixed = mixed * (first - total).exp()[..., None]
    mixed = mixed + (shares[..., None] * value[:, :, 1:, None]).sum(dim=2, dtype=exact)
    return mixed.to(value.dtype).reshape(batch, heads, width, size).transpose(1, 2), None


AttentionInterface.register(UNROLLED, unrolled_attention)


def one_step(
    head: Eagle3Head, tokens: Tensor, states: Tensor, positions: Tensor, earlier: list[Step]
) -> tuple[Tensor, Step]:
    """One step of all chains.

    Args:
        head: With the attention `UNROLLED`.
        tokens: `[B, T]` int64, by chain.
        states: `[B, T, H]`.
        positions: `[1, T]` int64.
        earlier: The steps before.

    Returns:
        The next states, and the keys and values of this step.
    """
    cache = StepCache(earlier)
    nothing = torch.empty(0, dtype=torch.int64, device=tokens.device)
    # Neither a mask nor logits are needed: the attention knows who sees whom, and few positions' logits are read.
    output = head(
        tokens, states, attention_mask=nothing, position_ids=positions, past_key_values=cache, logits_to_keep=nothing
    )
    return output.hidden_states, cache.added


def unrolled(
    head: Eagle3Head,
    states: Tensor,
    input_ids: Tensor,
    steps: int,
    one_step: Callable[..., tuple[Tensor, Step]] = one_step,
) -> Iterator[Tensor]:
    """Unroll the chains of a text.

    Args:
        head: With the attention `UNROLLED`.
        states: The target's features of the text, projected, `[B, T, H]`.
        input_ids: The text, `[B, T]` int64, padded on the right.
        steps: How many.
        one_step: The function of that name, or what `torch.compile` made of it.

    Yields:
        For each step j the states `[B, T, H]` by chain, from which `draft_logits` makes guesses: those of chain i at
        token i + j + 2. A chain that reaches beyond the text goes on with token 0.

    Raises:
        ValueError: The head has another attention.
    """
    if head.config._attn_implementation != UNROLLED:
        raise ValueError(
            f"head: its attention is {head.config._attn_implementation!r}; call "
            f"`head.set_attn_implementation({UNROLLED!r})` first"
        )
    earlier: list[Step] = []
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    for step in range(steps):
        tokens = pad(input_ids[:, step + 1 :], (0, step + 1))[:, : input_ids.shape[1]]
        states, added = one_step(head, tokens, states, positions + step, earlier)
        earlier = [*earlier, added]
        yield states


def draft_logits(head: Eagle3Head, states: Tensor) -> Tensor:
    """Logits over the draft vocabulary, `[..., draft_vocab_size]`, for states as `unrolled` yields them."""
    logits: Tensor = head.lm_head(states if head.settings.norm_output else head.norm(states))
    return logits


def draft_token_ids(head: Eagle3Head) -> Tensor:
    """The target's id of each token of the draft vocabulary, int64."""
    if head.draft_ids is None:
        return torch.arange(head.lm_head.out_features, device=head.lm_head.weight.device)
    return head.draft_ids


def read_target(target: PreTrainedModel, head: Eagle3Head, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Run the target over a text.

    Args:
        target: A causal LM.
        head: Its settings say which features are read.
        input_ids: `[B, T]` int64, padded on the right: under causal attention no real token sees the padding.

    Returns:
        The features, `[features, B, T, feature_size]`, and the last hidden states, `[B, T, size]`, ready for the
        target's product with its vocabulary.
    """
    layers = head.settings.feature_layers
    body: Any = target.base_model
    with torch.no_grad():
        output = body(input_ids=input_ids, use_cache=False, output_hidden_states=compat.hidden_states_argument(layers))
    return torch.stack([output.hidden_states[layer] for layer in layers]), output.last_hidden_state
