from __future__ import annotations

import itertools
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_rounds import round_record

from hf_dsde.divergence import DEFAULT_TOLERANCE_ULPS, RowComparison, Verdict
from hf_dsde.evaluate_modules import MODULES, module_path
from hf_dsde.measurement.counts import RowCounts
from hf_dsde.measurement.statistics import SpeculationStatistics, StatisticsRecorder

evaluate = pytest.importorskip("evaluate")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`evaluate.load` of a module by name, with all that `evaluate` writes in a folder of the tests."""
    cache = tmp_path_factory.mktemp("evaluate")
    path = list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_MODULES_CACHE", cache / "modules")
        patch.setattr("evaluate.config.HF_METRICS_CACHE", cache / "metrics")
        yield lambda name, **arguments: evaluate.load(module_path(name), **arguments)
    sys.path[:] = path


@pytest.fixture(scope="module")
def acceptance(load):
    return load("speculative_acceptance")


@pytest.fixture(scope="module")
def equivalence(load):
    return load("output_equivalence")


def counts(rounds, drafted, accepted, emitted, **more):
    return {"rounds": rounds, "drafted": drafted, "accepted": accepted, "emitted": emitted, **more}


@st.composite
def rows_of_counts(draw):
    """Counts that rounds can have: each drafts 0 to 4 tokens, accepts some, emits one more or is cut at its end."""
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        blocks = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4))
        accepted = sum(min(block) for block in blocks)
        drafted = sum(length for length, _ in blocks)
        emitted = accepted + len(blocks) - (draw(st.integers(0, 1)) if blocks else 0)
        past_end = draw(st.integers(0, 3)) if blocks else 0
        rows.append(counts(len(blocks), drafted, accepted, emitted, past_end=past_end))
    return rows


def plain_acceptance(rows):
    def ratio(numerator, denominator):
        return numerator / denominator if denominator else math.nan

    total = {name: sum(row[name] for row in rows) for name in ("rounds", "drafted", "accepted", "emitted", "past_end")}
    return {
        "acceptance_rate": ratio(total["accepted"], total["drafted"]),
        "block_efficiency": ratio(total["emitted"], total["rounds"]),
        "mean_draft_length": ratio(total["drafted"] + total["past_end"], total["rounds"]),
        "row_rounds": total.pop("rounds"),
        "rows": len(rows),
    } | total


@given(rows=rows_of_counts(), cut=st.integers(0, 5))
def test_acceptance_over_batches_is_that_of_all_sequences(acceptance, rows, cut):
    acceptance.add_batch(data=rows[:cut])
    acceptance.add_batch(data=rows[cut:])
    assert acceptance.compute() == pytest.approx(plain_acceptance(rows), nan_ok=True)


def test_ratios_of_nothing_are_nan(acceptance):
    empty = acceptance.compute(data=[])
    assert empty["rows"] == 0
    assert all(math.isnan(empty[name]) for name in ("acceptance_rate", "block_efficiency", "mean_draft_length"))
    plain = acceptance.compute(data=[counts(3, 0, 0, 3)])
    assert math.isnan(plain["acceptance_rate"])
    assert (plain["block_efficiency"], plain["mean_draft_length"]) == (1.0, 0.0)


def recorded_call(accepted_by_round):
    """Statistics of a call of two rows, 3 drafted tokens a round each, whose texts end before their last token."""
    recorder = StatisticsRecorder(2, "static")
    for accepted in accepted_by_round:
        recorder.on_round(round_record((3, 3), accepted))
    emitted = [sum(number + 1 for number in of_row) for of_row in zip(*accepted_by_round, strict=True)]
    return recorder.finish([number - 1 for number in emitted])


def test_acceptance_is_that_of_the_calls_own_statistics(acceptance):
    calls = [recorded_call([(3, 0), (1, 2)]), recorded_call([(0, 1), (2, 2), (3, 1)])]
    for call in calls:
        acceptance.add_batch(data=call.rows)
    merged = SpeculationStatistics.merge(calls)
    assert merged.past_end > 0
    result = acceptance.compute(
        drafted_by_position=merged.drafted_by_position, accepted_by_position=merged.accepted_by_position
    )
    for name in ("acceptance_rate", "block_efficiency", "row_rounds", "drafted", "accepted", "emitted", "past_end"):
        assert result[name] == getattr(merged, name), name
    assert result["acceptance_by_position"] == list(merged.acceptance_by_position)
    # Every round of this call drafted 3 tokens, inside the texts or not.
    assert result["mean_draft_length"] == 3.0


def test_results_of_a_row_are_taken_as_they_are(acceptance):
    row = {"prompt_tokens": 17, "new_tokens": 9, "rounds": 4, "drafted": 10, "accepted": 6, "text": "a"}
    acceptance.add(data=row)
    result = acceptance.compute(data=[RowCounts(rounds=1, drafted=2, past_end=1, accepted=1, emitted=2)])
    assert (result["rows"], result["emitted"], result["drafted"], result["past_end"]) == (2, 11, 12, 1)
    assert result["block_efficiency"] == 11 / 5


@dataclass
class OwnCounts:
    rounds: int
    drafted: int
    accepted: int
    new_tokens: int
    seconds: float = 1.5


def test_a_sequence_may_be_a_dict_or_any_dataclass(acceptance):
    own = OwnCounts(rounds=2, drafted=5, accepted=3, new_tokens=5)
    same = RowCounts(rounds=2, drafted=5, past_end=0, accepted=3, emitted=5)
    expected = acceptance.compute(data=[counts(2, 5, 3, 5)])
    assert all(acceptance.compute(data=[row]) == expected for row in (own, asdict(own), same, asdict(same)))


def test_by_position_is_absent_unless_given(acceptance):
    assert "acceptance_by_position" not in acceptance.compute(data=[counts(1, 2, 1, 2)])
    known = acceptance.compute(data=[counts(2, 2, 1, 3)], drafted_by_position=[1, 1, 0], accepted_by_position=[1, 0, 0])
    assert known["acceptance_by_position"] == pytest.approx([1.0, 0.0, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ({"rounds": 1, "drafted": 2, "accepted": 1}, ValueError, r"lacks \['emitted'\]"),
        (counts(1, 2, 3, 3), ValueError, "accepted <= drafted"),
        (counts(1, 2, 1, 3), ValueError, "one bonus token a round"),
        (counts(2, 2, 2, 1), ValueError, "accepted <= emitted"),
        (counts(0, 2, 0, 0), ValueError, "without a round"),
        (counts(0, 0, 0, 0, past_end=1), ValueError, "without a round"),
        (counts(1, -1, 0, 1), ValueError, "at least 0"),
        (counts(1, 2.0, 1, 2), TypeError, "integer"),
        (None, TypeError, "Leave out sequences without any"),
    ],
)
def test_counts_that_cannot_be_are_refused_and_nothing_is_added(load, row, error, words):
    measurement = load("speculative_acceptance")
    with pytest.raises(error, match=words):
        measurement.add_batch(data=[counts(1, 2, 1, 2), row])
    assert measurement.compute(data=[counts(1, 1, 1, 2)])["rows"] == 1


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (([2], None), "need both"),
        (([1, 1], [1]), "one count for each position"),
        (([1, 1], [0, 2]), r"accepted_by_position\[1\]"),
        (([1, 0], [1, 0]), "`drafted_by_position` sums to 1"),
        (([1, 1], [1, 1]), "`accepted_by_position` sums to 2"),
    ],
)
def test_counts_by_position_of_other_sequences_are_refused(load, positions, words):
    with pytest.raises(ValueError, match=words):
        load("speculative_acceptance", keep_in_memory=True).compute(
            data=[counts(1, 2, 1, 2)], drafted_by_position=positions[0], accepted_by_position=positions[1]
        )


def plain_equivalence(first, second):
    """Padded with a value that no sequence has, so that the end of one is a difference like any other."""
    found = []
    for pair in zip(first, second, strict=True):
        columns = list(itertools.zip_longest(*pair, fillvalue=object()))
        found.append(next((place for place, (a, b) in enumerate(columns) if a != b), None))
    places = sorted(place for place in found if place is not None)
    middle = len(places) // 2
    return {
        "exact_match": found.count(None) / len(found) if found else math.nan,
        "first_divergence": found,
        "mean_first_divergence": sum(places) / len(places) if places else math.nan,
        "median_first_divergence": (places[middle] + places[~middle]) / 2 if places else math.nan,
        "rows": len(found),
        "differing_rows": len(places),
    }


token_pairs = st.lists(st.tuples(*2 * [st.lists(st.integers(0, 2), max_size=4)]), max_size=5)
text_pairs = st.lists(st.tuples(*2 * [st.text("ab", max_size=4)]), min_size=1, max_size=5)


@given(pairs=token_pairs | text_pairs, cut=st.integers(1, 5))
def test_equivalence_over_batches_is_that_of_all_sequences(equivalence, pairs, cut):
    first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for part in (slice(None, cut), slice(cut, None)):
        equivalence.add_batch(predictions1=first[part], predictions2=second[part])
    result, expected = equivalence.compute(), plain_equivalence(first, second)
    assert result.pop("first_divergence") == expected.pop("first_divergence")
    assert result == pytest.approx(expected, nan_ok=True)


def test_tensors_are_sequences(equivalence):
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    equivalence.add(predictions1=tokens[0], predictions2=tokens[0].numpy())
    result = equivalence.compute(predictions1=tokens, predictions2=list(tokens.numpy()[:, ::-1]))
    assert result["first_divergence"] == [None, 0, 0]


def test_near_ties_are_those_of_compare_outputs(equivalence):
    """Gaps around the tolerance, in each form; the verdict and ulps of a `RowComparison` are the reference."""
    unit = 2.0**-4  # of bfloat16 between 8 and 16: 8 bits of precision
    tokens = {"predictions1": [[1, 2]] * 5, "predictions2": [[1, 2]] + [[1, 3]] * 4}
    ulps = [None, 0.0, DEFAULT_TOLERANCE_ULPS, DEFAULT_TOLERANCE_ULPS + 1, math.inf]
    rows = [
        RowComparison(row, Verdict.DIFFERENT, gap=None if gap is None else gap * unit, ulp=unit)
        for row, gap in enumerate(ulps)
    ]
    in_ulps = equivalence.compute(**tokens, gap_ulps=[row.gap_ulps for row in rows])
    pairs = [None if gap is None else (9.0, 9.0 - gap * unit) for gap in ulps]
    as_logits = equivalence.compute(**tokens, top_logits=pairs, dtype="bfloat16")
    assert in_ulps == as_logits
    assert in_ulps["verdicts"] == ["equal", "near tie", "near tie", "different", "different"]
    assert in_ulps["near_tie_share"] == 0.5
    assert equivalence.compute(**tokens, top_logits=pairs, dtype=torch.float32)["near_tie_share"] == 0.25
    assert equivalence.compute(**tokens, gap_ulps=ulps, tolerance_ulps=3)["near_tie_share"] == 0.75


def test_the_end_of_one_sequence_is_no_near_tie(equivalence):
    result = equivalence.compute(
        predictions1=[[1, 2], [1, 2], [1]], predictions2=[[1], [1, 3], [1]], gap_ulps=[None, 1.0, None]
    )
    assert result["verdicts"] == ["different", "near tie", "equal"]
    assert "near_tie_share" not in equivalence.compute(predictions1=[[1, 2]], predictions2=[[1]])
    assert math.isnan(equivalence.compute(predictions1=[[1]], predictions2=[[1]], gap_ulps=[3.0])["near_tie_share"])


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({"predictions1": [[1], [2]], "predictions2": [[1]]}, ValueError, "'predictions2': 1"),
        ({"predictions1": [[1]], "predictions2": [[1]], "gap_ulps": []}, ValueError, "'gap_ulps': 0"),
        ({"predictions1": [[1]], "predictions2": [[1]], "top_logits": [(1.0,)]}, ValueError, "need two logits"),
        ({"predictions1": ["a"], "predictions2": [[1]]}, ValueError, "1 texts and 1 lists"),
        ({"predictions1": "ab", "predictions2": "ab"}, TypeError, "one text"),
        ({"predictions1": [[0.5]], "predictions2": [[1]]}, TypeError, "integers"),
    ],
)
def test_sequences_that_do_not_belong_together_are_refused(load, batch, error, words):
    comparison = load("output_equivalence")
    with pytest.raises(error, match=words):
        comparison.add_batch(**batch)
    assert comparison.compute(predictions1=["a"], predictions2=["a"])["rows"] == 1


def test_texts_and_token_ids_in_different_batches_are_refused(load):
    comparison = load("output_equivalence")
    comparison.add_batch(predictions1=[[1]], predictions2=[[1]])
    with pytest.raises(ValueError, match="that of the first batch"):
        comparison.add_batch(predictions1=["a"], predictions2=["a"])
    assert comparison.compute()["exact_match"] == 1.0


@pytest.mark.parametrize(
    ("margins", "words"),
    [
        ({"top_logits": [(2.0, 1.0), None]}, "`dtype` is None"),
        ({"top_logits": [(2.0, 1.0), None], "dtype": "int64"}, "floating dtype"),
        ({"top_logits": [(math.nan, 1.0), None], "dtype": "bfloat16"}, "top_logits"),
        ({"gap_ulps": [-1.0, None]}, "gap_ulps"),
        ({"gap_ulps": [1.0, None]}, "Row 1 differs at position 1 and has no margin"),
        ({"gap_ulps": [1.0, 1.0], "top_logits": [(2.0, 1.0), None]}, "both given for row 0"),
        ({"gap_ulps": [1.0, 1.0], "tolerance_ulps": -1}, "tolerance_ulps"),
    ],
)
def test_margins_that_say_nothing_are_refused(load, margins, words):
    with pytest.raises(ValueError, match=words):
        load("output_equivalence", keep_in_memory=True).compute(
            predictions1=[[1, 2]] * 2, predictions2=[[2, 2], [1, 3]], **margins
        )


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_documentation_hold(load, name):
    import doctest

    module = sys.modules[type(load(name)).__module__]
    example = doctest.DocTestParser().get_doctest(module._INPUTS, {"None": None}, name, None, None)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 3
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_what_its_card_says(load, name):
    module = load(name, keep_in_memory=True)
    assert module.name == name
    card = Path(module_path(name), "README.md").read_text()
    assert module.module_type in card
    assert all(feature in card for feature in module._feature_names())


def test_another_name_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'output_equivalence', 'speculative_acceptance'"):
        module_path("acceptance")


def test_both_load_offline_in_a_folder_elsewhere(load, tmp_path, monkeypatch):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", tmp_path / "modules")
    measured = load("speculative_acceptance", module_type="measurement").compute(data=[counts(2, 4, 2, 4)])
    compared = load("output_equivalence", module_type="comparison").compute(predictions1=["ab"], predictions2=["ac"])
    assert measured["acceptance_rate"] == 0.5
    assert compared["first_divergence"] == [1]
    assert list((tmp_path / "modules").rglob("speculative_acceptance.py"))
