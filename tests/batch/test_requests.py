"""Requests of rows: every form a prompt comes in, and every way in which it can be bad."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_models import BOS, EOS, PAD, VOCABULARY
from tiny_text import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_dsde.batch.input_rows import BrokenRow
from hf_dsde.batch.requests import RejectedRow, Request, RequestBuilder

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% if think %}{{ 'T' }}{% endif %}{% endif %}"
)
WORDS = ["<pad>", "<bos>", "<user>", "<assistant>", "<system>", "<end>", "T", *"abcdefgh"]
UNKNOWN = {"unk_token": "h"}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>"}
IDS = {word: index for index, word in enumerate(WORDS)}


def _chat_tokenizer(template=TEMPLATE):
    """Words of one character, `<bos>` in front of plain texts, and a chat template with marks for roles."""
    core = Tokenizer(models.WordLevel(IDS, **UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.add_special_tokens([word for word in WORDS if len(word) > 1])
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", IDS["<bos>"])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL)
    tokenizer.chat_template = template
    return tokenizer


def _ids(*words):
    return [IDS[word] for word in words]


def _builder(tokenizer=None, **arguments):
    defaults = {"max_new_tokens": 8, "max_prompt_tokens": None, "context": None}
    return RequestBuilder(tokenizer or _chat_tokenizer(), **{**defaults, **arguments})


def _prompt(row, **arguments):
    request = _builder(**arguments).build(5, row)
    assert isinstance(request, Request), request
    assert request.index == 5
    assert all(type(token) is int for token in request.prompt)
    return list(request.prompt)


def _error(row, **arguments):
    rejected = _builder(**arguments).build(5, row)
    assert isinstance(rejected, RejectedRow), rejected
    assert rejected.index == 5
    json.dumps(rejected.error, ensure_ascii=False).encode()  # can be written to a result file
    assert len(rejected.error) < 600
    return rejected.error


USER = {"role": "user", "content": "a"}
ASKED = _ids("<user>", "a", "<end>", "<assistant>")


@pytest.mark.parametrize(
    "row", ["ab", {"prompt": "ab"}, {"text": "ab"}, {"text": "ab", "id": 3}, b"ab", {"text": b"ab"}]
)
def test_text_is_tokenised_as_the_tokenizer_does_by_default(row):
    assert _prompt(row) == _ids("<bos>", "a", "b")
    assert _prompt(row) == _chat_tokenizer()("ab")["input_ids"]


@pytest.mark.parametrize("row", [[USER], {"messages": [USER]}, {"prompt": [USER]}, {"messages": (USER,)}])
def test_messages_become_a_prompt_for_an_answer(row):
    assert _prompt(row) == ASKED


def test_a_last_message_of_the_assistant_is_continued():
    messages = [USER, {"role": "assistant", "content": "bc"}]
    assert _prompt(messages) == _ids("<user>", "a", "<end>", "<assistant>", "b", "c")
    answered = [*messages, {"role": "user", "content": "d"}]
    assert _prompt(answered)[-4:] == _ids("<user>", "d", "<end>", "<assistant>")


def test_arguments_of_the_template_reach_it():
    assert _prompt([USER], chat_template_kwargs={"think": True}) == [*ASKED, IDS["T"]]
    own = {"chat_template": "{{ messages[0].content }}"}
    assert _prompt([USER], tokenizer=_chat_tokenizer(None), chat_template_kwargs=own)[-1] == IDS["a"]


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "return_tensors", "truncation"])
def test_arguments_of_the_template_that_are_decided_here_are_refused(name):
    with pytest.raises(ValueError, match=f"`chat_template_kwargs` has {name}"):
        _builder(chat_template_kwargs={name: True})


def test_keys_that_arrow_filled_with_none_are_no_part_of_a_message():
    template = "{% for m in messages %}{% if 'name' in m %}b{% else %}a{% endif %}{% endfor %}"
    assert _prompt([{**USER, "name": None}], tokenizer=_chat_tokenizer(template))[-1] == IDS["a"]
    assert _prompt([{**USER, "name": "x"}], tokenizer=_chat_tokenizer(template))[-1] == IDS["b"]


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4],
        (3, 4),
        np.array([3, 4], dtype=np.int32),
        [np.int64(3), np.uint8(4)],
        torch.tensor([3, 4]),
        [torch.tensor(3), torch.tensor(4)],
        pa.array([3, 4]),
        [pa.scalar(3), pa.scalar(4)],
        pa.scalar([3, 4]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_token_ids_come_in_any_library_s_lists_and_numbers(ids):
    assert _prompt(ids) == [3, 4]
    assert _prompt({"input_ids": ids}) == [3, 4]
    assert _prompt({"tokens": ids}, column="tokens") == [3, 4]


def test_rows_and_scalars_of_arrow_and_numpy_count_as_what_they_hold():
    row = pa.scalar({"messages": [USER], "max_new_tokens": 3, "stop_strings": ["x"]})
    request = _builder().build(0, row)
    assert (request.prompt, request.max_new_tokens, request.stop_strings) == (ASKED, 3, ("x",))
    assert _prompt(pa.scalar("ab")) == _ids("<bos>", "a", "b")
    assert _prompt({"text": np.str_("ab")}) == _ids("<bos>", "a", "b")
    assert _prompt({"messages": np.array([USER], dtype=object)}) == ASKED
    request = _builder().build(0, {"text": "a", "max_new_tokens": np.int64(3), "stop_strings": np.array(["x", "y"])})
    assert (request.max_new_tokens, request.stop_strings) == (3, ("x", "y"))
    assert type(request.max_new_tokens) is int
    assert all(type(text) is str for text in request.stop_strings)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [([0, 0, 1, 1], [5, 6]), ([1, 1, 1, 1], [0, 0, 5, 6]), ([0, 1, 1, 0], [0, 5]), (np.array([0, 0, 0, 1]), [6])],
)
def test_an_attention_mask_takes_padding_off(mask, kept):
    assert _prompt({"input_ids": [0, 0, 5, 6], "attention_mask": mask}) == kept


def test_a_padded_row_of_the_tokenizer_gives_the_prompt_without_padding():
    padded = tiny_tokenizer()("abc", padding="max_length", max_length=6)
    alone = tiny_tokenizer()("abc")["input_ids"]
    assert padded["input_ids"] == [PAD] * (6 - len(alone)) + alone
    assert len(alone) < 6
    assert _prompt(padded, tokenizer=tiny_tokenizer()) == alone


@pytest.mark.parametrize("mask", [[1, 0, 1], [1, 1], [0, 0, 0], [1, 1, 2], "111", [1, None, 1]])
def test_a_mask_that_is_none_rejects_the_row(mask):
    assert "column `attention_mask` is" in _error({"input_ids": [3, 4, 5], "attention_mask": mask})


@pytest.mark.parametrize(("value", "expected"), [("ab", ["<bos>", "a", "b"]), ([3, 4], None), ([USER], None)])
def test_the_type_of_a_named_column_s_value_decides(value, expected):
    result = _prompt({"question": value, "text": "c", "prompt": "d"}, column="question")
    assert result == (_ids(*expected) if expected else [3, 4] if value == [3, 4] else ASKED)


def test_a_named_column_settles_which_of_the_known_ones_counts():
    row = {"prompt": "a", "text": "b"}
    assert _prompt(row, column="text") == _ids("<bos>", "b")
    error = _error(row)
    assert "`prompt`, `text`" in error
    assert "pass `column`" in error


def test_a_column_of_none_counts_as_absent():
    assert _prompt({"prompt": None, "text": "a", "messages": None}) == _ids("<bos>", "a")


def test_options_of_a_row_replace_the_builder_s():
    builder = _builder(max_new_tokens=8, stop_strings=["x"])
    assert builder.build(0, "a") == Request(0, _ids("<bos>", "a"), 8, ("x",))
    row = {"text": "a", "max_new_tokens": 100, "stop_strings": "yz"}
    assert builder.build(1, row) == Request(1, _ids("<bos>", "a"), 100, ("yz",))
    assert builder.build(2, {"text": "a", "max_new_tokens": None, "stop_strings": None}).stop_strings == ("x",)
    assert builder.build(3, {"text": "a", "stop_strings": []}).stop_strings == ()


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", [3], float("nan"), np.float64(2), np.bool_(True)])
def test_a_row_s_limit_that_is_no_positive_integer_rejects_it(value):
    error = _error({"text": "a", "max_new_tokens": value})
    assert error.startswith("column `max_new_tokens` is ")
    assert "an integer of at least 1 is needed" in error


@pytest.mark.parametrize("value", [3, [""], "", ["a", None], {"a": 1}, ["\ud800"]])
def test_stop_strings_that_are_none_reject_the_row(value):
    assert _error({"text": "a", "stop_strings": value}).startswith("`stop_strings` is ")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (None, ["the row is None", "text, a list of chat messages, a list of token ids, or a mapping"]),
        (3, ["the row is 3 (int)"]),
        (2.5, ["the row is 2.5 (float)"]),
        (True, ["the row is True (bool)"]),
        (object(), ["(object)"]),
        ({}, ["empty mapping", "`messages`, `prompt`, `text`, `input_ids`"]),
        ({"question": "a"}, ["has the columns `question`", "pass `column`"]),
        ({"prompt": None}, ["column `prompt` is None"]),
        ({"prompt": None, "text": None}, ["columns `prompt`, `text` are None"]),
        ("", ["the row is '' (str)", "at least one character"]),
        ({"text": ""}, ["column `text` is '' (str)"]),
        ({"text": 3}, ["column `text` is 3 (int)", "text of at least one character is needed"]),
        ({"text": ["a"]}, ["column `text` is ['a'] (list)"]),
        ({"prompt": 1.5}, ["column `prompt` is 1.5 (float)"]),
        ({"prompt": []}, ["column `prompt` is []", "at least one chat message"]),
        ("a\ud800b", [r"'a\ud800b'", "valid Unicode", "character 1"]),
        ({"text": "\udfff"}, ["column `text`", "valid Unicode"]),
        (b"a\xff", ["UTF-8", "byte 1"]),
        ({"text": b"\xc3"}, ["column `text`", "UTF-8"]),
        ({"\ud800": "a"}, [r"`\ud800`"]),
        ([], ["the row is []"]),
        ({"input_ids": []}, ["column `input_ids` is []", "at least one token id from 0 to 14"]),
        ({"input_ids": "abc"}, ["column `input_ids` is 'abc'"]),
        ({"input_ids": 3}, ["column `input_ids` is 3"]),
        ({"input_ids": [1, len(WORDS)]}, ["column `input_ids` at place 1 is 15 (int)", "from 0 to 14"]),
        ([-1], ["the row at place 0 is -1"]),
        ([1, 2.0], ["place 1 is 2.0 (float)"]),
        ([1, True], ["place 1 is True (bool)"]),
        ([1, None], ["place 1 is None"]),
        (["a", "b"], ["place 0 is 'a' (str)"]),
        ([[1, 2]], ["without a dimension for a batch"]),
        (np.array([[1, 2]]), ["without a dimension for a batch"]),
        (np.array([1.0]), ["place 0 is 1.0 (float)"]),
        ({"messages": "hello"}, ["column `messages` is 'hello'", "a list of at least one chat message"]),
        ({"messages": []}, ["column `messages` is []"]),
        ({"messages": {"role": ["user"], "content": ["a"]}}, ["column `messages`"]),
        ({"messages": [3]}, ["message 0 of column `messages` is 3", "`role` and `content`"]),
        ([USER, "b"], ["message 1 of the row is 'b'"]),
        ([{"content": "a"}], ["`role` of message 0 of the row is None", "'user' or 'assistant'"]),
        ([{"role": 3, "content": "a"}], ["`role` of message 0 of the row is 3"]),
        ([{"role": "user"}], ["`content` of message 0 of the row is None"]),
        ([{"role": "user", "content": None}], ["`content` of message 0"]),
        ([{"role": "user", "content": 3}], ["`content` of message 0 of the row is 3 (int)"]),
        ([{"role": "user", "content": "\ud800"}], ["message 0 of the row", "valid Unicode"]),
        ([{**USER, "parts": [{"text": "\ud800"}]}], ["message 0 of the row", "valid Unicode"]),
        ([{"role": "user", "content": [{"text": "a"}]}], ["the chat template takes", "TypeError"]),
        (BrokenRow("line 3 is no JSON"), ["line 3 is no JSON"]),
    ],
)
def test_a_bad_row_is_rejected_with_column_value_and_what_is_accepted(row, parts):
    error = _error(row)
    for part in parts:
        assert part in error


def test_a_named_column_is_checked_like_the_known_ones():
    assert "has the columns `text`, but `question` is needed" in _error({"text": "a"}, column="question")
    assert "column `question` is None" in _error({"question": None, "text": "a"}, column="question")
    assert "column `question` is 3 (int)" in _error({"question": 3}, column="question")
    assert "column `question` is {'a': 1}" in _error({"question": {"a": 1}}, column="question")


def test_long_values_are_shortened_in_errors():
    assert len(_error({"messages": "x" * 100_000})) < 250
    assert len(_error([1] * 100_000 + ["y" * 100_000])) < 250
    assert len(_error({f"column {number}": 1 for number in range(10_000)})) < 400


def test_text_without_any_token_is_rejected():
    error = _error("zzz", tokenizer=tiny_tokenizer())
    assert "'zzz'" in error
    assert "at least one token" in error


def test_messages_without_a_chat_template_are_rejected():
    assert "no chat template" in _error([USER], tokenizer=_chat_tokenizer(None))


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}", "{% for %}", "{{ 1 / 0 }}"],
)
def test_what_a_template_raises_rejects_the_row(template):
    error = _error([USER], tokenizer=_chat_tokenizer(template))
    assert "messages that the chat template takes are needed (" in error
    if "alternate" in template:
        assert "roles must alternate" in error


def test_a_template_that_renders_nothing_rejects_the_row():
    core = _chat_tokenizer("{{ '' }}")
    core.backend_tokenizer.post_processor = processors.Sequence([])
    assert "at least one token" in _error([USER], tokenizer=core)


def test_a_template_that_drops_the_last_answer_cannot_continue_it():
    messages = [USER, {"role": "assistant", "content": "b"}]
    assert "the chat template takes" in _error(messages, tokenizer=_chat_tokenizer("{{ messages[0].content }}"))


def test_prompts_beyond_the_limits_are_rejected_with_their_lengths():
    assert len(_prompt("ab", max_prompt_tokens=3)) == 3
    error = _error("abc", max_prompt_tokens=3)
    assert "4 tokens" in error
    assert "`max_prompt_tokens` accepts 3" in error
    assert len(_prompt("ab", context=11)) == 3
    error = _error("ab", context=10)
    for part in ["3 tokens", "`max_new_tokens` is 8", "context has 10"]:
        assert part in error
    assert _prompt({"text": "ab", "max_new_tokens": 7}, context=10)
    assert "context" in _error({"text": "ab", "max_new_tokens": 8}, context=10)


def test_a_mapping_that_raises_is_a_bad_row_too():
    class Lazy(dict):
        def get(self, *_):
            raise OSError("file is gone")

    assert "OSError: file is gone" in _error(Lazy(text="a"))


def test_messages_nested_beyond_reason_are_a_bad_row():
    deep = "x"
    for _ in range(5000):
        deep = [deep]
    assert "RecursionError" in _error([{**USER, "parts": deep}])


def test_ids_up_to_the_largest_of_a_vocabulary_with_gaps_are_accepted():
    core = Tokenizer(models.WordLevel({"a": 0, "h": 7}, **UNKNOWN))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert _prompt([7], tokenizer=tokenizer) == [7]
    assert "from 0 to 7" in _error([8], tokenizer=tokenizer)


def test_the_tiny_models_whole_vocabulary_is_accepted():
    assert _prompt([BOS, EOS, VOCABULARY - 1], tokenizer=tiny_tokenizer()) == [BOS, EOS, VOCABULARY - 1]


def test_a_prompt_longer_than_the_tokenizer_s_own_limit_is_no_warning(caplog):
    tokenizer = _chat_tokenizer()
    tokenizer.model_max_length = 2
    assert len(_prompt("abcdef", tokenizer=tokenizer)) == 7
    assert not caplog.records


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"max_prompt_tokens": 0},
        {"context": 1},
        {"column": 3},
        {"stop_strings": [""]},
        {"stop_strings": 3},
    ],
)
def test_arguments_of_the_builder_are_checked(arguments):
    with pytest.raises((TypeError, ValueError), match=f"`{next(iter(arguments))}`"):
        _builder(**arguments)
