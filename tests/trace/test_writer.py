"""Files of a trace: rounding, row groups, and a folder that is complete or not there."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.trace import load_trace, writer
from hf_dsde.trace.schema import COMMITTED, DRAFTED, table_schema
from hf_dsde.trace.writer import TraceWriter, round_mantissa


def rows(table: str, count: int, start: int = 0) -> dict[str, object]:
    """Columns with numbers that tell rows and columns apart."""
    columns: dict[str, object] = {}
    for number, field in enumerate(table_schema(table)):
        kind = str(field.type)
        if kind.startswith("dictionary"):
            columns[field.name] = np.array([f"task {start % 3}"] * count, dtype=object)
        elif kind == "bool":
            columns[field.name] = (np.arange(start, start + count) + number) % 3 == 0
        elif kind == "float":
            columns[field.name] = ((np.arange(start, start + count) + 1) / (7 + number)).astype(np.float32)
        else:
            columns[field.name] = np.arange(start, start + count) + number
    return {**columns, "temperature": 1.0}


def plain_rounding(value: float, bits: int) -> float:
    """To nearest, ties to even, in plain floats."""
    if value == 0:
        return 0.0
    fraction, exponent = math.frexp(value)
    scaled = fraction * 2 ** (bits + 1)
    return math.ldexp(round(scaled), exponent - bits - 1)


@given(
    st.floats(
        width=32,
        allow_nan=False,
        allow_infinity=False,
        allow_subnormal=False,
        min_value=-(2.0**100),
        max_value=2.0**100,
    ),
    st.integers(1, 23),
)
def test_mantissas_are_rounded_to_nearest_even(value, bits):
    found = float(round_mantissa(np.array([value], dtype=np.float32), bits)[0])
    assert found == plain_rounding(value, bits)


@pytest.mark.parametrize(
    ("value", "bits", "expected"), [(1.999, 3, 2.0), (1.0625, 3, 1.0), (1.1875, 3, 1.25), (0.0, 5, 0.0)]
)
def test_rounding_carries_into_the_exponent_and_ties_go_to_even(value, bits, expected):
    assert round_mantissa(np.array([value], dtype=np.float32), bits)[0] == expected


def test_a_probability_stays_one():
    values = np.nextafter(np.ones(5, dtype=np.float32), np.float32(0))
    assert (round_mantissa(values, 11) == 1).all()


def test_what_was_added_is_read_back_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP", 10)
    with TraceWriter(tmp_path / "deep" / "trace", tokens=True) as file:
        for start in range(0, 36, 4):
            file.add(COMMITTED, rows(COMMITTED, 4, start))
        file.add(DRAFTED, rows(DRAFTED, 5))
        assert file.rows == {COMMITTED: 36, DRAFTED: 5}
        file.finish({"note": "ä"})
    trace = load_trace(tmp_path / "deep" / "trace")
    assert trace.description["note"] == "ä"
    expected = [rows(COMMITTED, 4, start) for start in range(0, 36, 4)]
    for name in trace.committed.column_names:
        if name != "temperature":
            whole = np.concatenate([part[name] for part in expected]).tolist()
            assert trace.committed[name].to_pylist() == pytest.approx(whole) if name != "task" else whole
    with pq.ParquetFile(tmp_path / "deep" / "trace" / "committed.parquet") as file:
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [10, 2, 10, 2, 10, 2]


def test_fewer_bits_make_smaller_files_and_small_errors(tmp_path):
    generator = np.random.default_rng(0)
    columns = rows(COMMITTED, 20_000)
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.dtype == np.float32:
            columns[name] = generator.random(len(values), dtype=np.float32)
    sizes = {}
    for bits in (23, 11):
        folder = tmp_path / str(bits)
        with TraceWriter(folder, tokens=False, mantissa_bits=bits) as file:
            file.add(COMMITTED, columns)
            file.finish({})
        sizes[bits] = (folder / "committed.parquet").stat().st_size
        trace = load_trace(folder)
        assert trace.description["mantissa_bits"] == bits
        error = np.abs(trace.committed["kld"].to_numpy() / columns["kld"] - 1).max()
        assert error <= (0 if bits == 23 else 2**-12 * 1.001)
        np.testing.assert_array_equal(trace.committed["position"].to_numpy(), columns["position"])
    assert sizes[11] < 0.65 * sizes[23]


def test_no_rows_are_no_rows(tmp_path):
    with TraceWriter(tmp_path / "trace", tokens=True) as file:
        file.add(DRAFTED, {})
        file.finish({})
    assert load_trace(tmp_path / "trace").drafted.num_rows == 0


def test_a_missing_column_is_an_error(tmp_path):
    columns = rows(COMMITTED, 3)
    del columns["kld"]
    with TraceWriter(tmp_path / "trace", tokens=True) as file, pytest.raises(KeyError, match="kld"):
        file.add(COMMITTED, columns)


def test_without_finish_nothing_is_left(tmp_path):
    with TraceWriter(tmp_path / "trace", tokens=True) as file:
        file.add(COMMITTED, rows(COMMITTED, 3))
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_in_one_step(tmp_path, monkeypatch):
    def fails(_self, _target):
        raise OSError

    with TraceWriter(tmp_path / "trace", tokens=True) as file:
        monkeypatch.setattr("pathlib.Path.rename", fails)
        with pytest.raises(OSError):  # noqa: PT011 - the one raised above
            file.finish({})
        assert not (tmp_path / "trace").exists()


def test_the_folder_can_be_read_by_others(tmp_path):
    with TraceWriter(tmp_path / "trace", tokens=True) as file:
        file.finish({})
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o755


def test_an_empty_folder_may_be_there_and_a_file_may_not(tmp_path):
    (tmp_path / "trace").mkdir()
    with TraceWriter(tmp_path / "trace", tokens=True) as file:
        file.finish({})
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="not empty"):
        TraceWriter(tmp_path / "file", tokens=True)
