"""The reader takes what the recorder wrote, and says what is wrong with anything else."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_traces import record

from hf_dsde.trace import load_trace
from hf_dsde.trace.schema import COMMITTED, DRAFTED, SIGNAL_COLUMNS, TOKEN_COLUMNS, table_schema


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces") / "temperature=0"
    record(folder, temperatures=[0.0], max_new_tokens=4, tokens=False)
    return folder


@pytest.fixture
def folder(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "trace")


def describe(folder, **changes):
    file = folder / "trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_the_columns_are_these():
    shared = ["token", "target_argmax", "draft_argmax", "target_agrees", "draft_agrees", *SIGNAL_COLUMNS]
    assert table_schema(COMMITTED).names == ["task", "temperature", "sequence", "position", *shared]
    own = ["round", "start", "offset", "on_path", "accepted"]
    assert table_schema(DRAFTED).names == ["task", "temperature", "sequence", *own, *shared]
    for table in (COMMITTED, DRAFTED):
        assert not set(TOKEN_COLUMNS) & set(table_schema(table, tokens=False).names)
        assert all(table_schema(table).field(name).type == pa.float32() for name in SIGNAL_COLUMNS)


def test_a_folder_whose_name_looks_like_a_column_is_read_like_any_other(recorded):
    assert load_trace(str(recorded)).committed.schema.names == table_schema(COMMITTED, tokens=False).names


def test_another_version_is_refused_with_both_numbers(folder):
    describe(folder, version=2)
    with pytest.raises(ValueError, match=r"trace\.json is of version 2.*reads version 1"):
        load_trace(folder)


def test_another_version_of_a_table_is_refused(folder):
    table = pq.ParquetFile(folder / "drafted.parquet").read()
    metadata = {**table.schema.metadata, b"hf_dsde.trace_version": b"7"}
    pq.write_table(table.replace_schema_metadata(metadata), folder / "drafted.parquet")
    with pytest.raises(ValueError, match=r"drafted\.parquet is of version 7"):
        load_trace(folder)


def test_a_parquet_file_of_somebody_else_is_refused(folder):
    pq.write_table(pa.table({"a": [1]}), folder / "committed.parquet")
    with pytest.raises(ValueError, match="version unknown"):
        load_trace(folder)


def test_other_columns_are_refused_by_name(folder):
    table = pq.ParquetFile(folder / "committed.parquet").read().drop_columns(["kld"])
    pq.write_table(table, folder / "committed.parquet")
    with pytest.raises(ValueError, match=r"acceptance, reverse_kld.*acceptance, kld"):
        load_trace(folder)


def test_swapped_tables_are_refused(folder):
    shutil.copy(folder / "committed.parquet", folder / "drafted.parquet")
    with pytest.raises(ValueError, match="'drafted'"):
        load_trace(folder)


def test_files_of_two_traces_are_refused(folder):
    describe(folder, rows={"committed": 3, "drafted": 3})
    with pytest.raises(ValueError, match="speaks of 3"):
        load_trace(folder)


@pytest.mark.parametrize("name", ["trace.json", "drafted.parquet"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.replace(".", r"\.")):
        load_trace(folder)


def test_another_json_is_refused(folder):
    describe(folder, format="something")
    with pytest.raises(ValueError, match="'something'"):
        load_trace(folder)
