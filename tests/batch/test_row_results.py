"""Results of single rows: what fits together, and what survives JSON."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.batch.results import END_TOKEN, ERROR, FINISH_REASONS, LENGTH, STOP, RowResult, RowStatistics

counts = st.integers(0, 1 << 40)


@st.composite
def results(draw):
    number = draw(counts)
    if draw(st.booleans()):
        return RowResult.failed(number, draw(st.text(min_size=1)))
    tokens = draw(st.none() | st.lists(st.integers(0, 1 << 40), max_size=5))
    text = draw(st.text() if tokens is None else st.none() | st.text())
    drafted = draw(counts)
    new = len(tokens) if tokens is not None else draw(counts)
    seconds = draw(st.floats(0, 1e9))
    statistics = RowStatistics(draw(counts), new, draw(counts), drafted, draw(st.integers(0, drafted)), seconds)
    reason = draw(st.sampled_from([END_TOKEN, STOP, LENGTH]))
    return RowResult(number, text, tokens, reason, None, draw(st.sampled_from([None, statistics])))


@given(results())
def test_a_result_survives_strict_json(result):
    text = json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False)
    assert RowResult.from_dict(json.loads(text.encode("utf-8"))) == result


def test_ratios_of_a_row():
    row = RowStatistics(prompt_tokens=9, new_tokens=12, rounds=4, drafted=16, accepted=8, seconds=2)
    assert (row.acceptance_rate, row.mean_draft_length, row.block_efficiency) == (0.5, 4.0, 3.0)
    assert isinstance(row.seconds, float)


def test_ratios_of_nothing_are_nan():
    nothing = RowStatistics(9, 0, 0, 0, 0, 0.0)
    assert math.isnan(nothing.acceptance_rate)
    assert math.isnan(nothing.mean_draft_length)
    assert math.isnan(nothing.block_efficiency)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"accepted": 4}, ValueError, "`accepted` is 4, but only `drafted`=3"),
        ({"rounds": -1}, ValueError, "`rounds` is -1"),
        ({"rounds": 1.0}, TypeError, "`rounds` is 1.0"),
        ({"seconds": math.nan}, ValueError, "`seconds` is nan"),
        ({"seconds": math.inf}, ValueError, "`seconds` is inf"),
        ({"seconds": "1"}, TypeError, "`seconds` is '1'"),
    ],
)
def test_statistics_that_cannot_be_are_refused(change, error, message):
    fields = {"prompt_tokens": 1, "new_tokens": 2, "rounds": 1, "drafted": 3, "accepted": 1, "seconds": 0.5}
    with pytest.raises(error, match=message):
        RowStatistics(**fields | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"index": -1}, ValueError, "`index` is -1"),
        ({"index": True}, TypeError, "`index` is True"),
        ({"finish_reason": "eos"}, ValueError, "'end_token', 'stop', 'length', 'error' is needed"),
        ({"text": b"x"}, TypeError, "`text` is b'x'"),
        ({"token_ids": (1, 2)}, TypeError, r"`token_ids` is \(1, 2\)"),
        ({"token_ids": [1, 2.0]}, TypeError, "`token_ids` of row 3 has 2.0"),
        ({"token_ids": [1]}, ValueError, "`statistics.new_tokens` of row 3 is 2, but `token_ids` has 1"),
        ({"text": None, "token_ids": None}, ValueError, "neither `text` nor `token_ids`"),
        ({"error": "why"}, ValueError, "`finish_reason` is 'length'"),
        ({"finish_reason": ERROR}, ValueError, "a row that failed needs a message"),
        ({"finish_reason": ERROR, "error": ""}, ValueError, "a row that failed needs a message"),
        ({"finish_reason": ERROR, "error": "why"}, ValueError, "a row that failed has neither"),
        ({"statistics": {"rounds": 1}}, TypeError, "`statistics` is"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(change, error, message):
    fields = {"index": 3, "text": "ab", "token_ids": [1, 2], "finish_reason": LENGTH, "error": None}
    fields["statistics"] = RowStatistics(1, 2, 1, 3, 1, 0.5)
    assert RowResult(**fields).text == "ab"
    with pytest.raises(error, match=message):
        RowResult(**fields | change)


def test_numpy_integers_are_refused_with_the_way_out():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="tolist"):
        RowResult(0, None, list(numpy.arange(2)), LENGTH)


def test_surrogates_are_replaced_and_pairs_are_joined():
    assert RowResult(0, "a\ud800b \ud83e\udd9c", None, LENGTH).text == "a\ufffdb 🦜"
    assert RowResult.failed(0, "no file \udcff").error == "no file \ufffd"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, r"unknown fields \['extra'\]"),
        ({"index": ...}, r"lacks \['index'\]"),
        ({"statistics": {"rounds": 1}}, "lacks .*'seconds'"),
    ],
)
def test_dictionaries_with_other_fields_are_refused(change, message):
    values = RowResult(0, "a", [1], LENGTH).to_dict() | change
    with pytest.raises(ValueError, match=message):
        RowResult.from_dict({name: value for name, value in values.items() if value is not ...})


def test_optional_fields_may_be_missing():
    result = RowResult.from_dict({"index": 1, "text": "a", "token_ids": None, "finish_reason": STOP})
    assert result == RowResult(1, "a", None, STOP)


def test_the_reasons_are_what_files_hold():
    assert FINISH_REASONS == ("end_token", "stop", "length", "error")
