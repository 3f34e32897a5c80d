"""Data sets of every shape go through `map`, `stream` and `run`, or are refused with the way out."""

from __future__ import annotations

import datetime as dt
import json

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Sequence, Value
from tiny_pair import tiny_pair

from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.batch.output import read_results

PROMPTS = ["a", "bb", "cGh"]
PAIR = tiny_pair(torch.float32)


@pytest.fixture(autouse=True)
def quiet_datasets():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def generator(**changes):
    settings = {"speculation_policy": "static", "batch_size": 2, "max_new_tokens": 3, **changes}
    return BatchGenerator(PAIR.target, PAIR.tokenizer, assistant_model=PAIR.draft, **settings)


@pytest.fixture(scope="module")
def expected():
    return [result.text for result in generator().stream(PROMPTS, ordered=True)]


def data(prompts=PROMPTS, features=None, **columns):
    features = None if features is None else Features({"prompt": Value("string"), **features})
    return Dataset.from_dict({"prompt": prompts, **columns}, features=features)


OTHER_COLUMNS = {
    "struct": {"answers": [{"text": ["x"]}] * 3},
    "struct or none": {"answers": [{"text": ["x"]}, None, None]},
    "struct of structs": {"answers": [{"a": {"b": {"c": 1}}}] * 3},
    "list of structs": {"answers": [[{"text": "x"}], [], None]},
    "times": {"when": [dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)] * 3, "day": [dt.date(2020, 1, 1)] * 3},
    "bytes": {"raw": [b"\xff", b"", None]},
    "numbers": {"id": [1, 2, 3], "score": [0.5, None, 1.5]},
    "nothing": {"empty": [None] * 3},
    "outputs of before": {"generated_text": [1, 2, 3], "finish_reason": [[1]] * 3, "generation_statistics": ["x"] * 3},
}


@pytest.mark.parametrize("what", OTHER_COLUMNS)
def test_columns_that_are_not_read_may_hold_anything(what, expected, tmp_path):
    given = data(**OTHER_COLUMNS[what])
    mapped = given.map(generator(), batched=True)
    assert mapped["generated_text"][:] == expected
    kept = [name for name in given.column_names if not name.startswith(("generat", "finish"))]
    assert mapped.select_columns(kept).to_list() == given.select_columns(kept).to_list()
    assert [result.text for result in generator().stream(given, ordered=True)] == expected
    given.to_parquet(tmp_path / "in.parquet")
    for source in (given, tmp_path / "in.parquet"):
        output = tmp_path / f"{type(source).__name__}.parquet"
        generator().run(source, output, ordered=True)
        assert [result.text for result in read_results(output)] == expected


def test_lists_of_mappings_that_a_feature_turned_around_are_left_alone(expected):
    features = {"answers": Sequence({"text": Value("string"), "start": Value("int32")})}
    given = data(features=features, answers=[{"text": ["x"], "start": [1]}] * 3)
    assert given.map(generator(), batched=True)["generated_text"][:] == expected


def test_images_are_not_decoded_for_prompts_beside_them(expected, tmp_path):
    pytest.importorskip("PIL")
    broken = [{"bytes": b"no image", "path": None}] * 3
    given = data(features={"image": datasets.Image()}, image=broken)
    with pytest.raises(Exception, match="cannot identify image"):
        given[0]
    assert [result.text for result in generator().stream(given, ordered=True)] == expected
    assert [result.text for result in generator().stream(given.to_iterable_dataset(), ordered=True)] == expected
    assert given.map(generator(), batched=True).remove_columns("image")["generated_text"][:] == expected
    generator().run(given, tmp_path / "out.jsonl", ordered=True)
    assert [result.text for result in read_results(tmp_path / "out.jsonl")] == expected


