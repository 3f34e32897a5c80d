"""What of a job's results is on disk when, and how other tools read them."""

import os
from pathlib import Path

import pytest
from output_job import JOB, expected
from outputs import FORMATS, indices, write

from hf_dsde.batch import parquet_output
from hf_dsde.batch.output import merge, open_output, read_results
from hf_dsde.batch.results import LENGTH, RowResult


def recorded_calls(monkeypatch):
    """What is told to the disk from now on, in order: the call, and the name of the file or folder."""
    calls = []
    real_fsync, real_replace, real_write = os.fsync, os.replace, os.write

    def name(descriptor):
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", name(fd))), real_fsync(fd))[1])
    monkeypatch.setattr(os, "write", lambda fd, c: (calls.append(("write", name(fd))), real_write(fd, c))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("replace", Path(b).name)), real_replace(a, b))[1])
    return calls


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the names of open files")
class TestWhatIsOnDisk:
    @pytest.mark.parametrize(("suffix", "name"), [(".jsonl", "out.jsonl"), (".parquet", "shard-0-of-1.jsonl")])
    def test_results_are_when_write_returns(self, tmp_path, monkeypatch, suffix, name):
        with open_output(tmp_path / f"out{suffix}", job=JOB) as output:
            calls = recorded_calls(monkeypatch)
            output.write([expected(1), expected(2)])
            assert calls == [("write", name), ("fsync", name)]
            assert output.done == {1, 2}

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_a_merged_file_is_before_it_gets_its_name(self, tmp_path, monkeypatch, suffix):
        path = tmp_path / f"out{suffix}"
        write(path, [1], shards=2)
        calls = recorded_calls(monkeypatch)
        merge(path)
        assert calls == [("fsync", "merged.tmp"), ("replace", path.name), ("fsync", tmp_path.name)]


@pytest.mark.parametrize("ordered", [False, True])
def test_large_parquet_outputs_are_joined_in_pieces(tmp_path, monkeypatch, ordered):
    monkeypatch.setattr(parquet_output, "ROW_GROUP", 10)
    path = tmp_path / "out.parquet"
    rows = [i * 37 % 101 for i in range(101)]
    for start in range(0, 101, 25):
        write(path, rows[start : start + 25], ordered=ordered)
        merge(path)
    assert list(read_results(path)) == [expected(i) for i in (sorted(rows) if ordered else rows)]
    with parquet_output.pq.ParquetFile(path) as file:
        assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) <= 10


def test_sorting_lines_copies_them_as_they_are(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, [4, 0, 3], ordered=True)
    lines = path.read_bytes().splitlines(keepends=True)
    merge(path)
    assert path.read_bytes().splitlines(keepends=True) == [lines[1], lines[2], lines[0]]
    with open_output(path, job=JOB) as output:
        assert output.done == {0, 3, 4}
    merge(path)
    assert indices(path) == [0, 3, 4]


def test_other_tools_read_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "out.parquet"
    write(path, range(5), ordered=True)
    merge(path)
    frame = pandas.read_parquet(path)
    assert frame["text"].isna().tolist() == [False, False, False, True, False]
    assert frame["token_ids"][1].tolist() == expected(1).token_ids
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert [RowResult.from_dict(row) for row in rows] == [expected(i) for i in range(5)]


def test_an_all_none_column_keeps_its_type(tmp_path):
    path = tmp_path / "out.parquet"
    with open_output(path, job=JOB) as output:
        output.write([RowResult(0, "a", None, LENGTH)])
    merge(path)
    with parquet_output.pq.ParquetFile(path) as file:
        assert file.schema_arrow.equals(parquet_output.SCHEMA)


def test_other_tools_read_lines(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "out.jsonl"
    write(path, range(5))
    frame = pandas.read_json(path, lines=True)
    assert frame["index"].tolist() == list(range(5))
    assert frame["text"][2] == expected(2).text


def test_reading_what_is_not_there_names_the_way_out(tmp_path):
    path = tmp_path / "out.parquet"
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_results(path)
    with pytest.raises(FileNotFoundError, match="no job has written there"):
        merge(path)
    write(path, [1])
    with pytest.raises(FileNotFoundError, match="call `merge` first"):
        read_results(path)
