"""A conversation's prompt is what the chat template makes of it alone, whatever data set it went through."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizer import readable_tokenizer
from datasets import Dataset

from hf_dsde.batch.data_sets import rows_of_batch
from hf_dsde.batch.input_rows import read_rows
from hf_dsde.batch.job import InputRows
from hf_dsde.batch.requests import RejectedRow, RequestBuilder

pytestmark = pytest.mark.usefixtures("quiet_datasets")
TOKENIZER = readable_tokenizer()


def built(row, **arguments):
    builder = RequestBuilder(TOKENIZER, max_new_tokens=4, max_prompt_tokens=None, context=None, **arguments)
    return builder.build(0, row)


def prompt(row, **arguments):
    request = built(row, **arguments)
    assert not isinstance(request, RejectedRow), request.error
    return TOKENIZER.decode(request.prompt)


def error(row, **arguments):
    rejected = built(row, **arguments)
    assert isinstance(rejected, RejectedRow), prompt(row, **arguments)
    return rejected.error


def rendered(messages, **arguments):
    """What transformers makes of a conversation by itself."""
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*calls, **more):
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": list(calls), **more}, ANSWER]


ANSWER = {"role": "tool", "name": "weather", "content": "7"}
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    asked(call("weather", {"city": "Paris", "days": 2})),
    asked(call("time", {"zone": "UTC", "format": {"hours": 24, "long": False}}), content="Let me see."),
    asked(call("time", {"format": {"style": "iso"}}), call("now", {})),
    asked({**call("list", {"of": ["a", "b"]}), "id": "1"}),
]
PARTS = [
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "c"}]}],
]


def weather(**properties):
    return {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    [weather(city={"type": "string"})],
    [weather(days={"type": "integer", "enum": [1, 2]}), {"type": "function", "function": {"name": "now"}}],
    None,
    [],
    [weather()],
]


def through_map(rows, tmp_path):
    return rows_of_batch(Dataset.from_list(rows)[:], (), {}, None)


def through_job(rows, tmp_path):
    return [row for _, row in InputRows(Dataset.from_list(rows), None).share(0, 1, ())]


def through_stream_in_arrow(rows, tmp_path):
    data = Dataset.from_list(rows).to_iterable_dataset().with_format("arrow")
    return [row for _, row in InputRows(data, None).share(0, 1, ())]


def through_parquet(rows, tmp_path):
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    return list(read_rows(tmp_path / "rows.parquet"))


def through_scalars(rows, tmp_path):
    return list(pa.Table.from_pylist(rows).to_struct_array())


WAYS = [through_map, through_job, through_stream_in_arrow, through_parquet, through_scalars]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("conversations", [CONVERSATIONS, PARTS], ids=["calls", "parts"])
def test_a_conversation_keeps_its_prompt_among_others_with_other_keys(way, conversations, tmp_path):
    rows = way([{"messages": messages} for messages in conversations], tmp_path)
    assert [prompt(row) for row in rows] == [rendered(messages) for messages in conversations]


@pytest.mark.parametrize("way", WAYS)
def test_tools_of_a_row_reach_the_template_as_they_are_alone(way, tmp_path):
    rows = [{"messages": CONVERSATIONS[0], "tools": tools} for tools in TOOLS]
    expected = [rendered(CONVERSATIONS[0], **({"tools": tools} if tools else {})) for tools in TOOLS]
    assert "days" in expected[1]
    assert [prompt(row) for row in way(rows, tmp_path)] == expected


@pytest.mark.parametrize("way", WAYS)
def test_template_arguments_of_a_row_are_added_to_the_generator_s(way, tmp_path):
    rows = [
        {"messages": CONVERSATIONS[0], "chat_template_kwargs": arguments}
        for arguments in ({"style": "brief", "other": None}, {"style": None, "other": 3}, None)
    ]
    given = {"style": "plain", "tools": TOOLS[0]}
    assert [prompt(row, chat_template_kwargs=given) for row in way(rows, tmp_path)] == [
        rendered(CONVERSATIONS[0], tools=TOOLS[0], style=style) for style in ("brief", "plain", "plain")
    ]


def test_tools_and_template_arguments_may_be_json_as_data_sets_keep_mixed_types():
    expected = rendered(CONVERSATIONS[0], tools=TOOLS[1], style="brief")
    for tools in (json.dumps(TOOLS[1]), [json.dumps(tool) for tool in TOOLS[1]], json.dumps(TOOLS[1]).encode()):
        row = {"messages": CONVERSATIONS[0], "tools": tools, "chat_template_kwargs": '{"style": "brief"}'}
        assert prompt(row) == expected
    for nothing in ("", " ", "null", "[]", []):
        assert prompt({"messages": CONVERSATIONS[0], "tools": nothing}) == rendered(CONVERSATIONS[0])


def test_tools_of_a_row_win_over_the_generator_s():
    row = {"messages": CONVERSATIONS[0], "tools": TOOLS[1], "chat_template_kwargs": {"tools": TOOLS[4]}}
    assert prompt(row, chat_template_kwargs={"tools": TOOLS[0]}) == rendered(CONVERSATIONS[0], tools=TOOLS[1])


def test_functions_as_tools_are_described_by_transformers():
    def now(zone: str) -> str:
        """
        Tell the time.

        Args:
            zone: Where.
        """
        return zone

    assert prompt({"messages": CONVERSATIONS[0], "tools": [now]}) == rendered(CONVERSATIONS[0], tools=[now])


def test_arguments_in_json_keep_their_nulls_and_the_order_of_their_keys():
    conversation = asked(call("weather", '{"unit": null, "city": "Paris"}'))
    rows = Dataset.from_list([{"messages": conversation}, {"messages": asked(call("now", "{}"))}])
    assert prompt(rows[0]) == rendered(conversation)
    assert "null" in prompt(rows[0])


def test_a_null_of_the_user_s_own_is_left_out_from_every_source_alike():
    conversation = asked(call("weather", {"city": "Paris", "unit": None}))
    without = asked(call("weather", {"city": "Paris"}))
    assert prompt({"messages": conversation}) == rendered(without)
    assert prompt(Dataset.from_list([{"messages": conversation}])[0]) == rendered(without)
    listed = asked(call("list", {"of": ["a", None]}))
    assert prompt({"messages": listed}) == rendered(listed)


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="Arrow has a type for JSON since pyarrow 19")
def test_values_of_mixed_types_are_read_from_parquet_as_they_were_written(tmp_path):
    conversations = [PARTS[0], CONVERSATIONS[0], [{"role": "assistant", "content": None}]]
    messages = [messages[0] for messages in conversations]
    contents = pa.array([None if m["content"] is None else json.dumps(m["content"]) for m in messages])
    parts = [pa.array([m["role"] for m in messages]), pa.ExtensionArray.from_storage(pa.json_(), contents)]
    column = pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays(parts, ["role", "content"]))
    pq.write_table(pa.table({"messages": column}), tmp_path / "mixed.parquet")
    rows = list(read_rows(tmp_path / "mixed.parquet"))
    assert [row["messages"] for row in rows] == conversations
    assert prompt(rows[0]) == rendered(PARTS[0])


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"tools": 3}, "column `tools` is 3 (int), but a list of tools"),
        ({"tools": ["hammer"]}, "column `tools` is 'hammer' (str), but JSON is needed"),
        ({"tools": [3]}, "column `tools` is [3] (list), but a list of tools"),
        ({"tools": "{}"}, "column `tools` is {} (dict)"),
        ({"tools": [{"name": "\ud800"}]}, "valid Unicode"),
        ({"chat_template_kwargs": [1]}, "column `chat_template_kwargs` is [1] (list), but a mapping"),
        ({"chat_template_kwargs": "style=brief"}, "column `chat_template_kwargs` is 'style=brief' (str), but JSON"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "has add_generation_prompt, which cannot be"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "has continue_final_message, which cannot be"),
        ({"chat_template_kwargs": {"chat_template": "{% for %}"}}, "messages that the chat template takes"),
    ],
)
def test_what_is_no_argument_of_a_template_is_an_error_of_its_row(row, part):
    assert part in error({"messages": CONVERSATIONS[0], **row})


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_template_columns_beside_plain_text_are_an_error_unless_the_text_is_asked(column):
    row = {column: "hi", "tools": TOOLS[0]}
    assert "column `tools` has tools for the chat template, but the prompt is text" in error(row)
    assert "pass `chat=True`" in error(row)
    assert prompt(row, chat=True) == rendered(CONVERSATIONS[0], tools=TOOLS[0])
    assert "`chat_template_kwargs` has style" in error({column: "hi", "chat_template_kwargs": {"style": "brief"}})
    assert prompt({column: "hi", "tools": None, "chat_template_kwargs": {"style": None}}) == "hi"
    assert prompt({"input_ids": TOKENIZER("hi")["input_ids"], "tools": TOOLS[0]}) == "hi"


@pytest.mark.parametrize("row", ["hi", {"prompt": "hi"}, {"text": "hi"}, b"hi", {"q": "hi"}])
def test_text_that_is_asked_is_a_message_of_a_user(row):
    column = "q" if isinstance(row, dict) and "q" in row else None
    assert prompt(row, chat=True, column=column) == rendered(CONVERSATIONS[0])
    assert prompt(row, column=column) == "hi"


def test_asking_needs_a_template():
    arguments = {"max_new_tokens": 4, "max_prompt_tokens": None, "context": None, "chat": True}
    with pytest.raises(ValueError, match="`chat` is True, but the tokenizer has no chat template"):
        RequestBuilder(readable_tokenizer(None), **arguments)
    own = {"chat_template": "{{ messages[0].content }}!"}
    made = RequestBuilder(readable_tokenizer(None), chat_template_kwargs=own, **arguments).build(0, "hi")
    assert TOKENIZER.decode(made.prompt) == "hi!"
