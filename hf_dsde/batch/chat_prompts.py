"""Prompts of chat messages: what a row holds of a conversation, and what the tokenizer's chat template makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hf_dsde.batch.encoding import Encoding, ToEncode
from hf_dsde.batch.row_values import BadRowError, check_unicode, plain, quoted, reason, without_absent, wrong

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns that hold arguments of the chat template for a single row."""

_DECIDED_HERE = (
    "add_generation_prompt",
    "continue_final_message",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "truncation",
)
"""Arguments of `apply_chat_template` that are not the user's: the last message decides, and prompts are never cut."""
_WHY_DECIDED = (
    "which cannot be chosen: a last message of the assistant is continued, any other answered, and prompts are neither "
    "padded nor cut"
)


class ChatPrompts:
    """Applies a tokenizer's chat template.

    Args:
        tokenizer: A tokenizer of transformers, with or without a template.
        arguments: Arguments of `tokenizer.apply_chat_template` for every row, such as `tools` or `enable_thinking`.

    Raises:
        ValueError: The arguments include one that is decided here.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        if taken := sorted(set(_DECIDED_HERE) & set(self._arguments)):
            raise ValueError(f"`chat_template_kwargs` has {', '.join(taken)}, {_WHY_DECIDED}.")

    @property
    def has_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(getattr(self._tokenizer, "chat_template", None)) or "chat_template" in self._arguments

    def prompt(self, name: str, value: Any, row: Mapping[Any, Any] | None) -> Encoding:
        """The token ids of a conversation, ready for the next answer.

        Args:
            name: What the conversation is called in errors.
            value: Messages.
            row: The row, which may have arguments of the template in columns of their own.

        Raises:
            BadRowError: For messages or arguments from which no prompt can be made.
        """
        messages = list(_checked_messages(name, value))
        own = row_arguments(row)
        if not self.has_template and "chat_template" not in own:
            raise wrong(name, value, "text: the tokenizer has no chat template to turn messages into a prompt,")
        continued = messages[-1]["role"] == "assistant"
        apply = partial(
            self._tokenizer.apply_chat_template,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tokenize=True,
            return_dict=False,
            **{**self._arguments, **own},
        )
        try:
            ids = yield ToEncode(messages, apply, None if own else ("chat", continued))
        except Exception as failure:  # noqa: BLE001  a template can raise whatever it likes
            raise wrong(name, value, f"messages that the chat template takes are needed ({reason(failure)})") from None
        if not ids:
            raise wrong(name, value, "messages of which the chat template makes at least one token")
        return list(ids)


def row_arguments(row: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Arguments of the chat template that a row has in columns of its own; a `tools` column wins over the other.

    Raises:
        BadRowError: One of the columns holds something else.
    """
    if row is None:
        return {}
    arguments: dict[str, Any] = {}
    name = "column `chat_template_kwargs`"
    given = _from_json(name, plain(row.get("chat_template_kwargs")))
    if given is not None:
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise wrong(name, given, "a mapping of arguments' names to values, or a text of JSON with one,")
        arguments = without_absent(given)
        if taken := sorted(set(_DECIDED_HERE) & set(arguments)):
            raise BadRowError(f"{name} has {', '.join(taken)}, {_WHY_DECIDED}")
    tools = _tools(plain(row.get("tools")))
    return {**arguments, "tools": tools} if tools else arguments


def refuse_template_columns(row: Mapping[Any, Any] | None) -> None:
    """Raise a `BadRowError` for a row that has arguments of a chat template but a prompt that goes through none."""
    if found := row_arguments(row):
        named = [name for name in TEMPLATE_COLUMNS if row is not None and plain(row.get(name)) is not None]
        raise BadRowError(
            f"column {quoted(named)} has {', '.join(sorted(found))} for the chat template, but the prompt is text that "
            "goes through none; give it as `messages`, pass `chat=True`, or leave the column out"
        )


def _tools(value: Any) -> list[Any]:
    """The tools of a row: descriptions as mappings or JSON, or functions that transformers describes."""
    name, accepted = "column `tools`", "a list of tools, each a mapping or its JSON,"
    value = _from_json(name, value)
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise wrong(name, value, accepted)
    tools = [without_absent(_from_json(name, plain(tool))) for tool in value]
    for tool in tools:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise wrong(name, value, accepted)
    for text in _texts(tools):
        check_unicode(name, text)
    return tools


def _from_json(name: str, value: Any) -> Any:
    """What a text of JSON holds, which is how many data sets keep values of mixed types; other values as they are."""
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as failure:
        raise wrong(name, value, f"JSON is needed where there is text ({reason(failure)})") from None


def _checked_messages(name: str, value: Any) -> Iterator[dict[str, Any]]:
    """The messages as a template is shown them: without what Arrow put where a message of the column has nothing."""
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong(name, value, "a list of at least one chat message")
    for place, item in enumerate(value):
        message = plain(item)
        name_here = f"message {place} of {name}"
        if not isinstance(message, Mapping):
            raise wrong(name_here, message, "a mapping with `role` and `content`")
        message = without_absent(message)
        if not isinstance(message.get("role"), str):
            raise wrong(f"`role` of {name_here}", message.get("role"), "text such as 'user' or 'assistant'")
        content = message.get("content")
        # An assistant's message may hold nothing but calls of tools or its reasoning, under a name of the template's.
        if "content" in message and not isinstance(content, (str, list, tuple)):
            raise wrong(f"`content` of {name_here}", content, "text or a list of parts")
        if message.keys() == {"role"}:
            raise wrong(f"`content` of {name_here}", None, "text or a list of parts")
        for text in _texts(message):
            check_unicode(name_here, text)
        yield message


def _texts(value: Any) -> Iterator[str]:
    """Every string inside nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for part in value:
            yield from _texts(part)
