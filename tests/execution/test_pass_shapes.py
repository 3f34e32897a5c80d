"""Sizes of packed passes, and which recorded pass does for one that is not there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.execution.cuda_graphs import CapturedPasses
from hf_dsde.execution.model_runner import WIDTH_BUCKETS
from hf_dsde.execution.pass_shapes import (
    LEAST_CHARGE,
    LEAST_VARYING_WIDTH,
    MOST_PADDED,
    PACKED_WIDTHS,
    RECORDING_CHARGE,
    ROOMY_STEPS,
    SMALLEST_STEP,
    STEPS_PER_DOUBLING,
    Shape,
    larger_shapes,
    packed_bucket,
    roomy,
    shape_to_run,
)


@given(st.integers(0, 50_000))
def test_a_bucket_holds_its_tokens(tokens: int) -> None:
    size = packed_bucket(tokens)
    assert size >= tokens
    assert size % SMALLEST_STEP == 0
    assert size - tokens < max(SMALLEST_STEP, tokens / STEPS_PER_DOUBLING)


@given(st.integers(SMALLEST_STEP * STEPS_PER_DOUBLING, 1_000_000))
def test_one_token_in_seventeen_is_padding_at_most(tokens: int) -> None:
    size = packed_bucket(tokens)
    assert (size - tokens) * (STEPS_PER_DOUBLING + 1) <= size


def test_no_bucket_is_smaller_than_that_of_fewer_tokens() -> None:
    sizes = [packed_bucket(tokens) for tokens in range(1, 5000)]
    assert sizes == sorted(sizes)


def test_a_bucket_holds_itself() -> None:
    sizes = {packed_bucket(tokens) for tokens in range(1, 5000)}
    assert {packed_bucket(size) for size in sizes} == sizes


def test_buckets_are_few() -> None:
    """Each is a pass to record."""
    for power in (256, 512, 1024, 2048):
        assert len({packed_bucket(tokens) for tokens in range(power + 1, 2 * power + 1)}) == STEPS_PER_DOUBLING


@given(st.integers(1, 5000), st.sampled_from(PACKED_WIDTHS))
def test_packed_passes_of_up_to_twice_the_tokens_do_for_one_and_are_charged_for(tokens: int, width: int) -> None:
    size = packed_bucket(tokens)
    sizes = sorted({packed_bucket(more) for more in range(size, 2 * size + 1)})
    found = list(larger_shapes(("packed", size, width, True), WIDTH_BUCKETS, 128))
    assert found == [
        (("packed", each, bound, True), max(each - size, LEAST_CHARGE))
        for each in sizes
        for bound in PACKED_WIDTHS
        if each <= MOST_PADDED * size and bound >= width and (each, bound) != (size, width)
    ]


@given(st.integers(1, 64), st.sampled_from(WIDTH_BUCKETS), st.integers(0, 256))
def test_padded_passes_that_cost_nothing_more_do_for_one(rows: int, width: int, free: int) -> None:
    shape = ("padded", rows, width, width, False, None)
    found = list(larger_shapes(shape, WIDTH_BUCKETS, free))
    wider = [each for each in WIDTH_BUCKETS if each > width and rows * each <= free]
    expected = [("padded", rows, each, each, False, None) for each in wider if width >= LEAST_VARYING_WIDTH]
    assert found == [(each, 0) for each in expected]
    if width > 1:
        assert not list(larger_shapes(("padded", rows, width, 1, False, None), WIDTH_BUCKETS, free))


def test_nothing_else_does_for_a_chain() -> None:
    shape = ("chain", 4, None, None)
    assert not list(larger_shapes(shape, WIDTH_BUCKETS, 128))
    assert roomy(shape) == shape


@given(st.integers(33, 5000), st.sampled_from(PACKED_WIDTHS))
def test_what_is_recorded_first_has_few_sizes_and_little_padding(tokens: int, width: int) -> None:
    size = packed_bucket(tokens)
    kind, larger, *others = roomy(("packed", size, width, True))
    assert (kind, others) == ("packed", [width, True])
    assert larger >= size
    assert (larger - tokens) * (ROOMY_STEPS + 1) <= larger
    assert packed_bucket(larger) == larger
    assert roomy(("packed", larger, width, True)) == ("packed", larger, width, True)


def test_what_is_run_in_place_of_a_pass_costs_no_more_than_recording_it() -> None:
    """It is recorded, larger, where nothing does for it; others are padded to that until they have cost as much."""
    passes = CapturedPasses[Shape](9)

    def run(size: int, *, used: bool = True) -> Shape:
        shape = shape_to_run(("packed", size, 8, False), passes, lambda each: each, WIDTH_BUCKETS, 128, used=used)
        return passes.get(shape, lambda: shape) if used else shape

    assert run(200) == ("packed", 224, 8, False)
    assert run(224) == ("packed", 224, 8, False)
    assert passes.captures == 1
    assert [run(160, used=False) for _ in range(1000)] == [("packed", 224, 8, False)] * 1000
    lent = [run(160) for _ in range(1000)].index(("packed", 160, 8, False))
    assert lent == RECORDING_CHARGE // (224 - 160)
    assert run(104) == ("packed", 160, 8, False), "the smallest that does"
    assert passes.captures == 2
    assert run(72) == ("packed", 80, 8, False), "twice the tokens are too many"
