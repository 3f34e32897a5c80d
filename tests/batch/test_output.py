"""Outputs of jobs that are killed, started again and shared out: every row once, and as if nothing had happened."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_job import JOB, ROWS, expected
from outputs import FORMATS, indices, names, write

from hf_dsde.batch.output import merge, open_output, read_results, remove_output
from hf_dsde.batch.parquet_output import write_rows

SCRIPT = Path(__file__).with_name("output_job.py")


@pytest.mark.parametrize(
    ("kind", "suffix", "shards"),
    [
        ("random", ".jsonl", "2 1 3"),
        ("random", ".parquet", "1"),
        ("points", ".jsonl", "1"),
        ("points", ".jsonl", "2 1 3"),
        ("points", ".parquet", "2 1 3"),
    ],
)
def test_a_killed_job_ends_with_every_row_once_and_as_if_never_killed(tmp_path, kind, suffix, shards):
    if not hasattr(os, "fork"):
        pytest.skip("needs forks")
    command = [sys.executable, str(SCRIPT), kind, str(tmp_path), suffix, *shards.split()]
    path = os.pathsep.join([str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert not report["torch"]
    assert sum(report["kills"]) > 0
    outputs = sorted(tmp_path.glob(f"*{suffix}"))
    assert len(outputs) == len(report["kills"])
    for path in outputs:
        rows = ROWS[kind]
        results = list(read_results(path))
        assert sorted(results, key=lambda r: r.index) == [expected(i) for i in range(rows)]
        ordered = int(path.stem.rpartition("-")[2]) % 2 == 1
        assert not ordered or [r.index for r in results] == list(range(rows))
        assert not path.with_name(path.name + ".parts").exists()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.integers(0, 30), max_size=4, unique=True)),
        st.tuples(st.just("reopen"), st.tuples(st.integers(1, 3), st.booleans())),
        st.tuples(st.just("tear"), st.tuples(st.integers(31, 40), st.integers(0, 200))),
        st.tuples(st.just("merge"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), actions)
def test_any_sequence_of_writing_reopening_tearing_and_merging_keeps_each_row_once(suffix, steps):
    """A torn tail is a prefix of what the next write would have appended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"out{suffix}"
        written, shards, ordered = set(), 1, False

        def opened(shard=0):
            return open_output(path, job=JOB, shard=shard, shards=shards, ordered=ordered)

        output = opened()
        for what, detail in steps:
            if what == "write":
                new = [i for i in detail if i not in written]
                output.write([expected(i) for i in new])
                written |= set(new)
            else:
                output.close()
                if what == "merge":
                    merge(path)
                    assert sorted(indices(path)) == sorted(written)
                elif what == "reopen":
                    shards, ordered = detail
                else:
                    index, length = detail
                    line = json.dumps(expected(index).to_dict(), ensure_ascii=False).encode()
                    files = [*Path(f"{path}.parts").glob("*.jsonl"), *([path] if suffix == ".jsonl" else [])]
                    for file in filter(Path.exists, files[:1]):
                        file.write_bytes(file.read_bytes() + line[:length])
                # Another shard than before, as far as there is one.
                output = opened(shard=len(written) % shards)
                assert output.done == written
        output.close()
        merge(path)
        results = list(read_results(path))
        assert sorted(results, key=lambda r: r.index) == [expected(i) for i in sorted(written)]
        assert not ordered or [r.index for r in results] == sorted(written)


def test_lines_are_in_the_output_from_the_start(tmp_path):
    path = tmp_path / "out.jsonl"
    with open_output(path, job=JOB) as output:
        output.write([expected(5), expected(2)])
        assert indices(path) == [5, 2]
        output.write([expected(4)])
        assert indices(path) == [5, 2, 4]
    assert path.read_text("utf-8").count("Grüße") == 3
    assert names(tmp_path) == ["out.jsonl", "out.jsonl.job.json"]


def test_merging_one_shard_of_lines_leaves_the_file_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, [5, 2])
    before = path.stat()
    merge(path)
    assert path.stat().st_ino == before.st_ino
    assert indices(path) == [5, 2]


