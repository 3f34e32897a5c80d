"""Reading rows of every format: broken ones keep their place, and files are told apart by their bytes."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_dsde.batch.input_rows import BrokenRow, input_identity, read_rows


def _file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".JSONL"])
def test_each_line_of_json_lines_is_a_row_of_any_kind(tmp_path, suffix):
    rows = [{"prompt": "a"}, "text", [1, 2], [{"role": "user", "content": "x"}], None, 3, {"text": "a\u2028b"}]
    path = _file(tmp_path, f"in{suffix}", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert list(read_rows(path)) == rows


def test_a_broken_line_keeps_its_place_and_says_where_it_is(tmp_path):
    path = _file(tmp_path, "in.jsonl", b'"a"\n{"prompt": \n"\xff"\n"d"\n')
    first, broken, undecodable, last = read_rows(path)
    assert (first, last) == ("a", "d")
    assert isinstance(broken, BrokenRow)
    assert "line 2 is no JSON" in broken.error
    assert isinstance(undecodable, BrokenRow)
    assert "line 3 is no UTF-8" in undecodable.error


def test_json_nested_beyond_reason_is_a_broken_line(tmp_path):
    path = _file(tmp_path, "in.jsonl", "[" * 200_000 + "\n1\n")
    broken, after = read_rows(path)
    assert isinstance(broken, BrokenRow)
    assert after == 1


def test_blank_lines_are_no_rows_of_json_lines_but_count_in_messages(tmp_path):
    path = _file(tmp_path, "in.jsonl", "\n1\n   \n\t\r\n2\n{\n\n")
    *rows, broken = read_rows(path)
    assert rows == [1, 2]
    assert "line 6" in broken.error


def test_every_line_of_a_text_file_is_a_prompt_also_an_empty_one(tmp_path):
    path = _file(tmp_path, "in.txt", b"first \n\n  third\r\n\xff\xfe\nfifth\xe2\x80\xa8still")
    rows = list(read_rows(path))
    assert rows[:3] == ["first ", "", "  third"]
    assert isinstance(rows[3], BrokenRow)
    assert rows[4:] == ["fifth\u2028still"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert list(read_rows(_file(tmp_path, "in.txt", mark + b"a\n" + mark + b"b"))) == ["a", "\ufeffb"]
    assert list(read_rows(_file(tmp_path, "in.jsonl", mark + b'"a"'))) == ["a"]
    assert list(read_rows(_file(tmp_path, "in.json", mark + b'["a"]'))) == ["a"]
    assert list(read_rows(_file(tmp_path, "in.csv", mark + b"text\na\n"))) == [{"text": "a"}]


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_an_empty_file_has_no_rows(tmp_path, name):
    assert list(read_rows(_file(tmp_path, name, ""))) == []


def test_a_json_file_is_an_array_of_rows(tmp_path):
    rows = [{"prompt": "a"}, "b", [3]]
    assert list(read_rows(_file(tmp_path, "in.json", json.dumps(rows)))) == rows


@pytest.mark.parametrize(
    ("content", "complaint"), [('{"a": 1}', "JSON dict"), ("[1,", "no JSON"), (b"\xff", "no JSON")]
)
def test_a_json_file_of_anything_else_is_refused_at_once(tmp_path, content, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_rows(_file(tmp_path, "in.json", content))


def _parquet(tmp_path, rows):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return path


def test_parquet_rows_are_mappings_with_python_values(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "x"}], "max_new_tokens": 3, "id": 7},
        {"messages": None, "max_new_tokens": None, "id": 8},
    ]
    assert list(read_rows(_parquet(tmp_path, rows))) == rows


def test_parquet_is_read_batch_by_batch_in_order(tmp_path):
    rows = [{"text": f"row {number}", "other": "x" * 10} for number in range(1000)]
    reading = read_rows(_parquet(tmp_path, rows), "text")
    assert next(reading) == {"text": "row 0"}
    assert [row["text"] for row in reading] == [f"row {number}" for number in range(1, 1000)]


def test_only_the_named_column_and_options_of_rows_are_read_from_tables(tmp_path):
    rows = [{"question": "q", "answer": "a", "max_new_tokens": 3, "attention_mask": [1]}]
    wanted = {"question": "q", "max_new_tokens": 3, "attention_mask": [1]}
    assert list(read_rows(_parquet(tmp_path, rows), "question")) == [wanted]
    path = _file(tmp_path, "in.csv", "answer,question,stop_strings\na,q,.\n")
    assert list(read_rows(path, "question")) == [{"question": "q", "stop_strings": "."}]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_table_without_the_named_column_is_refused_at_once(tmp_path, suffix):
    path = _parquet(tmp_path, [{"a": 1, "b": 2}]) if suffix == "parquet" else _file(tmp_path, "in.csv", "a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"no column `prompt`. Its columns are: a, b"):
        read_rows(path, "prompt")


def test_a_file_that_is_no_parquet_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="no Parquet file"):
        read_rows(_file(tmp_path, "in.parquet", "text"))


def test_cells_of_csv_are_text_whatever_they_look_like(tmp_path):
    path = _file(tmp_path, "in.csv", 'prompt,n\n42,x\n"a\nb ""c"" , d",\nnull,é\n1.5,true\n')
    assert list(read_rows(path)) == [
        {"prompt": "42", "n": "x"},
        {"prompt": 'a\nb "c" , d', "n": ""},
        {"prompt": "null", "n": "é"},
        {"prompt": "1.5", "n": "true"},
    ]


def test_limits_of_rows_in_csv_are_numbers_and_empty_options_are_none(tmp_path):
    path = _file(tmp_path, "in.csv", "text,max_new_tokens,stop_strings\na,12,.\nb,,\nc,many,\nd,-1,\n")
    rows = list(read_rows(path))
    assert [row["max_new_tokens"] for row in rows] == [12, None, "many", -1]
    assert [row["stop_strings"] for row in rows] == [".", None, None, None]


def test_csv_rows_with_too_few_or_many_cells_keep_their_places(tmp_path):
    broken_at = {0, 1, 17, 998, 999}
    lines = [f"row {i}" if i in broken_at else f"row {i},x" for i in range(1000)]
    rows = list(read_rows(_file(tmp_path, "in.csv", "\n".join(["text,other", *lines]))))
    assert {i for i, row in enumerate(rows) if isinstance(row, BrokenRow)} == broken_at
    assert all(row["text"] == f"row {i}" for i, row in enumerate(rows) if i not in broken_at)
    assert rows[17].error == "row 19 of the CSV file has 1 cells, not 2"


def test_a_cell_of_csv_may_be_longer_than_a_few_pages(tmp_path):
    lengths = (200_000, 3_000_000, 1)
    rows = read_rows(_file(tmp_path, "in.csv", "\n".join(["text", *("x" * length for length in lengths)])))
    assert [len(row["text"]) for row in rows] == list(lengths)


def test_a_cell_of_csv_that_is_no_utf8_stays_bytes_for_its_row_to_be_rejected(tmp_path):
    assert list(read_rows(_file(tmp_path, "in.csv", b"text\na\n\xff\nc\n"))) == [
        {"text": "a"},
        {"text": b"\xff"},
        {"text": "c"},
    ]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe,a\n1,2\n"])
def test_csv_without_a_line_of_names_is_refused_at_once(tmp_path, content):
    with pytest.raises(ValueError, match="no CSV file"):
        read_rows(_file(tmp_path, "in.csv", content))


def test_csv_with_names_only_has_no_rows(tmp_path):
    assert list(read_rows(_file(tmp_path, "in.csv", "text,other\n"))) == []


@pytest.mark.parametrize(("lines", "expected"), [("jsonl", ["a", 1]), ("text", ['"a"', "", "1"])])
def test_standard_input_is_json_lines_or_text(monkeypatch, lines, expected):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'"a"\n\n1\n')))
    assert list(read_rows("-", lines=lines)) == expected


def test_a_stream_is_read_line_by_line_and_left_open():
    stream = io.BytesIO(b"1\n2\n3\n")
    rows = read_rows(stream)
    assert next(rows) == 1
    assert list(rows) == [2, 3]
    assert not stream.closed


def test_what_is_no_input_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"'\.xlsx'.*\.jsonl.*\.csv"):
        read_rows(_file(tmp_path, "in.xlsx", ""))
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(IsADirectoryError, match="folder"):
        read_rows(tmp_path)
    with pytest.raises(ValueError, match="`lines`"):
        read_rows("-", lines="yaml")
    with pytest.raises(TypeError, match=r"`\.buffer`"):
        read_rows(io.StringIO("1"))


def test_an_identity_is_name_size_and_hash_of_the_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dsde.batch.input_rows._CHUNK_BYTES", 7)
    content = b"0123456789" * 5
    path = _file(tmp_path, "in.txt", content)
    expected = {"name": "in.txt", "size": 50, "sha256": hashlib.sha256(content).hexdigest()}
    assert input_identity(path) == expected
    (tmp_path / "elsewhere").mkdir()
    assert input_identity(path.rename(tmp_path / "elsewhere" / "in.txt")) == expected


def test_standard_input_and_absent_files_have_no_identity(tmp_path):
    with pytest.raises(ValueError, match="Standard input"):
        input_identity("-")
    with pytest.raises(FileNotFoundError):
        input_identity(tmp_path / "absent")
