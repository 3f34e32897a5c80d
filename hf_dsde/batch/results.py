"""What one row of a data set became: its text, why that ended, and what it cost.

This module knows no file and no model; `output.py` keeps results, the engine makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_dsde.measurement.counts import ratio
from hf_dsde.utils.checks import check_choice, check_integer, check_number

END_TOKEN = "end_token"  # noqa: S105 - a reason, not a password
"""The text ends with one of the end-of-sequence tokens."""
STOP = "stop"
"""A stop string or another stopping criterion ended the text."""
LENGTH = "length"
"""The text is as long as was allowed."""
ERROR = "error"
"""There is no text; `RowResult.error` says why."""
FINISH_REASONS = (END_TOKEN, STOP, LENGTH, ERROR)

_COUNTS = ("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted")


@dataclass(frozen=True)
class RowStatistics:
    """Counts of one row. Ratios are derived, as in `hf_dsde.measurement.statistics`.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        new_tokens: Generated tokens that are part of the output, the end token included.
        rounds: Rounds that extended the row.
        drafted: Draft tokens inside the text.
        accepted: How many of those the target accepted.
        seconds: From the row's admission to a batch to its end.

    Raises:
        TypeError: A count is no integer, or `seconds` no number.
        ValueError: A value is negative or not finite, or more tokens were accepted than drafted.
    """

    prompt_tokens: int
    new_tokens: int
    rounds: int
    drafted: int
    accepted: int
    seconds: float

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_integer(name, getattr(self, name), 0)
        # An integer would become a float on its way through a file.
        object.__setattr__(self, "seconds", check_number("seconds", self.seconds, 0.0))
        if self.accepted > self.drafted:
            raise ValueError(
                f"`accepted` is {self.accepted}, but only `drafted`={self.drafted} tokens could have been accepted."
            )

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, in `[0, 1]`; nan when nothing was drafted."""
        return ratio(self.accepted, self.drafted)

    @property
    def mean_draft_length(self) -> float:
        """Draft tokens per round; nan when there was no round."""
        return ratio(self.drafted, self.rounds)

    @property
    def block_efficiency(self) -> float:
        """Generated tokens per round, bonus token included; nan when there was no round."""
        return ratio(self.new_tokens, self.rounds)


@dataclass(frozen=True)
class RowResult:
    """What became of one row of the input.

    Surrogates, which no valid text has but a message about a file name may have, are replaced by U+FFFD (pairs by the
    character that they stand for), so that every result can be written as UTF-8.

    Attributes:
        index: Place of the row in the input, from 0.
        text: Generated text; None for a failed row, or where only tokens are kept.
        token_ids: Generated tokens, the end token included; None for a failed row, or where only texts are kept.
        finish_reason: One of `FINISH_REASONS`.
        error: Why there is no text, for a failed row and for no other.
        statistics: What the row cost; None where that is unknown.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field has a value that is not accepted, or fields contradict each other.
    """

    index: int
    text: str | None
    token_ids: list[int] | None
    finish_reason: str
    error: str | None = None
    statistics: RowStatistics | None = None

    def __post_init__(self) -> None:
        check_integer("index", self.index, 0)
        check_choice("finish_reason", self.finish_reason, FINISH_REASONS)
        for name in ("text", "error"):
            _check_type(name, getattr(self, name), str)
            object.__setattr__(self, name, _without_surrogates(getattr(self, name)))
        _check_type("token_ids", self.token_ids, list)
        _check_type("statistics", self.statistics, RowStatistics)
        wrong = next((token for token in self.token_ids or () if type(token) is not int), None)
        if wrong is not None:
            raise TypeError(
                f"`token_ids` of row {self.index} has {wrong!r} in it, but Python integers are needed. Call `tolist()`."
            )
        if self.finish_reason == ERROR:
            self._check_failed()
        else:
            self._check_finished()

    @classmethod
    def failed(cls, index: int, error: str) -> RowResult:
        """The result of a row that gave no text; `error` says why."""
        return cls(index, None, None, ERROR, error)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RowResult:
        """The inverse of `to_dict`. What has a default may be missing.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is unknown or missing, or a value is not accepted.
        """
        given = dict(values)
        if isinstance(given.get("statistics"), Mapping):
            statistics = given["statistics"]
            _check_names("statistics", statistics, RowStatistics, optional=())
            given["statistics"] = RowStatistics(**statistics)
        _check_names("result", given, cls, optional=("error", "statistics"))
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, `index` first, in types that JSON has; never nan."""
        statistics = None if self.statistics is None else asdict(self.statistics)
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"statistics": statistics}

    def _check_failed(self) -> None:
        if not self.error:
            raise ValueError(
                f"`error` of row {self.index} is {self.error!r}, but a row that failed needs a message. Pass one."
            )
        if self.text is not None or self.token_ids is not None:
            raise ValueError(
                f"Row {self.index} has `finish_reason`={ERROR!r} and yet a text or tokens; a row that failed has "
                f"neither. Use `RowResult.failed`, or another `finish_reason`."
            )

    def _check_finished(self) -> None:
        if self.error is not None:
            raise ValueError(
                f"`error` of row {self.index} is {self.error!r}, but `finish_reason` is {self.finish_reason!r}. Only "
                f"rows that failed have an `error`; use `RowResult.failed` for them."
            )
        if self.text is None and self.token_ids is None:
            raise ValueError(f"Row {self.index} has neither `text` nor `token_ids`; pass at least one of them.")
        if self.statistics is None or self.token_ids is None:
            return
        if self.statistics.new_tokens != len(self.token_ids):
            raise ValueError(
                f"`statistics.new_tokens` of row {self.index} is {self.statistics.new_tokens}, but `token_ids` has "
                f"{len(self.token_ids)} tokens. Count every generated token of the output, the end token included."
            )


def _check_type(argument: str, value: object, wanted: type) -> None:
    if value is not None and not isinstance(value, wanted):
        raise TypeError(f"`{argument}` is {value!r}, but {wanted.__name__} or None is needed.")


def _check_names(what: str, values: Mapping[str, Any], kind: type, optional: tuple[str, ...]) -> None:
    names = {field.name for field in fields(kind)}
    wrong, missing = set(values) - names, names - set(values) - set(optional)
    if wrong or missing:
        raise ValueError(
            f"The {what} has unknown fields {sorted(map(str, wrong))} and lacks {sorted(missing)}; "
            f"the fields of a {kind.__name__} are needed: {sorted(names)}."
        )


def _without_surrogates(text: str | None) -> str | None:
    if text is None or text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
