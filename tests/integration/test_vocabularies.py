"""Which tokenizers suit each other, where they are found, and that a pair of them is compared once."""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_batch import ARGUMENTS, draft, model, plain_text
from tiny_models import VOCABULARY
from tiny_text import tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import hf_dsde
from hf_dsde import BatchGenerator

CALL: dict[str, Any] = {**ARGUMENTS, "speculation_policy": "static"}
SMALL = VOCABULARY - 20
"""Size of a tokenizer inside the padding of the models' vocabulary."""

# Rounds without drafts let the loop measure that a tiny draft as large as its target costs too much. It is right.
pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")


def own_tokenizer(*added: str, size: int = SMALL, swapped: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of the test's own, which may be changed."""
    tokenizer = tiny_tokenizer.__wrapped__(size, swapped=swapped)
    tokenizer.add_tokens(list(added))
    return tokenizer


def serves(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> bool:
    target = hf_dsde.enable(model())
    text = target.generate(**CALL, assistant_model=draft(), tokenizer=ours, assistant_tokenizer=theirs)
    return text.tolist() == plain_text()


@pytest.mark.parametrize(
    ("ours", "theirs"), [((), ("<a>",)), (("<a>",), ()), (("<a>", "<b>"), ("<a>",)), (("<a>",), ("<a>",))]
)
def test_an_id_that_one_tokenizer_alone_names_has_one_meaning(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    assert serves(own_tokenizer(*ours), own_tokenizer(*theirs))


def test_an_id_of_two_names_is_noticed_also_inside_the_padding() -> None:
    with pytest.warns(hf_dsde.SpeculationWarning, match=f"1 token ids differ.*{SMALL}: '<a>' against '<b>'"):
        assert serves(own_tokenizer("<a>"), own_tokenizer("<b>"))
    with pytest.warns(hf_dsde.SpeculationWarning, match="against"):
        assert serves(own_tokenizer("<a>", "<b>"), own_tokenizer("<b>", "<a>"))


def test_ids_beyond_a_models_vocabulary_do_not_count() -> None:
    assert serves(own_tokenizer("<a>", size=VOCABULARY), own_tokenizer("<b>", size=VOCABULARY))


def test_a_pair_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[PreTrainedTokenizerFast] = []
    vocabulary = PreTrainedTokenizerFast.get_vocab

    def counted(self: PreTrainedTokenizerFast) -> dict[str, int]:
        read.append(self)
        return vocabulary(self)

    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", counted)
    ours, theirs, others = own_tokenizer(), own_tokenizer(), own_tokenizer(swapped=(20, 41))
    read.clear()
    assert serves(ours, theirs)
    assert read
    read.clear()
    assert serves(ours, theirs)
    assert not read
    for _ in range(2):  # another pair is another question
        with pytest.warns(hf_dsde.SpeculationWarning, match="2 token ids differ"):
            assert serves(ours, others)


def test_tokens_that_are_added_later_are_seen() -> None:
    ours, theirs = own_tokenizer(), own_tokenizer()
    assert serves(ours, theirs)
    ours.add_tokens(["<a>"])
    theirs.add_tokens(["<b>"])
    with pytest.warns(hf_dsde.SpeculationWarning, match="'<a>' against '<b>'"):
        assert serves(ours, theirs)


# Beside models


@pytest.fixture
def saved(tmp_path: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft that were loaded from folders with tokenizers of their own."""
    for name, swapped in (("target", None), ("draft", (20, 41))):
        model().save_pretrained(tmp_path / name)
        own_tokenizer(swapped=swapped).save_pretrained(tmp_path / name)
    target, assistant = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("target", "draft"))
    return hf_dsde.enable(target), assistant


def test_a_tokenizer_is_read_again_when_its_files_have_changed(saved: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    target, assistant = saved
    folder = Path(assistant.name_or_path)
    with pytest.raises(ValueError, match=f"if '{folder}' holds a wrong one, put the right one there"):
        target.generate(**CALL, assistant_model=assistant)
    own_tokenizer().save_pretrained(folder)  # the way out that was named
    for file in folder.iterdir():  # a clock may be too coarse to tell the two moments apart
        os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    target.generate(**CALL, assistant_model=assistant)


def test_a_tokenizer_that_appears_later_is_found(saved: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    target, assistant = saved
    folder = Path(assistant.name_or_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    target.generate(**CALL, assistant_model=assistant)
    own_tokenizer(swapped=(20, 41)).save_pretrained(folder)
    with pytest.raises(ValueError, match="2 token ids differ"):
        target.generate(**CALL, assistant_model=assistant)


def test_the_way_out_that_is_named_exists_in_every_way_to_generate(
    saved: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    target, assistant = saved
    right = own_tokenizer()

    def custom(**tokenizers: Any) -> None:
        method = partial(hf_dsde.generate, assistant_model=assistant, **tokenizers)
        target.generate(**ARGUMENTS, custom_generate=method)

    def batch(**tokenizers: Any) -> None:
        generator = BatchGenerator(target, right, assistant_model=assistant, max_new_tokens=2, **tokenizers)
        assert [result.error for result in generator.stream([[5, 6]])] == [None]

    ways = (partial(target.generate, **CALL, assistant_model=assistant), custom, batch)
    for way in ways:
        with pytest.raises(ValueError, match="pass assistant_tokenizer to `generate` or `BatchGenerator`"):
            way()
        way(assistant_tokenizer=right)


def test_tokenizers_that_were_translated_between_can_go() -> None:
    ours, theirs = own_tokenizer(), own_tokenizer(swapped=(20, 41))
    gone = [weakref.ref(ours), weakref.ref(theirs)]
    assert serves(ours, theirs)
    del ours, theirs
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
