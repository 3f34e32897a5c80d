"""Requests of rows: whatever a data set calls a prompt, checked and tokenised, or the reason why it cannot be.

Nothing here raises for what a row holds: one bad row in a million costs that row, and says what it would have needed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dsde.argument_checks import check_integer
from hf_dsde.batch.input_rows import BrokenRow

PROMPT_COLUMNS = ("messages", "prompt", "text", "input_ids")
"""Columns that are found without being named."""

_ACCEPTED_ROWS = "text, a list of chat messages, a list of token ids, or a mapping with one of these in a column"
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

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60
_shortened.maxlist = _shortened.maxdict = 4


@dataclass(frozen=True)
class Request:
    """One text to generate.

    Attributes:
        index: The row's place in the input, from 0.
        prompt: Token ids, at least one.
        max_new_tokens: The most tokens behind the prompt, at least 1.
        stop_strings: Texts whose appearance ends generation.
    """

    index: int
    prompt: tuple[int, ...] | list[int]
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be generated from; `error` says which value is to blame and what is accepted."""

    index: int
    error: str


class _BadRowError(Exception):
    """What is wrong with a row; it becomes the text of a `RejectedRow`."""


class RequestBuilder:
    """Makes requests of rows, all with the same tokenizer and limits.

    A row is text, a list of chat messages, a list of token ids, or a mapping that has one of them in a column:

    - `messages`: chat messages, which the tokenizer's chat template turns into a prompt for the next answer. A last
      message of the assistant is continued instead.
    - `prompt`: text, or chat messages.
    - `text`: text, tokenised with the special tokens that the tokenizer adds by default.
    - `input_ids`: token ids. An `attention_mask` beside them says which are padding, to be taken off at the ends.
    - any other column, if `column` names it; its value's type decides.

    A mapping's `max_new_tokens` and `stop_strings` replace the builder's for that row. A column whose value is None
    counts as absent, which is how Arrow stores what a row does not have. Values and arrays of numpy, Arrow and torch
    count as the numbers and lists that they hold; bytes as the UTF-8 text that they hold.

    Args:
        tokenizer: A tokenizer of transformers. While `build` runs in another thread, its padding and truncation must
            not be changed.
        max_new_tokens: The most tokens behind each prompt, at least 1.
        stop_strings: Text or texts whose appearance ends generation.
        max_prompt_tokens: The longest prompt that is accepted; None for no limit.
        context: The models' longest text: a prompt and its new tokens must fit. None for no limit.
        column: The column that holds the prompts. None looks for the known ones.
        chat_template_kwargs: Arguments for `tokenizer.apply_chat_template`, such as `tools` or `enable_thinking`.

    Raises:
        TypeError, ValueError: An argument is none of what is accepted.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        stop_strings: str | Sequence[str] = (),
        max_prompt_tokens: int | None,
        context: int | None,
        column: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1)
        try:
            self._stop_strings = _stop_strings(stop_strings)
        except _BadRowError as failure:
            raise ValueError(str(failure)) from None
        if max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", max_prompt_tokens, 1)
        if context is not None:
            check_integer("context", context, 2)
        if column is not None and not isinstance(column, str):
            raise TypeError(f"`column` is {column!r}, but the name of a column, or None, is needed.")
        self._max_prompt_tokens, self._context, self._column = max_prompt_tokens, context, column
        self._template_arguments = dict(chat_template_kwargs or {})
        if taken := sorted(set(_DECIDED_HERE) & set(self._template_arguments)):
            raise ValueError(
                f"`chat_template_kwargs` has {', '.join(taken)}, which cannot be chosen: a last message of the "
                "assistant is continued, any other answered, and prompts are neither padded nor cut."
            )
        # The largest id, since some tokenizers leave gaps and `len` counts tokens only.
        self._vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))

    def build(self, index: int, row: Any) -> Request | RejectedRow:
        """The request of a row, or why there is none. Never raises for what the row holds."""
        if isinstance(row, BrokenRow):
            return RejectedRow(index, _printable(row.error))
        try:
            row = _plain(row)
            max_new_tokens, stop_strings = self._max_new_tokens, self._stop_strings
            if isinstance(row, Mapping):
                if (given := _plain(row.get("max_new_tokens"))) is not None:
                    max_new_tokens = _row_limit(given)
                if (given := _plain(row.get("stop_strings"))) is not None:
                    stop_strings = _stop_strings(given)
            prompt = self._prompt(row)
            self._check_length(len(prompt), max_new_tokens)
        except _BadRowError as failure:
            return RejectedRow(index, _printable(str(failure)))
        except Exception as failure:  # noqa: BLE001  a mapping or an array of the user's own may raise anything
            return RejectedRow(index, f"the row cannot be read ({_reason(failure)}); {_ACCEPTED_ROWS} is needed")
        return Request(index, prompt, max_new_tokens, stop_strings)

    def _prompt(self, row: Any) -> list[int]:
        if not isinstance(row, Mapping):
            return self._of_any_type("the row", row, _ACCEPTED_ROWS)
        column = self._column_of(row)
        value, name = _plain(row[column]), f"column `{column}`"
        if self._column is not None and column not in PROMPT_COLUMNS:
            return self._of_any_type(name, value, "text, a list of chat messages or a list of token ids", row)
        if column == "messages":
            return self._of_messages(name, value)
        if column == "input_ids":
            return self._of_ids(name, value, row)
        if column == "prompt" and isinstance(value, (list, tuple)):
            return self._of_messages(name, value)
        return self._of_text(name, value)

    def _column_of(self, row: Mapping[Any, Any]) -> str:
        """The column that holds the prompt."""
        looked_for = PROMPT_COLUMNS if self._column is None else (self._column,)
        present = [name for name in looked_for if name in row]
        filled = [name for name in present if _plain(row[name]) is not None]
        if len(filled) == 1:
            return filled[0]
        if filled:
            raise _BadRowError(
                f"the row has the columns {_quoted(filled)}, and each could be the prompt; pass `column` to say which"
            )
        if present:
            raise _BadRowError(f"{_columns(present)} None; text, chat messages or token ids are needed")
        found = f"has the columns {_quoted(row)}" if row else "is an empty mapping"
        wanted = f"`{looked_for[0]}`" if self._column is not None else f"one of {_quoted(PROMPT_COLUMNS)}"
        way_out = "" if self._column is not None else "; pass `column` to name another"
        raise _BadRowError(f"the row {found}, but {wanted} is needed{way_out}")

    def _of_any_type(self, name: str, value: Any, accepted: str, row: Mapping[Any, Any] | None = None) -> list[int]:
        if isinstance(value, (str, bytes)):
            return self._of_text(name, value)
        if isinstance(value, (list, tuple)) and value:
            if isinstance(_plain(value[0]), Mapping):
                return self._of_messages(name, value)
            return self._of_ids(name, value, row)
        raise _wrong(name, value, accepted)

    def _of_text(self, name: str, value: Any) -> list[int]:
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as failure:
                raise _wrong(
                    name, value, f"text in UTF-8 is needed ({failure.reason} at byte {failure.start})"
                ) from None
        if not isinstance(value, str) or not value:
            raise _wrong(name, value, "text of at least one character")
        _check_unicode(name, value)
        try:
            ids = self._tokenizer(value, return_attention_mask=False, verbose=False)["input_ids"]
        except Exception as failure:  # noqa: BLE001  tokenizers raise bare `Exception`
            raise _wrong(name, value, f"text that the tokenizer takes is needed ({_reason(failure)})") from None
        if not ids:
            raise _wrong(name, value, "text of which the tokenizer makes at least one token")
        return list(ids)

    def _of_ids(self, name: str, value: Any, row: Mapping[Any, Any] | None) -> list[int]:
        accepted = f"a list of at least one token id from 0 to {self._vocabulary - 1}"
        if not isinstance(value, (list, tuple)) or not value:
            raise _wrong(name, value, accepted)
        ids = [token if type(token) is int else _plain(token) for token in value]
        for place, token in enumerate(ids):
            if isinstance(token, (list, tuple)):
                raise _wrong(name, value, f"{accepted}, without a dimension for a batch,")
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise _wrong(f"{name} at place {place}", token, f"a token id from 0 to {self._vocabulary - 1}")
        mask = None if row is None else _plain(row.get("attention_mask"))
        return ids if mask is None else _without_padding(ids, mask)

    def _of_messages(self, name: str, value: Any) -> list[int]:
        messages = list(_checked_messages(name, value))
        if not getattr(self._tokenizer, "chat_template", None) and "chat_template" not in self._template_arguments:
            raise _wrong(name, value, "text: the tokenizer has no chat template to turn messages into a prompt,")
        continued = messages[-1]["role"] == "assistant"
        try:
            ids = self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                tokenize=True,
                return_dict=False,
                **self._template_arguments,
            )
        except Exception as failure:  # noqa: BLE001  a template can raise whatever it likes
            raise _wrong(
                name, value, f"messages that the chat template takes are needed ({_reason(failure)})"
            ) from None
        if not ids:
            raise _wrong(name, value, "messages of which the chat template makes at least one token")
        return list(ids)

    def _check_length(self, length: int, max_new_tokens: int) -> None:
        if self._max_prompt_tokens is not None and length > self._max_prompt_tokens:
            raise _BadRowError(
                f"the prompt has {length} tokens, but `max_prompt_tokens` accepts {self._max_prompt_tokens} at most"
            )
        if self._context is not None and length + max_new_tokens > self._context:
            raise _BadRowError(
                f"the prompt has {length} tokens and `max_new_tokens` is {max_new_tokens}, but the models' context has "
                f"{self._context}; shorten the prompt or ask for fewer new tokens"
            )


def _plain(value: Any) -> Any:
    """The value as Python's own numbers, strings and lists hold it, if a library's scalar or array wraps it."""
    if value is None or isinstance(value, (str, bytes, int, float, list, tuple, Mapping)):
        # numpy's float64 and str_ are floats and strings already, and good as such.
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    for method in ("as_py", "to_pylist", "tolist"):  # pyarrow's scalars, its arrays, and numpy's and torch's of both
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    return value


def _wrong(name: str, value: Any, accepted: str) -> _BadRowError:
    needed = accepted if " needed" in accepted else f"{accepted} is needed"
    return _BadRowError(f"{name} is {_shortened.repr(value)} ({type(value).__name__}), but {needed}")


def _reason(failure: Exception) -> str:
    text = f"{type(failure).__name__}: {failure}"
    # Some errors quote the text they were about, of any length.
    return _printable(text if len(text) <= 200 else text[:200] + "...")


def _printable(text: str) -> str:
    """The text in a form that can be written to a file, whatever names and values of the row it quotes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _quoted(names: Sequence[Any] | Mapping[Any, Any]) -> str:
    shown = [f"`{name}`" for name in list(names)[:12]]
    return ", ".join([*shown, "..."] if len(names) > len(shown) else shown)


