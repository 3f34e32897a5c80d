"""Which tokens two tokenizers have in common, and how a text of one reads in the tokens of the other.

Tokens are compared by the bytes that they stand for inside a text, whatever a vocabulary calls them: ` the` is `Ġthe`
in one and `▁the` in another. A draft proposes tokens that both have (token-level intersection; Timor et al., arXiv
2502.05202). What it reads is its own: prompts as its tokenizer cuts them, then each token of the target's as the same
token, or in pieces where it has none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_dsde.execution.token_choice import SharedTokens

Spelling = tuple[bool, bytes]
"""Whether a token is a special one, and the bytes that it stands for, or its name."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Tables:
    """A translation on a device, all int64.

    Attributes:
        shared: The draft's ids of shared tokens, ascending.
        target_ids: The target's ids of the same, `[shared]`.
        to_draft: The draft's id of each of the target's tokens, `[target's vocabulary]`; 0 where it has none.
        to_target: The target's id of each of the draft's tokens, `[draft's vocabulary]`; 0 where it has none.
    """

    shared: SharedTokens
    target_ids: Tensor
    to_draft: Tensor
    to_target: Tensor


class Translation:
    """From the tokens of a target to those of a draft and, where both have the same, back.

    Args:
        tokenizer: The target's. It has to live as long as prompts are translated, and so has the draft's.
        draft_tokenizer: The draft's.
        size: Of the target's vocabulary: ids from there on have no logits.
        draft_size: Of the draft's, likewise.

    Attributes:
        shared: Id for the draft and id for the target of every token that both have, ascending by the first. No id is
            in it twice.
        share: Tokens that both have, among those of the smaller vocabulary.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase, size: int, draft_size: int
    ) -> None:
        # Translations are kept as long as their tokenizers, and must not be what keeps these.
        self._tokenizer, self._draft_tokenizer = ref(tokenizer), ref(draft_tokenizer)
        self._spelled, of_draft = spellings(tokenizer, size), spellings(draft_tokenizer, draft_size)
        # Of several with one spelling, such as a byte and the letter that it is, the one with the highest id counts:
        # bytes come first where there are any.
        ours, theirs = ({spelling: token for token, spelling in each.items()} for each in (self._spelled, of_draft))
        self._draft_tokens = theirs
        self._beginning = _beginning(draft_tokenizer)
        self._longest = max((len(name) for special, name in theirs if not special), default=0)
        pairs = {theirs[spelling]: token for spelling, token in ours.items() if spelling in theirs}
        taken = set(pairs.values())
        for role in ("eos_token_id", "bos_token_id"):  # of different names, and of one meaning
            their, our = getattr(draft_tokenizer, role), getattr(tokenizer, role)
            known = their is not None and our is not None and their < draft_size and our < size
            if known and their not in pairs and our not in taken:
                pairs[their] = our
                taken.add(our)
        self.shared = sorted(pairs.items())
        self.share = len(pairs) / max(min(len(ours), len(theirs)), 1)
        self._same = {token: draft for draft, token in self.shared}
        self._sizes = size, draft_size
        self._pieces = cache(self._cut)
        self._on_device = cache(self._tables)

    @cached_property
    def fingerprint(self) -> str:
        """Tells this translation from others, also in another process."""
        return hashlib.sha256(str(self.shared).encode()).hexdigest()[:16]

    def same(self, token: int) -> int | None:
        """Return the draft's id of a token of the target's, None if it has none."""
        return self._same.get(token)

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt as the draft's tokenizer cuts it. Special tokens that the draft lacks are left out."""
        found: list[int] = []
        for special, group in groupby(tokens, lambda token: self._spelled.get(token, (True, b""))[0]):
            run = list(group)
            found += self.of_tokens(run) if special else self._encoded(run)
        begin = self._beginning
        return found if found[: len(begin)] == begin else begin + found

    def of_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens of the target's one by one: the same token, or pieces of it where the draft has no such one."""
        return [piece for token in tokens for piece in self._pieces(token)]

    def tables(self, device: torch.device) -> Tables:
        """Return what translates on a device; the same object in every call."""
        return self._on_device(device)

    def _tables(self, device: torch.device) -> Tables:
        draft, target = torch.tensor(self.shared, dtype=torch.long).T.contiguous()
        to_draft = torch.zeros(self._sizes[0], dtype=torch.long).index_copy_(0, target, draft)
        to_target = torch.zeros(self._sizes[1], dtype=torch.long).index_copy_(0, draft, target)
        return Tables(SharedTokens(draft.to(device)), target.to(device), to_draft.to(device), to_target.to(device))

    def _encoded(self, tokens: Sequence[int]) -> list[int]:
        tokenizer, draft_tokenizer = self._tokenizer(), self._draft_tokenizer()
        assert tokenizer is not None
        assert draft_tokenizer is not None
        text: Any = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        ids: list[int] = draft_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _cut(self, token: int) -> tuple[int, ...]:
        """Cut a token into the longest tokens of the draft's, from left to right; what it cannot write is left out."""
        if token in self._same:
            return (self._same[token],)
        special, name = self._spelled.get(token, (True, b""))
        pieces, start = [], 0
        while start < len(name) and not special:
            ends = range(min(len(name), start + self._longest), start, -1)
            end = next((end for end in ends if (False, name[start:end]) in self._draft_tokens), None)
            if end is not None:
                pieces.append(self._draft_tokens[False, name[start:end]])
            start = end or start + 1
        return tuple(pieces)


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a tokenizer puts in front of every text."""
    first: list[int] = tokenizer("")["input_ids"][:1]
    return [int(token) for token in first if token == tokenizer.bos_token_id]


def spellings(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, Spelling]:
    """Return what the tokens with ids below `size` stand for, by id, ascending."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    kind = _decoder(tokenizer)
    found: dict[int, Spelling] = {}
    for name, token in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if token < size:
            as_named = token in special or token in added
            found[token] = token in special, name.encode() if as_named else _bytes(name, kind)
    return found


def _decoder(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what turns the names of a tokenizer's tokens into text, as the library `tokenizers` describes it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)


def _bytes(name: str, kind: str) -> bytes:
    """Return the bytes that a token stands for inside a text."""
    if "ByteLevel" in kind:
        known = [_byte_letters().get(letter) for letter in name]
        return bytes(byte for byte in known if byte is not None) if None not in known else name.encode()
    byte = _BYTE_TOKEN.fullmatch(name) if "ByteFallback" in kind else None
    if byte is not None:
        return bytes.fromhex(byte[1])
    return (name.replace("▁", " ") if "▁" in kind else name).encode()


@cache
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers call bytes: printable ones their own, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
