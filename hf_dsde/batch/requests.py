"""Requests of rows: whatever a data set calls a prompt, checked and tokenised, or the reason why it cannot be.

Nothing here raises for what a row holds: one bad row in a million costs that row, and says what it would have needed.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dsde.batch.chat_prompts import ChatPrompts, refuse_template_columns
from hf_dsde.batch.encoding import ToEncode, make_all
from hf_dsde.batch.input_rows import PROMPT_COLUMNS, BrokenRow
from hf_dsde.batch.row_values import BadRowError, check_unicode, plain, printable, quoted, reason, wrong
from hf_dsde.utils.checks import check_flag, check_integer

_ACCEPTED_ROWS = "text, a list of chat messages, a list of token ids, or a mapping with one of these in a column"


@dataclass(frozen=True)
class Request:
    """One text to generate.

    Attributes:
        index: The row's place in the input, from 0.
        prompt: Token ids, at least one.
        max_new_tokens: The most tokens after the prompt, at least 1.
        stop_strings: Texts whose appearance ends generation.
        is_raw_text: Whether the prompt is text that went through no chat template.
    """

    index: int
    prompt: tuple[int, ...] | list[int]
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    is_raw_text: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be generated from; `error` says which value is to blame and what is accepted."""

    index: int
    error: str


