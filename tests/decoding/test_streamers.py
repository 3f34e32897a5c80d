"""Streaming rows at their own pace: nothing lost, nothing torn, whole words, and the prompt only when asked for."""

from __future__ import annotations

import io
import sys
from functools import cache
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dsde.decoding import streamers
from hf_dsde.decoding.streamers import BatchIteratorStreamer, BatchStreamer, BatchTextStreamer

EOS, PAD = 0, 1
SPECIAL_TOKENS = {"eos_token": "<eos>", "pad_token": "<pad>"}


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus a few merged ones; ids 0 and 1 are the end and the padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<eos>", "<pad>", *alphabet, "Ġt", "Ġth", "he", "in"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("h", "e"), ("i", "n")]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL_TOKENS)


@cache
def sentencepiece_like_tokenizer() -> PreTrainedTokenizerFast:
    """Spaces are `▁`, the first one is dropped when decoding, unknown characters are spelled in bytes."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁ab", "▁the", "\n"]
    tokens = ["<eos>", "<pad>", *bytes_, *words]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL_TOKENS)


def sentencepiece_ids(text: str) -> list[int]:
    tokenizer = sentencepiece_like_tokenizer()
    known = tokenizer.get_vocab()
    ids: list[int] = []
    for character in text.replace(" ", "▁"):
        ids += [known[character]] if character in known else [known[f"<0x{b:02X}>"] for b in character.encode()]
    return ids


class Collected(BatchTextStreamer):
    """Keeps what `on_text` receives."""

    calls: list[tuple[int, str, bool]]

    def on_text(self, row: int, text: str, end: bool) -> None:
        self.calls = [*getattr(self, "calls", []), (row, text, end)]

    def row_text(self, row: int) -> str:
        return "".join(text for r, text, _ in self.calls if r == row)


def stream(tokenizer: PreTrainedTokenizerFast, ids: list[int], chunks: list[int], **kwargs: object) -> Collected:
    """One row, its tokens in chunks of the given sizes (repeated)."""
    streamer = Collected(tokenizer, **kwargs)
    streamer.put(torch.tensor([[5, 6]]))
    position, turn = 0, 0
    while position < len(ids):
        size = chunks[turn % len(chunks)]
        streamer.put_tokens(0, torch.tensor(ids[position : position + size]))
        position, turn = position + size, turn + 1
    streamer.end()
    return streamer


chunkings = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.text(max_size=200), chunkings)
def test_texts_of_a_row_together_are_its_whole_text(text: str, chunks: list[int]) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, ids, chunks).row_text(0) == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.lists(st.integers(2, 261), max_size=300), chunkings)
def test_arbitrary_bytes_stream_to_what_decoding_them_at_once_gives(ids: list[int], chunks: list[int]) -> None:
    assert stream(byte_tokenizer(), ids, chunks).row_text(0) == byte_tokenizer().decode(ids)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["ab ", "the", " ", "\n", "\n ", "é", "日本語", "🙂", "x" * 40]), min_size=1, max_size=9),
    chunkings,
)
def test_long_texts_survive_the_shortening_of_the_window(words: list[str], chunks: list[int]) -> None:
    check_long_text(("".join(words) * 600)[:600], chunks)


def check_long_text(text: str, chunks: list[int]) -> None:
    byte_ids = byte_tokenizer().encode(text, add_special_tokens=False)
    assert stream(byte_tokenizer(), byte_ids, chunks).row_text(0) == text
    spelled = sentencepiece_ids(text)
    expected = sentencepiece_like_tokenizer().decode(spelled)
    assert stream(sentencepiece_like_tokenizer(), spelled, chunks).row_text(0) == expected


def test_window_stays_short_in_a_long_row() -> None:
    row = streamers._RowText(byte_tokenizer(), {})
    longest = 0
    for token in byte_tokenizer().encode("the thing in the thin tin " * 200, add_special_tokens=False):
        row.add([token])
        longest = max(longest, len(row._window))
    assert longest <= 2 * streamers._RowText._LONGEST_WINDOW


def forget_the_window(self: streamers._RowText, text: str) -> None:
    self._window, self._shown = [], 0


def count_from_the_start(self: streamers._RowText, text: str) -> None:
    self._window = self._window[-self._KEPT_TOKENS :]


@pytest.mark.parametrize("mutant", [forget_the_window, count_from_the_start])
def test_mutants_of_shortening_the_window_are_noticed(monkeypatch: pytest.MonkeyPatch, mutant: object) -> None:
    check_long_text("the ab " * 80, [1])
    monkeypatch.setattr(streamers._RowText, "_shorten_window", mutant)
    with pytest.raises(AssertionError):
        check_long_text("the ab " * 80, [1])


def test_words_are_handed_over_whole() -> None:
    ids = byte_tokenizer().encode("hello big world", add_special_tokens=False)
    texts = [text for _, text, _ in stream(byte_tokenizer(), ids, [1]).calls]
    assert texts == ["hello ", "big ", "world"]


def test_character_of_several_bytes_is_never_torn() -> None:
    ids = byte_tokenizer().encode("日本🙂 é", add_special_tokens=False)
    calls = stream(byte_tokenizer(), ids, [1]).calls
    assert [text for _, text, _ in calls] == ["日", "本", "🙂", " ", "é"]


def test_rows_advance_and_end_independently() -> None:
    streamer = Collected(byte_tokenizer())
    streamer.put(torch.tensor([[5], [6], [7]]))
    encode = byte_tokenizer().encode
    streamer.put_tokens(2, torch.tensor(encode("last row ")))
    streamer.put_tokens(0, torch.tensor(encode("first ro")))
    streamer.end_row(2)
    streamer.put_tokens(0, torch.tensor(encode("w")))
    streamer.end()
    assert streamer.calls == [
        (2, "last row ", False),
        (0, "first ", False),
        (2, "", True),
        (0, "row", True),
        (1, "", True),
    ]


def test_every_row_ends_exactly_once() -> None:
    streamer = Collected(byte_tokenizer())
    streamer.put(torch.tensor([[5], [6]]))
    streamer.end_row(1)
    streamer.end_row(1)
    streamer.end()
    assert sorted(row for row, _, end in streamer.calls if end) == [0, 1]


def test_prompt_is_shown_only_when_asked_for_and_without_its_padding() -> None:
    encode = byte_tokenizer().encode
    prompts = torch.tensor([[PAD, PAD, *encode("hi ")], [*encode("a b c")]])
    for skip_prompt, expected in [(True, "yes"), (False, "hi yes")]:
        streamer = Collected(byte_tokenizer(), skip_prompt=skip_prompt)
        streamer.put(prompts)
        streamer.put_tokens(0, torch.tensor(encode("yes")))
        streamer.end()
        assert streamer.row_text(0) == expected


def test_decode_arguments_arrive() -> None:
    ids = [*byte_tokenizer().encode("bye"), EOS]
    assert stream(byte_tokenizer(), ids, [1], skip_special_tokens=True).row_text(0) == "bye"
    assert stream(byte_tokenizer(), ids, [1]).row_text(0) == "bye<eos>"


def test_streamer_is_used_again_without_traces() -> None:
    streamer = Collected(byte_tokenizer())
    for _ in range(2):
        streamer.calls = []
        streamer.put(torch.tensor([[5], [6]]))
        streamer.put_tokens(1, torch.tensor(byte_tokenizer().encode("abc")))
        streamer.end()
        assert (streamer.row_text(0), streamer.row_text(1)) == ("", "abc")


def test_prompts_of_a_new_batch_are_taken_after_a_call_that_raised() -> None:
    streamer = Collected(byte_tokenizer())
    streamer.put(torch.tensor([[5], [6]]))
    streamer.put_tokens(1, torch.tensor(byte_tokenizer().encode("lost")))
    streamer.put(torch.tensor([[5], [6], [7]]))
    streamer.put_tokens(2, torch.tensor(byte_tokenizer().encode("kept")))
    streamer.end()
    assert "".join(text for _, text, _ in streamer.calls) == "kept"


def test_misuse_names_what_is_wrong() -> None:
    streamer = Collected(byte_tokenizer())
    with pytest.raises(ValueError, match="before any prompt"):
        streamer.put(torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="0 rows"):
        streamer.put_tokens(0, torch.tensor([3]))
    streamer.put(torch.tensor([[5]]))
    with pytest.raises(ValueError, match="`row` is 1"):
        streamer.end_row(1)
    streamer.end_row(0)
    with pytest.raises(ValueError, match="ended already"):
        streamer.put_tokens(0, torch.tensor([3]))


def test_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BatchStreamer()  # type: ignore[abstract]


@pytest.mark.parametrize("rows", [1, 3])
def test_stock_generate_streams_a_batch(rows: int) -> None:
    torch.manual_seed(0)
    model = tiny_model(vocab_size=262, num_hidden_layers=1)
    prompt = torch.arange(2, 2 + 4 * rows).reshape(rows, 4)
    streamer = Collected(byte_tokenizer())
    for _ in range(2):
        streamer.calls = []
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            streamer=streamer,
            max_new_tokens=20,
            do_sample=True,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        for row, tokens in enumerate(output[:, 4:].tolist()):
            length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
            assert streamer.row_text(row) == byte_tokenizer().decode(tokens[:length])


def test_iterator_yields_rows_from_another_thread() -> None:
    streamer = BatchIteratorStreamer(byte_tokenizer(), timeout=10)

    def produce() -> None:
        streamer.put(torch.tensor([[5], [6]]))
        streamer.put_tokens(1, torch.tensor(byte_tokenizer().encode("one two")))
        streamer.put_tokens(0, torch.tensor(byte_tokenizer().encode("three ")))
        streamer.end()

    for _ in range(2):
        thread = Thread(target=produce)
        thread.start()
        assert list(streamer) == [(1, "one "), (0, "three "), (1, "two")]
        thread.join()


def test_iterator_times_out_with_the_reason() -> None:
    streamer = BatchIteratorStreamer(byte_tokenizer(), timeout=0.01)
    with pytest.raises(TimeoutError, match=r"`timeout` = 0\.01"):
        next(iter(streamer))


def test_rows_are_printed_line_by_line_outside_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = BatchTextStreamer(byte_tokenizer())
    encode = byte_tokenizer().encode
    streamer.put(torch.tensor([[5], [6]]))
    streamer.put_tokens(0, torch.tensor(encode("a b\nc ")))
    streamer.put_tokens(1, torch.tensor(encode("d")))
    streamer.end_row(1)
    streamer.put_tokens(0, torch.tensor(encode("e")))
    streamer.end()
    assert capsys.readouterr().out == "[0] a b\n[1] d\n[0] c e\n"


def test_single_row_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = BatchTextStreamer(byte_tokenizer())
    streamer.put(torch.tensor([[5]]))
    streamer.put_tokens(0, torch.tensor(byte_tokenizer().encode("a b")))
    assert capsys.readouterr().out == "a "
    streamer.end()
    assert capsys.readouterr().out == "b\n"


def test_terminal_shows_all_rows_in_full_at_the_end() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=60, height=10, color_system=None)
    display = streamers._LiveDisplay(2, console)
    long = "word " * 40
    display.show(0, long, False)
    display.show(1, "[bold]not markup[/bold] \x1b[31mnot red", True)
    display.close()
    last_drawing = output.getvalue().split("\x1b[2K")[-1]
    assert last_drawing.count("word") == 40
    assert "[bold]not markup[/bold] \ufffd[31mnot red" in last_drawing


def test_terminal_is_used_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, str, bool]] = []

    class Display:
        def __init__(self, rows: int) -> None:
            assert rows == 1

        def show(self, row: int, text: str, end: bool) -> None:
            drawn.append((row, text, end))

        def close(self) -> None:
            drawn.append((-1, "closed", True))

    monkeypatch.setattr(streamers, "_LiveDisplay", Display)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    streamer = BatchTextStreamer(byte_tokenizer())
    streamer.put(torch.tensor([[5]]))
    streamer.put_tokens(0, torch.tensor(byte_tokenizer().encode("x ")))
    streamer.end()
    assert drawn == [(0, "x ", False), (0, "", True), (-1, "closed", True)]
