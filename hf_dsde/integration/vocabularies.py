"""Where tokenizers are found, and in which ids two of them differ. Both are remembered, since every call asks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dsde.drafting.translation import Translation

KEPT_TOKENIZERS = 8
"""Tokenizers found beside models that are kept for further calls."""
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a tokenizer in the cache of the Hub has one."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")

Difference = tuple[int, str, str]
"""An id and what either tokenizer calls it."""
Sizes = tuple[int, int, int]

_compared: WeakKeyDictionary[
    PreTrainedTokenizerBase, WeakKeyDictionary[PreTrainedTokenizerBase, dict[Sizes, tuple[Difference, ...]]]
] = WeakKeyDictionary()


_translations: WeakKeyDictionary[
    PreTrainedTokenizerBase, WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], Translation]]
] = WeakKeyDictionary()


def differences(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, shared: int) -> tuple[Difference, ...]:
    """Return the ids below `shared` that mean one token to one tokenizer and another token to the other, ascending.

    An id that only one of them names has but one meaning. The answer is kept for as long as both tokenizers live, and
    is asked again when tokens were added to either.
    """
    if ours is theirs:
        return ()
    known = _compared.setdefault(ours, WeakKeyDictionary()).setdefault(theirs, {})
    sizes = (len(ours), len(theirs), shared)
    if sizes not in known:
        known.clear()
        known[sizes] = _compare(ours.get_vocab(), theirs.get_vocab(), shared)
    return known[sizes]


def _compare(ours: dict[str, int], theirs: dict[str, int], shared: int) -> tuple[Difference, ...]:
    first, second = ({index: token for token, index in vocabulary.items()} for vocabulary in (ours, theirs))
    both = first.keys() & second.keys()
    return tuple(sorted((i, first[i], second[i]) for i in both if i < shared and first[i] != second[i]))


def translation(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    assistant_tokenizer: PreTrainedTokenizerBase,
) -> Translation:
    """Return what translates between two tokenizers, kept as `differences` keeps its answer."""
    sizes = (_size(target), _size(draft))
    key = (len(tokenizer), len(assistant_tokenizer), *sizes)
    known = _translations.setdefault(tokenizer, WeakKeyDictionary()).setdefault(assistant_tokenizer, {})
    if key not in known:
        known.clear()
        known[key] = Translation(tokenizer, assistant_tokenizer, *sizes)
    return known[key]


def examples(different: Sequence[Difference]) -> str:
    """Name the first few differing ids."""
    return ", ".join(f"{i}: {ours!r} against {other!r}" for i, ours, other in different[:3])


def shared_size(target: PreTrainedModel, draft: PreTrainedModel) -> int:
    """Return below which number both models have all ids."""
    return min(_size(target), _size(draft))


def _size(model: PreTrainedModel) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def tokenizer_at(name_or_path: str | None) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that lies beside a model on this machine, None when there is none.

    What was found is kept until its files change.
    """
    files = _files(name_or_path) if name_or_path else ()
    return _load(name_or_path, files) if files else None


def _files(name_or_path: str) -> tuple[tuple[str, int], ...]:
    """Return the files that a tokenizer may be made of, with the times of their last changes."""
    folder = Path(name_or_path)
    if folder.is_dir():
        places = [file for file in folder.iterdir() if file.is_file() and file.suffix not in WEIGHTS]
    else:
        cached = [_cached(name_or_path, file) for file in TOKENIZER_FILES]
        places = [Path(place) for place in cached if place is not None]
    return tuple((str(place), place.stat().st_mtime_ns) for place in sorted(places))


def _cached(repository: str, file: str) -> str | None:
    """Return where a file of a repository lies in the cache of the Hub, whose path names the commit."""
    try:
        place = try_to_load_from_cache(repository, file)
    except ValueError:  # no name that a repository can have
        return None
    return place if isinstance(place, str) else None


@lru_cache(KEPT_TOKENIZERS)
def _load(name_or_path: str, files: tuple[tuple[str, int], ...]) -> PreTrainedTokenizerBase | None:  # noqa: ARG001
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name_or_path, local_files_only=True)
    except (OSError, ValueError, ImportError):  # none there, none of a known kind, or a package it needs is missing
        return None
    return tokenizer