WAYS = {
    "features": lambda g: Dataset.from_dict(
        {"prompt": PROMPTS}, features=Features({"prompt": Value("large_string")})
    ).map(g, batched=True),
    "numpy": lambda g: data(x=[{"y": 1}] * 3).with_format("numpy").map(g, batched=True),
    "torch": lambda g: data(x=[{"y": 1}] * 3).with_format("torch").map(g, batched=True),
    "a stream": lambda g: data(x=[{"y": 1}] * 3).to_iterable_dataset().map(g, batched=True),
    "a stream of numpy": lambda g: data().to_iterable_dataset().with_format("numpy").map(g, batched=True),
    "a dict": lambda g: DatasetDict(a=data(), b=data(x=[{"y": 1}] * 3)).map(g, batched=True)["b"],
    "removed columns": lambda g: data(x=[{"y": 1}] * 3).map(g, batched=True, remove_columns=["prompt", "x"]),
    "one input column": lambda g: data(x=[1, 2, 3]).map(g, batched=True, input_columns="prompt"),
    "one input column in a list": lambda g: data(x=[1, 2, 3]).map(g, batched=True, input_columns=["prompt"]),
    "batches of one": lambda g: data().map(g, batched=True, batch_size=1),
    "one batch": lambda g: data().map(g, batched=True, batch_size=None),
    "a named column": lambda g: data().rename_column("prompt", "q").map(_named("q"), batched=True),
}


def _named(column):
    return generator(column=column)


@pytest.mark.parametrize("way", WAYS)
def test_map_takes_data_sets_in_every_way_that_keeps_rows_apart(way, expected):
    assert [row["generated_text"] for row in WAYS[way](generator())] == expected


