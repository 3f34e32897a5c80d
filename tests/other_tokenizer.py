"""A draft whose tokenizer is another one than the tiny target's, and what it should propose, worked out slowly.

Of the target's pairs of letters (`tiny_text`), the draft has most, in another order, and single letters that the target
lacks. On the tokens that both have it agrees with the target as `noise` says.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from tiny_models import VOCABULARY, noisy_copy, tiny_model
from tiny_text import SPECIAL, tiny_tokenizer, tiny_vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

LACKED = range(30, 40)
"""The target's tokens that the draft writes in two."""
SHARED = sorted(set(range(VOCABULARY)) - set(LACKED))
LETTERS = [*"GHIJKLMNOPQRSTU", *"ghijklmnopqrstu"]


@cache
def draft_tokens() -> list[str]:
    """The draft's tokens, by id."""
    ours = tiny_vocabulary()
    pairs = [ours[token] for token in SHARED if token not in SPECIAL]
    order = torch.randperm(len(pairs) + len(LETTERS), generator=torch.Generator().manual_seed(5)).tolist()
    mixed = [*pairs, *LETTERS]
    return [*(mixed[index] for index in order), *SPECIAL.values()]


@cache
def draft_tokenizer() -> PreTrainedTokenizerFast:
    tokens = draft_tokens()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL.values()])
    pad, bos, eos = SPECIAL.values()
    names = {"pad_token": pad, "bos_token": bos, "eos_token": eos}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


TOKENIZERS = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": draft_tokenizer()}


NOT_LACKED = {"suppress_tokens": list(LACKED)}
"""Keeps a text to the tokens that both have."""


def only_shared(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prompts with other tokens in place of those that the draft lacks."""
    lacked = torch.isin(inputs["input_ids"], inputs["input_ids"].new_tensor(list(LACKED)))
    return {**inputs, "input_ids": torch.where(lacked, inputs["input_ids"] + len(LACKED), inputs["input_ids"])}


def draft_for(target: PreTrainedModel, noise: float = 0.0) -> PreTrainedModel:
    """Return a draft of that tokenizer with the target's layers, and its rows of the tokens that both have."""
    draft = noisy_copy(target, noise)
    ours = {token: index for index, token in enumerate(tiny_vocabulary())}
    generator = torch.Generator().manual_seed(9)
    draft.resize_token_embeddings(len(draft_tokens()), mean_resizing=False)
    rows = torch.tensor([ours.get(token, -1) for token in draft_tokens()])
    for there, here in (
        (target.get_input_embeddings(), draft.get_input_embeddings()),
        (target.get_output_embeddings(), draft.get_output_embeddings()),
    ):
        own = torch.randn(len(rows), there.weight.shape[1], generator=generator, dtype=there.weight.dtype)
        spread = there.weight.detach().std()
        values = torch.where((rows >= 0)[:, None], there.weight.detach()[rows], own * spread)
        here.weight.data.copy_(values + noise * spread * own)
    return draft.eval()


@cache
def translated_pair(noise: float = 0.0) -> tuple[PreTrainedModel, PreTrainedModel]:
    import hf_dsde

    target = copy.deepcopy(tiny_model())
    target.generation_config.eos_token_id = None
    return hf_dsde.enable(target), draft_for(target, noise)


def as_read(prompt: list[int], generated: list[int]) -> list[int]:
    """The draft's text: the prompt's own words, then what was generated in letters or pairs."""
    ours, theirs = tiny_vocabulary(), {token: index for index, token in enumerate(draft_tokens())}
    text: list[int] = []
    for token in [*prompt, *generated]:
        name = ours[token]
        text += [theirs[name]] if name in theirs else [theirs[letter] for letter in name]
    return text


def best_guesses(draft: PreTrainedModel, text: list[int], count: int, *, special: bool = True) -> list[int]:
    """What a draft without a cache proposes greedily among the tokens that both have, as the target knows them.

    Args:
        draft: The draft.
        text: In its own ids.
        count: Tokens to propose.
        special: Whether special tokens are among them.
    """
    ours = {token: index for index, token in enumerate(tiny_vocabulary())}
    names = draft_tokens()
    allowed = torch.tensor(
        [index for index, name in enumerate(names) if name in ours and (special or name not in SPECIAL.values())]
    )
    guesses = []
    for _ in range(count):
        with torch.no_grad():
            logits: Tensor = draft(torch.tensor([text])).logits[0, -1]
        best = int(allowed[logits[allowed].argmax()])
        guesses.append(ours[names[best]])
        text = [*text, best]
    return guesses
