"""Texts that a drafter knows from the start: given as strings or tokens, or written to a file by an earlier job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

Corpus = Iterable[str] | Iterable[Sequence[int]] | os.PathLike[str]
"""Texts as strings, for which there is a tokenizer, or as token ids, such as a column of a data set; or the file of an
earlier job's."""

FORMAT = "hf-dsde texts, 1"


def corpus_texts(corpus: Corpus | None, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[list[int]]:
    """Yield the tokens of each text.

    Args:
        corpus: As `Corpus` says; None for no texts.
        tokenizer: Makes tokens of strings, without special ones.

    Raises:
        TypeError: If the corpus or a text in it is something else.
        ValueError: If a text is a string and there is no tokenizer, or the file holds something else.
    """
    if corpus is None:
        return
    if isinstance(corpus, os.PathLike):
        yield from read_texts(corpus)
        return
    if isinstance(corpus, (str, bytes, Mapping)):
        kind = "a mapping" if isinstance(corpus, Mapping) else "one text"
        msg = (
            f"corpus: expected several texts, got {kind} ({type(corpus).__name__}). Pass a list of texts, a column "
            "of a data set (dataset['text']), or a pathlib.Path of a file that `save_memory` wrote."
        )
        raise TypeError(msg)
    for number, text in enumerate(corpus):
        yield _tokens(text, number, tokenizer)


def _tokens(text: Any, number: int, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            msg = (
                f"corpus: text {number} is a string ({text[:40]!r}), which only a tokenizer makes tokens of. Pass the "
                "target's as tokenizer=..., or token ids."
            )
            raise ValueError(msg)
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    ids = text.tolist() if callable(getattr(text, "tolist", None)) else text
    if not isinstance(ids, (list, tuple)) or not all(type(token) is int and token >= 0 for token in ids):
        msg = (
            f"corpus: text {number} is neither a string nor token ids, but {type(text).__name__}. Of a data set, pass "
            "one column: corpus=dataset['text']."
        )
        raise TypeError(msg)
    return list(ids)


def save_texts(texts: Sequence[Sequence[int]], file: str | os.PathLike[str]) -> None:
    """Write texts to a file of safetensors: all tokens one after another, int32, and the texts' lengths, int64."""
    tensors = {
        "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64),
    }
    save_file(tensors, os.fspath(file), metadata={"format": FORMAT})


def read_texts(file: str | os.PathLike[str]) -> list[list[int]]:
    """Read what `save_texts` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds something else.
    """
    try:
        with safe_open(os.fspath(file), framework="pt") as opened:
            known = (opened.metadata() or {}).get("format") == FORMAT
            tokens, lengths = (opened.get_tensor(name) for name in ("tokens", "lengths")) if known else (None, None)
    except SafetensorError as error:
        msg = f"corpus: {Path(file)} is no file of safetensors ({error}); `save_memory` of a drafter writes them."
        raise ValueError(msg) from error
    if tokens is None or lengths is None:
        msg = f"corpus: {Path(file)} holds no texts of a drafter; `save_memory` of one writes them."
        raise ValueError(msg)
    return [text.tolist() for text in tokens.split(lengths.tolist())]