MESSAGES = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
TABLES = "map hands over tables of {}, .*Call `dataset.with_format\\(None\\).map\\(generator, batched=True\\)`"
REFUSED = {
    "one row of text": (lambda g: data().map(g), "column 'prompt' holds one value .*batched=True"),
    "one row of text beside a struct": (
        lambda g: data(x=[{"y": 1}] * 3).map(g),
        "column 'prompt' holds one value .*batched=True",
    ),
    "one row of messages": (
        lambda g: Dataset.from_dict({"messages": MESSAGES}).map(g),
        "column 'messages' .*the messages of one row.*batched=True",
    ),
    "one row of ids": (
        lambda g: Dataset.from_dict({"input_ids": [[3, 4], [5]]}).map(g),
        "column 'input_ids' .*the token ids of one row.*batched=True",
    ),
    "one row of ids in numpy": (
        lambda g: Dataset.from_dict({"input_ids": [[3, 4], [5]]}).with_format("numpy").map(g),
        "column 'input_ids' .*the token ids of one row.*batched=True",
    ),
    "one row of a stream": (lambda g: data().to_iterable_dataset().map(g), "column 'prompt' holds one value"),
    "one value": (lambda g: data().map(g, input_columns="prompt"), "map hands over one value .*batched=True"),
    "arrow": (lambda g: data().with_format("arrow").map(g, batched=True), TABLES.format("pyarrow")),
    "pandas": (lambda g: data().with_format("pandas").map(g, batched=True), TABLES.format("pandas")),
    "a row of pandas": (lambda g: data().with_format("pandas").map(g), TABLES.format("pandas")),
    "a stream of arrow": (
        lambda g: data().to_iterable_dataset().with_format("arrow").map(g, batched=True),
        TABLES.format("pyarrow"),
    ),
    "two input columns": (
        lambda g: data(x=[1, 2, 3]).map(g, batched=True, input_columns=["prompt", "x"]),
        "`input_columns` of map names 2 columns, .*Leave it out",
    ),
    "indices": (lambda g: data().map(g, batched=True, with_indices=True), "with_indices or with_rank.*Leave them out"),
    "ranks": (lambda g: data().map(g, batched=True, with_rank=True), "with_indices or with_rank.*Leave them out"),
    "settings": (
        lambda g: data().map(g, batched=True, fn_kwargs={"max_new_tokens": 3}),
        "`fn_kwargs` of map has max_new_tokens, .*Pass them to BatchGenerator",
    ),
    "another column": (
        lambda g: data().rename_column("prompt", "q").map(g, batched=True),
        "none of the columns `messages`, .*Its columns are: q; pass `column`",
    ),
    "a column that is not there": (
        lambda g: data().map(generator(column="q"), batched=True),
        "no column `q`. Its columns are: prompt",
    ),
    "mappings as prompts": (
        lambda g: data(q=[{"a": 1}] * 3).map(generator(column="q"), batched=True),
        "column 'q' holds one mapping a row",
    ),
    "limits that numpy made floats": (
        lambda g: data(max_new_tokens=[1, None, 2]).with_format("numpy").map(g, batched=True),
        "column 'max_new_tokens' holds numpy's floating-point numbers.*with_format",
    ),
    "arguments that numpy made floats": (
        lambda g: (
            Dataset.from_dict({"messages": MESSAGES, "chat_template_kwargs": [{"n": 1}, {"n": None}, {"n": 2}]})
            .with_format("numpy")
            .map(g, batched=True)
        ),
        "column 'chat_template_kwargs' holds numpy's floating-point numbers.*with_format",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_map_refuses_by_name_what_mixes_rows_up(what):
    call, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        list(call(generator()))


def test_an_empty_data_set_stays_empty(tmp_path):
    assert len(data(prompts=[]).map(generator(), batched=True)) == 0
    assert list(generator().stream(data(prompts=[]))) == []
    assert generator().run(data(prompts=[]), tmp_path / "out.jsonl").rows == 0
    assert generator()({}) == generator()({"prompt": []})


def test_a_data_set_without_prompts_is_refused_before_an_output_is_made(tmp_path):
    other = data().rename_column("prompt", "q")
    other.to_parquet(tmp_path / "in.parquet")
    for source in (other, other.to_iterable_dataset(), tmp_path / "in.parquet"):
        with pytest.raises(ValueError, match=r"none of the columns `messages`.*pass `column`"):
            generator().run(source, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="none of the columns"):
        generator().stream(other)


@pytest.mark.parametrize("format_", ["numpy", "torch", "arrow", "pandas"])
def test_jobs_and_streams_read_rows_as_they_are_in_any_format(format_, tmp_path):
    limits = [1, None, 2]
    given = data(max_new_tokens=limits, x=[{"y": [1]}] * 3).with_format(format_)
    for source in (given, given.to_iterable_dataset()):
        counts = [len(result.token_ids) for result in generator().stream(source, ordered=True)]
        assert counts == [1, 3, 2]
    generator().run(given, tmp_path / "out.jsonl", ordered=True)
    assert [len(result.token_ids) for result in read_results(tmp_path / "out.jsonl")] == [1, 3, 2]
    # A format is no other data: the job is done.
    assert generator().run(given, tmp_path / "out.jsonl").skipped == 3


def test_bad_rows_in_the_first_batch_do_not_decide_what_columns_hold():
    rows = ["", "", "a", "bb"]
    mapped = data(prompts=rows).map(generator(), batched=True, batch_size=2)
    assert [bool(ids) for ids in mapped["generated_token_ids"]] == [False, False, True, True]


TIGHT = {"context": 16}
ODD_ROWS = {
    "white space": ({"prompt": " "}, "at least one token"),
    "a line break": ({"prompt": "a\nb"}, None),
    "an accent": ({"prompt": "aé"}, None),
    "an emoji": ({"prompt": "a😀"}, None),
    "half of an emoji": ({"prompt": "a\ud83d"}, "valid Unicode"),
    "empty": ({"prompt": ""}, "at least one character"),
    "none": ({"prompt": None}, "is None"),
    "twice": ({"prompt": "a"}, None),
    "twice again": ({"prompt": "a"}, None),
    "longer than the context": ({"prompt": "a" * 600}, "context has 512"),
    "bytes": ({"prompt": b"ab"}, None),
    "a limit of numpy": ({"prompt": "a", "max_new_tokens": np.int32(2)}, None),
    "no limit": ({"prompt": "a", "max_new_tokens": None}, None),
    "a limit of nothing": ({"prompt": "a", "max_new_tokens": 0}, "at least 1"),
    "a limit that is no number": ({"prompt": "a", "max_new_tokens": "two"}, "an integer"),
    "a stop string": ({"prompt": "a", "stop_strings": "Gh"}, None),
    "stop strings": ({"prompt": "a", "stop_strings": ["Gh", "Hr"]}, None),
    "no stop string": ({"prompt": "a", "stop_strings": None}, None),
    "no stop strings": ({"prompt": "a", "stop_strings": []}, None),
    "an empty stop string": ({"prompt": "a", "stop_strings": ""}, "`stop_strings` is ''"),
    "a stop string in a list, empty": ({"prompt": "a", "stop_strings": [""]}, "`stop_strings` is ['']"),
    "another column of times": ({"prompt": "a", "when": dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)}, None),
    "an output's name": ({"prompt": "a", "index": 7, "error": "x", "text": None}, None),
}


@pytest.mark.parametrize("way", ["stream", "run", "parquet"])
def test_odd_rows_give_a_text_or_an_error_of_their_own(way, tmp_path):
    rows = [row for row, _ in ODD_ROWS.values()]
    if way == "stream":
        results = list(generator().stream(rows, ordered=True))
    else:
        output = tmp_path / ("out.jsonl" if way == "run" else "out.parquet")
        assert generator().run(rows, output, ordered=True).rows == len(rows)
        results = list(read_results(output))
        assert generator().run(rows, output).skipped == len(rows)
    for result, (what, (row, error)) in zip(results, ODD_ROWS.items(), strict=True):
        if error is None:
            assert result.error is None, (what, result.error)
            assert 1 <= len(result.token_ids) <= (row.get("max_new_tokens") or 3), what
        else:
            assert error in result.error, what
    by_name = dict(zip(ODD_ROWS, results, strict=True))
    assert by_name["twice"].text == by_name["twice again"].text == by_name["no limit"].text
    assert len(by_name["a limit of numpy"].token_ids) == 2


def test_odd_rows_go_through_map_and_files_alike(tmp_path):
    def fits(row):
        plain = all(isinstance(value, (str, int, type(None))) for value in row.values())
        return plain and "\ud83d" not in str(row.get("prompt")) and not {"index", "when"} & set(row)

    chosen = {what: entry for what, entry in ODD_ROWS.items() if fits(entry[0])}
    del chosen["a limit that is no number"]  # Arrow's columns have one type
    rows = [{"max_new_tokens": None, "stop_strings": None, **row} for row, _ in chosen.values()]
    streamed = [result.text or "" for result in generator().stream(rows, ordered=True)]
    assert Dataset.from_list(rows).map(generator(), batched=True, batch_size=5)["generated_text"][:] == streamed
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    for name in ("in.jsonl", "in.parquet"):
        generator().run(tmp_path / name, tmp_path / f"{name}.out.jsonl", ordered=True)
        assert [result.text or "" for result in read_results(tmp_path / f"{name}.out.jsonl")] == streamed


@pytest.mark.parametrize(
    "rows",
    [
        lambda: tuple(PROMPTS),
        lambda: pd.Series(PROMPTS, index=[7, 0, 1]),
        lambda: dict.fromkeys(PROMPTS),
        lambda: np.array(PROMPTS),
        lambda: iter(PROMPTS),
        lambda: data()["prompt"],
    ],
    ids=["tuple", "series", "dict", "array", "iterator", "column"],
)
def test_any_iterable_gives_its_rows_in_its_order(rows, expected, tmp_path):
    assert [result.text for result in generator().stream(rows(), ordered=True)] == expected
    generator().run(rows(), tmp_path / "out.jsonl", ordered=True)
    assert [result.text for result in read_results(tmp_path / "out.jsonl")] == expected


class CountsCalls:
    """A tokenizer that notes how much it is given at a time."""

    def __init__(self, tokenizer):
        self._tokenizer, self.sizes = tokenizer, []

    def __call__(self, texts, **arguments):
        self.sizes.append(1 if isinstance(texts, str) else len(texts))
        return self._tokenizer(texts, **arguments)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __len__(self):
        return len(self._tokenizer)


@pytest.mark.parametrize(("rows", "most"), [(list, 4), (iter, 1)], ids=["at hand", "waited for"])
def test_prompts_that_are_at_hand_are_encoded_many_at_a_time(rows, most):
    tokenizer = CountsCalls(PAIR.tokenizer)
    builder = generator(batch_size=4)
    builder._builder._tokenizer = tokenizer
    texts = [*PROMPTS, "", "zzz", *PROMPTS, "a"]
    results = list(builder.stream(rows(texts), ordered=True))
    alone = list(generator(batch_size=4).stream(iter(texts), ordered=True))
    assert [(r.text, r.error) for r in results] == [(r.text, r.error) for r in alone]
    assert max(tokenizer.sizes) == most
