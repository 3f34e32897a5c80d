"""What is read of a data set of `datasets`: the columns that make requests, whatever else it has, in any format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_dsde.batch.input_rows import PROMPT_COLUMNS, check_columns, columns_read
from hf_dsde.batch.row_values import plain

_WITHOUT_FORMAT = (
    "Call `dataset.with_format(None).map(generator, batched=True)`; the result can be given the format again."
)
_CALL_BATCHED = "Call map with batched=True, and with a batch_size of some times the generator's."


def read_only_what_counts(source: Any, column: str | None) -> Any:
    """The rows of a `Dataset` or `IterableDataset` without columns that nobody reads and as plain Python.

    Columns of images or audio are then never decoded, and no format makes an array or a table of a row. Any other
    source is returned as it is.

    Args:
        source: Rows.
        column: The column that holds the prompts; None for the known ones.

    Raises:
        ValueError: The data set says which columns it has, and none of them can hold the prompts.
    """
    if not (hasattr(source, "with_format") and hasattr(source, "select_columns")):
        return source
    source = source.with_format(None)
    names = getattr(source, "column_names", None)
    if not names or len(source if hasattr(source, "__len__") else names) == 0:
        return source
    check_columns("The data set", names, column)
    return source.select_columns(columns_read(names, column))


def rows_of_batch(batch: Any, others: Sequence[Any], settings: Mapping[str, Any], column: str | None) -> list[Any]:
    """The rows of a batch that `map` hands over.

    Args:
        batch: Columns by name; or the values of the one column that `input_columns` names.
        others: What `map` hands over beside them.
        settings: What `map` hands over by name.
        column: The column that holds the prompts; None for the known ones.

    Returns:
        Mappings with the columns that are read, or prompts without a name.

    Raises:
        TypeError: `map` was called in a way that hands over something else; the message says which.
        ValueError: No column can hold the prompts.
    """
    if settings:
        raise TypeError(
            f"`fn_kwargs` of map has {', '.join(settings)}, but settings are arguments of the generator. Pass them to "
            "BatchGenerator, or put them into columns where rows have their own."
        )
    if isinstance(batch, Mapping):
        if others:
            raise TypeError(
                "map was called with with_indices or with_rank, of which a generator has no use. Leave them out."
            )
        return _rows_of_columns(batch, column)
    if not _is_column(batch):
        _refuse_table_or_value(batch)
    if others:
        raise TypeError(
            f"`input_columns` of map names {1 + len(others)} columns, which come without their names (or with_indices "
            "or with_rank was added to it). Leave it out: only columns that a generator knows are read, and `column` "
            "of BatchGenerator names the one with the prompts."
        )
    values = list(batch)
    _check_batched("of `input_columns`", values)
    return values


def _rows_of_columns(batch: Mapping[str, Any], column: str | None) -> list[dict[str, Any]]:
    names = list(batch)
    if not names:
        return []
    check_columns("The data set", names, column)
    columns: dict[str, list[Any]] = {}
    read = columns_read(names, column)
    prompts = [name for name in read if name in ((column,) if column is not None else PROMPT_COLUMNS)]
    for name in sorted(read, key=lambda name: name not in prompts):
        values = batch[name]
        if name in prompts:
            if not _is_column(values):
                raise TypeError(f"column {name!r} holds one value and not a list of them. {_CALL_BATCHED}")
            _check_batched(repr(name), list(values))
        if name not in ("input_ids", "attention_mask"):
            _check_numbers(name, values)
        columns[name] = list(values)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_column(values: Any) -> bool:
    """Whether it can be the values of several rows."""
    scalar = values is None or isinstance(values, (str, bytes, Mapping)) or getattr(values, "ndim", 1) == 0
    # Tables have columns where lists have items.
    return not scalar and isinstance(values, Iterable) and not hasattr(values, "columns")


def _check_batched(name: str, values: Sequence[Any]) -> None:
    """Refuse the messages or the token ids of a single row, which look like a column of mappings or of numbers."""
    first = next((plain(value) for value in values if value is not None), None)
    if isinstance(first, (int, Mapping)) and not isinstance(first, bool):
        what, whole = ("mapping", "messages") if isinstance(first, Mapping) else ("number", "token ids")
        raise TypeError(
            f"column {name} holds one {what} a row, or is the {whole} of one row. A row is text, chat messages or a "
            f"list of token ids. {_CALL_BATCHED}"
        )


def _check_numbers(name: str, value: Any) -> None:
    """Refuse arrays of floating-point numbers: they may have been integers beside nothing, or more precise."""
    if isinstance(value, (str, bytes)):
        return
    if "float" in str(getattr(value, "dtype", "")):
        raise TypeError(
            f"column {name!r} holds {type(value).__module__.partition('.')[0]}'s floating-point numbers, which that "
            f"format also makes of integers where a value is missing. {_WITHOUT_FORMAT}"
        )
    if isinstance(value, Mapping):
        for part in value.values():
            _check_numbers(name, part)
    elif _is_column(value) and getattr(getattr(value, "dtype", None), "kind", "O") == "O":
        for part in value:
            _check_numbers(name, part)


def _refuse_table_or_value(batch: Any) -> None:
    if hasattr(batch, "columns"):
        raise TypeError(
            f"map hands over tables of {type(batch).__module__.partition('.')[0]}, since the data set has that format. "
            f"{_WITHOUT_FORMAT}"
        )
    raise TypeError(f"map hands over one value ({type(batch).__name__}) and not a list of them. {_CALL_BATCHED}")