@pytest.mark.parametrize("suffix", FORMATS)
def test_merging_again_changes_nothing(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    write(path, [3, 1], shards=2, ordered=True)
    write(path, [2, 0], shard=1, shards=2, ordered=True)
    merge(path)
    before = path.stat()
    merge(path)
    after = path.stat()  # reading it may have moved its time of access
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert list(read_results(path)) == [expected(i) for i in range(4)]
    assert names(tmp_path) == [f"out{suffix}", f"out{suffix}.job.json"]


@pytest.mark.parametrize("kept", [False, True])
def test_jobs_whose_parts_are_parquet_go_on(tmp_path, kept):
    path = tmp_path / "out.parquet"
    if kept:
        write(path, [7, 2], ordered=True)
        merge(path)
    write(path, [5], ordered=True)
    parts = tmp_path / "out.parquet.parts"
    parts.mkdir(exist_ok=True)
    with (parts / "shard-0-of-1-000000.parquet").open("wb") as file:
        write_rows(file, [expected(i).to_dict() for i in (9, 1)])
    with open_output(path, job=JOB, ordered=True) as output:
        assert output.done == {1, 5, 9} | ({2, 7} if kept else set())
        output.write([expected(4)])
    merge(path)
    assert indices(path) == [i for i in (1, 2, 4, 5, 7, 9) if kept or i not in (2, 7)]
    assert names(tmp_path) == ["out.parquet", "out.parquet.job.json"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_job_without_rows_has_an_empty_output(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    write(path, [], shards=2)
    merge(path)
    assert indices(path) == []


@pytest.mark.parametrize("suffix", FORMATS)
def test_another_job_is_refused_with_what_differs_and_nothing_changes(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    write(path, [1])
    merge(path)
    other = {"policy": "dsde", "settings": {"seed": 4, "temperature": 0.5, "top_k": 5}}
    with pytest.raises(ValueError, match="overwrite") as refusal:
        open_output(path, job=other)
    assert "`settings.seed`: 3 there, 4 here" in str(refusal.value)
    assert "`settings.top_k`: none there, 5 here" in str(refusal.value)
    assert "temperature" not in str(refusal.value)
    assert indices(path) == [1]
    with open_output(path, job=other, overwrite=True) as output:
        assert output.done == set()
    merge(path)
    assert indices(path) == []


def test_a_job_is_compared_as_json_holds_it(tmp_path):
    path = tmp_path / "out.jsonl"
    for job in ({"a": (1, 2), "b": 1}, {"b": 1.0, "a": [1, 2]}):
        open_output(path, job=job).close()
    with pytest.raises(ValueError, match="`b`: 1 there, True here"):
        open_output(path, job={"a": [1, 2], "b": True})


@pytest.mark.parametrize(
    ("job", "error"), [({"a": float("nan")}, ValueError), ({"a": object()}, TypeError), ([1], TypeError)]
)
def test_a_job_that_json_cannot_hold_is_refused(tmp_path, job, error):
    with pytest.raises(error, match="`job` is"):
        open_output(tmp_path / "out.jsonl", job=job)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["out.json", "out.csv", "out", "out.jsonl.gz"])
def test_other_formats_are_refused_with_what_is_accepted(tmp_path, name):
    with pytest.raises(ValueError, match=r"\.jsonl, \.ndjson, \.parquet"):
        open_output(tmp_path / name, job=JOB)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_of_unknown_origin_is_not_touched(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="not known to belong to this job"):
        open_output(path, job=JOB)
    assert path.read_bytes() == b"precious"
    assert names(tmp_path) == [path.name]


def test_strange_files_among_the_parts_stay(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, [1], shards=2)
    mine = tmp_path / "out.jsonl.parts" / "notes.jsonl"
    mine.write_text("mine")
    merge(path)
    assert names(mine.parent) == ["notes.jsonl"]
    remove_output(path)
    assert names(tmp_path) == ["out.jsonl.parts"]


def test_overwriting_by_several_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="remove_output"):
        open_output(tmp_path / "out.jsonl", job=JOB, shards=2, overwrite=True)


def test_a_row_that_was_written_is_not_taken_again(tmp_path):
    path = tmp_path / "out.jsonl"
    with open_output(path, job=JOB) as output:
        output.write([expected(1)])
        for rows in ([2, 1], [3, 3]):
            with pytest.raises(ValueError, match="write each row once"):
                output.write([expected(i) for i in rows])
    merge(path)
    assert indices(path) == [1]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_closed_output_takes_nothing(tmp_path, suffix):
    output = open_output(tmp_path / f"out{suffix}", job=JOB)
    output.close()
    output.close()
    with pytest.raises(ValueError, match="closed"):
        output.write([expected(1)])


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_output_that_is_open_is_neither_opened_nor_merged_nor_removed(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    with open_output(path, job=JOB, shards=2) as output:
        output.write([expected(1)])
        for blocked in (
            lambda: open_output(path, job=JOB, shards=2),
            lambda: open_output(path, job=JOB),
            lambda: merge(path),
            lambda: remove_output(path),
        ):
            with pytest.raises(RuntimeError, match="is locked"):
                blocked()
        write(path, [2], shard=1, shards=2)
    merge(path)
    assert indices(path) == [1, 2]


def test_a_torn_last_line_is_cut_off_and_not_read(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, [1])
    whole = path.read_bytes()
    for tail in (b'{"index": 2', b'{"index": 2}', b"\0" * 9 + b"\n", b"[]\n", '{"index": 2, "text": "ß'.encode()[:-1]):
        path.write_bytes(whole + tail)
        assert indices(path) == [1]
        with open_output(path, job=JOB) as output:
            assert output.done == {1}
        assert path.read_bytes() == whole


def test_a_damaged_line_before_others_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, [1, 2])
    path.write_bytes(b"damage\n" + path.read_bytes())
    with pytest.raises(ValueError, match="Line 1 of"):
        open_output(path, job=JOB)
    assert path.read_bytes().startswith(b"damage")


def test_a_write_that_the_disk_refuses_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    real = os.write

    def full(descriptor, content):
        monkeypatch.setattr(os, "write", refuse)
        return real(descriptor, content[:20])

    def refuse(descriptor, content):
        raise OSError(28, "No space left on device")

    with open_output(path, job=JOB) as output:
        output.write([expected(1)])
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            output.write([expected(2)])
        monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:7]))
        output.write([expected(2)])
        assert output.done == {1, 2}
    assert list(read_results(path)) == [expected(1), expected(2)]