class RequestBuilder:
    """Makes requests of rows, all with the same tokenizer and limits.

    A row is text, a list of chat messages, a list of token ids, or a mapping that has one of them in a column:

    - `messages`: chat messages, which the tokenizer's chat template turns into a prompt for the next answer. A last
      message of the assistant is continued instead.
    - `prompt`: text, or chat messages.
    - `text`: text, tokenised with the special tokens that the tokenizer adds by default.
    - `input_ids`: token ids. An `attention_mask` beside them says which are padding, to be taken off at the ends.
    - any other column, if `column` names it; its value's type decides.

    A mapping's `max_new_tokens` and `stop_strings` replace the builder's for that row, and its `chat_template_kwargs`
    and `tools` are added to the arguments of the chat template. These two may be JSON; beside text that goes through no
    template they are an error, and token ids count as the whole prompt.

    A column whose value is None counts as absent, and so does every key inside messages, tools and arguments, which is
    how Arrow stores what a row does not have. Values and arrays of numpy, Arrow and torch count as the numbers and
    lists that they hold; bytes as the UTF-8 text that they hold.

    Args:
        tokenizer: A tokenizer of transformers. While `build` runs in another thread, its padding and truncation must
            not be changed.
        max_new_tokens: The most tokens after each prompt, at least 1.
        stop_strings: Text or texts whose appearance ends generation.
        max_prompt_tokens: The longest prompt that is accepted; None for no limit.
        context: The models' longest text: a prompt and its new tokens must fit. None for no limit.
        column: The column that holds the prompts. None looks for the known ones.
        chat_template_kwargs: Arguments for `tokenizer.apply_chat_template`, such as `tools` or `enable_thinking`.
        chat: Whether text is a user's message, which goes through the chat template, and not a prompt as it stands.
        image_tokens: Tokens that stand for parts of images, of which rows bring none.

    Raises:
        TypeError, ValueError: An argument is none of what is accepted, or `chat` asks for a template that there is not.
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
        chat: bool = False,
        image_tokens: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._image_tokens = frozenset(image_tokens)
        self._max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1)
        try:
            self._stop_strings = _stop_strings(stop_strings)
        except BadRowError as failure:
            raise ValueError(str(failure)) from None
        if max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", max_prompt_tokens, 1)
        if context is not None:
            check_integer("context", context, 2)
        if column is not None and not isinstance(column, str):
            raise TypeError(f"`column` is {column!r}, but the name of a column, or None, is needed.")
        self._max_prompt_tokens, self._context, self._column = max_prompt_tokens, context, column
        self._chats = ChatPrompts(tokenizer, chat_template_kwargs or {})
        self._chat = check_flag("chat", chat)
        if chat and not self._chats.has_template:
            raise ValueError(
                "`chat` is True, but the tokenizer has no chat template. Leave it out, give the tokenizer a "
                "`chat_template`, or pass one in `chat_template_kwargs`."
            )
        # The largest id, since some tokenizers leave gaps and `len` counts tokens only.
        self._vocabulary = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))

    def build(self, index: int, row: Any) -> Request | RejectedRow:
        """The request of a row, or why there is none. Never raises for what the row holds."""
        return self.build_all([(index, row)])[0]

    def build_all(self, rows: Sequence[tuple[int, Any]]) -> list[Request | RejectedRow]:
        """The requests of rows with their places: as `build` for each, but the tokenizer works on all at once."""
        return make_all([self._build(index, row) for index, row in rows])

    def _build(self, index: int, row: Any) -> Generator[ToEncode, Any, Request | RejectedRow]:
        if isinstance(row, BrokenRow):
            return RejectedRow(index, printable(row.error))
        try:
            row = plain(row)
            max_new_tokens, stop_strings = self._max_new_tokens, self._stop_strings
            if isinstance(row, Mapping):
                if (given := plain(row.get("max_new_tokens"))) is not None:
                    max_new_tokens = _row_limit(given)
                if (given := plain(row.get("stop_strings"))) is not None:
                    stop_strings = _stop_strings(given)
            prompt, is_raw_text = yield from self._prompt(row)
            self._check_images(prompt)
            self._check_length(len(prompt), max_new_tokens)
        except BadRowError as failure:
            return RejectedRow(index, printable(str(failure)))
        except Exception as failure:  # noqa: BLE001  a mapping or an array of the user's own may raise anything
            return RejectedRow(index, f"the row cannot be read ({reason(failure)}); {_ACCEPTED_ROWS} is needed")
        return Request(index, prompt, max_new_tokens, stop_strings, is_raw_text)

    def _prompt(self, row: Any) -> Generator[ToEncode, Any, tuple[list[int], bool]]:
        """Token ids, and whether they are those of text that went through no template."""
        if not isinstance(row, Mapping):
            return (yield from self._of_any_type("the row", row, _ACCEPTED_ROWS))
        column = self._column_of(row)
        value, name = plain(row[column]), f"column `{column}`"
        if self._column is not None and column not in PROMPT_COLUMNS:
            return (
                yield from self._of_any_type(name, value, "text, a list of chat messages or a list of token ids", row)
            )
        if column == "messages" or (column == "prompt" and isinstance(value, (list, tuple))):
            return (yield from self._chats.prompt(name, value, row)), False
        if column == "input_ids":
            return self._of_ids(name, value, row), False
        return (yield from self._of_text(name, value, row))

    def _column_of(self, row: Mapping[Any, Any]) -> str:
        """The column that holds the prompt."""
        looked_for = PROMPT_COLUMNS if self._column is None else (self._column,)
        present = [name for name in looked_for if name in row]
        filled = [name for name in present if plain(row[name]) is not None]
        if len(filled) == 1:
            return filled[0]
        if filled:
            raise BadRowError(
                f"the row has the columns {quoted(filled)}, and each could be the prompt; pass `column` to say which"
            )
        if present:
            raise BadRowError(f"{_named(present)} None; text, chat messages or token ids are needed")
        found = f"has the columns {quoted(row)}" if row else "is an empty mapping"
        wanted = f"`{looked_for[0]}`" if self._column is not None else f"one of {quoted(PROMPT_COLUMNS)}"
        way_out = "" if self._column is not None else "; pass `column` to name another"
        raise BadRowError(f"the row {found}, but {wanted} is needed{way_out}")

    def _of_any_type(
        self, name: str, value: Any, accepted: str, row: Mapping[Any, Any] | None = None
    ) -> Generator[ToEncode, Any, tuple[list[int], bool]]:
        if isinstance(value, (str, bytes)):
            return (yield from self._of_text(name, value, row))
        if isinstance(value, (list, tuple)) and value:
            if isinstance(plain(value[0]), Mapping):
                return (yield from self._chats.prompt(name, value, row)), False
            return self._of_ids(name, value, row), False
        raise wrong(name, value, accepted)

    def _of_text(
        self, name: str, value: Any, row: Mapping[Any, Any] | None
    ) -> Generator[ToEncode, Any, tuple[list[int], bool]]:
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as failure:
                raise wrong(
                    name, value, f"text in UTF-8 is needed ({failure.reason} at byte {failure.start})"
                ) from None
        if not isinstance(value, str) or not value:
            raise wrong(name, value, "text of at least one character")
        check_unicode(name, value)
        if self._chat:
            return (yield from self._chats.prompt(name, [{"role": "user", "content": value}], row)), False
        refuse_template_columns(row)
        try:
            ids = yield ToEncode(value, self._encode, "text")
        except Exception as failure:  # noqa: BLE001  tokenizers raise bare `Exception`
            raise wrong(name, value, f"text that the tokenizer takes is needed ({reason(failure)})") from None
        if not ids:
            raise wrong(name, value, "text of which the tokenizer makes at least one token")
        return list(ids), True

    def _encode(self, texts: str | list[str]) -> Any:
        return self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]

    def _of_ids(self, name: str, value: Any, row: Mapping[Any, Any] | None) -> list[int]:
        accepted = f"a list of at least one token id from 0 to {self._vocabulary - 1}"
        if not isinstance(value, (list, tuple)) or not value:
            raise wrong(name, value, accepted)
        ids = [token if type(token) is int else plain(token) for token in value]
        for place, token in enumerate(ids):
            if isinstance(token, (list, tuple)):
                raise wrong(name, value, f"{accepted}, without a dimension for a batch,")
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocabulary:
                raise wrong(f"{name} at place {place}", token, f"a token id from 0 to {self._vocabulary - 1}")
        mask = None if row is None else plain(row.get("attention_mask"))
        return ids if mask is None else _without_padding(ids, mask)

    def _check_images(self, prompt: list[int]) -> None:
        found = sorted(self._image_tokens.intersection(prompt))
        if found:
            raise BadRowError(
                f"the prompt has the token ids {found}, which stand for images, but a row brings text alone; take the "
                "images out of it, or generate it with `model.generate(**processor(images, texts), ...)`"
            )

    def _check_length(self, length: int, max_new_tokens: int) -> None:
        if self._max_prompt_tokens is not None and length > self._max_prompt_tokens:
            raise BadRowError(
                f"the prompt has {length} tokens, but `max_prompt_tokens` accepts {self._max_prompt_tokens} at most"
            )
        if self._context is not None and length + max_new_tokens > self._context:
            raise BadRowError(
                f"the prompt has {length} tokens and `max_new_tokens` is {max_new_tokens}, but the models' context has "
                f"{self._context}; shorten the prompt or ask for fewer new tokens"
            )


def _named(columns: Sequence[str]) -> str:
    return f"column {quoted(columns)} is" if len(columns) == 1 else f"columns {quoted(columns)} are"


def _row_limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong("column `max_new_tokens`", value, "an integer of at least 1")
    return value


def _stop_strings(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise wrong("`stop_strings`", value, "text of at least one character, or a list of such texts,")
    for text in texts:
        check_unicode("`stop_strings`", text)
    return tuple(map(str, texts))


def _without_padding(ids: list[int], mask: Any) -> list[int]:
    """The ids under the ones of a mask, which may leave out ids at either end."""
    name, accepted = "column `attention_mask`", "one 0 or 1 per token id, zeros at the ends only and a one at least,"
    if not isinstance(mask, (list, tuple)) or len(mask) != len(ids):
        raise wrong(name, mask, accepted)
    seen = [plain(bit) for bit in mask]
    if any(bit not in (0, 1) for bit in seen) or 1 not in seen:
        raise wrong(name, mask, accepted)
    first, last = seen.index(1), len(seen) - 1 - seen[::-1].index(1)
    if not all(seen[first : last + 1]):
        raise wrong(name, mask, accepted)
    return ids[first : last + 1]
