"""Which tokens two tokenizers share, by what they stand for, and how texts of one read in the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_text import spelling_tokenizer, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_dsde.drafting.translation import Translation

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*more: str, special: tuple[str, ...] = (), **names: str) -> PreTrainedTokenizerFast:
    """A tokenizer of all bytes and of further tokens, in the letters of byte-level ones, each merged of two others."""
    vocabulary = {token: index for index, token in enumerate([*BYTES, *more])}
    merges = [
        next((token[:i], token[i:]) for i in range(1, len(token)) if {token[:i], token[i:]} <= vocabulary.keys())
        for token in more
    ]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def sentence_pieces(*tokens: str, begins_with: str | None = None, **names: str) -> PreTrainedTokenizerFast:
    """A tokenizer with `▁` for a space, and bytes for what it has no token of."""
    special = list(dict.fromkeys(names.values()))
    numbers = {
        token: index for index, token in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *tokens])
    }
    core = Tokenizer(models.BPE(vocab=numbers, merges=[], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(special)
    if begins_with is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{begins_with} $A", special_tokens=[(begins_with, numbers[begins_with])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def roles(end: str, begin: str) -> dict[str, str]:
    return {"eos_token": end, "bos_token": begin}


def translation(ours: Any, theirs: Any, size: int = 10**6, draft_size: int = 10**6) -> Translation:
    return Translation(ours, theirs, size, draft_size)


def names(ours: Any, theirs: Any, made: Translation) -> set[tuple[str, str]]:
    return {(ours.convert_ids_to_tokens(our), theirs.convert_ids_to_tokens(their)) for their, our in made.shared}


def test_tokens_are_the_same_by_their_bytes() -> None:
    ours = byte_level("th", "he", "the", "Ġthe", "Ã©")
    theirs = sentence_pieces("t", "h", "e", "the", "▁the", "é", "▁", "▁th")
    found = names(ours, theirs, translation(ours, theirs))
    assert {("the", "the"), ("Ġthe", "▁the"), ("Ã©", "é"), ("Ġ", "▁"), ("t", "t"), ("Ã", "<0xC3>")} <= found
    assert not {our for our, _ in found} & {"th", "he"}
    assert not {their for _, their in found} & {"▁th"}
    assert ("t", "<0x74>") not in found, "the letter is the token that is written"


def test_each_id_is_shared_once() -> None:
    ours, theirs = byte_level("th"), sentence_pieces("t", "h", "th", "▁")
    made = translation(ours, theirs)
    assert len(made.shared) == len({our for _, our in made.shared}) == len({their for their, _ in made.shared}) == 257


def test_ids_without_logits_are_not_shared() -> None:
    ours, theirs = byte_level("th", "the"), byte_level("th", "the")
    assert len(translation(ours, theirs).shared) == 258
    assert len(translation(ours, theirs, size=257).shared) == 257
    assert len(translation(ours, theirs, draft_size=256).shared) == 256


def test_a_token_that_the_draft_lacks_is_read_in_its_longest_pieces() -> None:
    ours = byte_level("th", "the", "Ġthe", "âĢ", "âĢ¦")
    theirs = sentence_pieces("t", "h", "e", "th", "▁", "▁t")
    made = translation(ours, theirs)

    def pieces(token: str) -> list[str]:
        return theirs.convert_ids_to_tokens(made.of_tokens([ours.convert_tokens_to_ids(token)]))

    assert pieces("the") == ["th", "e"]
    assert pieces("Ġthe") == ["▁t", "h", "e"]
    assert pieces("âĢ¦") == ["<0xE2>", "<0x80>", "<0xA6>"]
    assert pieces("âĢ") == ["<0xE2>", "<0x80>"]


def test_what_the_draft_cannot_write_is_left_out() -> None:
    ours, theirs = spelling_tokenizer("xyz", "axb"), spelling_tokenizer("y")
    made = translation(ours, theirs)
    ids = ours.convert_tokens_to_ids(["a", "xyz", "axb", "b"])
    assert theirs.convert_ids_to_tokens(made.of_tokens(ids)) == ["a", "y", "a", "b", "b"]
    assert made.of_tokens([10**6 - 1]) == []


def test_prompts_are_cut_as_the_drafts_tokenizer_does() -> None:
    ours = byte_level("th", "Ġt", special=("<|user|>", "<|own|>"))
    theirs = byte_level("th", "the", "Ġt", "Ġthe", special=("<|user|>", "<|other|>"))
    made = translation(ours, theirs)
    text = "the the"
    prompt = ours(f"<|user|>{text}<|own|>{text}")["input_ids"]
    assert theirs.convert_ids_to_tokens(made.of_prompt(prompt)) == ["<|user|>", "the", "Ġthe", "the", "Ġthe"]
    assert made.of_prompt([]) == []


def test_special_tokens_are_no_text() -> None:
    ours = byte_level(special=("<e>",))
    theirs = byte_level("<e", "<e>")
    made = translation(ours, theirs)
    special = ours.convert_tokens_to_ids("<e>")
    assert made.same(special) is None
    assert made.of_tokens([special]) == []


def test_ends_and_beginnings_are_of_one_meaning_whatever_they_are_called() -> None:
    ours = byte_level(special=("<s>", "<end>"), **roles("<end>", "<s>"))
    theirs = sentence_pieces("a", begins_with="<begin>", **roles("</s>", "<begin>"))
    made = translation(ours, theirs)
    assert made.same(ours.eos_token_id) == theirs.eos_token_id
    assert made.same(ours.bos_token_id) == theirs.bos_token_id
    letter = theirs.convert_tokens_to_ids("a")
    without, given = ours("a")["input_ids"], [ours.bos_token_id, *ours("a")["input_ids"]]
    assert made.of_prompt(without) == made.of_prompt(given) == [theirs.bos_token_id, letter]


def test_a_share_is_that_of_the_smaller_vocabulary() -> None:
    assert translation(byte_level("th"), byte_level("th", "the", "he")).share == 1.0
    assert translation(spelling_tokenizer("x", "y"), spelling_tokenizer("v", "w")).share == pytest.approx(6 / 8)


def test_tables_translate_both_ways_and_are_made_once() -> None:
    ours, theirs = tiny_tokenizer(), tiny_tokenizer(swapped=(20, 41))
    made = translation(ours, theirs, 96, 96)
    tables = made.tables(torch.device("cpu"))
    assert tables is made.tables(torch.device("cpu"))
    assert (tables.to_draft[20], tables.to_target[20], tables.to_draft[41]) == (41, 41, 20)
    assert torch.equal(tables.to_target[tables.shared.ids], tables.target_ids)
    assert torch.equal(tables.to_draft[tables.target_ids], tables.shared.ids)