def _columns(names: Sequence[str]) -> str:
    return f"column {_quoted(names)} is" if len(names) == 1 else f"columns {_quoted(names)} are"


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise _wrong(
            name, text, f"valid Unicode is needed (half of a surrogate pair at character {failure.start})"
        ) from None


def _row_limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong("column `max_new_tokens`", value, "an integer of at least 1")
    return value


def _stop_strings(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise _wrong("`stop_strings`", value, "text of at least one character, or a list of such texts,")
    for text in texts:
        _check_unicode("`stop_strings`", text)
    return tuple(map(str, texts))


def _without_padding(ids: list[int], mask: Any) -> list[int]:
    """The ids under the ones of a mask, which may leave out ids at either end."""
    name, accepted = "column `attention_mask`", "one 0 or 1 per token id, zeros at the ends only and a one at least,"
    if not isinstance(mask, (list, tuple)) or len(mask) != len(ids):
        raise _wrong(name, mask, accepted)
    seen = [_plain(bit) for bit in mask]
    if any(bit not in (0, 1) for bit in seen) or 1 not in seen:
        raise _wrong(name, mask, accepted)
    first, last = seen.index(1), len(seen) - 1 - seen[::-1].index(1)
    if not all(seen[first : last + 1]):
        raise _wrong(name, mask, accepted)
    return ids[first : last + 1]


def _checked_messages(name: str, value: Any) -> Iterator[dict[str, Any]]:
    """The messages, without keys whose value is None: Arrow gives every message of a column the same keys."""
    if not isinstance(value, (list, tuple)) or not value:
        raise _wrong(name, value, "a list of at least one chat message")
    for place, item in enumerate(value):
        message = _plain(item)
        name_here = f"message {place} of {name}"
        if not isinstance(message, Mapping):
            raise _wrong(name_here, message, "a mapping with `role` and `content`")
        message = {key: _plain(part) for key, part in message.items()}
        message = {key: part for key, part in message.items() if part is not None}
        if not isinstance(message.get("role"), str):
            raise _wrong(f"`role` of {name_here}", message.get("role"), "text such as 'user' or 'assistant'")
        content = message.get("content")
        # An assistant's message may hold nothing but calls of tools or its reasoning, under a name of the template's.
        if "content" in message and not isinstance(content, (str, list, tuple)):
            raise _wrong(f"`content` of {name_here}", content, "text or a list of parts")
        if message.keys() == {"role"}:
            raise _wrong(f"`content` of {name_here}", None, "text or a list of parts")
        for text in _texts(message):
            _check_unicode(name_here, text)
        yield message


def _texts(value: Any) -> Iterator[str]:
    """Every string inside nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(key)
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)
